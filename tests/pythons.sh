#!/usr/bin/env bash
# Installs this project on Python 3.11 and 3.13 and runs its tests there. For Python 3.12 it resolves the wheels only.
#
#   tests/pythons.sh WORK [arguments of pytest]
#   PYTHONS=3.13 tests/pythons.sh /tmp/pythons -q tests/test_train.py
#
# WORK is a folder of 10 GB for the installations, which a second start uses again. The whole takes an hour or more, so CI does not run it.
# The default tests are those of the README. Each version is tested as pinned, then with the newest JAX and Flax that resolve.
# An interpreter that is not on PATH comes from Debian trixie (3.13): debootstrap makes a chroot of it, which needs root.
# From the environment: PYTHONS, fewer versions; BIND, folders that pip's configuration names and the chroot must see.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1"
repository=$PWD work=$(cd "$1" && pwd)
shift
if [ $# -eq 0 ]; then set -- -q -n 2 --dist loadfile -m 'not slow'; fi

# Runs a command in the folder $root of the clone: in the chroot where $root is one, else here.
inside() {
  if [ ! -e "$root/etc/debian_version" ]; then
    (cd "$root/project" && "$@")
    return
  fi
  # shellcheck disable=SC2016  # expanded by the inner shell
  root=$root shared=$repository/../shared unshare --mount bash -euo pipefail -c '
    for place in /proc /dev /etc/resolv.conf /etc/hosts /etc/ssl/certs $(ls -d /etc/pip.conf ~/.config/pip 2>/dev/null) ${BIND:-}; do
      if [ -d "$place" ]; then mkdir -p "$root$place"; else mkdir -p "$(dirname "$root$place")"; touch "$root$place"; fi
      mount --rbind "$place" "$root$place"
    done
    if [ -d "$shared" ]; then mkdir -p "$root/shared" && mount --bind "$shared" "$root/shared"; fi
    exec chroot "$root" bash -c '\''cd /project && exec "$@"'\'' bash "$@"' bash "$@"
}

# Makes $root: a folder with a clone of HEAD and a virtual environment of Python $1.
install_on() {
  root=$work/$1
  if ! "python$1" --version >/dev/null 2>&1 && [ ! -e "$root/usr/bin/python$1" ]; then
    [ "$1" = 3.13 ] || { echo "error: python$1 is not on PATH; install it" >&2; exit 2; }
    debootstrap --variant=minbase --include=python3-venv,python3-dev,g++,git,ca-certificates trixie "$root"
  fi
  mkdir -p "$root"
  if [ ! -e "$root/etc/debian_version" ]; then ln -sfn "$repository/../shared" "$root/shared"; fi
  rm -rf "$root/project"
  git clone -q --no-hardlinks "$repository" "$root/project"
  inside "python$1" -m venv .venv
  inside .venv/bin/python -m pip install -q -r requirements.txt
  inside .venv/bin/python -m pip install -q --no-deps -e .
}

for version in ${PYTHONS:-3.11 3.12 3.13}; do
  if [ "$version" = 3.12 ]; then
    python3.11 -m pip wheel -q --no-deps --wheel-dir "$work/wheels" promise # the one requirement that has no wheel; it has no compiled part
    python3.11 -m pip install --dry-run --ignore-installed --target "$work/none" --python-version 3.12 --only-binary=:all: \
      --find-links "$work/wheels" -r requirements.txt | tail -n 1
    continue
  fi
  install_on "$version"
  for versions in pinned newest; do
    if [ "$versions" = newest ]; then inside .venv/bin/python -m pip install -q --upgrade jax flax optax orbax-checkpoint; fi
    echo "== Python $version, $versions JAX $(inside .venv/bin/python -c 'import flax, jax; print(f"{jax.__version__}, Flax {flax.__version__}")')"
    inside .venv/bin/python -m pytest "$@"
  done
done
