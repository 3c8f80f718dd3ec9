"""Runs a function in processes of this machine."""

import concurrent.futures
import math
import multiprocessing
import os
import threading
import typing

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
        jobs: Its arguments: few bytes each, because a process that dies stops reading from a pipe.
        processes: Number of processes. With 1, the function runs in this process.
        chunk: Number of jobs that a process takes at a time.

    Raises:
        RunError: A process was killed, or could not start.
    """
    processes = min(processes, math.ceil(len(jobs) / chunk))
    if processes <= 1:
        yield from map(function, jobs)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=_start
    )
    try:
        yield from pool.map(function, jobs, chunksize=chunk)
    except concurrent.futures.process.BrokenProcessPool as error:
        raise config.RunError(
            "a worker process was killed, often because memory was full, or could not start; lower "
            "Corpus.processes and give the same command again: it goes on where it stopped"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start():
    # Work is divided among processes, so tokenizers needs no threads in each.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Without this thread, a worker whose parent was killed would wait for work forever.
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
