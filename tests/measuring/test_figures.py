"""The figures of the report: bars around their points, labels at every line, lines that need no colour."""

import itertools

import numpy as np
import pytest
from matplotlib import pyplot

from maelm_jax import plotting
from maelm_jax.encoders import results
from maelm_jax.measuring import figures


def measured(name: str, seed: int) -> dict:
    """An entry of ranks.json with ranks at random."""
    rng = np.random.default_rng(seed)

    def tokens():
        by_set = rng.integers(2, 9, 3).tolist()
        return {"tokens": 900, "rank": max(by_set), "rank_by_set": by_set, "spectrum": np.sort(rng.random(16))[::-1].tolist()}

    return {
        "name": name,
        "workdir": f"runs/{name}",
        "step": 9,
        "started_from": None,
        "started_step": None,
        "fine_tuned": False,
        "tokens": {"mask": 900},
        "layers": [{"layer": n} | {kind: tokens() for kind in figures.KIND_LABELS} for n in range(3)],
        "by_step": [{"step": step} | {kind: tokens() for kind in figures.KIND_LABELS} for step in (5, 9)],
        "curve": {"tokens": [10**6, 2 * 10**6], "losses": [5.0, 4.0 + seed], "unigrams": [6.0, 6.0 + seed], "words": [], "hours": []},
        "rank_curve": {"steps": [1, 2], "ranks": [5, 4]},
    }


TUNED = {"started_from": "./runs/../runs/mae", "started_step": 9, "fine_tuned": True}
RUNS = [measured("mae", 0), measured("mlm", 1), measured("rte", 2) | TUNED]


@pytest.fixture
def axes():
    figure, panels = pyplot.subplots(1, 2)
    yield panels
    pyplot.close(figure)


def test_error_bars_surround_their_point(axes):
    figures.plot_by_layer(axes[0], RUNS[0], "plain", "run", {})
    [container] = axes[0].containers
    line, _, [bars] = container.lines
    assert len(line.get_ydata()) == len(bars.get_segments()) == 3
    for layer, point, bar in zip(RUNS[0]["layers"], line.get_ydata(), bars.get_segments(), strict=True):
        by_set = layer["plain"]["rank_by_set"]
        assert bar[:, 1].tolist() == pytest.approx([min(by_set), max(by_set)]) and point == pytest.approx(np.mean(by_set))


def test_no_run_is_cut_off_by_the_scale_of_the_first(axes):
    low, high = (measured(name, 0) for name in ("low", "high"))
    for run, factor in ((low, 1), (high, 10)):
        for layer in run["layers"]:
            layer["plain"]["rank_by_set"] = [factor * rank for rank in layer["plain"]["rank_by_set"]]
    figures.plot_runs_by_layer(axes[0], [low, high], "plain", {"low": {}, "high": {}})
    bottom, top = axes[0].get_ylim()
    assert bottom == 0 and top > max(max(layer["plain"]["rank_by_set"]) for layer in high["layers"])


def test_lines_differ_without_colour():
    styles = list(itertools.islice(plotting.line_styles(), len(plotting.COLOURS) * len(plotting.DASHES)))
    assert len({(style["marker"], style["linestyle"]) for style in styles}) == len(styles)
    assert len({style["color"] for style in styles}) == len(plotting.COLOURS)


def test_panels_of_ranks_have_the_same_scale(axes):
    figures.plot_with_and_without(list(axes), RUNS[:2])
    assert len({panel.get_ylim() for panel in axes}) == 1


def test_a_fine_tuned_run_is_beside_its_source_whatever_its_path_looks_like():
    continued = RUNS[1] | {"started_from": "runs/mae"}
    earlier = RUNS[2] | {"started_step": 5}
    assert figures.find_pairs([RUNS[0], continued, RUNS[2], earlier]) == [(RUNS[0], RUNS[2])]
    before, of_step = RUNS[0] | {"step": 5}, RUNS[2] | {"started_from": "runs/mae@5", "started_step": 5}
    assert figures.find_pairs([before, *RUNS, of_step]) == [(RUNS[0], RUNS[2]), (before, of_step)]


def test_a_dollar_in_a_name_is_a_dollar(tmp_path):
    classes = [results.ClassScore(name, 1, 1.0, 1.0, 1.0) for name in ("$", "$$", "$10-$20")]
    results.ClassReport(classes, [[1, 0, 0], [0, 1, 0], [0, 0, 1]]).draw(tmp_path / "a.png", "prices")
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_every_title_is_a_question_and_every_file_is_drawn(tmp_path):
    files = figures.draw({"runs": RUNS, "tau": 0.9}, tmp_path)
    assert len(files) == 8 and all("?" in title for title in files)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted([*files.values(), *(name.replace(".png", ".pdf") for name in files.values())])
