"""The loss curve: every line has a name, and lines differ without colour."""

import json

from matplotlib import pyplot
from testing import flat_lines

from maelm_jax import gin_files
from maelm_jax.pretraining import summary
from maelm_jax.training import metrics


def test_the_loss_curve_names_its_lines_and_units(tmp_path):
    lines = [{"step": step, "loss": 7.0 - step / 10} | ({"eval_loss": 6.5} if step % 2 else {}) for step in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figure = metrics.figure_of(str(tmp_path), 6.789, metrics.CurveLabels())
    [axes] = figure.axes
    trained, heldout, _ = axes.lines
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["training (one batch)", "held-out", "unigram 6.79"]
    assert list(trained.get_xdata()) == [1, 2, 3, 4, 5, 6] and list(heldout.get_xdata()) == [1, 3, 5]
    assert flat_lines(axes) == ["unigram 6.79"]
    assert len({(line.get_marker(), line.get_linestyle()) for line in axes.lines}) == 3
    assert "nats" in axes.get_ylabel() and tmp_path.name in axes.get_title()
    pyplot.close(figure)


def test_the_loss_curve_says_that_training_has_another_mask_rate():
    named = ("training (one batch), at mask rate 0.4", "held-out, at mask rate 0.15")
    for binding, labels in ((None, named), ("Masking.rate=0.15", metrics.CurveLabels()), ("Masking.heldout_rate=None", metrics.CurveLabels())):
        assert summary._curve_labels(gin_files.load(["tiny.gin"], [binding] if binding else [])) == labels
