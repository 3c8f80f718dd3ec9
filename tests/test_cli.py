"""What every command goes through before its own code runs."""

import os
import pathlib
import platform
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CODE = "import os, sys; from maelm_jax import cli; cli.run(lambda argv: print(os.environ.get('GLIBC_TUNABLES'), os.getpid(), *argv), trains=True)"


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


def test_deterministic_operations_are_asked_for_before_a_device_is_there():
    code = """if True:
        import os, jax
        from jax._src import xla_bridge
        from maelm_jax import cli
        cli.parse(cli.parser(""), ["--gin_file=tiny.gin", "--gin.Run.deterministic=True"])
        print(os.environ["XLA_FLAGS"], xla_bridge.backends_are_initialized(), float(jax.numpy.ones(3).sum()))  # XLA ends on a flag unknown to it
    """
    words = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"XLA_FLAGS": ""}, capture_output=True, text=True).stdout.split()
    assert words == ["--xla_gpu_deterministic_ops=true", "False", "3.0"]
