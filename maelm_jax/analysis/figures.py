"""The figures of the report. A run has the same colour, marker and dashes in every figure."""

import collections.abc
import itertools
import pathlib
import typing

import numpy as np

from maelm_jax import plotting
from maelm_jax.analysis import ranks

KIND_LABELS = {
    "plain": "without [MASK] in the input",
    "real": "real tokens of masked input",
    "mask": "[MASK]",
    "all": "all tokens of masked input",
}
COLUMNS = 3  # panels side by side, at most
PANEL = (4.2, 3.6)  # width and height, inches
LEGEND_WIDTH = 2.2  # inches, of a legend beside the panels
RANK_LABEL = f"effective rank\n(mean of disjoint sets, {ranks.CONFIDENCE:.0%} interval)"
DIMENSION_LABEL = "dimension, largest share first"
TUNED_RANK_LABEL = f"effective rank of the last layer\n(text of the task, tau {ranks.TAU:g})"


class Line(typing.NamedTuple):
    """One line of a figure of ranks by layer."""

    label: str
    run: dict  # an entry of results["runs"]
    tokens: str  # a key of KIND_LABELS
    style: dict  # keyword arguments of Axes.plot


class Figure(typing.NamedTuple):
    """A figure of the report."""

    title: str  # the question that it answers
    file: str
    panels: int  # none: the runs have no data for it
    draw: collections.abc.Callable[[list], None]  # takes the panels


def draw(results: dict, folder: pathlib.Path) -> dict[str, str]:
    """Draws every figure that has data into `folder`; returns {title: file name}."""
    figures = [figure for figure in _figures(results) if figure.panels]
    for figure in figures:
        _save(figure, folder)
    return {figure.title: figure.file for figure in figures}


def _figures(results: dict) -> list[Figure]:
    runs = results["runs"]
    style = dict(zip((run["name"] for run in runs), plotting.line_styles(), strict=False))
    pairs = before_and_after_pairs(runs)
    pretrained = [run for run in runs if not any(run is after for _, after in pairs)]
    return [
        *_figures_by_layer(runs, pretrained, style),
        *_figures_of_training(runs, pretrained, style),
        *_figures_of_fine_tuning(runs, pairs, style),
        Figure(
            "How many dimensions hold the last layer's squared length?",
            "spectra_of_the_last_layer.png",
            2,
            lambda panels: spectra(panels, pretrained, style, results["tau"]),
        ),
    ]


def _figures_by_layer(
    runs: list[dict], pretrained: list[dict], style: dict[str, dict]
) -> list[Figure]:
    masked = [run for run in runs if any("rank" in layer["mask"] for layer in run["layers"])]

    def ranks_of(runs: list[dict], tokens: str) -> list[Line]:
        return [Line(run["name"], run, tokens, style[run["name"]]) for run in runs]

    return [
        Figure(
            "Does [MASK] in the input change the rank of real tokens?",
            "rank_by_layer_with_and_without_mask.png",
            len(pretrained),
            lambda panels: with_and_without(panels, pretrained),
        ),
        Figure(
            "Does the rank of [MASK] rise with depth?",
            "rank_of_mask_by_layer.png",
            1 if masked else 0,
            lambda panels: by_layer(panels[0], ranks_of(masked, "mask")),
        ),
        Figure(
            "Which run has the highest rank on text without [MASK]?",
            "rank_without_mask_of_every_run.png",
            1,
            lambda panels: by_layer(panels[0], ranks_of(pretrained, "plain")),
        ),
    ]


def _figures_of_training(
    runs: list[dict], pretrained: list[dict], style: dict[str, dict]
) -> list[Figure]:
    stepped = [run for run in runs if len(run.get("by_step", ())) > 1]
    evaluated = [run for run in pretrained if run["curve"]["steps"]]
    return [
        Figure(
            "How does the rank of the last layer change with training?",
            "rank_by_step.png",
            2 if stepped else 0,
            lambda panels: by_step(panels, stepped, style),
        ),
        Figure(
            "How far has each run come? Held-out loss",
            "held-out_loss.png",
            1 if evaluated else 0,
            lambda panels: losses(panels[0], evaluated, style),
        ),
    ]


def _figures_of_fine_tuning(
    runs: list[dict], pairs: list[tuple[dict, dict]], style: dict[str, dict]
) -> list[Figure]:
    tuned = [run for run in runs if run["fine_tuned"] and run["rank_curve"]["steps"]]
    return [
        Figure(
            "Does fine-tuning lower the rank?",
            "rank_before_and_after_fine-tuning.png",
            len(pairs),
            lambda panels: before_and_after(panels, pairs),
        ),
        Figure(
            "How does the rank change while fine-tuning?",
            "rank_while_fine-tuning.png",
            1 if tuned else 0,
            lambda panels: while_fine_tuning(panels[0], tuned, style),
        ),
    ]


def _save(figure: Figure, folder: pathlib.Path):
    """Draws one figure and writes it. One legend beside the panels serves all of them."""
    pyplot = plotting.pyplot()
    columns = min(figure.panels, COLUMNS)
    rows = -(-figure.panels // columns)
    size = (PANEL[0] * columns + LEGEND_WIDTH, PANEL[1] * rows)
    canvas, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for unused in axes.flat[figure.panels :]:
        unused.set_axis_off()
    panels = list(axes.flat[: figure.panels])
    figure.draw(panels)
    add_legend(canvas, panels)
    canvas.suptitle(figure.title)
    canvas.savefig(folder / figure.file, dpi=120)
    pyplot.close(canvas)


def add_legend(canvas, panels: list):
    """Adds a legend of all lines of the panels beside them, each label once."""
    handles = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    canvas.legend(
        handles.values(),
        handles.keys(),
        loc="outside right center",
        fontsize="small",
        handlelength=3.5,
    )


def by_layer(axes, lines: collections.abc.Iterable[Line]):
    """Plots rank against layer. A point is the mean over disjoint sets, its bar the interval."""
    for line in lines:
        known = [
            (layer["layer"], layer[line.tokens]["rank_by_set"])
            for layer in line.run["layers"]
            if "rank" in layer.get(line.tokens, {})
        ]
        if known:
            layers, intervals = zip(*known, strict=True)
            _plot_intervals(axes, layers, intervals, line.label, line.style)
    axes.set(xlabel="layer", ylabel=RANK_LABEL)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _plot_intervals(
    axes,
    x: collections.abc.Sequence[int],
    intervals: collections.abc.Sequence[dict],
    label: str,
    style: dict,
):
    """Plots means with their intervals. Without intervals, the label says that there is one set."""
    if any(interval["half"] is None for interval in intervals):
        label += " (one set)"
    means = [interval["mean"] for interval in intervals]
    bars = [interval["half"] or 0.0 for interval in intervals]
    axes.errorbar(x, means, yerr=bars, label=label, capsize=3, **style)


def by_step(panels: list, runs: list[dict], style: dict[str, dict]):
    """Plots the ranks of the last layer against the step, with and without [MASK]."""
    for panel, tokens in zip(panels, ("plain", "real"), strict=True):
        for run in runs:
            known = [entry for entry in run["by_step"] if "rank" in entry[tokens]]
            steps = [entry["step"] for entry in known]
            intervals = [entry[tokens]["rank_by_set"] for entry in known]
            _plot_intervals(panel, steps, intervals, run["name"], style[run["name"]])
        panel.set_title(KIND_LABELS[tokens], fontsize="medium")
        panel.set(xlabel="step", ylabel=RANK_LABEL)
    same_scale(panels)


def with_and_without(panels: list, runs: list[dict]):
    """Plots the ranks with and without [MASK], one panel a run, all with the same scale."""
    styles = dict(zip(("plain", "real", "all"), plotting.line_styles(), strict=False))
    for panel, run in zip(panels, runs, strict=True):
        names = [name for name in styles if name != "all" or run["tokens"]["mask"]]
        by_layer(panel, [Line(KIND_LABELS[name], run, name, styles[name]) for name in names])
        panel.set_title(run["name"], fontsize="medium")
    same_scale(panels)


def same_scale(panels: list):
    """Gives panels of ranks the same scale, and a label to the first of each row only."""
    top = max(panel.get_ylim()[1] for panel in panels)
    for number, panel in enumerate(panels):
        panel.set_ylim(0, top)
        if number % COLUMNS:
            panel.set_ylabel("")


def before_and_after_pairs(runs: list[dict]) -> list[tuple[dict, dict]]:
    """Pairs (source run, run fine-tuned from it) whose members are both among `runs`.

    Paths are resolved first, so a run may be named by different paths.
    """
    by_path = {pathlib.Path(run["workdir"]).resolve(): run for run in runs}
    tuned = [run for run in runs if run["fine_tuned"]]
    pairs = [(by_path.get(pathlib.Path(run["started_from"]).resolve()), run) for run in tuned]
    return [(source, run) for source, run in pairs if source]


def before_and_after(panels: list, pairs: list[tuple[dict, dict]]):
    """Plots the ranks before and after fine-tuning, one panel a pair."""
    for panel, (before, after) in zip(panels, pairs, strict=True):
        named = zip(("before", "after"), (before, after), plotting.line_styles(), strict=False)
        by_layer(panel, [Line(label, run, "plain", style) for label, run, style in named])
        panel.set_title(after["name"], fontsize="medium")
    same_scale(panels)


def while_fine_tuning(axes, runs: list[dict], style: dict[str, dict]):
    """Plots the ranks that fine-tuned runs logged, on the text of their tasks."""
    for run in runs:
        curve = run["rank_curve"]
        axes.plot(curve["steps"], curve["ranks"], label=run["name"], **style[run["name"]])
    axes.set(xlabel="step", ylabel=TUNED_RANK_LABEL)
    axes.set_ylim(bottom=0)


def spectra(panels: list, runs: list[dict], style: dict[str, dict], tau: float):
    """Plots the spectrum of the last layer without [MASK]: shares and their cumulative sum."""
    shares_panel, sum_panel = panels
    for run in runs:
        values = np.asarray(run["layers"][-1]["plain"]["spectrum"])
        shares, dimensions = values / values.sum(), np.arange(1, len(values) + 1)
        # A share of the panel's diagonal: the markers are even on both scales.
        line_style = style[run["name"]] | {"markevery": 0.12, "label": run["name"]}
        shares_panel.plot(dimensions, np.where(shares > 0, shares, np.nan), **line_style)
        sum_panel.plot(dimensions, np.cumsum(shares), **line_style)
    label = f"{tau:g} of the sum"
    sum_panel.axhline(tau, color=plotting.REFERENCE, linewidth=0.8, label=label)
    shares_panel.set(
        xscale="log", yscale="log", xlabel=DIMENSION_LABEL, ylabel="share of the squared length"
    )
    sum_panel.set(
        xlabel=DIMENSION_LABEL, ylabel="cumulative share of the squared length", ylim=(0, 1.02)
    )


def losses(axes, runs: list[dict], style: dict[str, dict]):
    """Plots the held-out losses against the tokens trained on, with the unigram cross-entropies."""
    for run in runs:
        line_style = style[run["name"]]
        axes.plot(run["curve"]["tokens"], run["curve"]["losses"], label=run["name"], **line_style)
    unigrams = {round(run["curve"]["unigram"], 2) for run in runs if run["curve"]["unigram"]}
    # Runs with different seeds may have different unigram cross-entropies.
    for unigram, dashes in zip(sorted(unigrams), itertools.cycle(plotting.DASHES), strict=False):
        axes.axhline(
            unigram,
            color=plotting.REFERENCE,
            linewidth=0.8,
            linestyle=dashes,
            label=f"unigram {unigram:g}",
        )
    axes.set(xlabel="tokens trained on", ylabel="held-out loss (nats per predicted token)")
