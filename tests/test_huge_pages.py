"""A command starts itself again for huge pages only where it trains on CPU, and nobody watches the process."""

import os
import pathlib
import platform
import sys
import unittest.mock

import pytest

from maelm_jax import huge_pages

TRAINING = ["--gin_file=tiny.gin"]
CHOICE = "/sys/kernel/mm/transparent_hugepage/enabled"


@pytest.fixture(autouse=True)
def files(monkeypatch) -> dict[str, str]:
    """{path: content} of the files that decide, on a machine without an accelerator. Nobody watches this process."""
    files, real = {CHOICE: "always [madvise] never\n"}, pathlib.Path.read_text
    monkeypatch.setattr(pathlib.Path, "read_text", lambda path, *rest: files.get(str(path)) or real(path, *rest))
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    monkeypatch.setattr(huge_pages.glob, "glob", lambda pattern: [])
    for name in ("bdb", "pydevd"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("GLIBC_TUNABLES", "MAELM_HUGE_PAGES", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    return files


def start_of(argv: list[str]) -> tuple | None:
    """The arguments of os.execve if a command with these flags starts again."""
    with unittest.mock.patch.object(os, "execve") as execve:
        huge_pages.use_huge_pages(argv)
    return execve.call_args and execve.call_args.args


def test_training_on_cpu_starts_again_with_the_same_arguments(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "maelm_jax.train", *TRAINING])
    program, arguments, environment = start_of(TRAINING)
    assert program == sys.executable and arguments == [sys.executable, "-m", "maelm_jax.train", *TRAINING]
    assert environment["GLIBC_TUNABLES"] == huge_pages.TUNABLES


@pytest.mark.parametrize("flag", ["--help", "--dry_run", "--predict=dev.tsv"])
def test_what_does_not_train_stays_as_it_is(flag):
    assert start_of([*TRAINING, flag]) is None


@pytest.mark.parametrize("name,value", [("MAELM_HUGE_PAGES", "0"), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0"), ("JAX_PLATFORMS", "cuda,cpu")])
def test_the_environment_decides(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert start_of(TRAINING) is None


@pytest.mark.parametrize("device", ["/dev/nvidia0", "/dev/accel0", "/dev/vfio/0", "/dev/kfd"])
def test_a_machine_with_an_accelerator_stays_as_it_is_unless_it_is_told_cpu(monkeypatch, device):
    monkeypatch.setattr(huge_pages.glob, "glob", lambda pattern: [device] if pathlib.PurePath(device).match(pattern) else [])
    assert start_of(TRAINING) is None
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert start_of(TRAINING)


def test_a_watched_process_stays_as_it_is(monkeypatch):
    monkeypatch.setitem(sys.modules, "bdb", pathlib)
    assert start_of(TRAINING) is None


def test_a_system_that_leaves_no_choice_is_left_alone(files):
    files[CHOICE] = "always madvise [never]\n"
    assert start_of(TRAINING) is None
