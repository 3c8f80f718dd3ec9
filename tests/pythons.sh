#!/usr/bin/env bash
# Installs HEAD on each Python, as the README says, and runs the tests there.
#
#   tests/pythons.sh WORK [arguments of pytest]
#   PYTHONS='python3.13' tests/pythons.sh /tmp/pythons -q tests/test_train.py
#
# PYTHONS names the interpreters. WORK is a folder of 3 GB for each; a second start uses its environments again. Without arguments, the
# tests are those of the README: 8 minutes a Python on two free cores.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1"
repository=$PWD work=$(cd "$1" && pwd)
shift
if [ $# -eq 0 ]; then set -- -q -n 2 --dist worksteal -m 'not slow'; fi

for python in ${PYTHONS:-python3.11 python3.12 python3.13}; do
  root=$work/$(basename "$python")
  mkdir -p "$root"
  ln -sfn "$repository/../shared" "$root/shared" # may be absent
  if [ ! -e "$root/project" ]; then git clone -q "$repository" "$root/project"; fi
  cd "$root/project"
  git pull -q --ff-only
  if [ ! -e .venv ]; then "$python" -m venv .venv; fi
  .venv/bin/pip install -q -r requirements.txt
  echo "== $(.venv/bin/python --version)"
  .venv/bin/python -m pytest "$@"
done
