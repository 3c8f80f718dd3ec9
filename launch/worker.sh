#!/usr/bin/env bash
# launch/tpu_pod.sh calls this script on each worker of a slice, in the unpacked repository.
#
#   launch/worker.sh install EXTRAS  makes .venv with this package and the extras, as "tpu,bucket"
#   launch/worker.sh start FLAGS     starts maelm_jax.train in the background, after an earlier run
#                                    on this worker has ended
#   launch/worker.sh state           prints "running", else the exit status of the last run, "lost"
#                                    (it has no exit status) or "none" (there was no run)
#   launch/worker.sh watch           shows the log until the run ends
#
# A run locks the file run.lock while it lives, so that two never run at once. Its output is in the
# file log, its exit status in the file status.
set -euo pipefail
cd "$(dirname "$0")/.."

state() (
  exec 9>>run.lock
  if ! flock -n 9; then
    echo running
  elif [ -e status ]; then
    cat status
  elif [ -e log ]; then
    echo lost
  else
    echo none
  fi
)

case ${1:-} in
  install)
    rm -f status # of an earlier run
    [ -x ~/.local/bin/uv ] || curl -LsSf https://astral.sh/uv/install.sh | sh
    ~/.local/bin/uv venv -q --allow-existing --python 3.11
    ~/.local/bin/uv pip install -q -c requirements.txt -e ".[$2]"
    ;;
  start)
    shift
    exec 9>>run.lock # the run inherits the lock
    if ! flock -w 600 9; then
      echo "error: an earlier run is still alive on $(hostname) after 10 minutes;" \
        "end it, then start again" >&2
      exit 1
    fi
    rm -f status
    # shellcheck disable=SC2016  # expanded by the inner shell
    nohup bash -c '.venv/bin/python -m maelm_jax.train --coordinator=auto "$@"; echo $? >status' \
      bash "$@" >log 2>&1 </dev/null &
    ;;
  state) state ;;
  watch)
    tail -n 50 -F log &
    while [ "$(state)" = running ]; do sleep 5; done
    kill $!
    ;;
  *)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
    exit 2
    ;;
esac
