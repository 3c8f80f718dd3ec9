"""Common parts of all commands: flags, settings, and one-line messages for errors."""

import argparse
import collections.abc
import errno
import hashlib
import io
import logging
import os
import pathlib
import platform
import re
import sys
import traceback
import typing

from maelm_jax import config, gin_files, huge_pages, storage
from maelm_jax.config import ConfigError

# What helps a command that ran out of memory.
TRAIN_MEMORY = "use a smaller Run.batch_size, a larger Run.accumulate or a smaller Model"
FINETUNE_MEMORY = "use a smaller Grid.batch_size"
# Errors of a machine that fails (exit status 1). Other errors of a path are wrong input.
FAILING_MACHINE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENXIO),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
    # Of network file systems that are away
    *(errno.ESHUTDOWN, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH),
)

# What JAX and Gloo raise in a process when another one of the same run is gone.
LOST_PEER = re.compile("Gloo|heartbeat|[Cc]oordination service|(closed|reset) by peer")

Main = collections.abc.Callable[[list[str]], int | None]  # a command: arguments -> exit status


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError instead of exiting."""

    def error(self, message: str):
        raise ConfigError(f"{message}; --help lists the flags")


def parser(
    description: str, reads_settings: bool = True, takes_path: bool = False
) -> argparse.ArgumentParser:
    """Returns a parser with the flags of every command. --help prints `description`.

    A command without `reads_settings` has no flags of settings, and requires --workdir. One that
    `takes_path` also takes the workdir without the name of the flag.
    """
    layout = argparse.RawDescriptionHelpFormatter
    result = _Parser(description=description, formatter_class=layout, allow_abbrev=False)
    workdir_help = "the run to write or to work on"
    if reads_settings:
        workdir_help += "; default runs/<stem of the first gin file>"
        result.epilog = (
            "Any setting of docs/configuration.md: --gin.NAME=VALUE, "
            "as in --gin.TRAIN_STEPS=500 or --gin.Encoder.layers=6."
        )
        gin_help = "settings; repeatable, later files win; found here or in configs/"
        result.add_argument(
            "--gin_file", action="append", default=[], metavar="FILE", help=gin_help
        )
    is_required = not (reads_settings or takes_path)
    result.add_argument("--workdir", metavar="DIR", help=workdir_help, required=is_required)
    if takes_path:
        # Without SUPPRESS, the default of an argument that is absent would replace --workdir.
        result.add_argument(
            "workdir", nargs="?", default=argparse.SUPPRESS, help="the same as --workdir"
        )
    result.add_argument("--verbose", action="store_true", help="show tracebacks")
    return result


def whole_number(least: int) -> collections.abc.Callable[[str], int]:
    """Returns the `type` of a flag that takes an integer of at least `least`."""

    def parse_number(text: str) -> int:
        if not text.lstrip("-").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, got {text}")
        return int(text)

    return parse_number


def add_step_flag(flags: argparse.ArgumentParser):
    """Adds the flag that chooses a checkpoint of --workdir."""
    step = "the checkpoint's step; default the newest"
    flags.add_argument("--step", type=whole_number(0), metavar="N", help=step)


def add_division_flags(flags: argparse.ArgumentParser):
    """Adds the flags of a command whose work several machines can share."""
    flags.add_argument(
        "--part",
        type=whole_number(0),
        metavar="I",
        help="do one share of the work only, from 0; needs --parts",
    )
    flags.add_argument("--parts", type=whole_number(1), metavar="N", help="number of shares")
    flags.add_argument("--join", action="store_true", help="join the shares of every --part")


def check_division(args: argparse.Namespace):
    """Raises ConfigError if --part and --parts do not fit together, or --join is there too."""
    if (args.part is None) != (args.parts is None):
        raise config.ConfigError("--part and --parts: give both, or neither")
    if args.part is not None and args.part >= args.parts:
        raise config.ConfigError(
            f"--part={args.part} --parts={args.parts}: part must lie between 0 and parts - 1"
        )
    if args.part is not None and args.join:
        raise config.ConfigError("--part and --join: give one of them")


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
        type=whole_number(1),
        default=120,
        metavar="SECONDS",
        help="how long to wait for another process to join or answer",
    )


class Arguments(typing.NamedTuple):
    """A command line."""

    args: argparse.Namespace
    bindings: list[str]  # NAME=VALUE of each --gin.NAME=VALUE


class Command(typing.NamedTuple):
    """A command line, and the settings of its gin files and bindings."""

    args: argparse.Namespace
    experiment: config.Experiment


def arguments(flags: argparse.ArgumentParser, argv: typing.Sequence[str]) -> Arguments:
    """Parses the command line. Raises ConfigError if a flag or value is wrong."""
    for item in argv:
        if not item.isprintable() and any("\udc80" <= character <= "\udcff" for character in item):
            raise ConfigError(
                f"{item!r} is not UTF-8, in which records and reports are written: "
                "rename the file or folder"
            )
    reads_settings = flags.get_default("gin_file") is not None
    given = [item for item in argv if reads_settings and item.startswith("--gin.")]
    bindings = [item.removeprefix("--gin.") for item in given]
    args = flags.parse_args([item for item in argv if item not in given])
    for name, value in vars(args).items():
        if value == "" or value == [""]:  # a shell variable that is not set
            raise ConfigError(f"--{name} is empty. Give a value, or leave the flag out")
    if args.workdir is None and args.gin_file:
        args.workdir = os.path.join("runs", pathlib.Path(args.gin_file[0]).stem)
    for name in ("workdir", "input", "output", "predict", "submission"):
        if path := getattr(args, name, None):
            setattr(args, name, os.path.expanduser(path))  # bash leaves the ~ of --workdir=~/runs
            if name != "workdir":
                storage.require_local(path)
    if args.workdir is not None:
        from maelm_jax.training.workdir import Workdir  # takes a second

        args.workdir = Workdir(args.workdir)
    return Arguments(args, bindings)


def parse(
    flags: argparse.ArgumentParser,
    argv: typing.Sequence[str],
    runs_modules: bool | tuple[str, ...] = True,
) -> Command:
    """Parses `argv` and builds the settings. Without --gin_file, reads config.gin of the workdir.

    `runs_modules` says whether the command imports what settings name (`gin_files.load`). Raises
    ConfigError if a flag, a gin file or a setting is wrong.
    """
    args, bindings = arguments(flags, argv)
    args.run = None
    if not args.gin_file:
        if not args.workdir:
            raise ConfigError(
                "give --gin_file=FILE (configs/ holds tiny.gin, small.gin, base.gin), "
                "or --workdir=RUN of a run that was started before"
            )
        args.workdir.fetch()
        args.workdir.require_run(
            remedy=". Name another --workdir, or start this one: train with --gin_file=FILE, as "
            "tiny.gin"
        )
        args.gin_file, args.run = [str(args.workdir.settings_file)], args.workdir
    experiment = gin_files.load(args.gin_file, bindings, runs_modules=runs_modules)
    return Command(args, experiment)


def log_plain_lines():
    """Lets the package log its messages as plain lines on stderr.

    Call it before gin files are read: gin logs, and the first one to log decides the format.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("maelm_jax").setLevel(logging.INFO)


def listed(flag: str, value: str) -> list[str]:
    """Returns the paths of a flag that separates them by commas, each once."""
    paths = [os.path.expanduser(path).rstrip("/") or "/" for path in value.split(",") if path]
    if not paths or len(set(paths)) < len(paths):
        raise ConfigError(f"{flag}={value}: give one path or more, each once, between commas")
    return paths


def require_writable(flag: str, path: str):
    """Raises ConfigError if a file or folder cannot be made at `path`, before long work is done."""
    folder = pathlib.Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() and folder != pathlib.Path(path).absolute():
        raise ConfigError(f"{flag}={path}: {folder} is a file; give a folder")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{flag}={path}: {folder} is read-only or another user's; give another")


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


class Ending(typing.NamedTuple):
    """The line that a command prints for an error, and its exit status."""

    line: str
    status: int


def ending(error: Exception, advice: str = "") -> Ending:
    """Returns the line and the exit status for an error.

    `advice` is what helps when the command runs out of memory.
    """
    message = " ".join(str(error).split())
    if isinstance(error, (ConfigError, config.RunError)):
        return Ending(message, error.status)
    if "No space left" in message or getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT):
        return Ending(f"{_describe(error)}; free some space. What was whole stays whole", 1)
    # Of a device: a JaxRuntimeError, which commands without JAX do not import.
    if isinstance(error, MemoryError) or message.startswith(("RESOURCE_EXH", "Out of memory")):
        return Ending(f"this machine has too little memory{advice and f'; {advice}'}", 1)
    if (
        LOST_PEER.search(message)
        and "jax" in sys.modules
        and sys.modules["jax"].process_count() > 1
    ):
        return Ending(
            "another process of this run has ended, or cannot be reached: its own last line says "
            f"why. Give the command again to all of them ({message[:100]})",
            1,
        )
    if isinstance(error, OSError):
        is_input = error.filename and error.errno not in FAILING_MACHINE
        return Ending(_describe(error), 2 if is_input else 1)
    line = f"{type(error).__name__}: {message[:500]} (--verbose shows where)"
    return Ending(line, 2 if isinstance(error, ValueError) else 1)


def _describe(error: Exception) -> str:
    """Returns the file of an error, if it has one, and what is wrong with it."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename2 or error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def status_of(main: Main, argv: list[str], advice: str = "") -> int:
    """Calls `main(argv)` and returns the exit status. Prints an error as one line."""
    try:
        return main(argv) or 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if "--verbose" in argv:
            traceback.print_exc()
        line, status = ending(error, advice)
        print(f"error: {line}", file=sys.stderr)
        return status


class _Output(io.FileIO):
    """A file descriptor to write to. When its reader has ended (`| head -1`), the rest is lost."""

    def write(self, content):
        try:
            return super().write(content)
        except BrokenPipeError:
            return len(content)


def open_outputs():
    """Lets the command end its work although nobody reads what it prints.

    An output that the shell closed (`2>&-`) goes to /dev/null: else the next file that is opened
    would take its number, and get what libraries print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
    for number, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        if before is not getattr(sys, f"__{name}__"):
            continue  # a caller catches what is printed
        buffered = io.BufferedWriter(_Output(number, "w", closefd=False))
        output = io.TextIOWrapper(
            buffered,
            before.encoding if before else "utf-8",
            "backslashreplace",
            line_buffering=number == 2 or os.isatty(number),
        )
        setattr(sys, name, output)


def _report_unraisable(unraisable: typing.Any):
    """Prints an error that Python cannot raise, as in a callback of a library.

    When a write of a checkpoint fails, Orbax raises its error. TensorStore reports the writes that
    end later to an event loop that is closed by then. These errors are left out.
    """
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def run(main: Main, trains: bool = False, advice: str = "") -> typing.NoReturn:
    """Runs a command and ends the process with its exit status.

    The status is that of `main` (0: success), that of `ending` for an error (2: wrong input, 3:
    diverged, 1: other failures), and 130 after Ctrl-C. If the command `trains`, the process may
    start again to get huge pages (huge_pages.py). `advice` is for `ending`.
    """
    open_outputs()
    sys.unraisablehook = _report_unraisable
    if trains:
        huge_pages.use_huge_pages(sys.argv[1:])
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(compilation_cache()))
    # JAX's default is 1 s. Several programs of each start compile faster than that.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    status = status_of(main, sys.argv[1:], advice)
    if status and "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized():
        # JAX's own exit would wait for the other processes, which may wait for this one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
