#!/usr/bin/env bash
# Trains on a Cloud TPU slice. It asks for the slice in the queue (queued resources) if necessary,
# waits for capacity, installs, starts every worker, shows the output of worker 0, and does all of
# it again after preemption.
#
#   launch/tpu_pod.sh [--dry-run] NAME ZONE TYPE --gin_file=base.gin \
#     --workdir=gs://BUCKET/runs/base --gin.Corpus.rows_dir=gs://BUCKET/rows [...]
#
# NAME is the name of the slice. TYPE is its type, as in v5litepod-256 or v5p-256. gcloud must be
# logged in, with a project set. All workers must see the workdir and the rows: in a bucket, or on a
# disk that each mounts. If rows_dir is not in a bucket, the workers also install the extra [data],
# to prepare rows. Variables of the environment:
#   VERSION  software of the TPU VM (default by TYPE, as in Google's table of versions)
#   CREATE   more flags for the request of the slice, as in "--spot" or "--reserved"
#   PATIENCE whole hours to wait for capacity, the first time and after each preemption (default 24)
#   RETRIES  see launch/restarts.sh; also how often in a row a request may fail
#
# If this machine loses contact, the same command shows the live run, or waits on. The exit status
# is that of the run (0, 2 or 3), or 1 if the script gives up. The script does not delete the slice
# at the end: gcloud compute tpus queued-resources delete NAME --zone=ZONE --force
set -euo pipefail
cd "$(dirname "$0")/.."

dry=
if [ "${1:-}" = --dry-run ]; then dry=1; shift; fi
if [ $# -lt 4 ]; then sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 2; fi
git rev-parse HEAD >/dev/null 2>&1 ||
  { echo "error: $PWD is no git clone; the workers get the commit HEAD of one" >&2; exit 2; }
[ -z "$(git status --porcelain)" ] || echo "warning: what has no commit is not sent" >&2
name=$1 zone=$2 type=$3; shift 3
case $type in v5litepod-*) software=v2-alpha-tpuv5-lite ;; v5p-*) software=v2-alpha-tpuv5 ;;
  v6e-*) software=v2-alpha-tpuv6e ;; *) software=tpu-ubuntu2204-base ;; esac
flags=$(printf ' %q' "$@") extras=tpu,bucket,data
read -ra create <<<"${CREATE:-}"
patience=${PATIENCE:-24}
[[ $patience =~ ^(0|[1-9][0-9]*)$ ]] ||
  { echo "error: PATIENCE=$patience is no number of hours; give a whole number" >&2; exit 2; }
case " $*" in *" --gin.Corpus.rows_dir="[gs][s3]://*) extras=tpu,bucket ;; esac
scratch=$(mktemp -d) started='' tries=0 waited=0 failed=0
trap 'rm -rf "$scratch"' EXIT; exec 3>&2
run() {
  printf '+%s\n' "$(printf ' %q' "$@")" >&3
  if [ -z "$dry" ]; then "$@"; fi
}
tpu() { run gcloud compute tpus tpu-vm "$1" "$name" --zone="$zone" "${@:2}"; }
queued() { run gcloud compute tpus queued-resources "$1" "$name" --zone="$zone" "${@:2}"; }
on() { tpu ssh --worker="$1" --command="$2"; }
# Waits at most 20 times in a row. Then the script ends; the slice and the run on it stay.
wait_for() {
  if [ $((tries += 1)) -gt 20 ]; then
    echo "error: $1; the same command goes on from here" >&2
    exit 1
  fi
  echo "$1; trying again in 30 s" >&2
  sleep 30
}
# Waits for capacity, at most $patience hours in a row. Then the request stays in the queue.
wait_in_queue() {
  if [ "$waited" -ge $((patience * 3600)) ]; then
    echo "error: $1 for $patience hours (PATIENCE); the request stays in the queue, and the same" \
      "command goes on from here" >&2
    exit 1
  fi
  echo "$1; waited $((waited / 60)) minutes of $patience hours" >&2
  sleep 120
  waited=$((waited + 120)) tries=0
}

# Takes one step towards a slice that is ready. Deletes only a slice that is preempted or terminated
# and a request that failed or whose slice is gone. $request is the state of the request in the
# queue, or empty.
ready() {
  request=
  state=$(tpu describe --format='value(state)' 2>"$scratch/describe") ||
    state=$(grep -o -m 1 NOT_FOUND "$scratch/describe") || state=UNKNOWN
  case $state in READY) return 0 ;; UNKNOWN) return 1 ;; esac
  request=$(queued describe --format='value(state.state)' 2>"$scratch/describe") ||
    request=$(grep -o -m 1 NOT_FOUND "$scratch/describe") || { request=''; return 1; }
  case $request in
    FAILED)
      queued describe >&2 || true # it says why
      if [ $((failed += 1)) -gt "${RETRIES:-5}" ]; then
        echo "error: the request for the slice $name failed $failed times; see above" >&2
        exit 1
      fi
      queued delete --force --quiet || true
      return 1
      ;;
    SUSPENDED) queued delete --force --quiet || true; return 1 ;;
    NOT_FOUND | '') ;;
    *) return 1 ;; # it waits, or the slice is being made or taken away
  esac
  case $state in
    PREEMPTED | TERMINATED) tpu delete --quiet || return 1 ;; # made without the queue
    NOT_FOUND | '') ;;
    *) return 1 ;;
  esac
  if queued create --node-id="$name" --accelerator-type="$type" \
    --runtime-version="${VERSION:-$software}" ${create[@]+"${create[@]}"}; then
    request=REQUESTED
    [ -n "$dry" ]
    return
  fi
  if [ -z "$started" ]; then
    echo "error: the slice $name could not be requested; see above" >&2
    exit 1
  fi
  request=
  return 1
}

install() {
  run git archive --format=tar.gz --output="$scratch/maelm_jax.tar.gz" HEAD &&
    run gcloud compute tpus tpu-vm scp "$scratch/maelm_jax.tar.gz" "$name:maelm_jax.tar.gz" \
      --zone="$zone" --worker=all &&
    on all "mkdir -p maelm_jax && tar xzf maelm_jax.tar.gz -C maelm_jax &&
      maelm_jax/launch/worker.sh install $extras"
}

while :; do
  if ! ready; then
    if [ -n "$request" ]; then
      wait_in_queue "the slice $name is not there (request: $request)"
    else
      wait_for "the slice $name is not ready ($state)"
    fi
    continue
  fi
  waited=0 failed=0
  state=$(on 0 'if [ -e maelm_jax/launch/worker.sh ]; then maelm_jax/launch/worker.sh state
    else echo none; fi') || state=
  case ${dry:+none}$state in
    running)
      started=1 tries=0
      on 0 'maelm_jax/launch/worker.sh watch' || true
      continue
      ;;
    0 | 2 | 3) [ -z "$started" ] || exit "$state" ;; # else it is the status of an earlier run
    none | lost | [1-9]*) ;;
    *) wait_for "worker 0 of $name does not answer"; continue ;;
  esac
  install || { wait_for "the workers of $name could not be installed"; continue; }
  if [ -n "$started" ]; then
    step=$(on 0 "cd maelm_jax && .venv/bin/python launch/newest_step.py$flags") || step=0
    if [ "$state" = none ]; then state=preempted; fi # the slice is a new one
    launch/restarts.sh "$scratch/restarts" "$state" "$step" || exit 1
  fi
  started=1
  on all "maelm_jax/launch/worker.sh start$flags" || echo "not all workers could be started" >&2
  if [ -n "$dry" ]; then on 0 'maelm_jax/launch/worker.sh watch'; exit; fi
done
