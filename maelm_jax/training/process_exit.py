"""How the processes of a run end together: on an error, on SIGTERM, or when one of them dies.

All functions but `set_abort_message` need the coordination service of `distributed.joined`.
"""

import atexit
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time

import jax
from jax._src import distributed as runtime  # no public API has the client; Orbax uses this too

from maelm_jax import config, stopping
from maelm_jax.training import coordination

FAILURE_KEY = "failed"  # in the coordination service: exit status and reason of the first failure
EXIT_PATIENCE = 10.0  # seconds that process 0 waits for the other processes to exit
# Words in errors of JAX's collectives that mean that another process has ended.
LOST_CONTACT = ("Gloo", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "another task")

# Set when the main thread learns itself how another process ends: in the training loop, and when
# this process fails.
_watch_ended = threading.Event()


def fail(error: Exception) -> Exception:
    """Tells the other processes about an error, and lets this process exit without them.

    Returns:
        `error`, or the failure of another process if that caused it.
    """
    _watch_ended.set()
    cause = _cause(error)
    # JAX's own exit waits for the other processes. `_exit` does not.
    atexit.register(_exit, getattr(cause, "status", 1))
    return cause


def _cause(error: Exception) -> Exception:
    reason = " ".join(str(error).split())
    if isinstance(error, (config.ConfigError, config.RunError)):
        _publish_failure(error.status, str(error))
    elif any(word in reason for word in LOST_CONTACT):
        time.sleep(0.5)  # time for the other process to publish its reason
        return _published_failure() or config.RunError(f"{lost_contact()} ({reason[:160]})")
    else:
        _publish_failure(1, f"{type(error).__name__}: {reason[:300]}")
    return error


def record_sigterm():
    """Starts to record SIGTERM instead of exiting. The signal to one process counts for all.

    The training loop asks for it with
    `jax.experimental.multihost_utils.reached_preemption_sync_point`. Before this call, SIGTERM
    ends all processes.
    """
    _watch_ended.set()
    if runtime.global_state.preemption_sync_manager is None:
        jax.config.update("jax_enable_preemption_service", True)
        runtime.global_state.initialize_preemption_sync_manager()


def _publish_failure(status: int, reason: str):
    """Tells the other processes why this one ends, and its exit status. The first reason counts."""
    message = f"{coordination.process_name()} ended: {reason}"
    with contextlib.suppress(Exception):  # the service may have ended
        coordination.client().key_value_set(FAILURE_KEY, json.dumps([status, message]))


def _published_failure() -> config.RunError | None:
    """Returns the failure that another process published before it ended."""
    with contextlib.suppress(Exception):
        status, reason = json.loads(coordination.client().key_value_try_get(FAILURE_KEY))
        error = config.RunError(reason)
        error.status = status
        return error
    return None


def end_all_together():
    """Makes SIGTERM to one process, or its failure, end all, until `record_sigterm` is called."""
    stopping.exit_by(_stop_all)
    threading.Thread(target=_end_with_others, name="end with others", daemon=True).start()


def _stop_all(status: int):
    """Ends all processes after SIGTERM to this one."""
    _watch_ended.set()
    _publish_failure(status, "stopped by SIGTERM")
    _exit(status)


def _end_with_others():
    """Ends this process if SIGTERM or an error ended another one. Runs until `_watch_ended`."""
    while not _watch_ended.wait(1.0):
        failure = _published_failure()
        if failure is None:
            continue
        if _watch_ended.wait(1.0):  # the same error has reached the main thread
            return
        line = f"error: {failure}"
        if failure.status == stopping.STOPPED:
            line = f"{failure}; the same command, on all hosts, goes on"
        os.write(2, f"{line}\n".encode())
        _exit(failure.status)


def lost_contact() -> str:
    """Returns the message for the loss of contact with another process."""
    return (
        f"{coordination.process_name()} lost contact with another process of the run, which has "
        "died or cannot be reached; the same command, on all hosts, goes on"
    )


def _exit(status: int):
    """Ends this process. Process 0 ends last, because it hosts the coordination service."""
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(Exception):  # the service may have ended; a dead process sets no key
        client, process = coordination.client(), runtime.global_state.process_id
        if process:
            client.key_value_set(f"exited/{process}", "")
        else:
            end = time.monotonic() + EXIT_PATIENCE
            for other in range(1, runtime.global_state.num_processes):
                milliseconds = max(1, int(1000 * (end - time.monotonic())))
                client.blocking_key_value_get(f"exited/{other}", milliseconds)
            time.sleep(0.5)
    os._exit(status)


def set_abort_message(text: str):
    """Sets the message for the case that JAX's runtime calls abort(). The exit status is then 1.

    The runtime calls abort() when processes do not meet or one of them dies. The handler is a C
    handler, because a handler of the `signal` module runs in the main thread, and abort() in any
    thread ends the process before that.
    """
    global _abort_handler  # noqa: PLW0603
    line = f"{text}\n".encode()

    def handler(_):
        os.write(2, line)
        os._exit(1)

    # The global variable keeps the handler alive, because the C library holds no reference.
    _abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)
    ctypes.CDLL(None).signal(int(signal.SIGABRT), _abort_handler)
