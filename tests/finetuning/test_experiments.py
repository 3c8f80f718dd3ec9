"""Settings of each task with each encoder: every config, and the published grids."""

import dataclasses
import types

import pytest

from maelm_jax import config, gin_files
from maelm_jax.finetuning import experiments, initial_encoder, runs
from maelm_jax.finetuning import grid as grid_module
from maelm_jax.training import sharding


@pytest.mark.parametrize("path", sorted((gin_files.CONFIGS / "finetune").glob("*.gin")), ids=lambda path: path.stem)
def test_every_config_loads_on_a_pretrained_run(path, pretrained):
    files = {"base": ["finetune/base.gin", "finetune/rte.gin"], "grid": ["finetune/rte.gin", "finetune/grid.gin"]}.get(
        path.stem, [f"finetune/{path.name}"]
    )
    own = ["TRAIN_FILE=a.tsv", "DEV_FILE=b.tsv"] if path.stem in ("own", "conll") else []
    if path.stem == "own":
        own.append("CustomTask.labels=('no', 'yes')")
    found = experiments.of_encoder(initial_encoder.load(str(pretrained)), files, ["SEEDS=[4, 5]", "DATA_DIR=x", *own])
    stock = dataclasses.replace(initial_encoder.load(str(pretrained)), gin_file=initial_encoder.DEFAULT_GIN_FILE)  # whose BATCH_SIZE is pretraining's
    assert experiments.of_encoder(stock, files, ["BATCH_SIZE=[16, 32]", "DATA_DIR=x", *own]).keys() == found.keys()
    for task, experiment in found.items():
        assert experiment.finetune.tasks == task and experiment.finetune.grid.listed("seeds") == (4, 5)
        assert (experiment.model.width, experiment.model.dropout, experiment.model.dtype, experiment.mesh.fsdp) == (32, 0.1, "float32", 1)
    if path.stem == "glue":
        (alone,) = experiments.of_encoder(initial_encoder.load(str(pretrained)), files, ["Finetune.tasks=('rte',)"]).values()
        assert alone.finetune.grid.epochs == 10, "a table of one task has that task's settings too"
        assert len(found) == 9 and (found["rte"].finetune.grid.epochs, found["squad2"].finetune.max_length) == (10, 384)


@pytest.mark.parametrize(
    "name,tasks,cells",
    [
        ("glue_small", ("cola", "rte", "mrpc", "stsb"), 80),
        ("glue_large", ("mnli", "qqp", "qnli", "sst2"), 30),
        ("squad", ("squad2",), 16),
    ],
)
def test_the_published_grids(name, tasks, cells, pretrained):
    encoder = initial_encoder.load(str(pretrained))
    by_task = experiments.of_encoder(encoder, [f"published/{name}.gin"], ["DATA_DIR=x"])
    assert tuple(by_task) == tasks
    for experiment in by_task.values():
        assert len(grid_module.cells(experiment.finetune.grid, 5000)) == cells and len(experiment.finetune.grid.listed("seeds")) == 5
        assert 1 / 16 in experiment.finetune.grid.listed("warmup")
    large = experiments.of_encoder(encoder, [f"published/{name}.gin", "published/large.gin"], ["DATA_DIR=x"])
    assert all(max(one.finetune.grid.listed("learning_rate")) == 2e-5 for one in large.values())


# Settings of the optimiser that fine-tuning does not read.
OF_PRETRAINING = {"learning_rate", "muon_learning_rate", "warmup_steps", "schedule", "decay_share", "freeze_encoder_steps"}


def test_the_optimiser_of_fine_tuning_does_not_depend_on_that_of_pretraining(pretrained, tmp_path):
    """Encoders of a table share a session: its optimiser and mesh."""
    other = {"kind": "'muon'", "b1": 0.8, "b2": 0.9, "eps": 1e-4, "weight_decay": 0.5, "decay_norms_and_biases": False, "clip_norm": 7.0}
    other |= {"ema_decay": 0.9}
    unknown = {field.name for field in dataclasses.fields(config.Optimizer)} - other.keys() - OF_PRETRAINING
    assert not unknown, "does fine-tuning read it? Bind it in configs/finetune/base.gin and add it here"
    lines = [f"Optimizer.{name} = {value}" for name, value in other.items()]
    lines += ["Mesh.data = 2", "Mesh.fsdp = 2", "Mesh.tensor = 2", "Run.accumulate = 4"]
    (tmp_path / "config.gin").write_text((pretrained / "config.gin").read_text() + "\n".join(lines))
    encoder = initial_encoder.load(str(pretrained))
    one, another = (
        experiments.of_encoder(dataclasses.replace(encoder, gin_file=str(path)), ["finetune/rte.gin"], ["DATA_DIR=x"])["rte"]
        for path in (pretrained / "config.gin", tmp_path / "config.gin")
    )
    for name in other:
        assert getattr(one.optimizer, name) == getattr(another.optimizer, name), name
    assert (one.mesh, one.run.accumulate) == (another.mesh, another.run.accumulate)


def test_settings_of_pretraining_alone_do_not_hinder_fine_tuning(pretrained, data_dir, tmp_path):
    """The ramp ends above the batch size of fine-tuning, and the devices do not divide it."""
    lines = [
        "Run.batch_size = 2048",
        "Run.batch_size_ramp = ((5, 10), (1024, 10))",
        "Masking.rate_plateaus = ((0.0, 0.4), (0.5, 0.2))",
        "Masking.heldout_rate = 0.15",
        "Optimizer.kind = 'muon'",
        "Optimizer.schedule = 'wsd'",
        "Optimizer.ema_decay = 0.99",
        "Optimizer.freeze_encoder_steps = 7",
    ]
    (tmp_path / "config.gin").write_text((pretrained / "config.gin").read_text() + "\n".join(lines))
    encoder = dataclasses.replace(initial_encoder.load(str(pretrained)), gin_file=str(tmp_path / "config.gin"))
    bindings = [f"DATA_DIR={data_dir}", "BATCH_SIZE=[16, 32]", "MAX_LENGTH=64"]
    experiment = experiments.of_encoder(encoder, ["finetune/rte.gin"], bindings)["rte"]
    session = runs._Sessions().of(experiments.Planned("rte", encoder, "little", experiment))
    for cell in grid_module.cells(experiment.finetune.grid, 32):
        of_run = grid_module.experiment_of(experiment, cell, seed=3)
        sharding.check_mesh(of_run, session.mesh)
        assert (of_run.run.batch_size, of_run.masking.rate_plateaus) == (cell.batch_size, ())
        assert of_run.run.named_batch_sizes == [("Run.batch_size", cell.batch_size)]
    session.fresh_state(encoder, seed=3)


def test_an_encoder_keeps_the_label_that_it_has_in_the_table():
    def labels(*names, **known):
        encoders = [types.SimpleNamespace(name=name, label=initial_encoder.label_of(name)) for name in names]
        return experiments._unique_labels(encoders, {name.replace("__", "/"): label for name, label in known.items()})

    assert labels("e/runs/tiny", "e/old/tiny") == ["e-runs-tiny", "e-old-tiny"]
    assert labels("e/runs/tiny", "e/old/tiny", e__runs__tiny="tiny") == ["tiny", "e-old-tiny"]
    assert labels("other/tiny", e__runs__tiny="tiny") == ["other-tiny"], "the table's row is another encoder's"
    assert labels("a-b/c", "a/b/c") == ["a-b-c", "a-b-c-2"]


def test_two_spellings_of_a_path_are_one_encoder(monkeypatch):
    """A slash at the end comes from the shell's completion."""
    monkeypatch.setenv("HOME", "/home/me")
    assert {initial_encoder.normalised(name) for name in ("runs/tiny", "./runs/tiny/", "runs//tiny")} == {"runs/tiny"}
    assert {initial_encoder.normalised(name) for name in ("random:runs/tiny/", "random:./runs/tiny")} == {"random:runs/tiny"}
    assert initial_encoder.normalised("~/x/") == "/home/me/x" and initial_encoder.normalised("random:~/x") == "random:/home/me/x"
    for name in ("gs://bucket/run", "random:gs://bucket/run"):
        assert initial_encoder.normalised(name) == name, "refused later, by its own name"
