"""What the figures and tables show: bars around their points, labels at every line, what is missing."""

import json

import numpy as np
import pytest
from matplotlib import pyplot

from maelm_jax import config, gin_files
from maelm_jax.analysis import report
from maelm_jax.encoders import card
from maelm_jax.finetuning import table, task_data

RESULTS = json.loads((gin_files.CONFIGS.parent / "docs" / "miniature" / "ranks.json").read_text())


@pytest.fixture
def axes():
    figure, found = pyplot.subplots(1, 2)
    yield found
    pyplot.close(figure)


def of_task(median, least, highest, **more) -> dict:
    spread = {"median": median, "least": least, "highest": highest}
    names = ("accuracy", "mcc", "spearman", "matched_accuracy", "mismatched_accuracy", "f1", "exact")
    return {
        "metrics": dict.fromkeys(names, spread), "seeds": 3, "chosen": "b32", "cells": [{}], "notes": [], "main_metric": "accuracy", **more,
    }  # fmt: skip


REPORTS = {
    "tiny": {"rte": of_task(0.6, 0.5, 0.9), "cola": of_task(0.2, 0.1, 0.25), "mrpc": of_task(0.7, 0.7, 0.7)},
    "mlm": {"rte": of_task(0.7, 0.6, 0.75), "cola": of_task(0.1, 0.0, 0.1)},
    "random-tiny": {"rte": of_task(0.5, 0.5, 0.5), "cola": of_task(0.0, 0.0, 0.05)},
}


@pytest.mark.parametrize("number", range(len(RESULTS["runs"])))
def test_error_bars_surround_their_point(axes, number):
    report.by_layer(axes[0], [("run", RESULTS["runs"][number], "plain")])
    [container] = axes[0].containers
    line, _, [bars] = container.lines
    assert len(line.get_ydata()) == len(bars.get_segments()) == 5
    for point, bar in zip(line.get_ydata(), bars.get_segments(), strict=True):
        assert bar[:, 1].mean() == pytest.approx(point) and bar[0, 1] <= point <= bar[1, 1]
    assert "mean" in axes[0].get_ylabel()


def legend(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def flat_lines(axes) -> list[str]:
    """The labels of the lines that cross the whole figure at one height."""
    return [line.get_label() for line in axes.lines if list(line.get_xdata()) == [0, 1] and len(set(line.get_ydata())) == 1]


def test_every_reference_line_has_a_label(axes):
    report.spectra(list(axes), RESULTS["runs"], 0.9)
    assert flat_lines(axes[1]) == ["0.9 of the sum"] and "0.9 of the sum" in legend(axes[1])
    for panel in axes:
        panel.clear()
    report.losses(axes[0], RESULTS["runs"])
    unigrams = sorted({round(run["curve"]["unigram"], 2) for run in RESULTS["runs"] if run["curve"]["unigram"]})
    assert len(unigrams) > 1 and flat_lines(axes[0]) == [f"unigram {value:g}" for value in unigrams]
    assert set(flat_lines(axes[0])) < set(legend(axes[0]))


def test_differences_are_centred_on_their_task_and_labelled(tmp_path):
    figure = table.figure_of(REPORTS)
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
    assert table.plot(REPORTS, tmp_path).stat().st_size > 5000


def test_a_partial_table_says_so(tmp_path):
    said = table.markdown(REPORTS, ["rte", "cola", "mrpc", "qqp"])
    assert "Partial: no result yet of mrpc with mlm, random-tiny; qqp with tiny, mlm, random-tiny." in said
    assert "Partial" not in table.markdown({"tiny": REPORTS["tiny"]}, ["rte", "cola", "mrpc"])
    table.write(REPORTS, tmp_path, ["rte", "cola", "mrpc"])
    missing = json.loads((tmp_path / "table.json").read_text())["missing"]
    assert missing == {"mrpc": ["mlm", "random-tiny"]}
    assert "Partial" in (tmp_path / "table.md").read_text()


def test_own_names_the_label_of_its_f1(tmp_path, monkeypatch):
    (tmp_path / "own.tsv").write_text("sentence\tlabel\na\tno\nb\tyes\n")
    settings = config.Finetune(tasks="own", train_file=str(tmp_path / "own.tsv"), dev_file=str(tmp_path / "own.tsv"), labels=("no", "yes"))

    class Letters:
        bos, eos = 0, 2

        def encode_batch(self, texts):
            return [[ord(character) for character in text] for text in texts]

    found = task_data.load("own", settings, config.Corpus(), Letters(), 16)
    assert "f1 is that of the label 'yes'" in found.notes


@pytest.mark.parametrize("form,said,unsaid", [
    ("huggingface", "Read back with transformers", "PyTorch's torch.load"), ("pytorch", "Read back with maelm.py", "transformers"),
    ("reference", "torch.load reads the same numbers", "compared with the JAX model"),
])  # fmt: skip
def test_a_card_says_read_back_of_what_was(form, said, unsaid):
    reports = [{"of": "hidden states", "largest_difference": 1e-7, "largest_value": 2.0}]
    text = card.verification(form, reports)
    assert said in text and unsaid not in text
    assert card.verification(form, None).startswith("Unverified") and "ead back" not in card.verification(form, None)
