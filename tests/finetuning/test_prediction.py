"""`--predict`: whose predictions a file holds, which files it replaces, and which files it labels."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from maelm_jax import config, finetune
from maelm_jax.finetuning import metrics, prediction, squad


@pytest.fixture
def workdir(rte_run, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(rte_run, tmp_path / "rte"))


def pairs(path: pathlib.Path, count: int) -> pathlib.Path:
    """A file of `count` examples to label."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("index\tsentence1\tsentence2\n" + "".join(f"{i}\tThe cat {i}.\tA dog.\n" for i in range(count)))
    return path


def predict(workdir, path, *more) -> int:
    return finetune.main([f"--workdir={workdir}", f"--predict={path}", *more])


def labels_in(path: pathlib.Path) -> int:
    return len(path.read_text().splitlines()) - 1


def test_predictions_of_another_file_of_the_same_name_are_kept(workdir, tmp_path):
    first, second = pairs(tmp_path / "a" / "test.tsv", 3), pairs(tmp_path / "b" / "test.tsv", 5)
    assert predict(workdir, first) == 0
    with pytest.raises(
        config.ConfigError,
        match=r"RTE.tsv holds the predictions of another file, .*/a/test.tsv. .*--output=FILE",
    ):
        predict(workdir, second)
    assert labels_in(workdir / "RTE.tsv") == 3
    assert predict(workdir, second, f"--output={tmp_path / 'new' / 'b.tsv'}") == 0
    assert labels_in(tmp_path / "new" / "b.tsv") == labels_in(tmp_path / "new" / "b_probabilities.tsv") == 5
    assert labels_in(workdir / "RTE.tsv") == 3
    record = json.loads((tmp_path / "new" / "b.tsv.source.json").read_text())
    assert record["input"] == str(second) and len(record["sha256"]) == 64
    pairs(first, 4)  # the same file, edited: its predictions are made again
    assert predict(workdir, first) == 0 and labels_in(workdir / "RTE.tsv") == 4


def test_predictions_are_kept_where_the_next_ones_fail(workdir, tmp_path):
    path = pairs(tmp_path / "test.tsv", 3)
    assert predict(workdir, path) == 0
    saved = workdir / "config.gin"
    saved.write_text(saved.read_text().replace("Model.width = 32", "Model.width = 64"))
    with pytest.raises(config.ConfigError, match="does not fit this model"):
        predict(workdir, path)
    assert labels_in(workdir / "RTE.tsv") == 3


def test_a_file_that_predict_did_not_write_is_kept(workdir, tmp_path):
    path = pairs(tmp_path / "mismatched.tsv", 3)
    for name in ("RTE.tsv", "RTE_probabilities.tsv"):
        mine = workdir / name
        mine.write_text("mine")
        with pytest.raises(config.ConfigError, match=f"{name} is there already, and --predict did not write it"):
            predict(workdir, path)
        assert mine.read_text() == "mine"
        mine.unlink()
    with pytest.raises(config.ConfigError, match="mismatched.tsv is there already"):
        predict(workdir, path, f"--output={path}")
    assert labels_in(path) == 3
    (workdir / "RTE.tsv.source.json").write_text("{}")
    with pytest.raises(config.ConfigError, match="source.json: damaged: not what was written there; name another file with --output=FILE"):
        predict(workdir, path)


def test_the_scores_of_the_dev_set_are_those_of_the_run(workdir, data_dir, tmp_path, capsys):
    """So those of another labelled file are computed in the same way."""
    dev = data_dir / "glue" / "RTE" / "dev.tsv"
    expected = {"accuracy": json.loads((workdir / "results.json").read_text())["best"]["accuracy"]}
    assert predict(workdir, dev, "--score") == 0
    scores = workdir / "predictions_dev_scores.json"
    assert json.loads(scores.read_text()) == expected and not (workdir / "RTE.tsv").exists(), "no submission is replaced"
    assert (workdir / "predictions_dev.tsv").read_text() == (workdir / "predictions.tsv").read_text()
    assert f"accuracy {expected['accuracy']:>25.4f}" in capsys.readouterr().out
    header, *rows = dev.read_text().splitlines(keepends=True)
    wrong = {"entailment": "not_entailment", "not_entailment": "entailment"}
    flipped = [row.rpartition("\t")[0] + "\t" + wrong[row.rstrip().rpartition("\t")[2]] + "\n" for row in rows]
    (tmp_path / "flipped.tsv").write_text("".join([header, *flipped]))
    assert predict(workdir, tmp_path / "flipped.tsv", "--score", f"--output={tmp_path / 'f.tsv'}") == 0
    assert json.loads((tmp_path / "f_scores.json").read_text())["accuracy"] == pytest.approx(1 - expected["accuracy"])
    assert predict(workdir, dev, f"--output={workdir / 'predictions_dev.tsv'}") == 0
    assert not scores.exists(), "they would be of other predictions"
    scores.write_text("mine")
    with pytest.raises(config.ConfigError, match="predictions_dev_scores.json is there already, and --predict did not write it"):
        predict(workdir, dev, "--score")
    assert scores.read_text() == "mine"
    with pytest.raises(config.ConfigError, match="in.tsv:1: no column 'label'"):
        predict(workdir, pairs(tmp_path / "in.tsv", 2), "--score")
    with pytest.raises(config.ConfigError, match="--score scores the predictions of --predict"):
        finetune.main([f"--workdir={workdir}", "--score"])


def test_squad_is_scored_at_the_threshold_of_the_run(data_dir, pretrained, tmp_path):
    """The threshold that suits the file best would be chosen by its right answers."""
    argv = ["--gin_file=finetune/squad2.gin", f"--init_from={pretrained}", f"--workdir={tmp_path / 'run'}", f"--gin.DATA_DIR={data_dir}"]
    quick = ["EPOCHS=1", "BATCH_SIZE=16", "MAX_LENGTH=64", "Run.rank_every=0"]
    assert finetune.main([*argv, *(f"--gin.{setting}" for setting in quick)]) == 0
    best = json.loads((tmp_path / "run" / "results.json").read_text())["best"]
    dev = data_dir / "squad" / "dev-v2.0.json"
    assert predict(tmp_path / "run", dev, "--score") == 0
    scores = json.loads((tmp_path / "run" / "predictions_dev-v2.0_scores.json").read_text())
    written = json.loads((tmp_path / "run" / "predictions_dev-v2.0.json").read_text())
    f1 = [
        max((metrics.f1(gold.text, written[question.id]) for gold in question.answers), default=float(not written[question.id]))
        for question in squad.read_file(dev)
    ]
    assert scores["f1"] == pytest.approx(100 * np.mean(f1)) and abs(scores["f1"] - best["f1"]) > 1
    assert set(scores) == {name for name in best if "best" not in name and name not in ("step", "epoch")}
    content = json.loads(dev.read_text())
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                question["answers"] = []
                question.pop("is_impossible")
    (tmp_path / "bare.json").write_text(json.dumps(content))
    assert predict(tmp_path / "run", tmp_path / "bare.json") == 0
    with pytest.raises(config.ConfigError, match="bare.json: the question 'q0' has no right answer. Give"):
        predict(tmp_path / "run", tmp_path / "bare.json", "--score")


def test_a_kill_between_record_and_predictions_is_made_good(tmp_path):
    path = pairs(tmp_path / "test.tsv", 3)
    target = prediction.Target(tmp_path / "out", "p", (".tsv", "_probabilities.tsv"))
    for _ in range(2):
        prediction.replace(target, prediction.check_target(target, str(path), "--output"))
    assert [found.name for found in (tmp_path / "out").iterdir()] == ["p.tsv.source.json"]


@pytest.mark.parametrize(
    "output,message",
    [
        ("labels.csv", r"--output=.*labels.csv: the predictions of this task are a .tsv file"),
        ("file/x.tsv", r"--output=.*: .*/file is a file"),
        ("file/deeper/x.tsv", r"--output=.*: .*/file is a file"),
        ("folder.tsv", "folder.tsv is there already"),
        ("x" * 300 + ".tsv", "cannot be written to .*File name too long"),
        ("/proc/nowhere/x.tsv", "--output=/proc/nowhere: cannot be written to"),
    ],
)
def test_an_output_that_cannot_be_written(workdir, tmp_path, output, message):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.tsv").mkdir()
    with pytest.raises(config.ConfigError, match=message) as error:
        predict(workdir, pairs(tmp_path / "in.tsv", 2), f"--output={tmp_path / output}")
    assert len(str(error.value).splitlines()) == 1 and (tmp_path / "file").read_text() == "mine"


def test_the_runs_of_a_grid_and_of_a_table_are_pointed_to(tmp_path):
    (tmp_path / "b16" / "seed1" / "checkpoints").mkdir(parents=True)
    with pytest.raises(config.ConfigError, match="this is a grid: give one of its runs, as .*b16/seed1$"):
        predict(tmp_path, pairs(tmp_path / "in.tsv", 2))
    (tmp_path / "table.json").write_text("{}")
    with pytest.raises(config.ConfigError, match="this is a table: give one of its runs, which table.json names"):
        predict(tmp_path, tmp_path / "in.tsv")


def test_output_is_predict_s_alone(pretrained):
    with pytest.raises(config.ConfigError, match="--output names the predictions of --predict"):
        finetune.main(["--gin_file=finetune/rte.gin", f"--init_from={pretrained}", "--output=x.tsv"])


@pytest.mark.parametrize("path", ["gone.tsv", "file/under.tsv", "folder", "x" * 5000], ids=lambda path: path[:20])
def test_an_input_that_is_no_file(workdir, tmp_path, path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(config.ConfigError, match="no such file"):
        predict(workdir, tmp_path / path)


@pytest.mark.parametrize(
    "results,message",
    [
        (b"", "not JSON"),
        (b"[1]", "not what was written there"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON .nested too deeply"),
        (b'{"task": 5, "cell": {}, "seed": 1}', "not what was written there"),
    ],
)
def test_a_damaged_results_file_ends_with_its_name(rte_run, data_dir, pretrained, tmp_path, results, message):
    shutil.copytree(rte_run, tmp_path / "rte")
    (tmp_path / "rte" / "results.json").write_bytes(results)
    with pytest.raises(config.ConfigError, match=f"rte/results.json: damaged: {message}.*; remove .*rte and run again"):
        predict(tmp_path / "rte", pairs(tmp_path / "in.tsv", 2))


def test_a_metric_that_is_no_number(workdir, tmp_path):
    content = json.loads((workdir / "results.json").read_text())
    content["last"]["accuracy"] = "high"
    (workdir / "results.json").write_text(json.dumps(content))
    with pytest.raises(config.ConfigError, match="results.json: damaged: not what was written there; remove"):
        predict(workdir, pairs(tmp_path / "in.tsv", 2))


@pytest.mark.parametrize(
    "name,stem",
    [
        ("dev-v2.0.json", "dev-v2.0"),
        ("test.en.tsv", "test.en"),
        ("test.tsv.xz", "test"),
        ("test.tsv.zst", "test"),
        ("new.tsv", "new"),
        ("new", "new"),
    ],
)
def test_predictions_have_the_whole_name_of_their_file(name, stem):
    assert prediction.default_stem("own", f"folder.d/{name}") == f"predictions_{stem}"


@pytest.mark.parametrize("setting", ["Finetune.tasks=sst2", "Model.layers=3", "Grid.learning_rate=1", "CustomTask.labels=('yes','no')"])
def test_settings_that_differ_from_the_run_are_refused(workdir, tmp_path, setting):
    """Other names of the classes would stand over the same columns."""
    path = pairs(tmp_path / "test.tsv", 3)
    with pytest.raises(config.ConfigError, match="uses the settings of the run in --workdir, and these differ from them: .*. Leave them out"):
        predict(workdir, path, f"--gin.{setting}")
    with pytest.raises(config.ConfigError, match="CustomTask.columns must name 1 of the columns, as in the run. It names 2: a, b"):
        predict(workdir, path, "--gin.CustomTask.columns=('a','b')")
    for free in ("Finetune.eval_batch_size=8", "CustomTask.label=kind"):
        assert predict(workdir, path, f"--gin.{free}") == 0
