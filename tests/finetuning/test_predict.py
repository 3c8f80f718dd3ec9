"""`--predict` and `--submission`: which files are replaced, which models are taken, and scores."""

import json
import pathlib
import shutil
import zipfile

import numpy as np
import pytest

from maelm_jax import config, finetune
from maelm_jax.finetuning import labelled_data, metrics, predict
from maelm_jax.finetuning.question import read_questions
from maelm_jax.training.workdir import Workdir


@pytest.fixture
def workdir(one_device, rte_run, tmp_path) -> pathlib.Path:
    return shutil.copytree(rte_run, tmp_path / "rte")


def pairs(path: pathlib.Path, count: int) -> pathlib.Path:
    """A file of `count` examples to label."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("index\tsentence1\tsentence2\n" + "".join(f"{i}\tThe cat {i}.\tA dog.\n" for i in range(count)))
    return path


def label(workdir, path, *more) -> int:
    return finetune.main([f"--workdir={workdir}", f"--predict={path}", *more])


def labels_in(path: pathlib.Path) -> int:
    return len(path.read_text().splitlines()) - 1


def column(path: pathlib.Path, name: str) -> list[str]:
    """The cells of a column of a tab-separated file."""
    header, *rows = (line.split("\t") for line in path.read_text().splitlines())
    return [row[header.index(name)] for row in rows]


def test_predictions_are_made_again_or_written_elsewhere(workdir, tmp_path):
    path = pairs(tmp_path / "test.tsv", 3)
    assert label(workdir, path) == 0 and labels_in(workdir / "predictions_test.tsv") == 3
    assert label(workdir, pairs(path, 4)) == 0 and labels_in(workdir / "predictions_test.tsv") == 4
    assert label(workdir, path, f"--output={tmp_path / 'new' / 'b.tsv'}") == 0
    assert labels_in(tmp_path / "new" / "b.tsv") == 4


def test_predictions_are_kept_where_the_next_ones_fail(workdir, tmp_path):
    path = pairs(tmp_path / "test.tsv", 3)
    assert label(workdir, path) == 0
    shutil.rmtree(next((workdir / "checkpoints").iterdir()))
    with pytest.raises(config.ConfigError, match=str(workdir)):
        label(workdir, path)
    assert labels_in(workdir / "predictions_test.tsv") == 3


def test_the_file_to_predict_is_kept(workdir, tmp_path):
    path = pairs(tmp_path / "in.tsv", 3)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(config.ConfigError, match="in.tsv"):
        label(workdir, path, f"--output={tmp_path / 'link' / 'in.tsv'}")
    assert labels_in(path) == 3


def test_the_scores_of_the_dev_set_are_those_of_the_run(workdir, data_dir, tmp_path, capsys):
    """So those of another labelled file are computed in the same way."""
    dev = data_dir / "glue" / "RTE" / "dev.tsv"
    expected = {"accuracy": json.loads((workdir / "results.json").read_text())["best"]["accuracy"]}
    assert label(workdir, dev, "--score") == 0
    scores = workdir / "predictions_dev_scores.json"
    written = json.loads(scores.read_text())
    assert written["accuracy"] == expected["accuracy"] and sum(map(sum, written["confusion"])) == 32
    assert written["classes"] == json.loads((workdir / "results.json").read_text())["classes"]["classes"]
    assert column(workdir / "predictions_dev.tsv", "prediction") == column(workdir / "predictions.tsv", "prediction")
    assert f"accuracy {expected['accuracy']:>25.4f}" in capsys.readouterr().out
    header, *rows = dev.read_text().splitlines(keepends=True)
    wrong = {"entailment": "not_entailment", "not_entailment": "entailment"}
    flipped = [row.rpartition("\t")[0] + "\t" + wrong[row.rstrip().rpartition("\t")[2]] + "\n" for row in rows]
    (tmp_path / "flipped.tsv").write_text("".join([header, *flipped]))
    assert label(workdir, tmp_path / "flipped.tsv", "--score", f"--output={tmp_path / 'f.tsv'}") == 0
    assert json.loads((tmp_path / "f_scores.json").read_text())["accuracy"] == pytest.approx(1 - expected["accuracy"])
    assert label(workdir, dev) == 0 and not scores.exists(), "they would be of other predictions"
    with pytest.raises(config.ConfigError, match="in.tsv:1.*'label'"):
        label(workdir, pairs(tmp_path / "in.tsv", 2), "--score")


def test_squad_is_scored_at_the_threshold_of_the_run(one_device, arguments, data_dir, pretrained, tmp_path):
    """The threshold that suits the file best would be chosen by its right answers."""
    assert finetune.main(arguments(pretrained, tmp_path / "run", "--gin_file=finetune/squad2.gin", "--gin.EPOCHS=1")) == 0
    best = json.loads((tmp_path / "run" / "results.json").read_text())["best"]
    dev = data_dir / "squad" / "dev-v2.0.json"
    assert label(tmp_path / "run", dev, "--score") == 0
    scores = json.loads((tmp_path / "run" / "predictions_dev-v2.0_scores.json").read_text())
    written = json.loads((tmp_path / "run" / "predictions_dev-v2.0.json").read_text())
    f1 = [
        max((metrics.f1(gold.text, written[question.id]) for gold in question.answers), default=float(not written[question.id]))
        for question in read_questions(dev)
    ]
    assert scores["f1"] == pytest.approx(100 * np.mean(f1)) and abs(scores["f1"] - best["f1"]) > 1
    assert set(scores) == {name for name in best if "best" not in name and name not in ("step", "epoch")}
    content = json.loads(dev.read_text().replace('"is_impossible"', '"other"'))
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                question["answers"] = []
    (tmp_path / "bare.json").write_text(json.dumps(content))
    assert label(tmp_path / "run", tmp_path / "bare.json") == 0
    with pytest.raises(config.ConfigError, match="bare.json.*'q0'"):
        label(tmp_path / "run", tmp_path / "bare.json", "--score")


def test_an_input_or_output_that_is_no_file(workdir, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.tsv").mkdir()
    path = pairs(tmp_path / "in.tsv", 2)
    for output in ("labels.xlsx", ".tsv", "folder.tsv", "file/x.tsv"):
        with pytest.raises((config.ConfigError, OSError), match=str(tmp_path)):
            label(workdir, path, f"--output={tmp_path / output}")
    for path in ("gone.tsv", "folder.tsv"):
        with pytest.raises((config.ConfigError, OSError), match=path):
            label(workdir, tmp_path / path)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_damaged_results_file_ends_with_its_name(workdir, tmp_path):
    for content in (b"", b"{}", b"\xff"):
        (workdir / "results.json").write_bytes(content)
        with pytest.raises(config.ConfigError, match="results.json"):
            label(workdir, pairs(tmp_path / "in.tsv", 2))


def test_settings_that_differ_from_the_run_are_refused(workdir, tmp_path):
    """Other names of the classes would stand over the same columns."""
    path = pairs(tmp_path / "test.tsv", 3)
    for setting in ("Finetune.tasks=sst2", "Grid.learning_rate=1", "CustomTask.labels=('yes','no')", "CustomTask.columns=('a','b')"):
        with pytest.raises(config.ConfigError, match=f"{setting.partition('=')[0]}.* -> "):
            label(workdir, path, f"--gin.{setting}")
    assert label(workdir, path, "--gin.CustomTask.label=kind") == 0


@pytest.mark.parametrize("ending", [".tsv", ".csv", ".jsonl", ".parquet"])
def test_predictions_have_the_columns_and_the_format_of_the_input(ending, workdir, tmp_path):
    pytest.importorskip("pyarrow")
    rows = [{"key": f"k{i}", "sentence1": f'A "cat", {i}.', "note": "", "sentence2": "A dog."} for i in range(3)]
    path = tmp_path / f"in{ending}"
    labelled_data.write(path, rows)
    assert label(workdir, path) == 0
    written = [row.values for row in labelled_data.read(workdir / f"predictions_in{ending}", ["prediction"])]
    assert [list(row) for row in written] == [[*rows[0], "prediction", "probability"]] * 3
    assert [{name: row[name] for name in rows[0]} for row in written] == rows
    assert {row["prediction"] for row in written} <= {"entailment", "not_entailment"}
    assert all(0.5 <= float(row["probability"]) <= 1 for row in written)
    assert label(workdir, path, "--probabilities", f"--output={tmp_path / 'all.jsonl'}") == 0
    for row, alike in zip(labelled_data.read(tmp_path / "all.jsonl", []), written, strict=True):
        by_class = {name: row.values[f"probability_{name}"] for name in ("entailment", "not_entailment")}
        assert sum(by_class.values()) == pytest.approx(1) and by_class[alike["prediction"]] == max(by_class.values())
        assert float(alike["probability"]) == pytest.approx(row.values["probability"], abs=1e-6)


def test_columns_of_parquet_keep_their_types_and_dates_are_plain_text(workdir, tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    types = {
        "key": pa.array([1, 2], pa.int32()),
        "sentence1": ["A cat.", "A dog."],
        "sentence2": ["A bird.", "A fish."],
        "at": pa.array([1_000, None], pa.timestamp("ns")),
        "day": pa.array([0, 1], pa.date32()),
        "none": pa.array([None, None], pa.string()),
    }
    given = pa.table(types)
    parquet.write_table(given, tmp_path / "in.parquet")
    assert label(workdir, tmp_path / "in.parquet") == 0
    written = parquet.read_table(workdir / "predictions_in.parquet")
    assert written.select(given.column_names).equals(given)
    assert written.column_names == [*types, "prediction", "probability"]
    assert label(workdir, tmp_path / "in.parquet", f"--output={tmp_path / 'out.csv'}") == 0
    assert [row.values["day"] for row in labelled_data.read(tmp_path / "out.csv", ["day"])] == ["1970-01-01", "1970-01-02"]


def test_columns_that_predictions_would_get_are_refused(workdir, tmp_path):
    path = tmp_path / "in.csv"
    for header in ("sentence1,sentence2,prediction", "sentence1,sentence2,note,note"):
        path.write_text(f"{header}\n" + ",".join("abcd"[: header.count(",") + 1]) + "\n")
        with pytest.raises(config.ConfigError, match=r"in\.csv.*'(prediction|note)'"):
            label(workdir, path)
    assert not (workdir / "predictions_in.csv").exists()


def test_answers_as_a_table_have_probabilities(one_device, arguments, data_dir, pretrained, tmp_path):
    assert finetune.main(arguments(pretrained, tmp_path / "run", "--gin_file=finetune/squad2.gin", "--gin.EPOCHS=1")) == 0
    dev = data_dir / "squad" / "dev-v2.0.json"
    assert label(tmp_path / "run", dev) == 0 and label(tmp_path / "run", dev, f"--output={tmp_path / 'a.csv'}") == 0
    texts = json.loads((tmp_path / "run" / "predictions_dev-v2.0.json").read_text())
    rows = [row.values for row in labelled_data.read(tmp_path / "a.csv", ["id", "question", "context"])]
    assert {row["id"]: row["prediction"] for row in rows} == texts
    assert all(0 < float(row["probability"]) < 1 for row in rows)


# --submission


@pytest.fixture(scope="module")
def test_sets(data_dir, tmp_path_factory) -> pathlib.Path:
    """A folder with RTE's test file, of three pairs."""
    folder = tmp_path_factory.mktemp("tests") / "data"
    shutil.copytree(data_dir / "glue" / "RTE", folder / "RTE")
    rows = (data_dir / "glue" / "RTE" / "dev.tsv").read_text().splitlines()[:4]
    cells = [row.split("\t")[:3] for row in rows]
    (folder / "RTE" / "test.tsv").write_text("".join("\t".join(row) + "\n" for row in cells))
    return folder


def submit(workdir, output, *more) -> int:
    return finetune.main([f"--workdir={workdir}", f"--submission={output}", *more])


def test_a_run_is_submitted_with_the_labels_that_predict_gives(workdir, test_sets, tmp_path, capsys):
    folder = f"--gin.Finetune.data_dir={test_sets}"
    assert submit(workdir, tmp_path / "new" / "glue.zip", folder) == 0
    printed = capsys.readouterr().out
    assert "CoLA.tsv" in printed and "AX.tsv" in printed
    assert label(workdir, test_sets / "RTE" / "test.tsv") == 0
    with zipfile.ZipFile(tmp_path / "new" / "glue.zip") as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    header, *lines = files["RTE.tsv"].splitlines()
    assert files.keys() == {"RTE.tsv"} and header == "index\tprediction"
    labels = column(workdir / "predictions_test.tsv", "prediction")
    assert lines == [f"{number}\t{label}" for number, label in enumerate(labels)]
    for name in ("new/glue.zip", "glue.tar", ".zip/x"):
        with pytest.raises(config.ConfigError, match=".zip"):
            submit(workdir, tmp_path / name, folder)


def write_table(folder: pathlib.Path, **models_of_encoders) -> pathlib.Path:
    """A table with the models {encoder: {task: workdir or None}}."""
    reports = {name: {task: {"model": model} for task, model in models.items()} for name, models in models_of_encoders.items()}
    (folder / "table.json").write_text(json.dumps({"reports": reports}))
    return folder


def test_a_table_gives_the_chosen_model_of_each_task_of_glue(tmp_path):
    tiny = {"rte": "tiny/rte/a/seed1", "squad2": "tiny/squad2/b/seed1", "cola": "tiny/cola/c/seed2", "mrpc": None}
    write_table(tmp_path, tiny=tiny)
    assert predict.find_models(Workdir(tmp_path), None) == [Workdir(tmp_path / tiny["rte"]), Workdir(tmp_path / tiny["cola"])]
    write_table(tmp_path, tiny={"mrpc": None, "rte": "tiny/rte/a/seed1"}, mlm={"rte": "mlm/rte/b/seed1"})
    assert predict.find_models(Workdir(tmp_path), "mlm") == [Workdir(tmp_path / "mlm/rte/b/seed1")]
    with pytest.raises(config.ConfigError, match="tiny/rte/a/seed1"):
        label(tmp_path, pairs(tmp_path / "in.tsv", 2))


@pytest.mark.parametrize(
    "encoders,init_from,message",
    [
        ({"tiny": {"rte": "a"}, "mlm": {"rte": "b"}}, None, "tiny, mlm"),
        ({"tiny": {"rte": "a"}}, "mlm", "tiny"),
        ({"tiny": {"own": "a"}}, None, "--submission"),
        ({"tiny": {"rte": None}}, None, "--submission"),
    ],
)
def test_a_table_without_a_clear_model_is_refused(encoders, init_from, message, tmp_path):
    write_table(tmp_path, **encoders)
    with pytest.raises(config.ConfigError, match=message):
        predict.find_models(Workdir(tmp_path), init_from)


def test_no_run_and_no_test_file_end_with_what_to_give(rte_run, tmp_path):
    with pytest.raises(config.ConfigError, match=tmp_path.name):
        submit(tmp_path, tmp_path / "glue.zip")
    with pytest.raises(config.ConfigError):
        submit(rte_run, tmp_path / "glue.zip")
    assert list(tmp_path.iterdir()) == []
