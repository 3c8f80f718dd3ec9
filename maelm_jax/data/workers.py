"""Runs functions in processes of this machine."""

import collections
import concurrent.futures
import multiprocessing
import os
import threading
import typing

from maelm_jax import config

_shared: dict[str, typing.Any] = {}  # of a worker process


def usable_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def count(corpus: config.Corpus) -> int:
    """Returns the number of worker processes: `Corpus.processes`, or one for each core."""
    return corpus.processes or usable_cores()


def results(
    function: typing.Callable, jobs: typing.Iterable, processes: int, shared: typing.Any = None
) -> typing.Iterator:
    """Applies a function to jobs and yields the results in the order of the jobs.

    Few jobs are in memory at a time. With `processes=1`, the function runs in this process.

    Args:
        function: A function of a module, called as `function(job)` or `function(job, shared)`.
        jobs: Arguments that can be pickled.
        processes: Number of processes.
        shared: The second argument, sent once to each process. None: the function gets the job
            alone.

    Raises:
        RunError: A process was killed.
    """
    more = () if shared is None else (shared,)
    if processes == 1:
        for job in jobs:
            yield function(job, *more)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(more,),
    )
    pending: collections.deque[concurrent.futures.Future] = collections.deque()
    try:
        for job in jobs:
            pending.append(pool.submit(_call, function, job))
            if len(pending) > 2 * processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except concurrent.futures.process.BrokenProcessPool as error:
        raise config.RunError(
            "a worker process was killed, often because memory was full; lower Corpus.processes "
            "and give the same command again: it goes on where it stopped"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start(more: tuple):
    _shared["more"] = more
    # Work is divided among processes, so tokenizers needs no threads in each.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Without this thread, a worker whose parent was killed would wait for work forever.
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _call(function: typing.Callable, job: typing.Any) -> typing.Any:
    return function(job, *_shared["more"])
