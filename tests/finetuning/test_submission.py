"""The zip file for GLUE's server: what it holds, which models it comes from, and bad input."""

import json
import pathlib
import shutil
import zipfile

import pytest

from maelm_jax import config, finetune
from maelm_jax.finetuning import submission


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


def read(path: pathlib.Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_a_run_is_submitted_with_the_labels_that_predict_gives(rte_run, test_sets, tmp_path, capsys):
    folder = f"--gin.Finetune.data_dir={test_sets}"
    assert submit(rte_run, tmp_path / "new" / "glue.zip", folder) == 0
    printed = capsys.readouterr().out
    assert "GLUE's server also asks for CoLA.tsv" in printed and "AX.tsv" in printed
    workdir = shutil.copytree(rte_run, tmp_path / "rte")
    path = test_sets / "RTE" / "test.tsv"
    assert finetune.main([f"--workdir={workdir}", f"--predict={path}"]) == 0
    files = read(tmp_path / "new" / "glue.zip")
    assert files == {"RTE.tsv": (workdir / "RTE.tsv").read_text()}
    header, *lines = files["RTE.tsv"].splitlines()
    assert header == "index\tprediction" and [line.split("\t")[0] for line in lines] == ["0", "1", "2"]
    with pytest.raises(config.ConfigError, match="glue.zip exists. Name another file, or remove"):
        submit(rte_run, tmp_path / "new" / "glue.zip", folder)


def report_of(task: str, model) -> dict:
    return {"task": task, "main_metric": "f1", "chosen": "c", "seeds": 1, "metrics": {}, "cells": [], "notes": [], "model": model}


def write_table(folder: pathlib.Path, **models_of_encoders) -> pathlib.Path:
    """A table with the models {encoder: {task: workdir or None}}."""
    reports = {label: {task: report_of(task, model) for task, model in models.items()} for label, models in models_of_encoders.items()}
    (folder / "table.json").write_text(json.dumps({"reports": reports}))
    return folder


def test_a_table_gives_the_chosen_model_of_each_task_of_glue(tmp_path):
    tiny = {"rte": "tiny/rte/a/seed1", "squad2": "tiny/squad2/b/seed1", "cola": "tiny/cola/c/seed2", "mrpc": None}
    write_table(tmp_path, tiny=tiny)
    assert submission.models_of(str(tmp_path), None) == [str(tmp_path / tiny["rte"]), str(tmp_path / tiny["cola"])]
    write_table(tmp_path, tiny={"rte": "tiny/rte/a/seed1"}, mlm={"rte": "mlm/rte/b/seed1"})
    assert submission.models_of(str(tmp_path), "mlm") == [str(tmp_path / "mlm/rte/b/seed1")]


@pytest.mark.parametrize("stored", ["tiny/rte/a/seed1", "runs/table/tiny/rte/a/seed1", "/runs/tiny/rte/a/seed1"])
def test_the_models_of_a_table_are_those_in_its_folder(stored, tmp_path, monkeypatch):
    """Wherever the table was copied, and wherever the command runs. Earlier versions stored the last two paths."""
    table, original = tmp_path / "copy", tmp_path / "original"
    (original / stored.lstrip("/")).mkdir(parents=True)
    table.mkdir()
    write_table(table, tiny={"rte": stored})
    monkeypatch.chdir(original)
    assert submission.models_of("../copy", None) == ["../copy/tiny/rte/a/seed1"]


@pytest.mark.parametrize(
    "encoders,init_from,message",
    [
        ({"tiny": {"rte": "a"}, "mlm": {"rte": "b"}}, None, "has the encoders tiny, mlm. Name one of them"),
        ({"tiny": {"rte": "a"}}, "mlm", "has the encoders tiny. Name one of them"),
        ({"tiny": {"own": "a"}}, None, "has no model of a task of GLUE"),
        ({"tiny": {"rte": None}}, None, "has no model of a task of GLUE"),
        ({"tiny": {"rte": 3}}, None, "table.json: damaged: not what was written there; remove"),
    ],
)
def test_a_table_without_a_clear_model_is_refused(encoders, init_from, message, tmp_path):
    write_table(tmp_path, **encoders)
    with pytest.raises(config.ConfigError, match=message):
        submission.models_of(str(tmp_path), init_from)


@pytest.mark.parametrize(
    "output,message",
    [
        ("glue.tar", "name a file that ends in .zip"),
        (".zip", "name a file that ends in .zip"),
        ("file/x.zip", "is a file; give a folder"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_first(output, message, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(config.ConfigError, match=message):
        submit(tmp_path / "nowhere", tmp_path / output)


def test_an_encoder_of_a_single_run_is_not_named(rte_run):
    with pytest.raises(config.ConfigError, match="holds one run and no table. Leave --init_from out"):
        submission.models_of(str(rte_run), "nonsense")


def test_no_run_and_no_test_file_end_with_what_to_give(rte_run, tmp_path):
    with pytest.raises(config.ConfigError, match="--submission needs --workdir=RUN of a finished"):
        submit(tmp_path, tmp_path / "glue.zip")
    with pytest.raises(config.ConfigError, match="no test file of GLUE .* was found. Give its fold"):
        submit(rte_run, tmp_path / "glue.zip")
    assert list(tmp_path.iterdir()) == []
