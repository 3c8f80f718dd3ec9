"""The command on a trained run: the losses of its own evaluations, other text, models of other kinds, what it refuses."""

import json
import re
import shutil

import numpy as np
import pytest
from testing import STEPS, call, metrics

from maelm_jax import config, evaluate, export
from maelm_jax.data import packing, vocabularies
from maelm_jax.measuring import scoring

pytestmark = pytest.mark.long


@pytest.fixture
def scores(tmp_path):
    """Runs the command and returns what it writes."""

    def run(*argv) -> list[dict]:
        assert evaluate.main([*map(str, argv), f"--output={tmp_path / 'scores.json'}"]) == 0
        return json.loads((tmp_path / "scores.json").read_text())["scores"]

    return run


@pytest.fixture
def other_text(tmp_path):
    (tmp_path / "other.txt").write_text("\n\n".join(f"The value of {number} is an object of the class {number % 7}." for number in range(900)))
    return tmp_path / "other.txt"


def test_own_rows_give_the_evaluations_of_the_run(uninterrupted, scores):
    logged = {line["step"]: line for line in metrics(uninterrupted) if "eval_loss" in line}
    measured = {score["step"]: score for score in scores(f"--models={uninterrupted}", "--all_steps")}
    assert set(logged) <= set(measured) and len(logged) > 1 and max(measured) == STEPS
    for step, line in logged.items():
        assert measured[step]["loss"] == pytest.approx(line["eval_loss"], rel=1e-6)
        assert measured[step]["accuracy"] == pytest.approx(line["eval_accuracy"], abs=1e-9)
        assert measured[step]["unigram"] == pytest.approx(line["unigram"], rel=1e-9)
        assert measured[step]["trained_tokens"] == step * 8 * 32
    [first] = scores(f"--models={uninterrupted}", f"--step={min(logged)}")
    assert first == measured[min(logged)]


def test_the_newest_checkpoint_may_be_pruned_before_it_is_read(uninterrupted, tmp_path, scores, monkeypatch):
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    [before] = scores(f"--models={run}")
    heldout_rows, checkpoints = scoring.heldout_rows, run / "checkpoints"

    def prune(model):
        (checkpoints / f"{STEPS}").rename(checkpoints / f"{STEPS + 5}")  # as a run that went on
        return heldout_rows(model)

    monkeypatch.setattr(scoring, "heldout_rows", prune)
    [after] = scores(f"--models={run}")
    assert (after["step"], after["loss"]) == (STEPS + 5, before["loss"])
    assert after["trained_tokens"] == (STEPS + 5) * 8 * 32
    monkeypatch.setattr(scoring, "heldout_rows", lambda model: shutil.rmtree(checkpoints / f"{STEPS + 5}") or heldout_rows(model))
    with pytest.raises(config.ConfigError, match=f"{STEPS + 5}"):
        scores(f"--models={run}", f"--step={STEPS + 5}")


def test_a_step_that_is_pruned_meanwhile_is_left_out_of_all_steps(uninterrupted, tmp_path, scores, monkeypatch, caplog):
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    for path in (run / "checkpoints").iterdir():
        if path.name not in ("20", "40", "60"):
            shutil.rmtree(path)
    heldout_rows = scoring.heldout_rows
    monkeypatch.setattr(scoring, "heldout_rows", lambda model: shutil.rmtree(run / "checkpoints" / "40") or heldout_rows(model))
    assert [score["step"] for score in scores(f"--models={run}", "--all_steps")] == [20, 60]
    assert "step 40" in caplog.text


def test_an_export_scores_as_its_run(uninterrupted, other_text, tmp_path, scores, capsys):
    assert export.main([f"--workdir={uninterrupted}", f"--output={tmp_path / 'out'}"]) == 0
    capsys.readouterr()
    run, exported = scores(f"--models={uninterrupted},{tmp_path / 'out'}", f"--text={other_text}", "--rate=0.4")
    assert exported["loss"] == pytest.approx(run["loss"], rel=1e-6)
    assert (exported["masked"], exported["accuracy"], exported["half"]) == pytest.approx((run["masked"], run["accuracy"], run["half"]), rel=1e-5)
    assert exported["step"] is None and exported["unigram"] is None and run["unigram"] > 0
    assert run["masked"] == pytest.approx(0.4 * run["tokens"], rel=0.2)  # special tokens count, and are not masked
    table = capsys.readouterr().out.splitlines()
    assert f"{run['loss']:.3f}" in table[1] and "0.4" in table[1]
    assert table[3].startswith(f"{uninterrupted}, step {STEPS} - {tmp_path / 'out'}: ") and "(95% interval " in table[3]
    assert [line.endswith("loss of the decoder, which is discarded after pretraining") for line in table[4:]] == [True, True]


def test_text_is_read_up_to_the_tokens_asked_for(uninterrupted, other_text, scores):
    vocabulary = vocabularies.load(uninterrupted / "vocabulary")
    [part] = scores(f"--models={uninterrupted}", f"--text={other_text}", "--tokens=500")
    text = other_text.read_text().split("\n\n")
    whole = packing.pack(text, vocabulary, 32)
    [all_of_it] = scores(f"--models={uninterrupted}", f"--text={other_text}")
    assert all_of_it["tokens"] == (whole != vocabulary.pad).sum()
    assert 0 < part["tokens"] < 0.2 * all_of_it["tokens"]
    [again] = scores(f"--models={uninterrupted}", f"--text={other_text}", "--seed=1")
    assert again["loss"] != all_of_it["loss"]
    assert abs(again["loss"] - all_of_it["loss"]) < 3 * all_of_it["half"]


def test_the_interval_is_that_of_a_ratio_of_sums():
    """Against the spread of the ratio over many samples of batches."""
    draw = np.random.default_rng(0)
    counts = draw.integers(500, 700, (2000, 40)).astype(float)
    losses = counts * draw.normal(5.0, 0.3, counts.shape)
    means = losses.sum(1) / counts.sum(1)
    halves = [scoring.half_interval(loss, count, mean) for loss, count, mean in zip(losses, counts, means, strict=True)]
    assert np.mean(np.abs(means - 5.0) < halves) == pytest.approx(0.95, abs=0.015)
    assert scoring.half_interval(losses[0, :1], counts[0, :1], means[0]) is None


def test_the_interval_of_a_difference_is_that_of_pairs():
    """Two models whose losses are equal but for a constant: hard batches are hard for both."""
    losses = 100 * np.random.default_rng(0).normal(5.0, 0.3, 40)
    counts = np.full(40, 100.0)
    scores = [scoring.Score(name, None, None, 0.15, 9, 9, 5.0, 0.1, 0.5, None) for name in ("a", "b")]
    found = scoring.paired_difference(scoring.Measurement(scores[0], losses, counts), scoring.Measurement(scores[1], losses + 2.0, counts))
    assert str(found) == "a - b: -0.020 nats (95% interval -0.020 to -0.020)"


def test_the_encoder_reads_masks_as_in_pretraining(uninterrupted, other_text, tmp_path, scores):
    """In a run and in its export: a decoder does not tell which masks the encoder reads, nor which positions."""
    copy = shutil.copytree(uninterrupted, tmp_path / "copy")
    settings = (copy / "config.gin").read_text()
    for name, before, after in (("name", "'mae_lm'", "'between'"), ("mask_fraction", None, 0.5), ("renumber", False, True)):
        assert f"{name} = {before}\n" in settings
        settings = settings.replace(f"{name} = {before}\n", f"{name} = {after}\n")
    (copy / "config.gin").write_text(settings)
    assert export.main([f"--workdir={copy}", f"--output={tmp_path / 'out'}", "--no-verify"]) == 0
    hidden, read, exported = scores(f"--models={uninterrupted},{copy},{tmp_path / 'out'}", f"--text={other_text}")
    assert hidden["loss"] != read["loss"] == pytest.approx(exported["loss"], rel=1e-6)


def test_a_text_is_measured_where_the_training_rows_cannot_be_opened(uninterrupted, text, other_text, tmp_path, scores, caplog):
    copy = shutil.copytree(uninterrupted, tmp_path / "copy")
    shutil.copytree(text / "rows", tmp_path / "rows")
    for path in tmp_path.glob("rows/*/train/zarr.json"):
        path.write_text("{")
    settings = (copy / "config.gin").read_text()
    (copy / "config.gin").write_text(re.sub(r"Corpus.rows_dir = .*", f"Corpus.rows_dir = '{tmp_path}/rows'", settings))
    [score] = scores(f"--models={copy}", f"--text={other_text}")
    [original] = scores(f"--models={uninterrupted}", f"--text={other_text}")
    assert score["unigram"] is None and score["loss"] == pytest.approx(original["loss"], rel=1e-6)
    assert "its rows cannot be read" in caplog.text and "train/zarr.json" in caplog.text


def test_a_field_of_other_text_is_named(uninterrupted, other_text, tmp_path, scores):
    lines = other_text.read_text().split("\n\n")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in lines))
    [of_field] = scores(f"--models={uninterrupted}", f"--text={tmp_path / 'a.jsonl'}", "--gin.Corpus.text_field='body'")
    [of_text] = scores(f"--models={uninterrupted}", f"--text={other_text}")
    assert of_field["loss"] == pytest.approx(of_text["loss"], rel=1e-6)


def test_runs_that_do_not_compare_are_named(uninterrupted, tmp_path, capsys):
    copy = shutil.copytree(uninterrupted, tmp_path / "copy")
    settings = (copy / "config.gin").read_text()
    assert "Run.seed = 0" in settings
    (copy / "config.gin").write_text(settings.replace("Run.seed = 0", "Run.seed = 1"))
    same = shutil.copytree(uninterrupted, tmp_path / "same")
    assert evaluate.main([f"--models={uninterrupted},{copy},{same}", f"--output={tmp_path / 'scores.json'}"]) == 0
    assert "different masks" in capsys.readouterr().out
    found = json.loads((tmp_path / "scores.json").read_text())
    assert len(found["notes"]) == 1 and found["seed"] is None
    assert [(one["one"], one["other"], one["mean"]) for one in found["differences"]] == [(f"{uninterrupted}, step 60", f"{same}, step 60", 0.0)]


def test_what_cannot_be_measured_is_one_line(uninterrupted, other_text, tmp_path):
    assert export.main([f"--workdir={uninterrupted}", f"--output={tmp_path / 'stock'}", "--no-verify"]) == 0
    (tmp_path / "stock" / "decoder.safetensors").unlink()
    copy = shutil.copytree(uninterrupted, tmp_path / "copy")
    (copy / "rows.json").unlink()
    (tmp_path / "blank.txt").write_text("\n\n \n")
    (tmp_path / "no_tokens.txt").write_text("\u200b\n", encoding="utf-8")
    for argv, message in (
        ([f"--models={tmp_path / 'stock'}", f"--text={other_text}"], "stock has no head, so it predicts no tokens: load the workdir"),
        ([f"--models={copy}"], "copy has no held-out rows: give --text=FILES"),
        ([f"--models={uninterrupted}", "--text=nowhere.txt"], "no text file matches 'nowhere.txt'"),
        ([f"--models={uninterrupted}", "--step=3"], "holds no checkpoint of step 3"),
        ([f"--models={uninterrupted}", "--gin.Masking.rate=0.3"], "are not flags of evaluate: name the models with --models"),
        ([f"--models={uninterrupted}", f"--text={tmp_path / 'blank.txt'}"], "the files hold no text. Name other files"),
        ([f"--models={uninterrupted}", f"--text={tmp_path / 'no_tokens.txt'}"], "--text has no tokens. Name files with text"),
        ([f"--models={uninterrupted}", f"--text={other_text}", "--rate=0.01"], "Masking.rate=0.01 masks less than one of the 32 tokens of a row"),
        ([f"--models={uninterrupted}", "--gin.Corpus.text_field='body'"], "With --text, it reads Corpus.text_field"),
        (["--models=nowhere"], "nowhere: no such file or folder"),
    ):
        done = call("evaluate", *argv)
        assert done.status == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
