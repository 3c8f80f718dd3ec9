"""The table of results and its figure: bars around their points, labels at every line, baselines, what is missing."""

import csv
import json

import numpy as np
import pytest
import scipy.stats
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


def test_the_axes_of_the_differences_end_where_their_columns_end():
    for count in (1, 2, 5):
        row = {f"column {number}": {"median": 1.0, "least": 0.0, "highest": 2.0} for number in range(count)}
        figure = table.figure_of({"a": row, "b": row})
        low, high = figure.axes[0].get_xlim()
        assert -1 < low < 0 and count - 1 < high < count
        pyplot.close(figure)


def seeded(task, *values, **more) -> dict:
    """The report of a task whose seeds 1, 2 and so on have these values, in percent."""
    report = of_task(task, float(np.median(values)), min(values), max(values), seeds=len(values), **more)
    by_seed = sorted(enumerate(values, start=1), key=lambda item: item[1])  # as runs are reported
    report["columns"][TITLES[task]]["by_seed"] = {str(seed): value for seed, value in by_seed}
    return report


SEEDED = {
    "tiny_a": {"rte": seeded("rte", 60.0, 62.0, 61.0), "cola": seeded("cola", 20.0, 21.0)},
    "mlm": {"rte": seeded("rte", 65.0, 66.5, 66.0), "cola": seeded("cola", 20.0, 21.0)},
}


def test_the_csv_has_the_seeds_and_a_paired_test_against_the_first_encoder(tmp_path):
    table.write(SEEDED, Workdir(tmp_path))
    with (tmp_path / "table.csv").open(newline="") as file:
        lines = {(line["encoder"], line["column"]): line for line in csv.DictReader(file)}
    line = lines["mlm", "RTE accuracy"]
    expected = scipy.stats.ttest_rel([65.0, 66.5, 66.0], [60.0, 62.0, 61.0])
    assert float(line["difference"]) == pytest.approx(np.mean([5.0, 4.5, 5.0])) and float(line["p"]) == pytest.approx(expected.pvalue)
    assert (line["n"], line["seeds"], line["pairs"], line["centre"], line["value"]) == ("3", "1 2 3", "3", "median", "66.0")
    same = lines["mlm", "CoLA mcc"]
    assert (same["centre"], same["difference"], same["p"]) == ("mean", "0.0", ""), "equal values have no p"
    assert lines["tiny_a", "RTE accuracy"]["difference"] == "" and len(lines) == 4


def test_the_markdown_has_the_differences_and_says_which_have_no_p():
    text = table.markdown(SEEDED)
    [line] = [line for line in text.splitlines() if line.startswith("| mlm") and "seeds)" in line]
    expected = scipy.stats.ttest_rel([65.0, 66.5, 66.0], [60.0, 62.0, 61.0]).pvalue
    _, _, rte, cola, _ = line.split("|")
    assert "+4.8" in rte and f"{expected:.2g}" in rte and "3 seeds" in rte
    assert "+0.0" in cola and "no p" in cola and "2 seeds" in cola
    one = {label: {"rte": seeded("rte", value)} for label, value in (("a", 1.0), ("b", 3.0))}
    assert "+2.0 (no p, 1 seed)" in table.markdown(one)


def test_only_common_seeds_are_paired():
    assert table.compare({"by_seed": {"1": 5.0, "3": 7.0}}, {"by_seed": {"1": 4.0, "2": 0.0}}) == (1.0, 1, None)
    assert table.compare({"median": 5.0}, {"by_seed": {"1": 4.0}}) is None


def test_differences_that_are_equal_but_for_rounding_have_no_p():
    assert 0.3 - 0.2 != 0.4 - 0.3
    assert table.compare({"by_seed": {"1": 0.3, "2": 0.4}}, {"by_seed": {"1": 0.2, "2": 0.3}}).p is None


def test_the_latex_table_marks_what_differs_and_escapes_names(tmp_path):
    table.write(SEEDED, Workdir(tmp_path))
    text = (tmp_path / "table.tex").read_text()
    assert text.startswith("% Medians over 2 or 3 seeds (of two, the mean)") and "toprule" in text
    first, second = (next(line for line in map(str.strip, text.splitlines()) if line.startswith(name)) for name in ("tiny", "mlm"))
    assert first.startswith("tiny\\_a") and "*" not in first and second.count("*") == 1 and "66.0" in second.split("*")[0]


def test_the_middle_of_two_seeds_is_called_a_mean():
    two = {"tiny": {"cola": seeded("cola", 20.0, 21.0, cells=[{"name": name, "median": 0.5, "least": 0.4, "highest": 0.6} for name in "ab"])}}
    text = table.markdown(two)
    assert "Means over 2 seeds" in text and "edian" not in text
    figure = table.figure_of(table.values(two), table.centre(two))
    assert "edian" not in figure.axes[0].get_ylabel() and flat_lines(figure.axes[0]) == ["mean of tiny"]
    pyplot.close(figure)
    assert "Values of one seed" in table.markdown({"tiny": {"cola": seeded("cola", 20.0)}})


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
    assert (tmp_path / "differences.pdf").read_bytes().startswith(b"%PDF")
