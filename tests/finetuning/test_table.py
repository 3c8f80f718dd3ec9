"""The table of results and its figure: bars around their points, labels at every line, what is missing."""

import json

import numpy as np
import pytest
from matplotlib import pyplot
from testing import flat_lines

from maelm_jax import config
from maelm_jax.finetuning import differences, table


def of_task(median, least, highest, **more) -> dict:
    spread = {"median": median, "least": least, "highest": highest}
    names = ("accuracy", "mcc", "spearman", "matched_accuracy", "mismatched_accuracy", "f1", "exact")
    return {
        "metrics": dict.fromkeys(names, spread),
        "seeds": 3,
        "chosen": "b32",
        "cells": [{}],
        "notes": [],
        "main_metric": "accuracy",
        **more,
    }


REPORTS = {
    "tiny": {"rte": of_task(0.6, 0.5, 0.9), "cola": of_task(0.2, 0.1, 0.25), "mrpc": of_task(0.7, 0.7, 0.7)},
    "mlm": {"rte": of_task(0.7, 0.6, 0.75), "cola": of_task(0.1, 0.0, 0.1)},
    "random-tiny": {"rte": of_task(0.5, 0.5, 0.5), "cola": of_task(0.0, 0.0, 0.05)},
}


def test_differences_are_centred_on_their_task_and_labelled(tmp_path):
    figure = differences.figure_of(table.values(REPORTS))
    [axes] = figure.axes
    figure.canvas.draw()
    points = np.concatenate([container.lines[0].get_xdata() for container in axes.containers])
    for place in range(2):
        near = points[np.abs(points - place) < 0.5]
        assert len(near) == 3 and near.mean() == pytest.approx(place) and len(set(near)) == 3
    assert [label.get_text() for label in axes.get_xticklabels()] == ["CoLA", "RTE"]
    assert flat_lines(axes) == ["median of tiny"] and figure.legends
    inside = figure.bbox
    for part in (axes.yaxis.label, axes.title, *axes.get_xticklabels(), *figure.legends):
        box = part.get_window_extent()
        assert box.x0 >= inside.x0 and box.y0 >= inside.y0 and box.x1 <= inside.x1 and box.y1 <= inside.y1, part
    assert "MRPC" in axes.get_title(), "what is left out is named"
    pyplot.close(figure)
    differences.plot(table.values(REPORTS), tmp_path)
    assert (tmp_path / "differences.png").stat().st_size > 5000


def test_scores_of_ones_own_have_a_column():
    spread = {"median": 0.5, "least": 0.4, "highest": 0.6}
    report = of_task(0, 0, 0) | {"metrics": {"spearman": spread, "pearson": spread}, "main_metric": "spearman"}
    said = table.markdown({"tiny": {"own": report}})
    assert "Own scores |" in said and "50.0" in said


def test_a_partial_table_says_so(tmp_path):
    said = table.markdown(REPORTS, ["rte", "cola", "mrpc", "qqp"])
    assert "Partial: no result yet of mrpc with mlm, random-tiny; qqp with tiny, mlm, random-tiny." in said
    assert "Partial" not in table.markdown({"tiny": REPORTS["tiny"]}, ["rte", "cola", "mrpc"])
    table.write(REPORTS, tmp_path, ["rte", "cola", "mrpc"])
    missing = json.loads((tmp_path / "table.json").read_text())["missing"]
    assert missing == {"mrpc": ["mlm", "random-tiny"]}
    assert "Partial" in (tmp_path / "table.md").read_text()


def test_a_note_names_the_encoders_that_it_holds_for():
    reports = {
        "tiny": {"rte": of_task(0.6, 0.5, 0.9, notes=["of both", "of tiny"])},
        "mlm": {"rte": of_task(0.7, 0.6, 0.75, notes=["of both"]), "cola": of_task(0.1, 0.0, 0.1, notes=["alone"])},
    }
    lines = table.markdown(reports).splitlines()
    assert lines[-3:] == ["- rte: of both", "- rte, tiny: of tiny", "- cola: alone"]


def test_a_table_is_read_as_it_was_written(tmp_path):
    assert table.read(tmp_path) == {}
    cell = {"name": "b32", "median": 0.6, "least": 0.5, "highest": None}
    model = str(tmp_path / "tiny" / "rte" / "b32" / "seed1")
    reports = {"tiny": {"rte": of_task(0.6, 0.5, 0.9, task="rte", model=model, cells=[cell])}, "mlm": {}}
    table.write(reports, tmp_path)
    assert (tmp_path / "differences.png").exists()
    assert json.loads((tmp_path / "table.json").read_text())["reports"]["tiny"]["rte"]["model"] == "tiny/rte/b32/seed1"
    assert table.read(tmp_path) == reports
    del reports["mlm"]
    table.write(reports, tmp_path)
    assert not (tmp_path / "differences.png").exists(), "a table of one encoder has no figure"


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        '{"reports": {"tiny": 3}}',
        '{"reports": {"tiny": {"rte": {}}}}',
        {"metrics": {"f1": 0.5}},
        {"cells": ["b32"]},
        {"model": 3},
    ],
    ids=str,
)
def test_a_table_file_that_is_no_table_is_refused(content, tmp_path):
    if isinstance(content, dict):
        report = of_task(0.6, 0.5, 0.9, task="rte", model=None) | {"cells": []} | content
        content = json.dumps({"reports": {"tiny": {"rte": report}}})
    (tmp_path / "table.json").write_text(content)
    with pytest.raises(config.ConfigError, match="table.json"):
        table.read(tmp_path)
