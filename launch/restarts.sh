#!/usr/bin/env bash
# Decides whether a run that has ended starts again, for launch/slurm.sbatch and launch/tpu_pod.sh.
#
#   launch/restarts.sh FILE STATUS STEP
#
# The exit status is 0 if the run starts again, else 1. A line on stderr says why.
#
# STATUS is the exit status of the run, or "lost" or "preempted". 0 (done), 2 (wrong input) and 3
# (diverged) are final. After any other status (143: stopped and saved; 1 and others: a process was
# lost) a run starts again, at most RETRIES times (default 5) in a row without a newer checkpoint.
# STEP is the step of the newest checkpoint. FILE keeps the step and the count between two calls.
# The last call removes it.
set -euo pipefail
[ $# -eq 3 ] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 2; }
file=$1 status=$2 step=${3:-0} limit=${RETRIES:-5} newest=-1 starts=0

case $status in 0 | 2 | 3)
  rm -f "$file"
  echo "ended with status $status; not started again (0: done, 2: wrong input, 3: diverged)" >&2
  exit 1
  ;;
esac
if [ -e "$file" ]; then read -r newest starts <"$file"; fi
if [ "$step" -gt "$newest" ]; then newest=$step starts=0; fi
starts=$((starts + 1))
if [ "$starts" -gt "$limit" ]; then
  rm -f "$file"
  echo "ended with status $status; $limit starts in a row brought no checkpoint newer than step" \
    "$newest; not started again (RETRIES=$limit)" >&2
  exit 1
fi
echo "$newest $starts" >"$file"
echo "ended with status $status at checkpoint $newest; starting again, $starts of $limit without" \
  "a newer one" >&2
