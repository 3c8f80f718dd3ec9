"""Effective ranks while fine-tuning, measured on the text of a task's first dev set."""

import dataclasses

import jax
import numpy as np

from maelm_jax import config
from maelm_jax.analysis import monitor
from maelm_jax.data.vocabularies import Vocabulary
from maelm_jax.finetuning.task_data import TaskData

MASK_SEED = 0  # of the masks of rank_real_* and rank_all_*: the same for all seeds of a task


class RankMonitors:
    """The rank monitors of a task: one for each way of masking, so that each is compiled once.

    Encoders that share a session may have been pretrained with different masks.
    """

    def __init__(self, task: TaskData, vocabulary: Vocabulary, mesh: jax.sharding.Mesh):
        self._rows = padded_rows(next(iter(task.dev.values())).features.ids, vocabulary.pad)
        self._vocabulary, self._mesh = vocabulary, mesh
        self._monitors: dict[config.Masking, monitor.RankMonitor] = {}

    def of(self, experiment: config.Experiment) -> monitor.RankMonitor:
        """Returns the monitor for the masks of a run."""
        if experiment.masking not in self._monitors:
            run = dataclasses.replace(experiment.run, seed=MASK_SEED)
            self._monitors[experiment.masking] = monitor.RankMonitor(
                dataclasses.replace(experiment, run=run),
                self._vocabulary.size,
                self._vocabulary.special,
                self._rows,
                self._mesh,
            )
        return self._monitors[experiment.masking]


def padded_rows(examples: list[np.ndarray], pad: int) -> np.ndarray:
    """Returns examples as rows of equal length, int32 [n, longest]."""
    rows = np.full((len(examples), max(map(len, examples))), pad, np.int32)
    for row, ids in zip(rows, examples, strict=True):
        row[: len(ids)] = ids
    return rows
