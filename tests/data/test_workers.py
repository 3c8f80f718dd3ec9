"""Work in processes of this machine: results in order, few jobs in memory, a killed worker is one line."""

import concurrent.futures
import itertools
import os

import pytest

from maelm_jax import config
from maelm_jax.data import workers


class Pool:
    """A pool whose jobs run at once in this process, and end as `fate` says."""

    fate = staticmethod(lambda function, *arguments: function(*arguments))

    def __init__(self, processes, mp_context, initializer, initargs):
        workers._shared["more"] = initargs[0]

    def submit(self, function, *arguments):
        future = concurrent.futures.Future()
        try:
            future.set_result(self.fate(function, *arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, cancel_futures):
        assert cancel_futures


@pytest.mark.parametrize("processes", [1, 2])
def test_results_have_the_order_of_the_jobs_and_few_jobs_are_taken(processes, monkeypatch):
    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", Pool)
    taken = []
    jobs = (taken.append(number) or number for number in itertools.count())
    results = workers.results(pow, jobs, processes, shared=2)
    assert [next(results) for _ in range(5)] == [0, 1, 4, 9, 16]
    assert len(taken) <= 5 + 2 * processes
    assert list(workers.results(abs, [-3, 2], processes)) == [3, 2]


def test_a_killed_worker_is_one_line(monkeypatch):
    def killed(*_):
        raise concurrent.futures.process.BrokenProcessPool("A process was terminated abruptly")

    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(Pool, "fate", staticmethod(killed))
    with pytest.raises(config.RunError, match="a worker process was killed, .* lower Corpus.processes") as caught:
        list(workers.results(abs, [1], 2))
    assert "\n" not in str(caught.value)


def test_tokenizers_needs_threads_in_a_process_that_is_alone_only(monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    for processes, value in ((1, None), (2, "false")):
        assert list(workers.results(os.getenv, ["TOKENIZERS_PARALLELISM"], processes)) == [value]


def test_one_process_for_each_core_by_default(monkeypatch):
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda _: {0, 1, 5})
    assert workers.count(config.Corpus()) == 3 and workers.count(config.Corpus(processes=7)) == 7
