"""What every command goes through before its own code runs."""

import errno
import os
import pathlib
import platform
import subprocess
import sys

import jax
import pytest

from maelm_jax import cli, config, finetune, storage
from maelm_jax.finetuning import glue, sentence_data

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


@pytest.mark.parametrize(
    "number,status",
    [
        (errno.ENOENT, 2),
        (errno.ENOTDIR, 2),
        (errno.EISDIR, 2),
        (errno.EACCES, 2),
        (errno.EPERM, 2),
        (errno.EROFS, 2),
        (errno.ENAMETOOLONG, 2),
        (errno.ELOOP, 2),
        (errno.EEXIST, 2),
        (errno.ENOTEMPTY, 2),
        (errno.EIO, 1),
        (errno.ENOSPC, 1),
        (errno.EDQUOT, 1),
        (errno.ESTALE, 1),
        (errno.EMFILE, 1),
    ],
)
def test_a_path_that_fails_is_one_line(number, status, capsys):
    def main(argv):
        raise OSError(number, os.strerror(number), "some/path")

    assert cli.status_of(main, []) == status
    line = capsys.readouterr().err
    assert line.startswith(f"error: some/path: {os.strerror(number)}; ") and line.count("\n") == 1


def test_an_error_of_two_paths_names_the_one_written(capsys):
    def main(argv):
        raise OSError(errno.EACCES, "Permission denied", b"from", None, b"to")

    assert cli.status_of(main, []) == 2
    assert capsys.readouterr().err.startswith("error: to: Permission denied; ")


def test_a_full_disk_without_a_path_is_one_line(capsys):
    def main(argv):
        raise OSError(errno.ENOSPC, "No space left on device")

    assert cli.status_of(main, []) == 1
    line = capsys.readouterr().err
    assert line.startswith("error: a file: No space left on device; free some space")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes."),
        jax.errors.JaxRuntimeError("INTERNAL: Error dispatching computation: Out of memory allocating 4294967296 bytes."),
    ],
)
def test_too_little_memory_is_one_line(capsys, error):
    def main(argv):
        raise error

    assert cli.status_of(main, []) == 1
    assert capsys.readouterr().err == "error: this machine has too little memory\n"
    assert cli.status_of(main, [], cli.FINETUNE_MEMORY) == 1
    assert capsys.readouterr().err == "error: this machine has too little memory; use a smaller Grid.batch_size or Finetune.eval_batch_size\n"


def test_a_defect_keeps_its_traceback_and_verbose_shows_every_one(capsys):
    errors = {
        "key": KeyError("k"),
        "socket": OSError(errno.ECONNRESET, "reset"),
        "wrong": config.ConfigError("two\nlines"),
        "surrogate": config.ConfigError("\udc80"),
    }

    def main(argv):
        raise errors[argv[0]]

    for kind in ("key", "socket"):
        with pytest.raises((KeyError, OSError)):
            cli.status_of(main, [kind])
    for kind, line in (("wrong", "two lines"), ("surrogate", "\\udc80")):
        assert cli.status_of(main, [kind]) == 2
        assert capsys.readouterr().err == f"error: {line}\n"
    assert cli.status_of(main, ["wrong", "--verbose"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    """bash does not expand it in --workdir=~/runs."""
    monkeypatch.setenv("HOME", str(tmp_path))
    args, _ = cli.arguments(cli.parser(""), ["--workdir=~/runs/x"])
    assert args.workdir == f"{tmp_path}/runs/x"
    args, _ = cli.arguments(finetune._flags(), ["--predict=~/new.tsv", "--submission=~/glue.zip"])
    assert (args.predict, args.submission) == (f"{tmp_path}/new.tsv", f"{tmp_path}/glue.zip")
    (tmp_path / "train.tsv").touch()
    custom = config.CustomTask(train_file="~/train.tsv", dev_file="~/train.tsv", labels=("a", "b"))
    located = sentence_data.locate(glue.task_of("own", custom), config.Finetune(tasks="own", custom=custom))
    assert set(located.values()) == {tmp_path / "train.tsv"}
    assert storage.local_path("~/rows") == tmp_path / "rows" and storage.file_system("~/rows")[1] == f"{tmp_path}/rows"
