"""Joins several processes into one run, and checks that they run the same program.

A process runs on a host of a TPU slice, as a Slurm or Open MPI task, or anywhere with the address
of process 0.
"""

import collections.abc
import contextlib
import hashlib
import os
import pathlib
import re

import jax

from maelm_jax import config, gin_files
from maelm_jax.training import coordination, process_exit

AUTO = "auto"  # value of --coordinator
HOST_SETTINGS = ("Corpus.processes", "Corpus.rows_dir")  # may differ from host to host


@contextlib.contextmanager
def joined(
    coordinator: str | None, processes: int | None, process: int | None, timeout: int
) -> collections.abc.Iterator[None]:
    """Context manager that joins the other processes and tells them when this one fails.

    Enter it before JAX is used. Inside it, only process 0 prints to stdout.

    The first three arguments may be None. The values then come from JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID, or from Slurm or Open MPI if they started several tasks.
    Without an address from any of these, there is one process.

    Args:
        coordinator: Address at which process 0 listens, HOST:PORT. "auto" gets it from the TPU
            slice, Slurm, Open MPI or Kubernetes.
        processes: Number of processes.
        process: Number of this process, from 0.
        timeout: Limit in seconds of the wait for the others at the start, and of the time after
            which a dead process is noticed.

    Raises:
        ConfigError: The flags do not fit together.
        RunError: Contact with another process is lost.
    """
    automatic = AUTO if _several_tasks() else None
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS") or automatic
    if coordinator is None:
        if processes is not None or process is not None:
            raise config.ConfigError(
                "--processes and --process need --coordinator=HOST:PORT, "
                "the address at which process 0 listens"
            )
        yield
        return
    _connect(coordinator, processes, process, timeout)
    if jax.process_index():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        yield
    except Exception as error:
        cause = process_exit.fail(error)
        if cause is error:
            raise
        raise cause from error


def _several_tasks() -> bool:
    """Returns whether Slurm or Open MPI started this process as one of several tasks."""
    slurm = "SLURM_STEP_NODELIST" in os.environ and _number_in_environment("SLURM_NTASKS", 1) > 1
    return slurm or _number_in_environment("OMPI_COMM_WORLD_SIZE", 1) > 1


def _connect(coordinator: str, processes: int | None, process: int | None, timeout: int):
    # SIGTERM ends a process at once until `record_sigterm`: there is nothing to save before.
    jax.config.update("jax_enable_preemption_service", False)
    automatic = coordinator == AUTO
    if not automatic and processes is None:
        processes = _number_in_environment("JAX_NUM_PROCESSES", 0)
    if not automatic and process is None:
        process = _number_in_environment("JAX_PROCESS_ID", -1)
    _check_flags(coordinator, processes, process)
    address = "the address the environment gives" if automatic else coordinator
    process_exit.set_abort_message(
        f"error: the processes did not all meet at {address} (where process 0 listens) within "
        f"{timeout} s; is each of them running?"
    )
    try:
        jax.distributed.initialize(
            None if automatic else coordinator,
            processes or None,
            process,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=timeout,
            shutdown_timeout_seconds=timeout,
            cluster_detection_method=None if automatic else "deactivate",
        )
    except (RuntimeError, ValueError) as error:  # jaxlib's own errors are RuntimeErrors
        raise config.RunError(
            f"could not join the other processes at {address}: {' '.join(str(error).split())[:300]}"
        ) from error
    process_exit.set_abort_message(f"error: {process_exit.lost_contact()}")
    process_exit.end_all_together()


def _number_in_environment(variable: str, default: int) -> int:
    """Reads an integer. An empty variable counts as unset. Raises ConfigError for other text."""
    text = os.environ.get(variable) or str(default)
    if not re.fullmatch("-?[0-9]{1,9}", text):
        raise config.ConfigError(
            f"{variable}={text!r} in the environment is not a number. Set it right, or remove it"
        )
    return int(text)


def _check_flags(coordinator: str, processes: int | None, process: int | None):
    """Raises ConfigError for an impossible address or number of processes."""
    if coordinator == AUTO:
        possible = (processes is None or processes > 0) and (
            process is None or 0 <= process < (processes or process + 1)
        )
    else:
        possible = _is_address(coordinator) and 0 <= process < processes
    if not possible:
        raise config.ConfigError(
            f"--coordinator={coordinator} --processes={processes} --process={process}: "
            "expected HOST:PORT, the number of processes, and this one's number from 0"
        )


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and bool(re.fullmatch("[0-9]{1,5}", port)) and 0 < int(port) < 65536


def check_same_start(experiment: config.Experiment, workdir: str):
    """Raises ConfigError if the settings, workdir, code or JAX version of processes differ."""
    lines = [line.partition(" = ") for line in gin_files.render(experiment).splitlines() if line]
    values = {key: value for key, _, value in lines if key not in HOST_SETTINGS}
    values["workdir"] = workdir
    values["maelm_jax (hash of its code)"] = code_hash()
    values["jax"] = jax.__version__
    coordination.check_equal("start", values)


def code_hash() -> str:
    """Returns 12 hex digits of a SHA-256 of the paths and contents of all maelm_jax modules."""
    root = pathlib.Path(__file__).parent.parent
    content = (
        str(path.relative_to(root)).encode() + b"\0" + path.read_bytes()
        for path in sorted(root.rglob("*.py"))
    )
    return hashlib.sha256(b"\0".join(content)).hexdigest()[:12]
