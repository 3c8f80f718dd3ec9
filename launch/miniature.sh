#!/usr/bin/env bash
# The paper in miniature. It pretrains the variants with equal steps, measures their ranks,
# fine-tunes them on the GLUE tasks that are there, and writes one report.
#
#   launch/miniature.sh 'corpus/*.txt' OUT [GLUE] [flags of maelm_jax.train ...]
#   launch/miniature.sh 'corpus/*.txt' runs/miniature glue_data --gin.TRAIN_STEPS=7500
#
# OUT/report/report.md is the report. The same command resumes after a stop. What is finished is not
# run again, and other settings for it are refused. Variables of the environment:
#   PYTHON    the interpreter (default .venv/bin/python of this repository)
#   CONFIG    the file that the variants are stacked on: miniature.gin (default), or
#             miniature_cpu.gin for two cores
#   VARIANTS  a part of the variants, as in "mae-lm mlm"
#   TASKS     a part of the tasks, as in "rte mrpc"
#   TUNE      flags of maelm_jax.finetune; by default three seeds, 3 epochs of at most 4,000 examples
#             and rate 1e-3, for encoders of these sizes
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 2; }
text=$1 out=$2 glue=
shift 2
if [ $# -gt 0 ] && [ "${1#--}" = "$1" ]; then glue=$1; shift; fi
python=${PYTHON:-$(dirname "$0")/../.venv/bin/python}

# name, seed, files stacked on it
variants='
mae-lm        0
mlm           0  mlm.gin
mae-lm-seed1  1
mlm-seed1     1  mlm.gin
delta-50      0  ablations/delta_50.gin
mlm-80-10-10  0  ablations/mlm_80_10_10.gin
'
for name in ${VARIANTS:-}; do
  if ! grep -q "^$name " <<<"$variants"; then
    echo "error: VARIANTS: there is no variant $name" >&2
    exit 2
  fi
done
tasks= # tasks with data; checked now, because pretraining takes a day
if [ -n "$glue" ]; then
  declare -A folders=([cola]=CoLA [sst2]=SST-2 [mrpc]=MRPC [stsb]=STS-B [qqp]=QQP [mnli]=MNLI
    [qnli]=QNLI [rte]=RTE [wnli]=WNLI)
  for task in ${TASKS:-cola sst2 mrpc stsb qqp mnli qnli rte}; do
    if [ -n "${folders[$task]:-}" ] && [ -d "$glue/${folders[$task]}" ]; then
      tasks+="'$task',"
    elif [ -n "${TASKS:-}" ]; then
      echo "error: TASKS: no data of $task in $glue" >&2
      exit 2
    fi
  done
  if [ -z "$tasks" ]; then
    echo "error: no GLUE task in $glue (looked for its folders: CoLA, SST-2, ...)" >&2
    exit 2
  fi
fi
runs=
while read -r name seed files; do
  [[ -n $name && " ${VARIANTS:-$name} " == *" $name "* ]] || continue
  runs+=${runs:+,}$out/$name
  echo "== pretraining $name"
  stacked=()
  for file in $files; do stacked+=("--gin_file=$file"); done
  "$python" -m maelm_jax.train --gin_file="${CONFIG:-miniature.gin}" "${stacked[@]}" \
    --gin.TEXT_FILES="$text" --gin.SEED="$seed" --workdir="$out/$name" "$@" </dev/null
done <<<"$variants"
tuned=
if [ -n "$glue" ]; then
  echo "== fine-tuning on $tasks"
  few='--gin.LEARNING_RATE=1e-3 --gin.EPOCHS=3 --gin.TRAIN_EXAMPLES=4000 --gin.SEEDS=(1,2,3)'
  read -ra tune <<<"${TUNE-$few}"
  "$python" -m maelm_jax.finetune --gin_file=finetune/glue.gin --init_from="$runs" \
    --workdir="$out/glue" --gin.DATA_DIR="$glue" --gin.Finetune.tasks="($tasks)" "${tune[@]}"
  task=${tasks%%,*}
  # One fine-tuned model of each variant, for the rank before and after fine-tuning.
  for run in ${runs//,/ }; do
    folder=$out/glue/$(basename "$run")/${task//\'/}
    model=$(find "$folder" -type d -name checkpoints -not -path '*/unfinished/*' 2>/dev/null |
      sort | head -n 1 || true)
    if [ -n "$model" ]; then tuned+=,$(dirname "$model"); fi
  done
fi
echo "== ranks"
rm -rf "$out/report" # it may be of other variants
"$python" -m maelm_jax.analyze --runs="$runs$tuned" --workdir="$out/report"
if [ -e "$out/glue/table.md" ]; then
  { printf '\n## Fine-tuned\n\n' && cat "$out/glue/table.md"; } >>"$out/report/report.md"
fi
echo "report: $out/report/report.md"
