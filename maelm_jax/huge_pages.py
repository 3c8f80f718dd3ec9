"""Starts a training command on CPU again, with an allocator that keeps its memory, in huge pages.

glibc reads the options of its allocator (GLIBC_TUNABLES) only when a process starts. A training
step on CPU allocates and frees hundreds of megabytes to gigabytes. The kernel clears each page that
it hands out, for up to a fifth of the step (docs/notes/performance.md).
"""

import glob
import os
import pathlib
import platform
import sys
import typing

NOT_TRAINING = ("-h", "--help", "--dry_run", "--predict")  # flags
# One heap for all threads keeps blocks of up to 512 MiB from step to step. Kept blocks of gigabytes
# made it grow by another one now and then.
TUNABLES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"
    ":glibc.malloc.mmap_threshold=536870912:glibc.malloc.trim_threshold=536870912"
)
ACCELERATORS = ("nvidia[0-9]*", "kfd", "accel*", "vfio/[0-9]*")  # files under /dev


def use_huge_pages(argv: typing.Sequence[str]):
    """Starts this process again with huge pages, if it trains on CPU.

    The process is not started again if the kernel does not let programs ask for huge pages, if
    GLIBC_TUNABLES is set, under a Python debugger, or with MAELM_HUGE_PAGES=0.
    """
    if os.environ.get("MAELM_HUGE_PAGES") == "0" or "GLIBC_TUNABLES" in os.environ:
        return
    # A Python debugger would lose a process that starts again.
    if sys.gettrace() is not None or "bdb" in sys.modules or "pydevd" in sys.modules:
        return
    if not _trains_on_cpu(argv):
        return
    try:
        choice = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return
    if "[madvise]" in choice and platform.libc_ver()[0] == "glibc":
        os.execve(
            sys.executable,
            [sys.executable, *sys.orig_argv[1:]],
            os.environ | {"GLIBC_TUNABLES": TUNABLES},
        )


def _trains_on_cpu(argv: typing.Sequence[str]) -> bool:
    """Returns whether a training command trains on CPU. JAX is not imported yet."""
    if any(argument.partition("=")[0] in NOT_TRAINING for argument in argv):
        return False
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms.split(",")[0] == "cpu"
    return not any(glob.glob(f"/dev/{pattern}") for pattern in ACCELERATORS)
