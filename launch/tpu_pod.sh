#!/usr/bin/env bash
# Trains on a Cloud TPU slice: creates it if it is not there, installs, starts every worker, shows worker 0, starts again after preemption.
#
#   launch/tpu_pod.sh [--dry-run] NAME ZONE TYPE --gin_file=base.gin --workdir=gs://BUCKET/runs/base --gin.Corpus.rows_dir=gs://BUCKET/rows [...]
#
# NAME is the slice's, TYPE as in v5litepod-256 or v5p-256. Needs gcloud, logged in, with a project set. From the environment: VERSION (software of
# the TPU VM, default tpu-ubuntu2204-base), CREATE (further flags of its creation, as in "--spot" or "--reserved"). Workdir and rows_dir must be seen
# by all workers: a bucket, or a disk mounted on each. Ends when the run is done (0) or wrong (2). The slice is left: delete it when it is not needed.
set -euo pipefail
cd "$(dirname "$0")/.."

dry=
if [ "${1:-}" = --dry-run ]; then
  dry=1
  shift
fi
if [ $# -lt 4 ]; then
  sed -n '2,8s/^# \{0,1\}//p' "$0"
  exit 2
fi
name=$1 zone=$2 type=$3
shift 3
arguments=$(printf ' %q' "$@")
read -ra create <<<"${CREATE:-}"

exec 3>&2
run() {
  printf '+%s\n' "$(printf ' %q' "$@")" >&3
  if [ -z "$dry" ]; then "$@"; fi
}
tpu() { run gcloud compute tpus tpu-vm "$1" "$name" --zone="$zone" "${@:2}"; }
on() { tpu ssh --worker="$1" --command="$2"; }

install() {
  if [ "$(tpu describe --format='value(state)' 2>/dev/null)" != READY ]; then
    tpu delete --quiet || true # what preemption left
    tpu create --accelerator-type="$type" --version="${VERSION:-tpu-ubuntu2204-base}" ${create[@]+"${create[@]}"}
  fi
  run git archive --format=tar.gz --output=/tmp/maelm_jax.tar.gz HEAD
  run gcloud compute tpus tpu-vm scp /tmp/maelm_jax.tar.gz "$name:maelm_jax.tar.gz" --zone="$zone" --worker=all
  on all 'mkdir -p maelm_jax && tar xzf maelm_jax.tar.gz -C maelm_jax && curl -LsSf https://astral.sh/uv/install.sh | sh'
  # shellcheck disable=SC2016  # expanded on the workers
  on all 'cd maelm_jax && $HOME/.local/bin/uv venv -q --allow-existing --python 3.11 && $HOME/.local/bin/uv pip install -q -e ".[tpu,bucket]"'
}

while :; do
  install
  on all "cd maelm_jax && rm -f status && (nohup sh -c '.venv/bin/python -m maelm_jax.train --coordinator=auto$arguments; echo \$? >status' >log 2>&1 &)"
  status=0
  # shellcheck disable=SC2016  # expanded on the worker
  on 0 'cd maelm_jax && tail -n +1 -F log & while [ ! -e maelm_jax/status ]; do sleep 5; done; exit $(cat maelm_jax/status)' || status=$?
  if [ "$status" -eq 0 ] || [ "$status" -eq 2 ]; then exit "$status"; fi
  echo "status $status (143: stopped and saved; others: a worker was lost); starting again" >&2
  sleep 30
done
