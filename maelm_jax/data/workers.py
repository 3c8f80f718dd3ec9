"""Runs a function in processes of this machine."""

import contextlib
import itertools
import multiprocessing
import os
import threading
import typing
from multiprocessing import connection

from maelm_jax import config


def usable_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def count(corpus: config.Corpus) -> int:
    """Returns the number of worker processes: `Corpus.processes`, or one for each core."""
    return corpus.processes or usable_cores()


def results(
    function: typing.Callable, jobs: typing.Sequence, processes: int, chunk: int = 1
) -> typing.Iterator[typing.Any]:
    """Applies a function to jobs. Yields the results in the order of the jobs.

    Args:
        function: A function of a module.
        jobs: Its arguments.
        processes: Number of processes. With 1, the function runs in this process.
        chunk: Number of jobs that a process takes at a time.

    Raises:
        RunError: A process was killed, or could not start.
    """
    chunks = [jobs[start : start + chunk] for start in range(0, len(jobs), chunk)]
    processes = min(processes, len(chunks))
    if processes <= 1:
        yield from map(function, jobs)
        return
    for results_of_chunk in _compute(function, chunks, processes):
        for result in results_of_chunk:
            if isinstance(result, _Failure):
                raise result.error
            yield result


class _Failure(typing.NamedTuple):
    """Stands for the result of a job that raised an error."""

    error: Exception


def _compute(
    function: typing.Callable, chunks: list[typing.Sequence], processes: int
) -> typing.Iterator[list]:
    """Yields the results of each chunk, which end with a `_Failure` if a job raised an error.

    A ProcessPoolExecutor of Python 3.11 can wait forever if a process dies while it starts another.
    """
    context, waiting = multiprocessing.get_context("spawn"), iter(enumerate(chunks))
    working: dict[connection.Connection, int] = {}  # the number of the chunk of each process
    done: dict[int, list] = {}

    def give_work(pipe: connection.Connection):
        for number, chunk in itertools.islice(waiting, 1):
            pipe.send(chunk)
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
            for number in range(len(chunks)):
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
    """Applies the function to chunks of jobs from the pipe, in a process of `_compute`."""
    # Work is divided among processes, so tokenizers needs no threads in each.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Without this thread, a process whose parent was killed would end its chunk first.
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            results = []
            for job in pipe.recv():
                try:
                    results.append(function(job))
                except Exception as error:
                    results.append(_Failure(error))
                    break
            pipe.send(results)
