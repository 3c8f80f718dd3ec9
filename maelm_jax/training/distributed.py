"""Several processes as one run: joining them, comparing what they were started with, and ending all when one is gone.

JAX's coordination service (jax.distributed) does the work; process 0 hosts it. A process is a host of a TPU slice, a GPU under Slurm, or anything
that is told where the others meet. What is said here holds for one process too, where all of it does nothing.
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
from jax._src import distributed as runtime  # the client of the coordination service has no public name; Orbax takes it from here too
from jax.experimental import multihost_utils

from maelm_jax import config, gin_files, stopping

LONGEST_TIMEOUT = 86_400  # seconds
DAY = 86_400_000  # milliseconds: the bound of waits during which a process that dies is noticed by its missing heartbeats
LOCAL = ("Corpus.processes", "Corpus.rows_dir")  # settings that may differ from host to host


@contextlib.contextmanager
def joined(coordinator: str | None, processes: int | None, process: int | None, timeout: int) -> collections.abc.Iterator[None]:
    """Joins the other processes before JAX is used, and lets them know when this one ends.

    `coordinator` is where process 0 listens (HOST:PORT; "auto" asks the TPU slice, Slurm, Open MPI or Kubernetes), `processes` how many there are and
    `process` the number of this one. What is None comes from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID, or from Slurm or Open
    MPI where they started several tasks; without any of these there is one process. `timeout`, in seconds, bounds the wait for the others at the
    start, and the time in which a process that has died is noticed. Only process 0 prints to stdout.

    Raises ConfigError for flags that do not fit together, RunError when contact with another process is lost.
    """
    slurm = "SLURM_STEP_NODELIST" in os.environ and _number_in_environment("SLURM_NTASKS", 1) > 1
    several = slurm or _number_in_environment("OMPI_COMM_WORLD_SIZE", 1) > 1
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS") or ("auto" if several else None)
    if coordinator is None:
        if processes is not None or process is not None:
            raise config.ConfigError("--processes and --process need --coordinator=HOST:PORT, the address at which process 0 listens")
        yield
        return
    _connect(coordinator, processes, process, timeout)
    if jax.process_index():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        yield
    except Exception as error:
        reported = _reported(error)
        atexit.register(_leave, getattr(reported, "status", 1))  # not through JAX's own way out, which waits for the other processes
        if reported is error:
            raise
        raise reported from error


def _reported(error: Exception) -> Exception:
    """Tells the other processes why this one ends; returns what it ends with: `error`, or the failure of another process that caused it."""
    reason = " ".join(str(error).split())
    if isinstance(error, (config.ConfigError, config.RunError)):
        _tell(error.status, str(error))
    elif any(word in reason for word in ("Gloo", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "another task")):
        time.sleep(0.5)  # for another process to tell why it ends
        return _told() or config.RunError(f"{_lost()} ({reason[:160]})")
    else:
        _tell(1, f"{type(error).__name__}: {reason[:300]}")
    return error


def _connect(coordinator: str, processes: int | None, process: int | None, timeout: int):
    jax.config.update("jax_enable_preemption_service", False)  # until `listen`: before there is anything to save, SIGTERM ends a process at once
    if coordinator != "auto":
        processes = processes if processes is not None else _number_in_environment("JAX_NUM_PROCESSES", 0)
        process = process if process is not None else _number_in_environment("JAX_PROCESS_ID", -1)
    _check_place(coordinator, processes, process, timeout)
    place = "the address the environment gives" if coordinator == "auto" else coordinator
    _set_last_words(f"error: the processes did not all meet at {place} (where process 0 listens) within {timeout} s; is each of them running?")
    try:
        jax.distributed.initialize(
            None if coordinator == "auto" else coordinator, processes or None, process, initialization_timeout=timeout,
            heartbeat_timeout_seconds=timeout, shutdown_timeout_seconds=timeout,
            cluster_detection_method=None if coordinator == "auto" else "deactivate",
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:  # jaxlib's own errors are RuntimeErrors
        raise config.RunError(f"could not join the other processes at {place}: {' '.join(str(error).split())[:300]}") from error
    _set_last_words(f"error: {_lost()}")
    stopping.exit_by(_stop_all)
    threading.Thread(target=_stop_with_others, name="stop with others", daemon=True).start()


def _number_in_environment(variable: str, default: int) -> int:
    """Raises ConfigError for a variable that holds no number; one that is empty is as one that is not set."""
    text = os.environ.get(variable) or str(default)
    if not re.fullmatch("-?[0-9]{1,9}", text):
        raise config.ConfigError(f"{variable}={text!r} in the environment is not a number. Set it right, or remove it")
    return int(text)


def _check_place(coordinator: str, processes: int | None, process: int | None, timeout: int):
    """Raises ConfigError for an address, a number of processes or a time that cannot be."""
    if not 1 <= timeout <= LONGEST_TIMEOUT:
        raise config.ConfigError(f"--peer_timeout={timeout}: expected seconds from 1 to {LONGEST_TIMEOUT}")
    if coordinator == "auto":
        fits = (processes is None or processes > 0) and (process is None or 0 <= process < (processes or process + 1))
    else:
        host, _, port = coordinator.rpartition(":")
        fits = host and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536 and 0 <= process < processes
    if not fits:
        raise config.ConfigError(
            f"--coordinator={coordinator} --processes={processes} --process={process}: expected HOST:PORT, the number of processes, and "
            "this one's number from 0"
        )


def several() -> bool:
    """Whether there are other processes."""
    return jax.process_count() > 1


def name(process: int | None = None) -> str:
    """What a process (this one by default) is called in messages."""
    own = runtime.global_state.process_id  # jax.process_index() would wait for the other processes' devices
    if process is not None and process != own:
        return f"process {process}"
    return f"process {own} on {socket.gethostname()}"


@contextlib.contextmanager
def first(what: str) -> collections.abc.Iterator[None]:
    """Process 0 does the block before the others do: what it makes and keeps on disk, they find. `what` names the place in the program."""
    if jax.process_index():
        _client().wait_at_barrier(what, DAY)
    yield
    if several() and not jax.process_index():
        _client().wait_at_barrier(what, DAY)


def same(what: str, values: dict[str, str]):
    """Compares `values` of all processes. Raises ConfigError on all of them, naming the first that differs from process 0, and in what."""
    if not several():
        return
    client, count = _client(), jax.process_count()
    client.key_value_set(f"same {what}/{jax.process_index()}", json.dumps([name(), values]))
    if not jax.process_index():
        verdict = ""
        for process in range(1, count):
            their_name, theirs = json.loads(client.blocking_key_value_get(f"same {what}/{process}", DAY))
            differing = [key for key in values if theirs.get(key) != values[key]]
            if differing and not verdict:
                shown = "; ".join(f"{key}: {values[key]} -> {theirs.get(key)}" for key in differing[:5])
                verdict = f"{their_name} has another {what} than {name()} ({shown})"
        client.key_value_set(f"same {what}/verdict", verdict)
    if verdict := client.blocking_key_value_get(f"same {what}/verdict", DAY):
        raise config.ConfigError(verdict)


def everywhere(flag: bool) -> bool:
    """Whether it holds on every process."""
    return bool(np.all(multihost_utils.process_allgather(np.asarray(flag))))


def decided_by_first(what: str, flag: bool) -> bool:
    """Process 0's `flag`, on every process. `what` names the decision and is used once."""
    if not several():
        return flag
    if not jax.process_index():
        _client().key_value_set(f"decided {what}", str(flag))
    return _client().blocking_key_value_get(f"decided {what}", DAY) == str(True)


def highest(number: int) -> int:
    """The highest of all processes' numbers."""
    return int(np.max(multihost_utils.process_allgather(np.asarray(number))))


def from_first(what: str, action: collections.abc.Callable[[], None]):
    """Process 0 does `action` while the others wait; a ConfigError that it raises is raised by all. `what` names the place in the program."""
    if not _client():  # one process; JAX's devices are not asked, for they may not be in use yet
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
    """Raises ConfigError, naming the host, unless all processes have the same settings, workdir, code and JAX."""
    lines = [line.partition(" = ") for line in gin_files.render(experiment).splitlines() if line]
    settings = {key: value for key, _, value in lines if key not in LOCAL}
    same("start", settings | {"workdir": workdir, "maelm_jax (hash of its code)": code_hash(), "jax": jax.__version__})


def code_hash() -> str:
    """Of every module of maelm_jax and its name."""
    root = pathlib.Path(__file__).parent.parent
    content = (str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() for path in sorted(root.rglob("*.py")))
    return hashlib.sha256(b"\0".join(content)).hexdigest()[:12]


def same_folder(path: str, what: str, patience: float = 30.0):
    """Raises ConfigError unless every process sees what process 0 writes into the folder `path` within `patience` seconds."""
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
    """From here on a SIGTERM to any process is noted for all (`jax.experimental.multihost_utils.reached_preemption_sync_point`).

    Until then it ends all processes.
    """
    _listening.set()
    if runtime.global_state.preemption_sync_manager is None:
        jax.config.update("jax_enable_preemption_service", True)
        runtime.global_state.initialize_preemption_sync_manager()


def _client():
    return runtime.global_state.client


def _tell(status: int, reason: str):
    """Lets the other processes know why, and with which exit status, this one ends. The first one to tell is believed."""
    with contextlib.suppress(Exception):  # the service may be gone already
        _client().key_value_set("failed", json.dumps([status, f"{name()} ended: {reason}"]))


def _told() -> config.RunError | None:
    """What another process told before it ended, with its exit status."""
    with contextlib.suppress(Exception):
        status, reason = json.loads(_client().key_value_try_get("failed"))
        error = config.RunError(reason)
        error.status = status
        return error
    return None


_listening = threading.Event()  # set when the training loop looks after SIGTERM


def _stop_all(status: int):
    """Ends this process after SIGTERM, and with it the others."""
    _listening.set()  # this process knows already
    _tell(status, "stopped by SIGTERM")
    _leave(status)


def _stop_with_others():
    """Until the loop begins: ends this process when another one was stopped by SIGTERM."""
    while not _listening.wait(1.0):
        told = _told()
        if told is not None and told.status == stopping.STOPPED:
            os.write(2, f"{told}; the same command, on all hosts, goes on\n".encode())
            _leave(stopping.STOPPED)


def _lost() -> str:
    return f"{name()} lost contact with another process of the run, which has died or cannot be reached; the same command, on all hosts, goes on"


def _leave(status: int, patience: float = 10.0):
    """Ends this process; process 0 after the others, for what they are told goes with the service that it hosts."""
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(Exception):  # the service may be gone already, and a process that died says nothing
        own, count = runtime.global_state.process_id, runtime.global_state.num_processes
        if own:
            _client().key_value_set(f"left/{own}", "")
        else:
            end = time.monotonic() + patience
            for process in range(1, count):
                _client().blocking_key_value_get(f"left/{process}", max(1, int(1000 * (end - time.monotonic()))))
            time.sleep(0.5)
    os._exit(status)


def _set_last_words(text: str):
    """What is said, with exit status 1, when JAX's runtime calls abort(): it does when processes do not meet or one of them is gone.

    A handler of the signal module would not do: those run in the main thread, and abort() in any thread ends the process first.
    """
    global _handler
    line = f"{text}\n".encode()

    def handler(_):
        os.write(2, line)
        os._exit(1)

    _handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)  # kept: the C library holds no reference
    ctypes.CDLL(None).signal(int(signal.SIGABRT), _handler)
