"""A command starts itself again for huge pages only where it trains on CPU, and nobody watches the process."""

import os
import pathlib
import platform
import subprocess
import sys

import pytest

from maelm_jax import huge_pages

TRAINING = ["--gin_file=tiny.gin"]
MADVISE = "always [madvise] never\n"
UNTRACED = "Name:\tpython\nTracerPid:\t0\n"


@pytest.fixture
def restarted(monkeypatch):
    """A function that says whether `use_huge_pages(argv)` starts the process again, on a machine of which all is set here."""
    real = pathlib.Path.read_text
    files = {"/sys/kernel/mm/transparent_hugepage/enabled": MADVISE, "/proc/self/status": UNTRACED}
    monkeypatch.setattr(pathlib.Path, "read_text", lambda path, *rest: files.get(str(path)) or real(path, *rest))
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    monkeypatch.setattr(huge_pages.glob, "glob", lambda pattern: [])
    for name in ("bdb", "pydevd"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("GLIBC_TUNABLES", "MAELM_HUGE_PAGES", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    starts = []
    monkeypatch.setattr(os, "execve", lambda *arguments: starts.append(arguments))

    def decide(argv: list[str], **changed: str) -> bool:
        files.update({name.replace("__", "/"): text for name, text in changed.items()})
        starts.clear()
        huge_pages.use_huge_pages(argv)
        return bool(starts)

    return decide


def test_training_on_cpu_starts_again_with_the_same_arguments(restarted, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "maelm_jax.train", *TRAINING])
    assert restarted(TRAINING)
    monkeypatch.setattr(os, "execve", lambda *arguments: seen.append(arguments))
    huge_pages.use_huge_pages(TRAINING)
    ((program, arguments, environment),) = seen
    assert program == sys.executable and arguments == [sys.executable, "-m", "maelm_jax.train", *TRAINING]
    assert environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"


@pytest.mark.parametrize("flag", ["--help", "-h", "--dry_run", "--predict=dev.tsv", "--predict"])
def test_what_does_not_train_stays_as_it_is(restarted, flag):
    assert not restarted([*TRAINING, flag])


@pytest.mark.parametrize(
    "name,value,expected",
    [
        ("MAELM_HUGE_PAGES", "0", False),
        ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0", False),
        ("JAX_PLATFORMS", "cuda,cpu", False),
        ("JAX_PLATFORMS", "tpu", False),
        ("JAX_PLATFORMS", "cpu", True),
    ],
)
def test_the_environment_decides(restarted, monkeypatch, name, value, expected):
    monkeypatch.setenv(name, value)
    assert restarted(TRAINING) == expected


@pytest.mark.parametrize("device", ["/dev/nvidia0", "/dev/accel0", "/dev/vfio/0", "/dev/kfd"])
def test_a_machine_with_an_accelerator_stays_as_it_is_unless_it_is_told_cpu(restarted, monkeypatch, device):
    monkeypatch.setattr(huge_pages.glob, "glob", lambda pattern: [device] if pathlib.PurePath(device).match(pattern) else [])
    assert not restarted(TRAINING)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert restarted(TRAINING)


def test_a_watched_process_stays_as_it_is(restarted, monkeypatch):
    assert not restarted(TRAINING, __proc__self__status=UNTRACED.replace("\t0", "\t4711"))
    assert restarted(TRAINING, __proc__self__status=UNTRACED)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "gettrace", lambda: print)
        assert not restarted(TRAINING)
    for name in ("bdb", "pydevd"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, pathlib)
            assert not restarted(TRAINING)


@pytest.mark.parametrize("choice", ["[always] madvise never\n", "always madvise [never]\n"])
def test_a_system_that_leaves_no_choice_is_left_alone(restarted, choice):
    assert not restarted(TRAINING, __sys__kernel__mm__transparent_hugepage__enabled=choice)


@pytest.mark.parametrize("before", [[], ["-m", "pdb", "-c", "continue", "-c", "quit"]], ids=["plain", "debugger"])
def test_help_and_a_debugged_command_are_one_process_start(before, tmp_path):
    """Python imports sitecustomize once each time it starts."""
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'starts')!r}, 'a').write('x')\n")
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"} | {"PYTHONPATH": f"{tmp_path}:."}
    flags = ["--gin_file=missing.gin"] if before else ["--help"]
    argv = [sys.executable, *before, "-m", "maelm_jax.train", *flags]
    root = pathlib.Path(__file__).resolve().parent.parent
    done = subprocess.run(argv, cwd=root, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert "missing.gin" in done.stderr if before else "usage: " in done.stdout
    assert (tmp_path / "starts").read_text() == "x"
