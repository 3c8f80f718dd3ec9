#!/usr/bin/env bash
# Makes the rows of a config's corpus, vocabulary included, and puts them where training will read them.
#
#   launch/prepare_data.sh [--dry-run] DESTINATION --gin_file=base.gin [any flag of maelm_jax.prepare]
#
# DESTINATION is a folder (of a shared disk: every host may run this with its own --host=I --hosts=N), gs://BUCKET/rows or s3://BUCKET/rows. For a
# bucket the rows are made in SCRATCH (default ./rows), then copied, with gcloud or aws, which must be logged in. PYTHON: default .venv/bin/python.
# Training then takes --gin.Corpus.rows_dir=DESTINATION.
set -euo pipefail
cd "$(dirname "$0")/.."

dry=
if [ "${1:-}" = --dry-run ]; then
  dry=1
  shift
fi
if [ $# -lt 2 ]; then
  sed -n '2,8s/^# \{0,1\}//p' "$0"
  exit 2
fi
destination=${1%/}
shift

run() {
  printf '+%s\n' "$(printf ' %q' "$@")"
  if [ -z "$dry" ]; then "$@"; fi
}

case $destination in
  gs://* | s3://*) rows=${SCRATCH:-rows} ;;
  *) rows=$destination ;;
esac
run "${PYTHON:-.venv/bin/python}" -m maelm_jax.prepare "$@" "--gin.Corpus.rows_dir=$rows"

# store.json of a store says that it is whole: it goes last.
case $destination in
  gs://*)
    run gcloud storage rsync --recursive --exclude='.*(store\.json|\.parts/.*)$' "$rows" "$destination"
    run gcloud storage rsync --recursive --exclude='.*\.parts/.*' "$rows" "$destination"
    ;;
  s3://*)
    run aws s3 sync "$rows" "$destination" --exclude '*store.json' --exclude '*.parts/*'
    run aws s3 sync "$rows" "$destination" --exclude '*.parts/*'
    ;;
esac
