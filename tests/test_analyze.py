"""The command on workdirs with random weights, made on the spot: the report, what it refuses, runs that differ, fine-tuned runs."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import english, random_parameters

from maelm_jax import analyze, config, gin_files, plotting
from maelm_jax.data import vocabulary_training
from maelm_jax.measuring import figures
from maelm_jax.measuring import report as reports
from maelm_jax.model import maelm
from maelm_jax.training import checkpoint
from maelm_jax.training.workdir import Workdir

WIDTH = 16  # of the models here


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "topics.txt").write_text("\n\n".join(english()))
    return folder


def workdir(text: pathlib.Path, path: pathlib.Path, *more: str) -> str:
    """A run's folder as maelm_jax.train leaves it, but for the training."""
    settings = [
        "BATCH_SIZE=8",
        "SEQUENCE_LENGTH=32",
        f"TEXT_FILES={text}/*.txt",
        "Vocabulary.size=400",
        f"Corpus.rows_dir={text}/rows",
        "Corpus.processes=1",
        "Corpus.heldout_fraction=0.2",
        f"Encoder.width={WIDTH}",
        "Encoder.heads=2",
        "Encoder.feed_forward=32",
        "Encoder.layers=2",
    ]
    files = [name.removeprefix("--gin_file=") for name in more if name.startswith("--gin_file=")]
    experiment = gin_files.load(["tiny.gin", *files], [*settings, *(name for name in more if not name.startswith("--"))])
    vocabulary = vocabulary_training.vocabulary_for(experiment.vocabulary, experiment.corpus)
    path.mkdir(parents=True)
    (path / "config.gin").write_text(gin_files.render(experiment))
    vocabulary.save(path / "vocabulary")
    _, init = maelm.create(experiment.model, vocabulary.size, vocabulary.special)
    params = random_parameters(jax.eval_shape(init, jax.random.key(0)), seed=0)
    save(path, 7, params)
    lines = [{"step": 5, "loss": 6.0, "tokens_per_second": 256.0}, {"step": 7, "tokens_per_second": 512.0, "eval_loss": 5.5, "unigram": 5.9}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def save(path: pathlib.Path, step: int, params: dict):
    store = checkpoint.Checkpoints(Workdir(path))
    store.save(step, {"step": jnp.asarray(step), "params": params})
    store.close()


@pytest.fixture(scope="module")
def runs(text, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "mae": workdir(text, folder / "mae"),
        "mlm": workdir(text, folder / "mlm", "--gin_file=mlm.gin", f"Run.init_from={folder / 'mae'}/"),
    }


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("report")
    flags = [f"--runs={','.join(runs.values())}", f"--workdir={folder}", "--tokens=6000", "--sets=3"]
    assert analyze.main(flags) == 0
    return folder


def test_the_numbers(report, runs):
    found = json.loads((report / "ranks.json").read_text())
    assert (found["tau"], found["seed"]) == (0.9, 0)
    mae, mlm = found["runs"]
    assert [run["name"] for run in found["runs"]] == ["mae", "mlm"] and mae["step"] == 7
    assert 6000 <= mae["tokens"]["plain"] < 6032 and mae["tokens"]["plain"] == mlm["tokens"]["plain"]
    assert mae["tokens"]["mask"] == 0 and mlm["tokens"]["real"] + mlm["tokens"]["mask"] == mlm["tokens"]["plain"]
    assert abs(mlm["tokens"]["mask"] / mlm["tokens"]["plain"] - 0.15) < 0.01
    assert mae["tokens"]["real"] == mlm["tokens"]["real"], "the same masks"
    for run in found["runs"]:
        assert [layer["layer"] for layer in run["layers"]] == [0, 1, 2] and run["sets"] == 3
        for layer in run["layers"]:
            assert 1 <= layer["plain"]["rank"] <= WIDTH and len(layer["plain"]["spectrum"]) == WIDTH
            shares = np.cumsum(layer["plain"]["spectrum"]) / np.sum(layer["plain"]["spectrum"])
            assert layer["plain"]["rank"] == np.searchsorted(shares, 0.9) + 1
            assert ("mask_alone" in layer) == (run is mlm)
    assert mlm["started_from"].rstrip("/") == runs["mae"] and not mlm["fine_tuned"]
    assert mae["curve"] == {"tokens": [7 * 8 * 32], "losses": [5.5], "unigrams": [5.9], "words": [], "hours": [pytest.approx(6 / 3600)]}


def test_the_report(report):
    said = (report / "report.md").read_text()
    drawn = sorted(path.name for path in report.glob("*.png"))
    assert len(drawn) == 5 == len(list(report.glob("*.pdf"))) and all(f"]({name})" in said for name in drawn)
    assert not any("fine-tuning" in name for name in drawn) and any("rank_of_mask" in name for name in drawn)
    found = json.loads((report / "ranks.json").read_text())
    for run in found["runs"]:
        assert f"### {run['name']}" in said
        assert f" {run['layers'][-1]['plain']['rank']} (" in said
    for line in said.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
    assert "does not rank encoders" in said


def test_runs_get_the_names_that_the_user_gives(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figures, "draw", lambda *_: {})
    flags = [f"--runs={runs['mae']}", f"--workdir={tmp_path}", "--tokens=6000", "--sets=3"]
    assert analyze.main([*flags, "--names=MAE-LM with a name"]) == 0
    assert reports.BRACKETS in capsys.readouterr().out, "what the brackets of the printed table are"
    assert json.loads((tmp_path / "ranks.json").read_text())["runs"][0]["name"] == "MAE-LM with a name"
    with pytest.raises(config.ConfigError, match="--names"):
        analyze.main([*flags, "--names=MAE-LM,MLM"])


def test_losses_are_drawn_by_tokens_words_and_hours():
    """A run whose words were not counted is left out of that panel."""
    curve = {"tokens": [2e6, 4e6], "losses": [6.0, 5.0], "unigrams": [6.5, 6.5], "words": [1e6, 2e6], "hours": [0.5, 1.5]}
    found = [{"name": "a", "curve": curve}, {"name": "b", "curve": curve | {"words": []}}]
    canvas, panels = plotting.pyplot().subplots(1, 3)
    figures.plot_losses(list(panels), found, {"a": {}, "b": {}})
    drawn = [[(line.get_label(), list(line.get_xdata())) for line in axes.lines[:-1]] for axes in panels]
    plotting.pyplot().close(canvas)
    assert drawn == [[("a", [2, 4]), ("b", [2, 4])], [("a", [1, 2])], [("a", [0.5, 1.5]), ("b", [0.5, 1.5])]]


def test_a_report_of_other_runs_is_not_replaced(report, runs):
    before = (report / "ranks.json").read_bytes()
    with pytest.raises(config.ConfigError, match="mae.*mlm"):
        analyze.main([f"--runs={runs['mlm']}", f"--workdir={report}", "--tokens=6000"])
    assert (report / "ranks.json").read_bytes() == before


def test_what_the_tables_must_not_pass_over(report):
    results = json.loads((report / "ranks.json").read_text())
    mae, mlm = results["runs"]
    last = mlm["layers"][-1]
    (row,) = [line for line in reports.mask_table(results).splitlines() if line.startswith("| mlm ")]
    own = 1 - sum(last["real"]["spectrum"][: last["real"]["rank"]]) / sum(last["real"]["spectrum"])
    assert [f"{last['mask_alone']['share_outside']:.1%}", f"{own:.1%}"] == [cell.strip() for cell in row.split("|")][4:6] and own <= 0.1
    mae["curve"]["tokens"] = [mlm["curve"]["tokens"][-1] * 2]  # first evaluated after the tokens at which all are compared
    (row,) = [line for line in reports.runs_table(results).splitlines() if line.startswith("| mae ")]
    assert [cell.strip() for cell in row.split("|")][-3] == "-"
    assert "predicted tokens as they are" not in reports.render(results, {})
    mlm["masking"]["keep_fraction"] = 0.1
    assert "mlm: the encoder reads some of the predicted tokens as they are" in reports.render(results, {})


def test_every_checkpoint_is_measured_with_its_own_weights(text, tmp_path, monkeypatch):
    """--all_steps gives for each step the ranks that --step gives, and those of the newest as without it."""
    path = tmp_path / "mae"
    run = workdir(text, path)
    params = checkpoint.read_params(Workdir(run), 7)
    params["encoder"]["blocks"]["feed_forward_norm"]["scale"][:, 4:] = 0  # four dimensions are left
    save(path, 3, params)
    flags = [f"--runs={run}", "--tokens=6000", "--sets=3", "--tau=0.99"]
    assert analyze.main([*flags, "--all_steps", f"--workdir={tmp_path / 'all'}"]) == 0
    monkeypatch.setattr(figures, "draw", lambda *_: {})
    assert analyze.main([*flags, "--step=3", f"--workdir={tmp_path / 'three'}"]) == 0
    assert analyze.main([f"--runs={run}@3,{run}@7", "--tokens=6000", "--sets=1", f"--workdir={tmp_path / 'both'}"]) == 0
    named = [one["name"] for one in json.loads((tmp_path / "both" / "ranks.json").read_text())["runs"]]
    assert named == [f"{run}@3", f"{run}@7"]
    every, three = (json.loads((tmp_path / name / "ranks.json").read_text())["runs"][0] for name in ("all", "three"))
    assert [entry["step"] for entry in every["by_step"]] == [3, 7] and (every["step"], three["step"]) == (7, 3)
    for entry, run_then in zip(every["by_step"], (three, every), strict=True):
        for tokens in ("plain", "real"):
            for figure in ("tokens", "rank", "rank_by_set", "centred_rank"):
                assert entry[tokens][figure] == run_then["layers"][-1][tokens][figure], (entry["step"], tokens, figure)
    assert every["by_step"][0]["plain"]["rank"] < every["by_step"][1]["plain"]["rank"]
    last = every["layers"][-1]["plain"]
    assert last["rank"] == np.searchsorted(np.cumsum(last["spectrum"]) / np.sum(last["spectrum"]), 0.99) + 1, "of --tau"
    said = (tmp_path / "all" / "report.md").read_text()
    assert "](rank_by_step.png)" in said and (tmp_path / "all" / "rank_by_step.png").is_file() and "## Every checkpoint" in said
    assert "Every checkpoint" not in (tmp_path / "three" / "report.md").read_text()


def test_runs_that_differ_are_each_measured_on_their_own_text_with_the_masks_of_the_command_line(text, runs, tmp_path, capsys, monkeypatch):
    """The columns of the training are those of the run, and notes name what differs."""
    monkeypatch.setattr(figures, "draw", lambda *_: {})
    other = workdir(text, tmp_path / "other", "SEQUENCE_LENGTH=16", "Vocabulary.size=450")
    flags = [f"--runs={runs['mae']},{other}", f"--workdir={tmp_path}", "--tokens=6000", "--sets=1"]
    assert analyze.main([*flags, "--gin.Masking.heldout_rate=0.3", "--gin.Objective.name=between", "--gin.Objective.mask_fraction=1.0"]) == 0
    printed, written = capsys.readouterr().out, (tmp_path / "report.md").read_text()
    for what in ("different vocabularies", "different rows", "mae are measured with other masks"):
        assert what in printed and what in written
    results = json.loads((tmp_path / "ranks.json").read_text())
    (row,) = [line for line in reports.runs_table(results).splitlines() if line.startswith("| mae ")]
    assert [cell.strip() for cell in row.split("|")][5:8] == ["0", "0.4", "0.3"]  # delta, training rate, rate here
    mae, short = results["runs"]
    assert mae["tokens"]["mask"] / mae["tokens"]["plain"] == pytest.approx(0.3, abs=0.01), "these masks are measured"
    assert (mae["length"], short["length"]) == (32, 16)


def test_bad_input(runs, tmp_path):
    for flags, message in (
        (["--runs=nowhere"], "nowhere"),
        ([f"--runs={runs['mae']}", "--tau=0"], "--tau"),
        ([f"--runs={runs['mae']}", "--tokens=100"], "--tokens"),
        ([f"--runs={runs['mae']}", "--sets=0"], "--sets"),
        ([f"--runs={runs['mae']}", "--step=5"], "step 5"),
        (["--runs=,"], "--runs=,"),
        ([f"--runs={runs['mae']},{runs['mae']}/"], "--runs="),
        ([f"--runs={runs['mae']}", "--gin.Corpus.text_files=nowhere/*.txt"], "nowhere/*.txt"),
        ([], "--runs"),
        (["--runs=a", "--encoders=b"], "--runs"),
        (["--encoders=a"], "--text"),
        (["--runs=a", "--text=x"], "--encoders"),
        (["--encoders=a", "--text=x", "--step=3"], "--step"),
        (["--encoders=nowhere", "--text=x"], "nowhere"),
        ([f"--runs={runs['mae']}", "--workdir=/proc/version/report"], "/proc/version"),
        ([f"--runs={runs['mae']}", "--workdir=gs://bucket/report"], "gs://bucket"),
    ):
        with pytest.raises(config.ConfigError) as error:
            analyze.main([f"--workdir={tmp_path / 'out'}", *flags])
        assert message in str(error.value), flags
    assert not (tmp_path / "out").exists()
