"""What every command goes through before its own code runs."""

import os
import pathlib
import platform
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CODE = "import os, sys; from maelm_jax import cli; cli.run(lambda argv: print(os.environ.get('GLIBC_TUNABLES'), os.getpid(), *argv))"


def said(**environment: str) -> tuple[list[str], int]:
    """(words printed, process id) of a command that prints the allocator's settings, its id and its arguments."""
    kept = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    process = subprocess.Popen([sys.executable, "-c", CODE, "a b", "c"], cwd=ROOT, env=kept | environment, stdout=subprocess.PIPE, text=True)
    return process.communicate()[0].split(), process.pid


def test_a_command_asks_for_huge_pages_where_it_may_and_was_not_told_otherwise():
    choice = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    may = choice.exists() and "[madvise]" in choice.read_text() and platform.libc_ver()[0] == "glibc"
    words, process = said()
    assert words == ["glibc.malloc.hugetlb=1" if may else "None", str(process), "a", "b", "c"], "the same process, the same arguments"
    assert said(GLIBC_TUNABLES="glibc.malloc.hugetlb=0")[0][0] == "glibc.malloc.hugetlb=0"
