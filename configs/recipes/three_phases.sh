#!/usr/bin/env bash
# The three phases in which ModernBERT was trained (arXiv 2412.13663, section 2.2): many tokens in
# short rows at a stable learning rate, then long rows with a larger rotary theta, then a decay of
# the learning rate to 0. Each phase is a run that goes on from the one before.
#
#   configs/recipes/three_phases.sh OUT [flags of maelm_jax.train ...]
#   TEXT='books/*.txt' configs/recipes/three_phases.sh runs/phases --gin.Optimizer.warmup_steps=50
#
# OUT/stable, OUT/extend and OUT/decay are the workdirs. The same command resumes after a stop.
# Variables of the environment, with sizes for two cores as defaults:
#   PYTHON        the interpreter (default .venv/bin/python of this repository)
#   CONFIG        the settings of all phases, with rotary positions (default modern_tiny.gin)
#   TEXT          glob of the text (default: the corpus of CONFIG)
#   DECAY_TEXT    glob of the text of the decay (default: TEXT)
#   STABLE_STEPS, EXTEND_STEPS, DECAY_STEPS    steps of each phase (default 450, 75, 75)
#   LENGTH, LONG_LENGTH    tokens of a row, before and after the extension (default 64, 256)
#   BATCH         rows of a step; long batches have as many tokens (default 32)
#   THETA         Encoder.rotary_theta of long rows (default 160000)
#   PLAN          a topology, as v5e:16x16: print the plan of each phase for it, and train nothing
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 2; }
out=$1
shift
python=${PYTHON:-$(dirname "$0")/../../.venv/bin/python}
short=${LENGTH:-64} long=${LONG_LENGTH:-256} batch=${BATCH:-32}

# run_phase NAME STEPS LENGTH TEXT [flag ...]
run_phase() {
  local name=$1 steps=$2 length=$3 text=$4 command=(train "--workdir=$out/$1")
  shift 4
  [ -z "${PLAN:-}" ] || command=(plan "--topology=$PLAN")
  echo "== $name"
  "$python" -m "maelm_jax.${command[0]}" "${command[@]:1}" \
    --gin_file="${CONFIG:-modern_tiny.gin}" ${text:+--gin.TEXT_FILES="$text"} \
    --gin.TRAIN_STEPS="$steps" --gin.BATCH_SIZE=$((batch * short / length)) \
    --gin.SEQUENCE_LENGTH="$length" --gin.Encoder.max_positions="$length" "$@"
}

long_rows=(--gin.Encoder.rotary_theta="${THETA:-160000}.0")
# The rate stays at its peak, so that the next phase begins there.
run_phase stable "${STABLE_STEPS:-450}" "$short" "${TEXT:-}" \
  --gin.Optimizer.schedule=wsd --gin.Optimizer.decay_share=0.0 "$@"
run_phase extend "${EXTEND_STEPS:-75}" "$long" "${TEXT:-}" "${long_rows[@]}" \
  --gin.Optimizer.schedule=wsd --gin.Optimizer.decay_share=0.0 \
  --gin.Run.continue_from="$out/stable" "$@"
run_phase decay "${DECAY_STEPS:-75}" "$long" "${DECAY_TEXT:-${TEXT:-}}" "${long_rows[@]}" \
  --gin.Optimizer.schedule=decay --gin.Run.continue_from="$out/extend" "$@"
