#!/usr/bin/env bash
# Says whether a run that has ended is to be started again; launch/slurm.sbatch and launch/tpu_pod.sh ask it.
#
#   launch/restarts.sh FILE STATUS STEP     exit status 0: start again; 1: leave it; a line on stderr says why
#
# STATUS is what the run ended with, or "lost". 0 (done), 2 (wrong input) and 3 (diverged) are final. After anything else (143: stopped and
# saved; 1 and others: a process was lost) a run is started again, at most RETRIES times (default 5) in a row without a newer checkpoint.
# STEP is the newest checkpoint's; FILE keeps it and the count from one call to the next, and is removed at the end.
set -euo pipefail
[ $# -eq 3 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; }
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
  echo "ended with status $status; $limit starts in a row brought no checkpoint newer than step $newest; not started again (RETRIES=$limit)" >&2
  exit 1
fi
echo "$newest $starts" >"$file"
echo "ended with status $status at checkpoint $newest; starting again, $starts of $limit without a newer one" >&2
