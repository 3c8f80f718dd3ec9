"""Common parts of all commands: flags, settings, and one-line messages for errors."""

import argparse
import collections.abc
import hashlib
import os
import pathlib
import platform
import re
import sys
import traceback
import typing

from maelm_jax import config, gin_files, huge_pages, paths, stopping, storage, workdirs
from maelm_jax.settings import LARGEST, closest, shown

DAY = 86_400  # seconds
# What helps a command that ran out of memory.
TRAIN_MEMORY = "use a smaller Run.batch_size, a larger Run.accumulate or a smaller Model"
FINETUNE_MEMORY = "use a smaller Grid.batch_size or Finetune.eval_batch_size"

Main = collections.abc.Callable[[list[str]], int | None]  # a command: arguments -> exit status


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError instead of exiting."""

    def error(self, message: str):
        known = [flag for action in self._actions for flag in action.option_strings]
        name = message.removeprefix("unrecognized arguments: ").split("=")[0].split(" ")[0]
        hint = closest(name, known) if message.startswith("unrecognized") else ""
        raise config.ConfigError(f"{_printable(message)}{hint}; --help lists the flags")


def parser(description: str) -> argparse.ArgumentParser:
    """Returns an argument parser with the flags of every command.

    Args:
        description: The docstring of the command's module, which --help prints.
    """
    layout = argparse.RawDescriptionHelpFormatter
    result = _Parser(description=description, formatter_class=layout, allow_abbrev=False)
    result.add_argument(
        "--gin_file",
        action="append",
        default=[],
        metavar="FILE",
        help="settings; repeatable, later files win; found here or in configs/",
    )
    result.add_argument(
        "--workdir",
        metavar="DIR",
        help="the run to write or to work on; default runs/<stem of the first gin file>",
    )
    result.add_argument("--verbose", action="store_true", help="show tracebacks")
    result.epilog = (
        "Any setting of docs/configuration.md: --gin.NAME=VALUE, "
        "as in --gin.TRAIN_STEPS=500 or --gin.Model.layers=6."
    )
    return result


def whole_number(least: int, most: int = LARGEST) -> collections.abc.Callable[[str], int]:
    """Returns the `type` of a flag that takes an integer from `least` to `most`."""

    def parse_number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:  # int() also raises it for more than 4300 digits
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"must be an integer from {least} to {most}, got {shown(text)}"
            )
        return value

    return parse_number


def add_process_flags(flags: argparse.ArgumentParser):
    """Adds the flags of a command that may run as several processes (training/distributed.py)."""
    group = flags.add_argument_group(
        "several processes", "Slurm and Open MPI give each process its number; docs/gpus.md"
    )
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help='where process 0 listens; "auto" asks a TPU slice, Slurm, Open MPI or Kubernetes',
    )
    group.add_argument("--processes", type=whole_number(1), metavar="N", help="how many there are")
    group.add_argument(
        "--process", type=whole_number(0), metavar="I", help="the number of this one, from 0"
    )
    group.add_argument(
        "--peer_timeout",
        type=whole_number(1, DAY),
        default=120,
        metavar="SECONDS",
        help="how long to wait for another process to join or answer",
    )


class Arguments(typing.NamedTuple):
    """A command line."""

    flags: argparse.Namespace
    bindings: list[str]  # NAME=VALUE of each --gin.NAME=VALUE


class Command(typing.NamedTuple):
    """A command line, and the settings of its gin files and bindings."""

    flags: argparse.Namespace
    experiment: config.Experiment | None  # None: see parse_encoder


def arguments(flags: argparse.ArgumentParser, argv: typing.Sequence[str]) -> Arguments:
    """Parses the command line and checks that each value is text and --workdir can be a folder.

    Raises:
        ConfigError: A flag or value is wrong.
    """
    bindings = [item.removeprefix("--gin.") for item in argv if item.startswith("--gin.")]
    args = flags.parse_args([item for item in argv if not item.startswith("--gin.")])
    for name, value in vars(args).items():
        for text in value if isinstance(value, list) else [value]:
            _check_text(f"--{name}", text)
    for binding in bindings:
        _check_text("--gin.", binding)
    if args.workdir is None and args.gin_file:
        args.workdir = os.path.join("runs", pathlib.Path(args.gin_file[0]).stem)
    if args.workdir is not None:
        args.workdir = os.path.expanduser(args.workdir)  # bash leaves the ~ of --workdir=~/runs
        paths.check_folder("--workdir", args.workdir)
    for name in ("input", "output", "predict", "submission"):
        if path := getattr(args, name, None):
            setattr(args, name, os.path.expanduser(path))
            storage.require_local(path)
    return Arguments(args, bindings)


def _check_text(flag: str, text):
    """Raises ConfigError for text that cannot be a name or a path."""
    if not isinstance(text, str):
        return
    if not text.strip():
        raise config.ConfigError(f"{flag} is empty. Give a value, or leave the flag out")
    if "\0" in text or _printable(text) != " ".join(text.split()):
        raise config.ConfigError(f"{flag}={shown(text)}: holds a character that is no UTF-8 text")


def _printable(text: str) -> str:
    """Returns `text` on one line, with escapes for characters that UTF-8 cannot encode."""
    line = " ".join(text.split()).replace("\0", "\\0")
    return line.encode("utf-8", "backslashreplace").decode("utf-8")


def parse(flags: argparse.ArgumentParser, argv: typing.Sequence[str]) -> Command:
    """Parses `argv` and builds the settings. Without --gin_file, reads config.gin of the workdir.

    Raises:
        ConfigError: A flag, a gin file or a setting is wrong.
    """
    args, bindings = arguments(flags, argv)
    args.run = None
    if not args.gin_file:
        if not args.workdir:
            raise config.ConfigError(
                "give --gin_file=FILE (configs/ holds tiny.gin, small.gin, base.gin), "
                "or --workdir=RUN of a run that was started before"
            )
        saved = workdirs.records(args.workdir) / gin_files.RECORD
        if not saved.is_file():
            raise config.ConfigError(
                f"{workdirs.no_run(args.workdir)}. "
                "Name another --workdir, or start this one: train with --gin_file=FILE, as tiny.gin"
            )
        args.gin_file, args.run = [str(saved)], args.workdir
    elif args.workdir:  # an older run that is resumed keeps the values that it does not record
        record = workdirs.records(args.workdir) / gin_files.RECORD
        bindings = [*gin_files.values_of_older_run(record), *bindings]
    experiment = gin_files.load(args.gin_file, bindings)
    paths.check_folder("Corpus.rows_dir", experiment.corpus.rows_dir)
    deterministic_operations(experiment.run.deterministic)
    return Command(args, experiment)


def parse_encoder(flags: argparse.ArgumentParser, argv: typing.Sequence[str]) -> Command:
    """Parses `argv` of a command that reads an encoder: a workdir, a folder or a checkpoint.

    The settings are None if --workdir is no workdir, because such an encoder has no settings of a
    run.

    Raises:
        ConfigError: A flag, a gin file or a setting is wrong.
    """
    args, bindings = arguments(flags, argv)
    path = pathlib.Path(args.workdir or "")
    if not args.workdir or not path.exists() or (path / "config.gin").is_file():
        return parse(flags, argv)
    if args.gin_file:
        raise config.ConfigError(
            f"--gin_file={args.gin_file[0]} has settings of a run, and --workdir={args.workdir} is "
            "no workdir. Leave it out"
        )
    if bindings:
        raise config.ConfigError(
            f"--gin.{bindings[0]} changes a setting of a run, and --workdir={args.workdir} is no "
            "workdir. Leave it out"
        )
    return Command(args, None)


def compilation_cache() -> pathlib.Path:
    """Returns the default folder for compiled programs, so that a step is compiled only once.

    JAX_COMPILATION_CACHE_DIR has priority (`run`). Each kind of processor has its own folder,
    because machines that share a home directory may have different instruction sets.
    """
    try:
        instructions = next(
            line
            for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith(("flags", "Features"))
        )
    except (OSError, StopIteration):
        instructions = platform.processor()
    digest = hashlib.sha256(f"{platform.machine()} {instructions}".encode()).hexdigest()[:8]
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return home / "maelm_jax" / f"compiled-{digest}"


def deterministic_operations(wanted: bool):
    """Makes XLA add in a fixed order on GPU if `wanted`. Call it before a device is used."""
    if not wanted:
        return
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()
    )


class Ending(typing.NamedTuple):
    """The line that a command prints for an error, and its exit status."""

    line: str
    status: int


def ending(error: BaseException, advice: str = "") -> Ending | None:
    """Returns the line and exit status for an error, or None for a defect of the program.

    `advice` is for a lack of memory (see `run`).
    """
    if isinstance(error, (config.ConfigError, config.RunError)):
        return Ending(str(error), error.status)
    # Of a device: a JaxRuntimeError, which commands without JAX do not import.
    if isinstance(error, MemoryError) or re.match("RESOURCE_EXH|.*Out of memory", str(error)):
        return Ending("this machine has too little memory" + (advice and f"; {advice}"), 1)
    if not isinstance(error, OSError):
        return None
    line = f"{_path_of(error)}: {paths.describe(error)}"
    if error.errno in paths.FAILING:
        return Ending(line, 1)
    return Ending(line, 2) if error.errno in paths.WRONG_PATH and error.filename else None


def _path_of(error: OSError) -> str:
    """Returns the path of an error. If it has two paths (a moved file), the second."""
    path = error.filename2 or error.filename
    return os.fsdecode(path) if isinstance(path, (str, bytes)) else "a file"


def status_of(main: Main, argv: list[str], advice: str = "") -> int:
    """Calls `main(argv)` and returns the exit status. Prints a known error as one line."""
    try:
        return main(argv) or 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        how = ending(error, advice)
        if how is None:
            raise
        if "--verbose" in argv:
            traceback.print_exc()
        print(f"error: {_printable(how.line)}", file=sys.stderr)
        return how.status


def run(main: Main, trains: bool = False, advice: str = "") -> typing.NoReturn:
    """Runs a command and ends the process with its exit status.

    The status is that of `main` (0: success), that of `ending` for a known error (2: wrong input,
    3: diverged, 1: other failures), 130 after Ctrl-C, 143 after SIGTERM, and 1 for an unknown
    error.

    Args:
        main: The command. It takes the list of arguments.
        trains: Whether the process may start again to get huge pages (huge_pages.py).
        advice: What helps when the command runs out of memory, for the message.
    """
    if trains:
        huge_pages.use_huge_pages(sys.argv[1:])
    stopping.exit_on_sigterm()
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(compilation_cache()))
    # JAX's default is 1 s. Several programs of each start compile faster than that.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    sys.exit(status_of(main, sys.argv[1:], advice))
