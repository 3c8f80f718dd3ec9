"""Joins several processes into one run, and what they agree on.

A process runs on a host of a TPU slice, as a Slurm or Open MPI task, or anywhere with the address
of process 0. Failures are detected by JAX: when a process ends, the next collective of the others
fails, or JAX ends them after the heartbeat timeout. SIGTERM to one process stops all of them after
the same step (JAX's preemption service). With one process, every function here returns at once.
"""

import collections.abc
import contextlib
import hashlib
import logging
import os
import pathlib
import re
import secrets
import signal
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from maelm_jax import config, gin_files

log = logging.getLogger(__name__)
AUTO = "auto"  # value of --coordinator
SHUTDOWN_SECONDS = 30  # a process that is done waits so long for the others
HOST_SETTINGS = ("Corpus.processes", "Corpus.rows_dir")  # may differ from host to host


@contextlib.contextmanager
def joined(
    coordinator: str | None, processes: int | None, process: int | None, timeout: int
) -> collections.abc.Iterator[None]:
    """Context manager that joins the other processes.

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
        RunError: The processes did not meet.
    """
    environment = os.environ.get("JAX_COORDINATOR_ADDRESS")
    coordinator = coordinator or environment or (AUTO if _several_tasks() else None)
    if coordinator is None:
        if processes is not None or process is not None:
            raise config.ConfigError(
                "--processes and --process need --coordinator=HOST:PORT, "
                "the address at which process 0 listens"
            )
        yield
        return
    if coordinator == AUTO:
        address = {"coordinator_address": None}
    else:
        address = {"coordinator_address": coordinator, "cluster_detection_method": "deactivate"}
        processes = _number_from_environment("JAX_NUM_PROCESSES", processes)
        process = _number_from_environment("JAX_PROCESS_ID", process)
        is_address = re.fullmatch(r".+:\d+", coordinator, re.ASCII)
        if not (is_address and 0 <= (-1 if process is None else process) < (processes or 0)):
            raise config.ConfigError(
                f"--coordinator={coordinator} --processes={processes} --process={process}: "
                "expected HOST:PORT, the number of processes, and this one's number from 0"
            )
    # JAX ends a process that meets nobody in time, with a message that has no address.
    place = "the address that the launcher gives" if coordinator == AUTO else coordinator
    log.warning("joining the other processes at %s, where process 0 listens", place)
    try:
        jax.distributed.initialize(
            **address,
            num_processes=processes,
            process_id=process,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=timeout,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise config.RunError(f"--coordinator={coordinator}: {str(error)[:300]}") from error
    if jax.process_count() == 1:  # JAX has taken SIGTERM, and only several processes ask it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if jax.process_index():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    yield


def _several_tasks() -> bool:
    """Returns whether Slurm or Open MPI started this process as one of several tasks."""
    slurm = "SLURM_STEP_NODELIST" in os.environ and _number_from_environment("SLURM_NTASKS")
    return (slurm or 1) > 1 or (_number_from_environment("OMPI_COMM_WORLD_SIZE") or 1) > 1


def _number_from_environment(variable: str, given: int | None = None) -> int | None:
    """Returns `given`, or the number in an environment variable, or None if there is none."""
    text = os.environ.get(variable)
    if given is not None or not text:
        return given
    if not text.isdecimal():
        raise config.ConfigError(f"{variable}={text!r} in the environment is not a number")
    return int(text)


@contextlib.contextmanager
def process_zero_first(name: str) -> collections.abc.Iterator[None]:
    """Context manager whose block runs on process 0 first, then on the others.

    So the others find the files that process 0 writes. `name` differs from call to call.
    """
    if jax.process_index():
        multihost_utils.sync_global_devices(name)
    yield
    if not jax.process_index():
        multihost_utils.sync_global_devices(name)


def from_process_zero(number: int) -> int:
    """Returns the `number` of process 0 on every process."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def check_equal(what: str, values: dict[str, str]):
    """Checks that `values` are the same on all processes. `what` names them in the message.

    Raises ConfigError on a process that differs from process 0, with the values that differ.
    """
    lines = "\n".join(f"{name}: {value}" for name, value in values.items())
    theirs = _text_from_process_zero(lines).splitlines()
    ours = lines.splitlines()
    if ours != theirs:
        only_theirs = [line for line in theirs if line not in ours]
        only_ours = [line for line in ours if line not in theirs]
        raise config.ConfigError(
            f"process {jax.process_index()} has another {what} than process 0: "
            f"{'; '.join(only_ours[:5])} instead of {'; '.join(only_theirs[:5])}"
        )


def _text_from_process_zero(text: str) -> str:
    """Returns the `text` of process 0 on every process."""
    content = np.frombuffer(text.encode(), np.uint8)
    padded = np.zeros(from_process_zero(len(content)), np.uint8)
    padded[: len(content)] = content[: len(padded)]
    return multihost_utils.broadcast_one_to_all(padded).tobytes().decode()


def check_shared_folder(folder: pathlib.Path):
    """Checks that all processes see the same workdir: process 0 writes a file, the others look.

    Process 0 creates the folder if it does not exist. Raises ConfigError if this process does not
    see the file.
    """
    if jax.process_count() == 1:
        return
    marker = folder / f".seen-by-all-{from_process_zero(secrets.randbits(31))}"
    if not jax.process_index():
        folder.mkdir(parents=True, exist_ok=True)
        marker.touch()
    multihost_utils.sync_global_devices("workdir is marked")
    is_visible = _appears(marker)
    multihost_utils.sync_global_devices("workdir is seen")
    if not jax.process_index():
        marker.unlink()
    if not is_visible:
        raise config.ConfigError(
            f"process {jax.process_index()} has another view of the workdir {folder} than "
            "process 0: put it on storage that all of them share"
        )


def _appears(path: pathlib.Path, seconds: float = 20.0) -> bool:
    """Returns whether a file that another machine has made appears within some seconds.

    An NFS client that looked it up before may answer for a minute that it does not exist, unless
    the folder is opened again. After 30 seconds, Gloo would end the processes that wait.
    """
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        for folder in reversed(path.parents):
            with contextlib.suppress(OSError):
                os.scandir(folder).close()
        time.sleep(0.5)
    return path.exists()


def check_same_start(experiment: config.Experiment, workdir: str):
    """Raises ConfigError if the settings, workdir, code or JAX version of processes differ."""
    lines = [line.partition(" = ") for line in gin_files.render(experiment).splitlines() if line]
    values = {key: value for key, _, value in lines if key not in HOST_SETTINGS}
    values |= {"workdir": workdir, "hash of maelm_jax": code_hash(), "jax": jax.__version__}
    check_equal("start", values)


def code_hash() -> str:
    """Returns 12 hex digits of a SHA-256 of the paths and contents of all maelm_jax modules."""
    root = pathlib.Path(__file__).parent.parent
    content = (
        str(path.relative_to(root)).encode() + b"\0" + path.read_bytes()
        for path in sorted(root.rglob("*.py"))
    )
    return hashlib.sha256(b"\0".join(content)).hexdigest()[:12]
