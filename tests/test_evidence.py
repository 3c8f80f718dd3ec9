"""docs/evidence.md states what the JSON files beside it hold."""

import importlib.util
import pathlib

import pytest

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "docs" / "evidence"
PAGE = FOLDER.with_suffix(".md").read_text()
TABLES = ("screening", "recipe", "continued", "finetuning", "encoders")


def draw():
    spec = importlib.util.spec_from_file_location("draw", FOLDER / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_that_of_the_committed_numbers(name):
    assert draw().all_tables()[name] in PAGE


def test_every_figure_is_drawn_from_the_committed_numbers(tmp_path, monkeypatch):
    module = draw()
    monkeypatch.setattr(module, "FIGURES", tmp_path)
    module.draw_all()
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in FOLDER.glob("*.png")}
    assert all(f"(evidence/{name})" in PAGE for name in drawn)
