"""docs/evidence.md states what the JSON files beside it hold."""

import importlib.util
import json
import pathlib
import re

import pytest
import testing

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "docs" / "evidence"
PAGE = FOLDER.with_suffix(".md").read_text()
TABLES = ("screening", "variations", "adamw", "recipe", "continued", "exact", "finetuning", "encoders", "delta", "longer", "pair", "scores", "minilm")


def load(name: str):
    """The module of a script of docs/evidence."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_that_of_the_committed_numbers(name):
    assert load("draw").page_tables.all_tables()[name] in PAGE


def test_every_figure_is_drawn_from_the_committed_numbers(tmp_path, monkeypatch):
    module = load("draw")
    monkeypatch.setattr(module, "FIGURES", tmp_path)
    module.draw_all()
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in FOLDER.glob("*.png")}
    assert all(f"(evidence/{name})" in PAGE for name in drawn)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.json")), ids=lambda file: file.name)
def test_no_file_holds_a_path_of_the_machine_that_made_it(file):
    """Paths of `config.gin` are quoted twice: "'/home/me/rows'"."""
    assert not re.search("[\"']/", file.read_text())


def test_runs_are_collected_beside_those_that_a_file_has(uninterrupted, tmp_path):
    collect, output = load("collect"), tmp_path / "runs.json"
    earlier = {"before": {"tokens": 1}, uninterrupted.name: {"tokens": 2}}
    output.write_text(json.dumps(earlier))
    collect.main([str(uninterrupted), "--add", f"--output={output}"])
    runs, evaluated = json.loads(output.read_text()), [line for line in testing.metrics(uninterrupted) if "eval_loss" in line]
    assert list(runs) == list(earlier) and runs["before"] == earlier["before"]
    assert runs[uninterrupted.name]["losses"] == [[line["step"], line["eval_loss"]] for line in evaluated] != []
    collect.main([str(uninterrupted), f"--output={output}"])
    assert list(json.loads(output.read_text())) == [uninterrupted.name]
