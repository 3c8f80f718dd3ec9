"""What all commands share: the flags, and how a wrong input ends (one line, exit status 2)."""

import argparse
import collections.abc
import errno
import glob
import hashlib
import os
import pathlib
import platform
import sys
import traceback
import typing

from maelm_jax import config, gin_files, stopping, storage, workdirs


def parser(description: str) -> argparse.ArgumentParser:
    """An argument parser with the flags every command takes; `description` is the command's docstring."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    result.add_argument(
        "--gin_file", action="append", default=[], metavar="FILE", help="settings; repeatable, later files win; found here or in configs/"
    )
    result.add_argument("--workdir", metavar="DIR", help="the run to write or to work on; default runs/<stem of the first gin file>")
    result.add_argument("--verbose", action="store_true", help="show tracebacks")
    result.epilog = "Any setting of maelm_jax/config.py: --gin.NAME=VALUE, as in --gin.TRAIN_STEPS=500 or --gin.Model.layers=6."
    return result


def add_process_flags(flags: argparse.ArgumentParser):
    """The flags of a command that runs as several processes (maelm_jax/training/distributed.py)."""
    group = flags.add_argument_group("several processes", "Slurm and Open MPI tell each its place; docs/SCALE.md")
    group.add_argument("--coordinator", metavar="HOST:PORT", help='where process 0 listens; "auto" asks a TPU slice, Slurm, Open MPI or Kubernetes')
    group.add_argument("--processes", type=int, metavar="N", help="how many there are")
    group.add_argument("--process", type=int, metavar="I", help="the number of this one, from 0")
    group.add_argument("--peer_timeout", type=int, default=120, metavar="SECONDS", help="after which one that does not come or answer is given up")


def arguments(flags: argparse.ArgumentParser, argv: typing.Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(flags, bindings NAME=VALUE); argparse itself ends an unknown flag with exit status 2."""
    bindings = [argument.removeprefix("--gin.") for argument in argv if argument.startswith("--gin.")]
    args = flags.parse_args([argument for argument in argv if not argument.startswith("--gin.")])
    if args.workdir is None and args.gin_file:
        args.workdir = os.path.join("runs", pathlib.Path(args.gin_file[0]).stem)
    return args, bindings


def parse(flags: argparse.ArgumentParser, argv: typing.Sequence[str]) -> tuple[argparse.Namespace, config.Experiment]:
    """Parses `argv` and builds the settings. `workdir` is set; without --gin_file the workdir's own config.gin is read.

    Raises ConfigError on anything wrong in the settings.
    """
    args, bindings = arguments(flags, argv)
    if not args.gin_file:
        saved = pathlib.Path(args.workdir or "") / "config.gin"
        if args.workdir and not saved.is_file():
            raise config.ConfigError(f"{workdirs.no_run(args.workdir)}. To start one, give --gin_file=FILE (configs/ holds tiny.gin, ...)")
        if not args.workdir:
            raise config.ConfigError(
                "give --gin_file=FILE (configs/ holds tiny.gin, small.gin, base.gin), or --workdir=RUN of a run that was started before"
            )
        args.gin_file = [str(saved)]
    experiment = gin_files.load(args.gin_file, bindings)
    deterministic_operations(experiment.run.deterministic)
    return args, experiment


def compilation_cache() -> pathlib.Path:
    """Where compiled programs are kept, so that a step is compiled once and not at each start; JAX_COMPILATION_CACHE_DIR says otherwise.

    One folder per kind of processor: a home directory may be shared by machines that do not know each other's instructions.
    """
    try:
        instructions = next(line for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        instructions = platform.processor()
    digest = hashlib.sha256(f"{platform.machine()} {instructions}".encode()).hexdigest()[:8]
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return home / "maelm_jax" / f"compiled-{digest}"


def use_huge_pages(argv: typing.Sequence[str]):
    """Starts this process again with the C library's allocator told to ask for huge pages, which it only reads at the start.

    A training step on CPU takes and gives back gigabytes. In pages of 4 KiB the kernel's part of that is 10% of the step
    (docs/PERFORMANCE.md). The process stays as it is where the system does not leave the choice to programs, where GLIBC_TUNABLES is
    set, under a debugger, and with MAELM_HUGE_PAGES=0.
    """
    if os.environ.get("MAELM_HUGE_PAGES") == "0" or "GLIBC_TUNABLES" in os.environ or not _trains_on_cpu(argv) or _debugged():
        return
    try:
        choice = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return
    if "[madvise]" in choice and platform.libc_ver()[0] == "glibc":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})


def _trains_on_cpu(argv: typing.Sequence[str]) -> bool:
    """Whether a training command with these arguments trains, and on CPU; to be known before JAX is imported."""
    if any(argument.partition("=")[0] in ("-h", "--help", "--dry_run", "--predict") for argument in argv):
        return False
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms.split(",")[0] == "cpu"
    return not any(glob.glob(f"/dev/{pattern}") for pattern in ("nvidia[0-9]*", "kfd", "accel*", "vfio/[0-9]*"))


def _debugged() -> bool:
    """Whether a debugger or tracer watches this process: it would lose sight of the process, or start again itself."""
    try:
        status = pathlib.Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    traced = any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in status.splitlines())
    return traced or sys.gettrace() is not None or "bdb" in sys.modules or "pydevd" in sys.modules


def deterministic_operations(wanted: bool):
    """Where `wanted`, asks XLA for operations on GPU that add in a fixed order, no atomics; to be called before a device is first used."""
    if not wanted:
        return
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()


def check_workdir(workdir: str, experiment: config.Experiment):
    """Raises ConfigError, with what differs, when the workdir holds a run with other settings."""
    saved = storage.here(workdir) / "config.gin"
    if saved.exists():
        changed = config.differences(gin_files.load([str(saved)]), experiment)
        if changed:
            raise config.ConfigError(
                f"{workdir} holds a run with other settings ({'; '.join(changed)}): give another --workdir, or the same settings"
            )


def run(main: collections.abc.Callable[[list[str]], int | None], trains: bool = False) -> typing.NoReturn:
    """Calls `main(argv)` and ends the process: 0 done, or main's own number; otherwise the status of a ConfigError (2) or RunError (1, or
    3 when a run diverged), each with one line; 143 after SIGTERM; 1 for any other error.

    With `trains` the process may first start itself again to get huge pages (`use_huge_pages`).
    """
    if trains:
        use_huge_pages(sys.argv[1:])
    stopping.exit_on_sigterm()
    argv = sys.argv[1:]
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(compilation_cache()))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")  # JAX's own is 1: a start has nine programs of less
    try:
        sys.exit(main(argv) or 0)
    except (config.ConfigError, config.RunError) as error:
        if "--verbose" in argv:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.status)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"error: no space left on the device ({error.filename or 'unknown file'}); free some: what was whole stays whole", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
