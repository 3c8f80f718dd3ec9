"""SIGTERM outside the training loop: exits at once with status 143, on which launchers restart.

The training loop saves a checkpoint first (training/loop.py). Before and after the loop there is
nothing to save, so the process does not wait. A handler is necessary all the same: the first
process of a container (PID 1) ignores SIGTERM if it has no handler.
"""

import collections.abc
import contextlib
import os
import signal
import socket
import sys
import threading

STOPPED = 143  # exit status after SIGTERM (128 + 15): launchers run the command again
_MESSAGE = "stopped by SIGTERM; the same command goes on\n"

_exit: collections.abc.Callable[[int], None] = os._exit
_leaving = threading.Lock()


def exit_on_sigterm():
    """Makes SIGTERM end this process with status 143. Call it in the main thread.

    Python runs a signal handler in the main thread between two bytecode instructions. The
    compilation of a training step is one instruction and takes minutes. So a thread waits for the
    signal instead: it reads the socket to which Python writes the signal number
    (`signal.set_wakeup_fd`).
    """
    if signal.getsignal(signal.SIGTERM) is _handle:  # one process may run several commands
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _handle)
    os.register_at_fork(after_in_child=_restore_default)
    threading.Thread(target=_wait, args=(reader, writer), name="SIGTERM", daemon=True).start()


def exit_by(exit_process: collections.abc.Callable[[int], None]):
    """Sets the function that ends this process. It takes the exit status.

    A multi-process run sets a function that ends the other processes too.
    """
    global _exit  # noqa: PLW0603  (one process has one way to end)
    _exit = exit_process


def leave():
    """Ends this process as SIGTERM does. If the handler and the thread both call it, one acts."""
    if not _leaving.acquire(blocking=False):
        return
    with contextlib.suppress(OSError):  # stderr may be closed
        os.write(2, _MESSAGE.encode())
    flush = threading.Thread(target=sys.stdout.flush, daemon=True)
    flush.start()
    flush.join(1.0)  # flush() blocks if the signal interrupted a print of the main thread
    _exit(STOPPED)


def _handle(_number, _frame):
    leave()


def _wait(reader: socket.socket, _writer: socket.socket):
    while numbers := reader.recv(64):
        # The training loop installs a handler of its own. The process must not exit then.
        if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is _handle:
            leave()


def _restore_default():
    """Runs in a forked child, which would write to its parent's socket."""
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGTERM) is _handle:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
