"""Runs a function in processes of this machine."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
import typing
from multiprocessing import connection

from maelm_jax import config


def usable_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def results(
    function: typing.Callable, jobs: typing.Sequence, processes: int
) -> typing.Iterator[typing.Any]:
    """Applies a function to jobs. Yields the results in the order of the jobs.

    Args:
        function: A function of a module.
        jobs: Its arguments.
        processes: Number of processes, 0 for one on each core. With 1, the function runs in this
            process.

    Raises:
        RunError: A process was killed, or could not start.
    """
    processes = min(processes or usable_cores(), len(jobs))
    if processes <= 1:
        yield from map(function, jobs)
        return
    for result, error in _compute(function, jobs, processes):
        if error:
            raise error
        yield result


def _compute(
    function: typing.Callable, jobs: typing.Sequence, processes: int
) -> typing.Iterator[tuple[typing.Any, Exception | None]]:
    """Yields the result of each job, or the error that it raised.

    A ProcessPoolExecutor of Python 3.11 can wait forever if a process dies while it starts another.
    """
    context, waiting = multiprocessing.get_context("spawn"), iter(enumerate(jobs))
    working: dict[connection.Connection, int] = {}  # the number of the job of each process
    done: dict[int, tuple[typing.Any, Exception | None]] = {}

    def give_work(pipe: connection.Connection):
        for number, job in itertools.islice(waiting, 1):
            pipe.send(job)
            working[pipe] = number

    with contextlib.ExitStack() as stack:
        try:
            for _ in range(processes):
                pipe, other_end = context.Pipe()
                process = context.Process(target=_work, args=(other_end, function))
                process.start()
                stack.callback(process.join)
                stack.callback(process.kill)
                other_end.close()  # so that the pipe ends when the process does
                give_work(pipe)
            for number in range(len(jobs)):
                while number not in done:
                    for pipe in connection.wait(list(working)):
                        done[working.pop(pipe)] = pipe.recv()
                        give_work(pipe)
                yield done.pop(number)
        except (EOFError, ConnectionError) as error:
            raise config.RunError(
                "a worker process was killed, often because memory was full, or could not start; "
                "lower Corpus.processes and give the same command again: it goes on where it "
                "stopped"
            ) from error


def _work(pipe: connection.Connection, function: typing.Callable):
    """Applies the function to jobs from the pipe, in a process of `_compute`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which kills this one
    # Work is divided among processes, so tokenizers needs no threads in each.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Without this thread, a process whose parent was killed would end its job first.
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            job = pipe.recv()
            try:
                outcome = function(job), None
            except Exception as error:
                outcome = None, error
            pipe.send(outcome)
