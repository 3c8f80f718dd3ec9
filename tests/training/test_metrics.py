"""metrics.jsonl and the loss curve: every line has a name, lines differ without colour, and a chain of runs has one axis."""

import json
import sys

import pytest
from matplotlib import pyplot
from testing import flat_lines

from maelm_jax import config, gin_files
from maelm_jax.training import metrics
from maelm_jax.training.workdir import Parent, Workdir


@pytest.fixture
def drawn(monkeypatch):
    """The axes of the picture that is drawn last."""
    figures = []
    monkeypatch.setattr(metrics.plotting.pyplot(), "close", figures.append)
    yield lambda: figures[-1].axes[0]
    monkeypatch.undo()
    pyplot.close("all")


def write_run(folder, steps, *bindings, parent=None):
    folder.mkdir()
    experiment = gin_files.load(["tiny.gin"], ["BATCH_SIZE=10", "SEQUENCE_LENGTH=20", *bindings])
    (folder / "config.gin").write_text(gin_files.render(experiment))
    lines = [{"step": step, "loss": 7.0 - step / 10} | ({"eval_loss": 6.5} if step % 2 else {}) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if parent:
        Workdir(folder).write_parent(parent)


def test_the_loss_curve_names_its_lines_and_units(tmp_path, drawn):
    write_run(tmp_path / "a", 6)
    metrics.plot(tmp_path / "a.png", metrics.read_curves(Workdir(tmp_path / "a")), "nats", "unigram", 6.789)
    axes = drawn()
    trained, heldout, _ = axes.lines
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["training (one batch)", "held-out", "unigram 6.79"]
    assert list(trained.get_xdata()) == [200, 400, 600, 800, 1000, 1200] and list(heldout.get_xdata()) == [200, 600, 1000]
    assert flat_lines(axes) == ["unigram 6.79"] and len({(line.get_marker(), line.get_linestyle()) for line in axes.lines}) == 3
    assert (
        "nats" in axes.get_ylabel()
        and axes.get_xlabel() == "tokens"
        and "Loss of a " in axes.get_title()
        and all((tmp_path / f"a.{kind}").is_file() for kind in ("png", "pdf"))
    )


def test_a_chain_of_runs_has_one_axis_of_tokens(tmp_path, drawn):
    """The second run goes on from step 4 of 6 of the first, with twice the rows a step."""
    write_run(tmp_path / "a", 6)
    parent = Parent(Workdir(tmp_path / "a"), 4, 800, 0.1, 40, [])
    write_run(tmp_path / "b", 2, "BATCH_SIZE=20", parent=parent)
    metrics.plot(tmp_path / "b.png", metrics.read_curves(Workdir(tmp_path / "b")), "nats", "unigram", 6.0)
    trained = [list(line.get_xdata()) for line in drawn().lines if line.get_linewidth() == 1]
    assert trained == [[200, 400, 600, 800], [1200, 1600]] and "Loss of a, then b " in drawn().get_title()
    assert Workdir(tmp_path / "b").trained_tokens(2) == 1600
    (tmp_path / "a" / "config.gin").unlink()
    assert [curve.first_token for curve in metrics.read_curves(Workdir(tmp_path / "b"))] == [800], "a run that is gone is left out"


def test_a_line_that_a_kill_cut_short_is_no_damage(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    assert metrics.read(Workdir(tmp_path)) == [{"step": 1}]
    metrics.Writer(Workdir(tmp_path), 1).close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_run_that_resumes_drops_the_lines_after_its_checkpoint(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    writer = metrics.Writer(Workdir(tmp_path), 1)
    writer.write(2, {"loss": 3.0, "tokens_per_second": None})
    writer.close()
    assert metrics.read(Workdir(tmp_path)) == [{"step": 1}, {"step": 2, "loss": 3.0, "tokens_per_second": None}]
    assert list((tmp_path / "tensorboard").iterdir())


# Other loggers.

WANDB = """
import json, pathlib

CALLS = []


class Run:
    def log(self, values, step):
        CALLS.append(("log", step, values))

    def finish(self):
        CALLS.append(("finish",))


def init(**settings):
    CALLS.append(("init", settings))
    return Run()
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """The calls of a module that stands for wandb."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    import wandb

    yield wandb.CALLS
    del sys.modules["wandb"]


def log_a_step(folder, step, started):
    write_run(folder, step - 1, "TRAIN_STEPS=7") if not folder.exists() else None
    (folder / "environment.txt").write_text(f"started {started}\ncommit 1\n\nstarted later\n")
    writer = metrics.Writer(Workdir(folder), step - 1, metrics.find_logger("wandb"))
    writer.write(step, {"loss": 3.0, "tokens_per_second": None})
    writer.write(step, {"mfu": None})
    writer.close()


def test_weights_and_biases_gets_every_value_and_goes_on_with_its_run(tmp_path, wandb):
    log_a_step(tmp_path / "a", 3, "on Monday")
    (_, begun), *calls = wandb
    assert calls == [("log", 3, {"loss": 3.0}), ("finish",)] and metrics.read(Workdir(tmp_path / "a"))[-1] == {"step": 3, "mfu": None}
    assert begun["config"]["Run.train_steps"] == 7 and begun["name"] == "a" and begun["resume"] == "allow"
    assert "dir" not in begun, "wandb makes links that lead out, and a workdir with these is refused"
    assert not (tmp_path / "a" / "tensorboard").exists()
    ids = []
    for folder, started in (("a", "on Monday"), ("a", "on Tuesday"), ("b", "on Monday")):
        wandb.clear()
        log_a_step(tmp_path / folder, 4, started)
        ids.append(wandb[0][1]["id"])
    assert ids[0] == begun["id"] and len(set(ids)) == 3, "a start from the beginning is another run"


@pytest.mark.parametrize("has_folder", [False, True])
def test_weights_and_biases_is_named_where_it_is_missing(tmp_path, monkeypatch, has_folder):
    """Python takes a folder wandb/, which earlier runs leave, for a package."""
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    if has_folder:
        (tmp_path / "wandb").mkdir()
        monkeypatch.syspath_prepend(str(tmp_path))
    else:
        monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(config.ConfigError, match="pip install wandb"):
        metrics.find_logger("wandb")
    sys.modules.pop("wandb", None)
