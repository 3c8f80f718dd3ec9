#!/usr/bin/env bash
# Makes the most of some minutes of one GPU without a network: measures, and trains two encoders.
#
#   benchmarks/device_window.sh --text='text/train-*.txt.xz' --output=OUT [--done=DIR] [--minutes=9]
#       [--stages=ceiling,attention,steps,mae_lm,mlm,peers] [--encoders=1] [--wheels=DIR]
#       [--work=DIR] [--toy]
#
# Stages, in this order:
#   ceiling    what the card reaches: a bfloat16 product, a copy
#   attention  attention alone, forward and backward, of each backend
#   steps      the training step of base with 32, 64 and 128 rows, and of its variants
#   mae_lm     configs/babylm.gin on --text: ten passes, or what fits; exported
#   mlm        the same with mlm.gin, for as many steps
#   peers      the step of these two beside models of transformers in PyTorch
#
# Everything is in OUT at any time: results.json has an entry for each stage, window.log what was
# printed, NAME.tar.gz.part-* the encoder that was trained (files of 15 MiB). Copy it somewhere and
# give that folder as --done to the next call, on any machine: it goes on with what is missing. The
# encoder is a workdir again after
#   mkdir -p runs/mae_lm && cat OUT/mae_lm.tar.gz.part-* | tar -xz -C runs/mae_lm
#
# --minutes   of this call, its start included
# --encoders  that are trained in one call, because OUT may have to stay below 64 MiB; 0: none
# --wheels    folder of wheels of packages that are not installed here:
#             pip download -q --no-deps --only-binary=:all: --python-version=3.12 -d wheels \
#                 gin-config==0.5.0 pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 \
#                 typing-inspection==0.4.5 tensorboardX==2.6.5 sentencepiece==0.2.3 flax==0.12.10 \
#                 optax==0.2.8 orbax-checkpoint==0.12.8
# --work      folder of rows, checkpoints and compiled programs. If it is still there in the next
#             call, an encoder that was stopped goes on
# --toy       small shapes, on CPU: a test of this script
#
# PYTHON names the interpreter. Exit status: 0 all stages are complete, 3 something is missing.
set -uo pipefail
began=$SECONDS
text='' output='' done_folder='' minutes=9 wheels='' encoders=1 toy=()
stages=ceiling,attention,steps,mae_lm,mlm,peers
work=${TMPDIR:-/tmp}/device_window
for flag in "$@"; do
  value=${flag#*=}
  case $flag in
    --text=*) text=$value ;;
    --output=*) output=$value ;;
    --done=*) done_folder=$value ;;
    --minutes=*) minutes=$value ;;
    --stages=*) stages=$value ;;
    --encoders=*) encoders=$value ;;
    --wheels=*) wheels=$value ;;
    --work=*) work=$value ;;
    --toy) toy=(--toy) ;;
    *)
      sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
      exit 2
      ;;
  esac
done
if [ -z "$text" ] || [ -z "$output" ]; then
  echo "error: give --text and --output; --help describes them" >&2
  exit 2
fi
# Paths are relative to where the command is given.
mkdir -p "$output" "$work"
output=$(realpath "$output") work=$(realpath "$work")
case $text in /*) ;; *) text=$PWD/$text ;; esac
if [ -n "$done_folder" ] && [ ! -e "$output/results.json" ]; then
  cp "$done_folder/results.json" "$output/results.json" || exit 2
fi
exec > >(tee -a "$output/window.log") 2>&1
python=${PYTHON:-python3}
if [ -n "$wheels" ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target "$work/site" "$wheels"/*.whl || exit 1
  export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH}
fi
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 MAELM_HUGE_PAGES=0
export JAX_COMPILATION_CACHE_DIR=$work/compiled JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.5
if [ ${#toy[@]} -gt 0 ]; then export JAX_PLATFORMS=cpu; fi

window() { "$python" benchmarks/device_window.py "$@" --output="$output" --work="$work"; }

is_encoder() { [ "$1" = mae_lm ] || [ "$1" = mlm ]; }

most_seconds() {
  if [ ${#toy[@]} -gt 0 ]; then
    echo 600
    return
  fi
  case $1 in
    ceiling) echo 40 ;;
    attention) echo 80 ;;
    steps) echo 140 ;;
    peers) echo 240 ;;
    *) echo 500 ;;
  esac
}

end=$((began + $(awk "BEGIN { print int(60 * $minutes) }")))
pending=() preparing='' running='' missing=0
# shellcheck disable=SC2329 # the trap invokes it
stop() { # an encoder saves a checkpoint
  trap - TERM INT
  for process in "$running" "$preparing"; do
    if [ -n "$process" ]; then kill "$process" 2>/dev/null; fi
  done
  wait "$running"
  exit 143
}
trap stop TERM INT
for stage in ${stages//,/ }; do
  if window is_complete --of="$stage"; then
    echo "$stage: complete"
  elif is_encoder "$stage" && [ "$encoders" -le 0 ]; then
    echo "$stage: in a later call"
    missing=1
  else
    pending+=("$stage")
    if is_encoder "$stage"; then encoders=$((encoders - 1)) preparing=yes; fi
  fi
done
if [ -n "$preparing" ]; then # with half of the cores, beside the measurements
  cores=$(nproc)
  timeout "$((end - SECONDS))" taskset -c "$((cores / 2))-$((cores - 1))" \
    "$python" benchmarks/device_window.py prepare --output="$output" --work="$work" \
    --text="$text" "${toy[@]}" &
  preparing=$!
fi
for stage in "${pending[@]}"; do
  if is_encoder "$stage"; then
    wait "$preparing" || echo "the text could not be prepared: status $?"
  fi
  seconds=$(most_seconds "$stage")
  left=$((end - SECONDS - 10))
  if [ "$seconds" -gt "$left" ]; then seconds=$left; fi
  if [ "$seconds" -lt 20 ]; then
    echo "$stage: out of time"
    missing=1
    continue
  fi
  # A stage ends by itself in time. If it does not, its measurements so far are in results.json.
  timeout --signal=TERM --kill-after=30 "$((seconds + 5))" "$python" benchmarks/device_window.py \
    "$stage" --output="$output" --work="$work" --text="$text" --seconds="$seconds" "${toy[@]}" &
  running=$!
  wait "$running" || echo "$stage: ended with status $?"
  window is_complete --of="$stage" || missing=1
done
if [ -n "$preparing" ]; then kill "$preparing" 2>/dev/null; fi # its text may not be needed yet
exit $((missing * 3))
