"""What a command prints of a task's data."""

import types

import numpy as np

from maelm_jax import gin_files
from maelm_jax.finetuning import features, runs
from maelm_jax.finetuning.task_data import DevSet, Head, TaskData


def described(*settings: str) -> list[str]:
    """The lines about a task with three examples of two tokens."""
    rows = features.Features([np.zeros(2, np.int32)] * 3, np.zeros(3, np.int32), np.zeros(3, np.int32))
    dev = {name: DevSet(rows, None, None, (".tsv",), []) for name in ("matched", "mismatched")}
    task = TaskData("mnli", Head("sentence", 3), (), "accuracy", rows, dev, {}, ["a note"])
    experiment = gin_files.load(["tiny.gin", "finetune/base.gin"], ["Finetune.tasks=mnli", *settings])
    return runs.describe_data(types.SimpleNamespace(task=task, sizes=[8, 16]), experiment).splitlines()


def test_sizes_and_notes_are_printed():
    first, *_, last = described()
    assert first == "mnli: 3 training rows, 3 matched, 3 mismatched dev rows of at most 128 tokens, padded to 8, 16"
    assert last == "mnli: a note"


def test_limits_of_the_encoder_are_printed_where_they_matter():
    positions = "mnli: the encoder has 128 positions, MAX_LENGTH is 512"
    untrained = "mnli: pretraining read rows of 64 tokens, and trained no later position"
    assert described()[1:-1] == [positions, untrained]
    assert described("MAX_LENGTH=100")[1:-1] == [untrained]
    assert described("MAX_LENGTH=64")[1:-1] == []
