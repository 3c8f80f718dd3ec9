"""docs/evidence.md states what the JSON files beside it hold."""

import importlib.util
import pathlib
import re

import pytest

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "docs" / "evidence"
PAGE = FOLDER.with_suffix(".md").read_text()
TABLES = ("screening", "variations", "recipe", "continued", "exact", "finetuning", "encoders", "delta", "longer", "minilm")


def draw():
    spec = importlib.util.spec_from_file_location("draw", FOLDER / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_that_of_the_committed_numbers(name):
    assert draw().page_tables.all_tables()[name] in PAGE


def test_every_figure_is_drawn_from_the_committed_numbers(tmp_path, monkeypatch):
    module = draw()
    monkeypatch.setattr(module, "FIGURES", tmp_path)
    module.draw_all()
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in FOLDER.glob("*.png")}
    assert all(f"(evidence/{name})" in PAGE for name in drawn)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.json")), ids=lambda file: file.name)
def test_no_file_holds_a_path_of_the_machine_that_made_it(file):
    """Paths of `config.gin` are quoted twice: "'/home/me/rows'"."""
    assert not re.search("[\"']/", file.read_text())
