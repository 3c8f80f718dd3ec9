"""The runs of a command, what it prints of their data, and grids that earlier versions began."""

import dataclasses
import types

import numpy as np
import pytest

from maelm_jax import gin_files
from maelm_jax.finetuning import experiments, features, runs
from maelm_jax.finetuning.task_data import DevSet, Head, TaskData


def planned(**model) -> experiments.Planned:
    experiment = gin_files.load(["tiny.gin"], ["Model.relative_buckets=none", "Model.decoder_relative_bias=False"])
    changed = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, **model))
    return experiments.Planned("rte", None, "stock", changed)


@pytest.mark.parametrize("place", ["stock/rte/b16/seed1", "."])
def test_a_grid_of_an_earlier_version_goes_on_with_the_model_it_began_with(tmp_path, place):
    """Its config.gin has no family, and no setting for what the decoder reads. RoBERTa's token types are in its positions."""
    lines = gin_files.render(planned(token_types=0).experiment).splitlines()
    later = ("Model.family", "Model.token_types", "Model.decoder_refills_mask")
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    (tmp_path / place / "config.gin").write_text("\n".join(line for line in lines if not line.startswith(later)))
    model = runs._as_begun(planned(family="roberta", token_types=1), tmp_path).experiment.model
    assert (model.family, model.token_types, model.decoder_refills_mask) == (None, 0, False)


def test_other_grids_have_the_model_of_their_encoder(tmp_path):
    now = planned(family="roberta", token_types=1)
    assert runs._as_begun(now, tmp_path) is now
    (tmp_path / "config.gin").write_text(gin_files.render(now.experiment))
    assert runs._as_begun(now, tmp_path) is now


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
