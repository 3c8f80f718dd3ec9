"""What every command goes through before its own code runs."""

import errno
import os
import pathlib
import platform
import subprocess
import sys

import jax
import pytest
from testing import ROOT

from maelm_jax import cli, config, finetune, gin_files, huge_pages, storage
from maelm_jax.finetuning import labelled_data

CODE = "import os, sys; from maelm_jax import cli; cli.run(lambda argv: print(os.environ.get('GLIBC_TUNABLES'), os.getpid(), *argv), trains=True)"


def test_a_command_asks_for_huge_pages_where_it_may():
    choice = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    may = choice.exists() and "[madvise]" in choice.read_text() and platform.libc_ver()[0] == "glibc"
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    process = subprocess.Popen([sys.executable, "-c", CODE, "a b", "c"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    words = process.communicate()[0].split()
    expected = [huge_pages.TUNABLES if may else "None", str(process.pid), "a", "b", "c"]
    assert words == expected, "the same process, the same arguments"


@pytest.mark.parametrize(
    "error,status,named",
    [
        (config.ConfigError("two\nlines"), 2, "two lines"),
        (config.RunError("later"), 1, "later"),
        (OSError(errno.ENOENT, "No such file", "some/path"), 2, "some/path"),
        (OSError(errno.EACCES, "Permission denied", "some/path"), 2, "some/path"),
        (OSError(errno.EROFS, "Read-only file system", "from", None, "to"), 2, "to"),
        (OSError(errno.EIO, "Input/output error", "some/path"), 1, "some/path"),
        (OSError(errno.ENOTCONN, "Transport endpoint is not connected", "some/path"), 1, "some/path"),
        (OSError(errno.ENOSPC, "No space left on device", "some/path"), 1, "some/path"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: writing some/path: No space left on device"), 1, "some/path"),
        (MemoryError(), 1, "smaller batch"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes."), 1, "smaller batch"),
        (ValueError("a library's words"), 2, "a library's words"),
        (KeyError("key"), 1, "KeyError"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_every_error_is_one_line_and_verbose_shows_where(error, status, named, capsys):
    def main(argv):
        raise error

    assert cli.status_of(main, [], "use a smaller batch") == status
    printed = capsys.readouterr().err
    assert named in printed and printed.count("\n") == (status != 130)
    assert cli.status_of(main, ["--verbose"]) == status
    assert ("Traceback" in capsys.readouterr().err) == (status != 130)


def test_only_the_command_line_lets_a_run_s_record_name_code(tmp_path):
    binding = "Corpus.task_modules=('antigravity',)"
    (tmp_path / "config.gin").write_text(gin_files.render(gin_files.load(["tiny.gin"], [binding])))
    flags = [f"--workdir={tmp_path}"]
    with pytest.raises(config.ConfigError, match="antigravity"):
        cli.parse(cli.parser(""), flags)
    experiment = cli.parse(cli.parser(""), [*flags, f"--gin.{binding}"]).experiment
    assert experiment.corpus.task_modules == ("antigravity",)


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    """bash does not expand it in --workdir=~/runs."""
    monkeypatch.setenv("HOME", str(tmp_path))
    args, _ = cli.arguments(cli.parser(""), ["--workdir=~/runs/x"])
    assert str(args.workdir) == f"{tmp_path}/runs/x"
    args, _ = cli.arguments(finetune._flags(), ["--predict=~/new.tsv", "--submission=~/glue.zip"])
    assert (args.predict, args.submission) == (f"{tmp_path}/new.tsv", f"{tmp_path}/glue.zip")
    (tmp_path / "train.tsv").touch()
    assert labelled_data.existing_file("Finetune.train_file", "~/train.tsv") == tmp_path / "train.tsv"
    assert storage.local_path("~/rows") == tmp_path / "rows" and storage.file_system("~/rows")[1] == f"{tmp_path}/rows"


def shell(line: str) -> int:
    """The exit status of the first command of a line, in which $PY is Python."""
    return subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=os.environ | {"PY": sys.executable, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL
    ).returncode


def test_work_is_done_although_nobody_reads_what_is_printed(tmp_path):
    code = f"""
import sys, time; from maelm_jax import cli
def main(argv):
    for number in range(2000): print(number, "x" * 100); print(number, file=sys.stderr, flush=True)
    with open({str(tmp_path / "done")!r}, "a") as file: assert file.fileno() > 2; file.write("done")
cli.run(main)"""
    (tmp_path / "work.py").write_text(code)
    for number, way in enumerate(("| head -1 >/dev/null", ">/dev/null 2>&-", ">&-", "2>&1 >/dev/null | head -1 >/dev/null", ">&- 2>&- <&-"), start=1):
        assert shell(f"$PY {tmp_path / 'work.py'} {way}; exit ${{PIPESTATUS[0]}}") == 0, way
        assert (tmp_path / "done").read_text() == "done" * number, way


def test_a_command_that_is_none_is_wrong_input():
    assert [shell(f"$PY -m maelm_jax {argument} >/dev/null") for argument in ("", "--help", "trian", "train")] == [0, 0, 2, 2]


def test_a_path_that_is_not_utf8_is_refused(tmp_path):
    with pytest.raises(config.ConfigError, match="UTF-8"):
        cli.arguments(cli.parser(""), [os.fsdecode(b"--workdir=" + os.fsencode(tmp_path) + b"/\xff")])


def test_a_lost_process_says_what_to_do(monkeypatch):
    error = jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:1234")
    assert "another process" not in cli.ending(error).line, "there is only one process"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert "another process" in cli.ending(error).line and cli.ending(error).status == 1


def test_a_gin_file_that_includes_itself_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.gin").write_text("include 'b.gin'\n")
    (tmp_path / "b.gin").write_text("include 'a.gin'\n")
    with pytest.raises(config.ConfigError, match="a.gin"):
        gin_files.load(["a.gin"])
