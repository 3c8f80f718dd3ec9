"""SIGTERM outside the training loop: the process ends at once, with the exit status that launchers restart on.

The loop saves a checkpoint first (training/loop.py). Before and after it nothing would be lost by SIGKILL either, so there is
nothing to wait for. A handler is needed all the same: the first process of a container ignores a SIGTERM that it has none for.
"""

import collections.abc
import contextlib
import os
import signal
import socket
import sys
import threading

STOPPED = 143  # exit status after SIGTERM: launchers start the command again
_MESSAGE = "stopped by SIGTERM; the same command goes on\n"

_exit: collections.abc.Callable[[int], None] = os._exit
_leaving = threading.Lock()


def exit_on_sigterm():
    """From here on SIGTERM ends this process with status 143. To be called in the main thread.

    Python runs a handler in the main thread between two of its instructions, and compiling a step is one instruction that takes
    minutes. So a thread waits for the signal, by the descriptor that Python writes the signal's number to.
    """
    if signal.getsignal(signal.SIGTERM) is _handle:  # several commands may run in one process
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _handle)
    os.register_at_fork(after_in_child=_restore_default)
    threading.Thread(target=_wait, args=(reader, writer), name="SIGTERM", daemon=True).start()


def exit_by(exit_process: collections.abc.Callable[[int], None]):
    """Sets what ends this process with a status: in a multi-process run, something that ends the other processes too."""
    global _exit
    _exit = exit_process


def leave():
    """Ends this process as SIGTERM does. The handler and the thread both call it: the first one does it."""
    if not _leaving.acquire(blocking=False):
        return
    with contextlib.suppress(OSError):  # stderr may be closed
        os.write(2, _MESSAGE.encode())
    flush = threading.Thread(target=sys.stdout.flush, daemon=True)
    flush.start()
    flush.join(1.0)  # it cannot be done where the main thread was stopped in the middle of a print
    _exit(STOPPED)


def _handle(_number, _frame):
    leave()


def _wait(reader: socket.socket, _writer: socket.socket):
    while numbers := reader.recv(64):
        # The training loop has a handler of its own, and wants no one to leave.
        if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is _handle:
            leave()


def _restore_default():
    """In a forked child, which would write to its parent's descriptor."""
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGTERM) is _handle:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
