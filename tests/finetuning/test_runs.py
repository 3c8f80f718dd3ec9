"""The runs of a command, what it prints of their data, and grids that earlier versions began."""

import dataclasses
import types

import numpy as np
import pytest

from maelm_jax import config, gin_files
from maelm_jax.finetuning import experiments, features, runs, table
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


def described(*settings: str, step: int | None = 3) -> list[str]:
    """The lines about a task with three examples of two tokens."""
    rows = features.Features([np.zeros(2, np.int32)] * 3, np.zeros(3, np.int32), np.zeros(3, np.int32))
    dev = {name: DevSet(rows, None, None, (".tsv",), [], "3 examples") for name in ("matched", "mismatched")}
    task = TaskData("mnli", Head("sentence", 3), (), "accuracy", rows, dev, {}, ["a note"])
    experiment = gin_files.load(["tiny.gin", "finetune/base.gin"], ["Finetune.tasks=mnli", *settings])
    of_rows = experiments.Planned("mnli", types.SimpleNamespace(step=step, length=64), "little", experiment)
    return runs.describe_data(types.SimpleNamespace(task=task, sizes=[8, 16]), of_rows).splitlines()


def test_sizes_and_notes_are_printed():
    first, *_, last = described()
    assert first == "mnli: 3 training examples, 3 matched, 3 mismatched dev examples of at most 128 tokens, padded to 8, 16"
    assert last == "mnli: a note"


def test_limits_of_the_encoder_are_printed_where_they_matter():
    positions = "mnli: the encoder has 128 positions, MAX_LENGTH is 512"
    untrained = "mnli: pretraining read rows of 64 tokens, and trained no later position"
    assert described()[1:-1] == [positions, untrained]
    assert described("MAX_LENGTH=100")[1:-1] == [untrained]
    assert described("MAX_LENGTH=64")[1:-1] == []
    assert described(step=None)[1:-1] == [positions], "what the pretraining of a stock encoder read is not known"


def plan_of(step: int = 3, **names: str) -> experiments.Plan:
    encoders = {label: types.SimpleNamespace(name=name, step=step) for label, name in names.items()}
    return experiments.Plan([experiments.Planned("rte", encoder, label, None) for label, encoder in encoders.items()], True)


def test_a_table_has_one_encoder_of_a_name(tmp_path):
    assert runs._reports_so_far(tmp_path, plan_of(a="runs/a")) == {"a": {}}
    report = {
        "task": "cola",
        "init_from": "runs/a",
        "main_metric": "mcc",
        "chosen": "b32",
        "seeds": 1,
        "metrics": {},
        "cells": [],
        "notes": [],
        "model": None,
    }
    table.write({"a": {"cola": report}, "stopped": {}}, tmp_path)
    assert runs._reports_so_far(tmp_path, plan_of(b="runs/b")) == {"a": {"cola": report}, "b": {}}
    assert runs._reports_so_far(tmp_path, plan_of(b="runs/b", a="runs/a")) == {"a": {"cola": report}, "b": {}}
    table.write({"a": {"cola": report | {"init_from": "./runs/a/"}}}, tmp_path)
    assert runs._reports_so_far(tmp_path, plan_of(a="runs/a")) and table.labels(tmp_path) == {"runs/a": "a"}
    table.write({"a": {"cola": report}}, tmp_path)
    with pytest.raises(config.ConfigError, match=r"table.json: a is runs/a, not old/a. Name the encoder as before, or give"):
        runs._reports_so_far(tmp_path, plan_of(a="old/a"))


def test_a_row_of_a_table_is_of_one_checkpoint(tmp_path):
    report = {
        "task": "cola",
        "init_from": "runs/a",
        "start_step": 400,
        "main_metric": "mcc",
        "chosen": "b32",
        "seeds": 1,
        "metrics": {},
        "cells": [],
        "notes": [],
        "model": None,
    }
    table.write({"a": {"cola": report}}, tmp_path)
    assert runs._reports_so_far(tmp_path, plan_of(step=400, a="runs/a"))
    with pytest.raises(config.ConfigError, match="a is step 400 of runs/a, not 600. Give --step=400, or another --workdir"):
        runs._reports_so_far(tmp_path, plan_of(step=600, a="runs/a"))


def test_the_message_about_another_encoder_names_it(tmp_path):
    """Not the step of the one in the table, which --step cannot ask for."""
    report = {
        "task": "cola",
        "init_from": "pretrained",
        "start_step": None,
        "main_metric": "mcc",
        "chosen": "b32",
        "seeds": 1,
        "metrics": {"mcc": {"median": 0.5, "least": 0.5, "highest": 0.5}},
        "cells": [],
        "notes": [],
        "model": None,
    }
    table.write({"pretrained": {"cola": report}}, tmp_path, ["cola"])
    assert table.labels(tmp_path) == {"pretrained": "pretrained"}
    for name, message in (
        ("q/pretrained", "is pretrained, not q/pretrained. Name the encoder as before"),
        ("pretrained", "is step None of pretrained, not 1. Give another --workdir"),
    ):
        encoder = types.SimpleNamespace(name=name, step=1)
        plan = experiments.Plan([experiments.Planned("rte", encoder, "pretrained", None)], True)
        with pytest.raises(config.ConfigError, match=message):
            runs._reports_so_far(tmp_path, plan)
