"""The table of results and its figure: bars around their points, labels at every line, baselines, what is missing."""

import json

import numpy as np
import pytest
from matplotlib import pyplot
from testing import flat_lines

from maelm_jax.finetuning import table
from maelm_jax.training.workdir import Workdir

TITLES = {"rte": "RTE accuracy", "cola": "CoLA mcc", "mrpc": "MRPC accuracy"}


def of_task(task, median, least, highest, **more) -> dict:
    spread = {"median": median, "least": least, "highest": highest, "baseline": 52.7}
    cell = {"name": "b32", "median": 0.6, "least": 0.5, "highest": None}
    report = {"task": task, "seeds": 3, "chosen": "b32", "cells": [cell], "notes": [], "main_metric": "accuracy", "model": None}
    return report | {"columns": {TITLES[task]: spread}, **more}


REPORTS = {
    "tiny": {"rte": of_task("rte", 60, 50, 90), "cola": of_task("cola", 20, 10, 25), "mrpc": of_task("mrpc", 70, 70, 70)},
    "mlm": {"rte": of_task("rte", 70, 60, 75), "cola": of_task("cola", 10, 0, 10)},
    "random-tiny": {"rte": of_task("rte", 50, 50, 50), "cola": of_task("cola", 0, 0, 5)},
}


def test_differences_are_centred_on_their_task_and_labelled():
    figure = table.figure_of(table.values(REPORTS))
    [axes] = figure.axes
    figure.canvas.draw()
    points = np.concatenate([container.lines[0].get_xdata() for container in axes.containers])
    for place in range(2):
        near = points[np.abs(points - place) < 0.5]
        assert len(near) == 3 and near.mean() == pytest.approx(place) and len(set(near)) == 3
    assert [label.get_text() for label in axes.get_xticklabels()] == ["RTE accuracy", "CoLA mcc"]
    assert flat_lines(axes) == ["median of tiny"] and figure.legends
    inside = figure.bbox
    for part in (axes.yaxis.label, axes.title, *axes.get_xticklabels(), *figure.legends):
        box = part.get_window_extent()
        assert box.x0 >= inside.x0 and box.y0 >= inside.y0 and box.x1 <= inside.x1 and box.y1 <= inside.y1, part
    assert "MRPC" in axes.get_title(), "what is left out is named"
    pyplot.close(figure)


def test_the_markdown_has_every_value_its_metric_and_the_baseline():
    rows = [line for line in table.markdown(REPORTS).splitlines() if line.startswith("|")]
    assert rows[0].split() == "| | RTE accuracy | CoLA mcc | MRPC accuracy |".split()
    assert rows[2].split("|")[2].strip() == "60.0 (50.0-90.0)" and rows[3].split("|")[4].strip() == "-"
    assert table.MAJORITY in rows[5] and rows[5].count("52.7") == 3


def test_the_average_is_that_of_the_paper():
    spread = {"median": 50.0, "least": 50.0, "highest": 50.0, "baseline": 0.0}
    reports = {"tiny": {"x": of_task("rte", 0, 0, 0, columns=dict.fromkeys(table.AVERAGED, spread))}}
    assert table.values(reports)["tiny"]["AVG"] == {"median": 50.0} and "AVG" in table.markdown(reports)
    assert "AVG" not in table.values(REPORTS)["tiny"]
    reports["tiny"]["squad2"] = of_task("rte", 0, 0, 0, columns={"SQuAD2 F1": spread})
    assert list(table.values(reports)["tiny"])[-2:] == ["AVG", "SQuAD2 F1"]


def test_a_partial_table_says_so(tmp_path):
    said = table.markdown(REPORTS, ["rte", "cola", "mrpc", "qqp"])
    assert "Partial: no result yet of mrpc with mlm, random-tiny; qqp with tiny, mlm, random-tiny." in said
    assert "Partial" not in table.markdown({"tiny": REPORTS["tiny"]}, ["rte", "cola", "mrpc"])
    table.write(REPORTS, Workdir(tmp_path), ["rte", "cola", "mrpc"])
    assert json.loads((tmp_path / "table.json").read_text())["missing"] == {"mrpc": ["mlm", "random-tiny"]}
    assert "Partial" in (tmp_path / "table.md").read_text()


def test_a_note_names_the_encoders_that_it_holds_for():
    reports = {
        "tiny": {"rte": of_task("rte", 60, 50, 90, notes=["of both", "of tiny"])},
        "mlm": {"rte": of_task("rte", 70, 60, 75, notes=["of both"]), "cola": of_task("cola", 10, 0, 10, notes=["alone"])},
    }
    lines = table.markdown(reports).splitlines()
    assert lines[-3:] == ["- rte: of both", "- rte, tiny: of tiny", "- cola: alone"]


def test_a_table_is_read_as_it_was_written(tmp_path):
    assert table.read(Workdir(tmp_path)) == {}
    table.write(REPORTS, Workdir(tmp_path))
    assert table.read(Workdir(tmp_path)) == REPORTS and (tmp_path / "differences.png").stat().st_size > 5000
