#!/usr/bin/env bash
# Trains on this machine, on all its devices in one process: GPUs, TPU chips, or else the CPU.
#
#   launch/local.sh [--dry-run] --gin_file=base.gin [any flag of maelm_jax.train]
#
# The first start makes .venv beside this folder and installs what the machine needs. PYTHON names
# the interpreter that makes it (3.11 or later). The same command resumes a run that was stopped.
# Paths in the flags are relative to the repository.
set -euo pipefail
cd "$(dirname "$0")/.."

dry=
if [ "${1:-}" = --dry-run ]; then
  dry=1
  shift
fi
if [ $# -eq 0 ]; then
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
  exit 2
fi

run() {
  printf '+%s\n' "$(printf ' %q' "$@")"
  if [ -z "$dry" ]; then "$@"; fi
}

if [ -e /dev/nvidia0 ]; then
  extra=cuda
elif compgen -G '/dev/accel*' >/dev/null || compgen -G '/dev/vfio/[0-9]*' >/dev/null; then
  extra=tpu
else
  extra=
fi

if [ ! -e .venv/installed ] || [ -n "$dry" ]; then # an installation may have been interrupted
  run "${PYTHON:-python3}" -m venv .venv
  if [ -n "$extra" ]; then
    run .venv/bin/pip install -q -r requirements.txt -e ".[$extra]"
  else
    run .venv/bin/pip install -q -r requirements.txt
  fi
  run touch .venv/installed
fi
if [ -n "$extra" ] && [ -z "$dry" ] &&
  ! .venv/bin/python -c 'import jax; raise SystemExit(jax.default_backend() == "cpu")'; then
  echo "error: this machine has an accelerator, but JAX in .venv sees the CPU only;" \
    "remove .venv, or install -e '.[$extra]' there" >&2
  exit 2
fi
run .venv/bin/python -m maelm_jax.train "$@"
