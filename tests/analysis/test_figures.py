"""The figures of the report: bars around their points, labels at every line, lines that need no colour."""

import copy
import itertools
import json
import pathlib

import pytest
from matplotlib import pyplot
from testing import flat_lines

from maelm_jax import gin_files, plotting
from maelm_jax.analysis import figures

RESULTS = json.loads((gin_files.CONFIGS.parent / "docs" / "miniature" / "ranks.json").read_text())
for run in RESULTS["runs"]:  # the file is older than these entries
    run |= {"fine_tuned": run["started_from"] is not None, "rank_curve": {"steps": [], "ranks": []}}
STYLES = dict(zip((run["name"] for run in RESULTS["runs"]), plotting.line_styles(), strict=False))


@pytest.fixture
def axes():
    figure, panels = pyplot.subplots(1, 2)
    yield panels
    pyplot.close(figure)


@pytest.mark.parametrize("number", range(len(RESULTS["runs"])))
def test_error_bars_surround_their_point(axes, number):
    figures.by_layer(axes[0], [figures.Line("run", RESULTS["runs"][number], "plain", {})])
    [container] = axes[0].containers
    line, _, [bars] = container.lines
    assert len(line.get_ydata()) == len(bars.get_segments()) == 5
    for point, bar in zip(line.get_ydata(), bars.get_segments(), strict=True):
        assert bar[:, 1].mean() == pytest.approx(point) and bar[0, 1] <= point <= bar[1, 1]
    assert "mean" in axes[0].get_ylabel()


def legend(panels) -> list[str]:
    """The labels of the legend beside the panels."""
    figure = panels[0].figure
    figures.add_legend(figure, list(panels))
    return [text.get_text() for text in figure.legends.pop().get_texts()]


def test_every_reference_line_has_a_label(axes):
    figures.spectra(list(axes), RESULTS["runs"], STYLES, 0.9)
    assert flat_lines(axes[1]) == ["0.9 of the sum"] and "0.9 of the sum" in legend(axes)
    for panel in axes:
        panel.clear()
    figures.losses(axes[0], [run for run in RESULTS["runs"] if run["curve"]["steps"]], STYLES)
    unigrams = sorted({round(run["curve"]["unigram"], 2) for run in RESULTS["runs"] if run["curve"]["unigram"]})
    assert len(unigrams) > 1 and flat_lines(axes[0]) == [f"unigram {value:g}" for value in unigrams]
    assert set(flat_lines(axes[0])) < set(legend(axes))


def test_ranks_without_intervals_say_so(axes):
    few = copy.deepcopy(RESULTS["runs"][0])
    for layer in few["layers"]:
        layer["plain"]["rank_by_set"] |= {"half": None, "sets": 1}
    lines = [figures.Line(name, run, "plain", {}) for name, run in (("many", RESULTS["runs"][0]), ("few", few))]
    figures.by_layer(axes[0], lines)
    assert legend(axes) == ["many", "few (one set)"]


def test_a_legend_names_each_label_once(axes):
    figures.spectra(list(axes), RESULTS["runs"], STYLES, 0.9)
    assert legend(axes) == [*STYLES, "0.9 of the sum"]


def test_lines_differ_without_colour():
    styles = list(itertools.islice(plotting.line_styles(), len(plotting.COLOURS) * len(plotting.DASHES)))
    assert len({(style["marker"], style["linestyle"]) for style in styles}) == len(styles)
    assert len({style["color"] for style in styles}) == len(plotting.COLOURS)


def test_panels_of_ranks_have_the_same_scale():
    figure, panels = pyplot.subplots(1, len(RESULTS["runs"]))
    figures.with_and_without(list(panels), RESULTS["runs"])
    assert len({panel.get_ylim() for panel in panels}) == 1
    pyplot.close(figure)


def test_a_fine_tuned_run_is_beside_its_source_whatever_its_path_looks_like(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "alias").symlink_to("tiny")
    paths = ("alias/", "./tiny", str(tmp_path / "tiny"), "random:tiny", "other")
    source = {"workdir": "tiny", "started_from": None, "fine_tuned": False}
    tuned = [{"workdir": f"tuned{i}", "started_from": path, "fine_tuned": True} for i, path in enumerate(paths)]
    assert figures.before_and_after_pairs([source, *tuned]) == [(source, run) for run in tuned[:3]]


def test_continued_pretraining_is_not_fine_tuning():
    """A run that continued the pretraining of another stands beside it in every figure."""
    source = {"workdir": "tiny", "started_from": None, "fine_tuned": False}
    continued = {"workdir": "longer", "started_from": "tiny", "fine_tuned": False}
    tuned = {"workdir": "rte", "started_from": "longer", "fine_tuned": True}
    assert figures.before_and_after_pairs([source, continued, tuned]) == [(continued, tuned)]


def test_every_title_is_a_question_and_every_file_is_drawn(tmp_path):
    files = figures.draw(RESULTS, tmp_path)
    assert len(files) == 6 and all("?" in title for title in files)
    assert sorted(files.values()) == sorted(path.name for path in pathlib.Path(tmp_path).iterdir())
