"""Agreement between the processes of a run: barriers, comparisons, and decisions of process 0.

The processes communicate through JAX's coordination service (jax.distributed), which process 0
hosts. With one process, every function here works and communicates with nobody.
"""

import collections.abc
import contextlib
import json
import pathlib
import secrets
import socket
import time

import jax
import numpy as np
from jax._src import distributed as runtime  # no public API has the client; Orbax uses this too
from jax.experimental import multihost_utils

from maelm_jax import config

DAY = 86_400_000  # milliseconds; limit of a wait. Missing heartbeats reveal a dead process sooner.
FOLDER_PATIENCE = 30.0  # seconds until a file of process 0 must be visible everywhere


def client():
    """Returns the client of the coordination service. None before processes have joined."""
    return runtime.global_state.client


def is_multi_process() -> bool:
    """Returns whether the run has more than one process."""
    return jax.process_count() > 1


def process_name() -> str:
    """Returns the name of this process in messages."""
    # jax.process_index() would wait for the devices of all processes.
    return f"process {runtime.global_state.process_id} on {socket.gethostname()}"


@contextlib.contextmanager
def process_zero_first(barrier: str) -> collections.abc.Iterator[None]:
    """Context manager whose block runs on process 0 first, then on the others.

    So the others find the files that process 0 writes.

    Args:
        barrier: Name of the barrier. It differs from call to call.
    """
    if jax.process_index():
        client().wait_at_barrier(barrier, DAY)
    yield
    if is_multi_process() and not jax.process_index():
        client().wait_at_barrier(barrier, DAY)


def check_equal(what: str, values: dict[str, str]):
    """Checks that `values` are the same on all processes.

    Args:
        what: Name of the comparison in the message. It differs from call to call.
        values: The values of this process.

    Raises:
        ConfigError: A process differs from process 0. All processes raise it. The message names
            the first such process and the values that differ.
    """
    store, prefix = client(), f"equal {what}"
    if not store:  # one process. JAX's devices are not used here: it may be too early.
        return
    entry = json.dumps([process_name(), values])
    store.key_value_set(f"{prefix}/{jax.process_index()}", entry)
    if not jax.process_index():
        others = [
            json.loads(store.blocking_key_value_get(f"{prefix}/{process}", DAY))
            for process in range(1, jax.process_count())
        ]
        store.key_value_set(f"{prefix}/difference", _first_difference(what, values, others))
    if message := store.blocking_key_value_get(f"{prefix}/difference", DAY):
        raise config.ConfigError(message)


def _first_difference(what: str, values: dict[str, str], others: list) -> str:
    """Describes how the first process that differs does. `others`: [name, values] of each."""
    for other_name, other in others:
        differing = [key for key in values | other if values.get(key) != other.get(key)]
        if differing:
            shown = "; ".join(
                f"{key}: {values.get(key)} -> {other.get(key)}" for key in differing[:5]
            )
            return f"{other_name} has another {what} than {process_name()} ({shown})"
    return ""


def all_true(flag: bool) -> bool:
    """Returns whether `flag` is true on every process."""
    return bool(np.all(multihost_utils.process_allgather(np.asarray(flag))))


def broadcast_flag(what: str, flag: bool) -> bool:
    """Returns the `flag` of process 0 on every process. `what` differs from call to call."""
    if not is_multi_process():
        return flag
    if not jax.process_index():
        client().key_value_set(f"flag {what}", str(flag))
    return client().blocking_key_value_get(f"flag {what}", DAY) == str(True)


def highest(number: int) -> int:
    """Returns the highest `number` of all processes."""
    return int(np.max(multihost_utils.process_allgather(np.asarray(number))))


def run_on_process_zero(what: str, action: collections.abc.Callable[[], None]):
    """Runs `action` on process 0 while the other processes wait.

    Args:
        what: Name of the action. It differs from call to call.
        action: A function without arguments.

    Raises:
        ConfigError: `action` raised it. All processes raise it.
    """
    if not client():  # one process. JAX's devices are not used here: it may be too early.
        action()
        return
    key = f"{what}/error"
    if jax.process_index():
        if message := client().blocking_key_value_get(key, DAY):
            raise config.ConfigError(message)
        return
    try:
        action()
    except config.ConfigError as error:
        client().key_value_set(key, str(error))
        raise
    client().key_value_set(key, "")


def check_shared_folder(path: str, what: str):
    """Checks that all processes see the same folder: process 0 writes a file, the others look.

    Args:
        path: The folder. Process 0 creates it if it does not exist.
        what: Name of the folder in the message. It differs from call to call.

    Raises:
        ConfigError: A process does not see the file.
    """
    if not is_multi_process():
        return
    folder, key = pathlib.Path(path), f"{what}/marker"
    if not jax.process_index():
        folder.mkdir(parents=True, exist_ok=True)
        client().key_value_set(key, f".seen-by-all-{secrets.token_hex(4)}")
    marker = folder / client().blocking_key_value_get(key, DAY)
    if not jax.process_index():
        marker.touch()
    end = time.monotonic() + FOLDER_PATIENCE
    while not (visible := marker.exists()) and time.monotonic() < end:
        time.sleep(0.2)
    try:
        check_equal(f"view of the {what}", {f"{path} as process 0 sees it": str(visible)})
    except config.ConfigError as error:
        raise config.ConfigError(f"{error}; put it on storage that all of them share") from None
    finally:
        if not jax.process_index():
            marker.unlink(missing_ok=True)
