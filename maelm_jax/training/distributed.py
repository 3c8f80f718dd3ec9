"""Runs several processes as one: joins them, compares their start, ends all when one ends.

The processes communicate through JAX's coordination service (jax.distributed), which process 0
hosts. A process runs on a host of a TPU slice, as a Slurm or Open MPI task, or anywhere with the
address of process 0. With one process, every function here works and communicates with nobody.
"""

import atexit
import collections.abc
import contextlib
import ctypes
import hashlib
import json
import os
import pathlib
import re
import secrets
import signal
import socket
import sys
import threading
import time

import jax
import numpy as np
from jax._src import distributed as runtime  # no public API has the client; Orbax uses this too
from jax.experimental import multihost_utils

from maelm_jax import config, gin_files, stopping

LONGEST_TIMEOUT = 86_400  # seconds
DAY = 86_400_000  # milliseconds; limit of a wait. Missing heartbeats reveal a dead process sooner.
LOCAL = ("Corpus.processes", "Corpus.rows_dir")  # settings that may differ from host to host


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
    slurm = "SLURM_STEP_NODELIST" in os.environ and _number_in_environment("SLURM_NTASKS", 1) > 1
    several = slurm or _number_in_environment("OMPI_COMM_WORLD_SIZE", 1) > 1
    coordinator = (
        coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS") or ("auto" if several else None)
    )
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
        reported = _reported(error)
        # JAX's own exit waits for the other processes. `_leave` does not.
        atexit.register(_leave, getattr(reported, "status", 1))
        if reported is error:
            raise
        raise reported from error


def _reported(error: Exception) -> Exception:
    """Tells the others about `error`. Returns it, or the failure of another that caused it."""
    reason = " ".join(str(error).split())
    if isinstance(error, (config.ConfigError, config.RunError)):
        _tell(error.status, str(error))
    elif any(
        word in reason
        for word in (
            "Gloo", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "another task"
        )
    ):  # fmt: skip
        time.sleep(0.5)  # time for the other process to tell its reason
        return _told() or config.RunError(f"{_lost()} ({reason[:160]})")
    else:
        _tell(1, f"{type(error).__name__}: {reason[:300]}")
    return error


def _connect(coordinator: str, processes: int | None, process: int | None, timeout: int):
    # Off until `listen`: there is nothing to save before, so SIGTERM ends a process at once.
    jax.config.update("jax_enable_preemption_service", False)
    if coordinator != "auto":
        processes = (
            processes if processes is not None else _number_in_environment("JAX_NUM_PROCESSES", 0)
        )
        process = process if process is not None else _number_in_environment("JAX_PROCESS_ID", -1)
    _check_place(coordinator, processes, process, timeout)
    place = "the address the environment gives" if coordinator == "auto" else coordinator
    _set_last_words(
        f"error: the processes did not all meet at {place} (where process 0 listens) within "
        f"{timeout} s; is each of them running?"
    )
    try:
        jax.distributed.initialize(
            None if coordinator == "auto" else coordinator, processes or None, process,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=timeout, shutdown_timeout_seconds=timeout,
            cluster_detection_method=None if coordinator == "auto" else "deactivate",
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:  # jaxlib's own errors are RuntimeErrors
        raise config.RunError(
            f"could not join the other processes at {place}: {' '.join(str(error).split())[:300]}"
        ) from error
    _set_last_words(f"error: {_lost()}")
    stopping.exit_by(_stop_all)
    threading.Thread(target=_stop_with_others, name="stop with others", daemon=True).start()


def _number_in_environment(variable: str, default: int) -> int:
    """Reads an integer. An empty variable counts as unset. Raises ConfigError for other text."""
    text = os.environ.get(variable) or str(default)
    if not re.fullmatch("-?[0-9]{1,9}", text):
        raise config.ConfigError(
            f"{variable}={text!r} in the environment is not a number. Set it right, or remove it"
        )
    return int(text)


def _check_place(coordinator: str, processes: int | None, process: int | None, timeout: int):
    """Raises ConfigError for an impossible address, number of processes or time."""
    if not 1 <= timeout <= LONGEST_TIMEOUT:
        raise config.ConfigError(
            f"--peer_timeout={timeout}: expected seconds from 1 to {LONGEST_TIMEOUT}"
        )
    if coordinator == "auto":
        fits = (processes is None or processes > 0) and (
            process is None or 0 <= process < (processes or process + 1)
        )
    else:
        host, _, port = coordinator.rpartition(":")
        fits = (
            host and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536
            and 0 <= process < processes
        )  # fmt: skip
    if not fits:
        raise config.ConfigError(
            f"--coordinator={coordinator} --processes={processes} --process={process}: "
            "expected HOST:PORT, the number of processes, and this one's number from 0"
        )


def several() -> bool:
    """Returns whether the run has more than one process."""
    return jax.process_count() > 1


def name(process: int | None = None) -> str:
    """Returns the name of a process in messages. The default is this process."""
    own = runtime.global_state.process_id  # jax.process_index() waits for all processes' devices
    if process is not None and process != own:
        return f"process {process}"
    return f"process {own} on {socket.gethostname()}"


@contextlib.contextmanager
def first(what: str) -> collections.abc.Iterator[None]:
    """Context manager whose block runs on process 0 first, then on the others.

    So the others find the files that process 0 writes.

    Args:
        what: Name of the barrier. It differs from call to call.
    """
    if jax.process_index():
        _client().wait_at_barrier(what, DAY)
    yield
    if several() and not jax.process_index():
        _client().wait_at_barrier(what, DAY)


def same(what: str, values: dict[str, str]):
    """Compares `values` of all processes.

    Args:
        what: Name of the comparison in the message. It differs from call to call.
        values: The values of this process.

    Raises:
        ConfigError: A process differs from process 0. All processes raise it. The message names
            the first such process and the values that differ.
    """
    if not several():
        return
    client, count = _client(), jax.process_count()
    client.key_value_set(f"same {what}/{jax.process_index()}", json.dumps([name(), values]))
    if not jax.process_index():
        verdict = ""
        for process in range(1, count):
            their_name, theirs = json.loads(
                client.blocking_key_value_get(f"same {what}/{process}", DAY)
            )
            differing = [key for key in values if theirs.get(key) != values[key]]
            if differing and not verdict:
                shown = "; ".join(
                    f"{key}: {values[key]} -> {theirs.get(key)}" for key in differing[:5]
                )
                verdict = f"{their_name} has another {what} than {name()} ({shown})"
        client.key_value_set(f"same {what}/verdict", verdict)
    if verdict := client.blocking_key_value_get(f"same {what}/verdict", DAY):
        raise config.ConfigError(verdict)


def everywhere(flag: bool) -> bool:
    """Returns whether `flag` is true on every process."""
    return bool(np.all(multihost_utils.process_allgather(np.asarray(flag))))


def decided_by_first(what: str, flag: bool) -> bool:
    """Returns the `flag` of process 0 on every process. `what` differs from call to call."""
    if not several():
        return flag
    if not jax.process_index():
        _client().key_value_set(f"decided {what}", str(flag))
    return _client().blocking_key_value_get(f"decided {what}", DAY) == str(True)


def highest(number: int) -> int:
    """Returns the highest `number` of all processes."""
    return int(np.max(multihost_utils.process_allgather(np.asarray(number))))


def from_first(what: str, action: collections.abc.Callable[[], None]):
    """Runs `action` on process 0 while the other processes wait.

    Args:
        what: Name of the action. It differs from call to call.
        action: A function without arguments.

    Raises:
        ConfigError: `action` raised it. All processes raise it.
    """
    if not _client():  # one process. JAX's devices are not used here: it may be too early.
        action()
        return
    if jax.process_index():
        if reason := _client().blocking_key_value_get(f"{what}/refused", DAY):
            raise config.ConfigError(reason)
        return
    try:
        action()
    except config.ConfigError as error:
        _client().key_value_set(f"{what}/refused", str(error))
        raise
    _client().key_value_set(f"{what}/refused", "")


def same_start(experiment: config.Experiment, workdir: str):
    """Raises ConfigError if the settings, workdir, code or JAX version of processes differ."""
    lines = [line.partition(" = ") for line in gin_files.render(experiment).splitlines() if line]
    settings = {key: value for key, _, value in lines if key not in LOCAL}
    same(
        "start",
        settings | {
            "workdir": workdir, "maelm_jax (hash of its code)": code_hash(), "jax": jax.__version__,
        },
    )  # fmt: skip


def code_hash() -> str:
    """Returns 12 hex digits of a SHA-256 of the paths and contents of all maelm_jax modules."""
    root = pathlib.Path(__file__).parent.parent
    content = (
        str(path.relative_to(root)).encode() + b"\0" + path.read_bytes()
        for path in sorted(root.rglob("*.py"))
    )
    return hashlib.sha256(b"\0".join(content)).hexdigest()[:12]


def same_folder(path: str, what: str, patience: float = 30.0):
    """Checks that all processes see the same folder: process 0 writes a file, the others look.

    Args:
        path: The folder. Process 0 creates it if it does not exist.
        what: Name of the folder in the message. It differs from call to call.
        patience: Seconds to wait until the file appears.

    Raises:
        ConfigError: A process does not see the file.
    """
    if not several():
        return
    client, folder = _client(), pathlib.Path(path)
    if not jax.process_index():
        folder.mkdir(parents=True, exist_ok=True)
        client.key_value_set(f"{what}/marker", f".seen-by-all-{secrets.token_hex(4)}")
    marker = folder / client.blocking_key_value_get(f"{what}/marker", DAY)
    if not jax.process_index():
        marker.touch()
    end = time.monotonic() + patience
    while not (seen := marker.exists()) and time.monotonic() < end:
        time.sleep(0.2)
    try:
        same(f"view of the {what}", {f"{path} as process 0 sees it": str(seen)})
    except config.ConfigError as error:
        raise config.ConfigError(f"{error}; put it on storage that all of them share") from None
    finally:
        if not jax.process_index():
            marker.unlink(missing_ok=True)


def listen():
    """Starts to record SIGTERM instead of exiting. The signal to one process counts for all.

    The training loop asks for it with
    `jax.experimental.multihost_utils.reached_preemption_sync_point`. Before this call, SIGTERM
    ends all processes.
    """
    _listening.set()
    if runtime.global_state.preemption_sync_manager is None:
        jax.config.update("jax_enable_preemption_service", True)
        runtime.global_state.initialize_preemption_sync_manager()


def _client():
    return runtime.global_state.client


def _tell(status: int, reason: str):
    """Tells the other processes why this one ends, and its exit status. The first reason counts."""
    with contextlib.suppress(Exception):  # the service may have ended
        _client().key_value_set("failed", json.dumps([status, f"{name()} ended: {reason}"]))


def _told() -> config.RunError | None:
    """Returns the reason and exit status that another process told before it ended."""
    with contextlib.suppress(Exception):
        status, reason = json.loads(_client().key_value_try_get("failed"))
        error = config.RunError(reason)
        error.status = status
        return error
    return None


_listening = threading.Event()  # set when the training loop checks for SIGTERM


def _stop_all(status: int):
    """Ends all processes after SIGTERM to this one."""
    _listening.set()  # ends the thread of `_stop_with_others` in this process
    _tell(status, "stopped by SIGTERM")
    _leave(status)


def _stop_with_others():
    """Ends this process if SIGTERM stopped another one. Runs until the training loop begins."""
    while not _listening.wait(1.0):
        told = _told()
        if told is not None and told.status == stopping.STOPPED:
            os.write(2, f"{told}; the same command, on all hosts, goes on\n".encode())
            _leave(stopping.STOPPED)


def _lost() -> str:
    return (
        f"{name()} lost contact with another process of the run, which has died or cannot be "
        "reached; the same command, on all hosts, goes on"
    )


def _leave(status: int, patience: float = 10.0):
    """Ends this process. Process 0 ends last, because it hosts the coordination service."""
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(Exception):  # the service may have ended; a dead process sets no key
        own, count = runtime.global_state.process_id, runtime.global_state.num_processes
        if own:
            _client().key_value_set(f"left/{own}", "")
        else:
            end = time.monotonic() + patience
            for process in range(1, count):
                _client().blocking_key_value_get(
                    f"left/{process}", max(1, int(1000 * (end - time.monotonic())))
                )
            time.sleep(0.5)
    os._exit(status)


def _set_last_words(text: str):
    """Sets the message for the case that JAX's runtime calls abort(). The exit status is then 1.

    The runtime calls abort() when processes do not meet or one of them dies. The handler is a C
    handler, because a handler of the `signal` module runs in the main thread, and abort() in any
    thread ends the process before that.
    """
    global _handler
    line = f"{text}\n".encode()

    def handler(_):
        os.write(2, line)
        os._exit(1)

    # The global variable keeps the handler alive, because the C library holds no reference.
    _handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)
    ctypes.CDLL(None).signal(int(signal.SIGABRT), _handler)
