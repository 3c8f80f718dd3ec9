"""A run that goes on with other settings or on another machine: what is allowed, said and recorded."""

import json

import numpy as np
import pytest

from maelm_jax import config, gin_files, setting_changes, train
from maelm_jax.training import optimizers, resume


def settings(*bindings: str) -> config.Experiment:
    linear = ["Optimizer.schedule='linear'", "Optimizer.warmup_steps=4", "Optimizer.learning_rate=0.1"]
    return gin_files.load(["tiny.gin"], [*linear, *bindings])


def test_a_longer_run_and_other_microbatches_are_no_other_run():
    assert setting_changes.differences(settings("TRAIN_STEPS=10"), settings("TRAIN_STEPS=20", "Run.accumulate=2")) == []
    assert setting_changes.differences(settings(), settings("BATCH_SIZE=64")) != []


def test_what_a_change_does_to_the_coming_steps_is_said():
    before = resume.Before(settings("TRAIN_STEPS=10"), None)
    assert resume.effects(before, settings("TRAIN_STEPS=10"), 7) == []
    said = resume.effects(before, settings("TRAIN_STEPS=16", "Run.accumulate=2"), 7)
    # Peak 0.1 at step 4, then linear to 0: of 10 steps half is left after step 7, of 16 three quarters.
    assert resume.effects(before, settings("TRAIN_STEPS=10", "Run.init_from='other'"), 7) == [
        "Run.init_from: None -> other. It is not read: the weights are those of the checkpoint"
    ]
    assert said == [
        "Run.train_steps: 10 -> 16. The schedule is now that of 16 steps: the learning rate of step 8 is 0.075, it would have been 0.05",
        "Run.accumulate: 1 -> 2. Rows and masks stay the same, losses differ by rounding",
    ]


def test_a_mask_rate_that_moves_with_the_length_of_the_run_is_said():
    plateaus = "Masking.rate_plateaus=((0, 0.3), (0.5, 0.15))"
    before = resume.Before(settings("TRAIN_STEPS=10", plateaus), None)
    said = resume.effects(before, settings("TRAIN_STEPS=20", plateaus), 7)
    assert said[1:] == ["The mask rate of step 8 is 0.3, it would have been 0.15"]
    assert len(resume.effects(before, settings("TRAIN_STEPS=20", plateaus), 3)) == 1


def test_another_number_of_cores_is_said(tmp_path, monkeypatch):
    (tmp_path / "config.gin").write_text(gin_files.render(settings()))
    assert resume.read(str(tmp_path)).cores is None, "an earlier version recorded none"
    (tmp_path / "environment.txt").write_text("started a\ncores 4\nnumpy==1\n\nstarted b\ncores 2\n")
    before = resume.read(str(tmp_path))
    monkeypatch.setattr(resume.workers, "usable_cores", lambda: 2)
    assert before.cores == 2 and resume.effects(before, settings(), 7) == []
    monkeypatch.setattr(resume.workers, "usable_cores", lambda: 1)
    assert resume.effects(before, settings(), 7) == ["This start has 1 CPU cores, the last one had 2. Losses may differ by rounding"]


def test_a_new_workdir_has_no_history(tmp_path):
    assert resume.read(str(tmp_path)) is None
    resume.record(str(tmp_path), 3, [])
    assert not (tmp_path / resume.HISTORY).exists()


def test_the_history_keeps_every_change(tmp_path):
    for step, line in ((3, "Run.log_every: 1 -> 2"), (5, "Run.log_every: 2 -> 1")):
        resume.record(str(tmp_path), step, [line])
    kept = (tmp_path / resume.HISTORY).read_text().splitlines()
    assert [line.partition("UTC, ")[2] for line in kept] == ["after step 3: Run.log_every: 1 -> 2", "after step 5: Run.log_every: 2 -> 1"]


@pytest.fixture
def command(tmp_path):
    """A command line for `train.main`: a tiny model on the English that comes with Python."""
    from pydoc_data import topics

    (tmp_path / "topics.txt").write_text("\n\n".join(" ".join(topic.split()) for topic in topics.topics.values()))
    values = {
        "BATCH_SIZE": 16,
        "SEQUENCE_LENGTH": 32,
        "TEXT_FILES": tmp_path / "*.txt",
        "Vocabulary.size": 400,
        "Corpus.rows_dir": tmp_path / "rows",
        "Corpus.processes": 1,
        "Corpus.heldout_fraction": 0.1,
        "Model.layers": 1,
        "Model.width": 32,
        "Model.heads": 2,
        "Model.feed_forward": 64,
        "Run.log_every": 1,
        "Run.eval_every": 1000,
        "Run.eval_rows": 16,
        "Run.checkpoint_every": 1000,
        "Run.rank_every": 0,
    }
    bindings = [f"--gin.{name}={value}" for name, value in values.items()]
    return lambda *more: ["--gin_file=tiny.gin", f"--workdir={tmp_path / 'run'}", *bindings, *more]


@pytest.mark.usefixtures("one_device")
def test_a_run_is_made_longer_and_goes_on_in_microbatches(command, tmp_path, capsys):
    folder = tmp_path / "run"
    assert train.main(command("--gin.TRAIN_STEPS=4")) == 0
    first = (folder / "metrics.jsonl").read_text()
    assert "effective rank: not measured" in capsys.readouterr().out
    more = ["--gin.TRAIN_STEPS=6", "--gin.Run.accumulate=2"]
    assert train.main(command(*more)) == 0
    said = capsys.readouterr().out
    assert "Run.train_steps: 4 -> 6. The schedule is now that of 6 steps" in said and "Run.accumulate: 1 -> 2" in said
    whole = (folder / "metrics.jsonl").read_text()
    assert whole.startswith(first), "no past step is changed"
    lines = [json.loads(line) for line in whole.splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6] and not any(name.startswith("rank") for line in lines for name in line)
    now = gin_files.load([str(folder / "config.gin")])
    assert (now.run.train_steps, now.run.accumulate) == (6, 2)
    rates = optimizers.schedule(now.optimizer, 6)(np.arange(6))
    assert [line["learning_rate"] for line in lines[4:]] == pytest.approx(np.asarray(rates)[4:].tolist())
    kept = (folder / resume.HISTORY).read_text()
    assert "after step 4: Run.train_steps: 4 -> 6\n" in kept and "after step 4: Run.accumulate: 1 -> 2\n" in kept
    with pytest.raises(config.ConfigError, match=r"Run.train_steps=5 is below the 6 steps that .* has done. Use 6 or more"):
        train.main(command("--gin.TRAIN_STEPS=5"))
    assert (folder / "metrics.jsonl").read_text() == whole
