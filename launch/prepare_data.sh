#!/usr/bin/env bash
# Prepares the rows and the vocabulary of a config's corpus at the place where training reads them.
#
#   launch/prepare_data.sh [--dry-run] DESTINATION --gin_file=base.gin [flags of maelm_jax.prepare]
#
# DESTINATION is a folder, gs://BUCKET/rows or s3://BUCKET/rows. On a shared disk every host may run
# this script with its own --part=I --parts=N, and one of them with --join at the end. For a bucket,
# rows are made in the folder SCRATCH (default ./rows) and copied with gcloud or aws, which must be
# logged in. All that is in SCRATCH is copied. PYTHON is the interpreter (default
# .venv/bin/python). Paths in the flags are relative to the repository. Give training
# --gin.Corpus.rows_dir=DESTINATION.
set -euo pipefail
from=$PWD
cd "$(dirname "$0")/.."

dry=
if [ "${1:-}" = --dry-run ]; then
  dry=1
  shift
fi
if [ $# -lt 2 ]; then
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
  exit 2
fi
destination=${1%/}
case $destination in gs://* | s3://* | /*) ;; *) destination=$from/$destination ;; esac
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

# These files say that a store is whole, so they are copied last.
case $destination in
  gs://*)
    run gcloud storage rsync --recursive --exclude='.*(store\.json|rows-[^/]*\.json|\.parts/.*)$' \
      "$rows" "$destination"
    run gcloud storage rsync --recursive --exclude='.*\.parts/.*' "$rows" "$destination"
    ;;
  s3://*)
    run aws s3 sync "$rows" "$destination" --exclude '*store.json' \
      --exclude 'rows-*.json' --exclude '*.parts/*'
    run aws s3 sync "$rows" "$destination" --exclude '*.parts/*'
    ;;
esac
