"""The figures of the report. A run has the same colour, marker and dashes in every figure."""

import collections.abc
import pathlib
import typing

import numpy as np

from maelm_jax import plotting
from maelm_jax.analysis import ranks
from maelm_jax.training import checkpoint

KIND_LABELS = {
    "plain": "without [MASK] in the input",
    "real": "real tokens of masked input",
    "mask": "[MASK]",
    "all": "all tokens of masked input",
}
COLUMNS = 3  # panels side by side, at most
PANEL = (4.2, 3.6)  # width and height, inches
LEGEND_WIDTH = 2.2  # inches, of a legend beside the panels
RANK_LABEL = "effective rank\n(mean and range of disjoint sets)"
DIMENSION_LABEL = "dimension, largest share first"
TUNED_RANK_LABEL = f"effective rank of the last layer\n(text of the task, tau {ranks.TAU:g})"

# What the held-out losses are drawn against: {name in a curve: (label, size of its unit)}.
LOSS_AXES = {
    "tokens": ("million tokens", 1e6),
    "words": ("million words", 1e6),
    "hours": ("hours of training", 1),
}

Styles = dict[str, dict]  # {name of a run: keyword arguments of Axes.plot}
Runs = list[dict]  # entries of results["runs"]


class Figure(typing.NamedTuple):
    """A figure of the report."""

    title: str  # the question that it answers
    file: str
    panels: int  # none: the runs have no data for it
    draw: collections.abc.Callable[[list], None]  # takes the panels


def draw(results: dict, folder: pathlib.Path) -> dict[str, str]:
    """Draws every figure that has data into `folder`; returns {title: file name}."""
    runs = results["runs"]
    styles = dict(zip((run["name"] for run in runs), plotting.line_styles(), strict=False))
    pairs = find_pairs(runs)
    pretrained = [run for run in runs if not any(run is after for _, after in pairs)]
    masked = [run for run in runs if any("rank" in layer["mask"] for layer in run["layers"])]
    stepped = [run for run in runs if len(run.get("by_step", ())) > 1]
    evaluated = [run for run in pretrained if run["curve"]["tokens"]]
    tuned = [run for run in runs if run["fine_tuned"] and run["rank_curve"]["steps"]]
    figures = [
        Figure(
            "Does [MASK] in the input change the rank of real tokens?",
            "rank_by_layer_with_and_without_mask.png",
            len(pretrained),
            lambda panels: plot_with_and_without(panels, pretrained),
        ),
        Figure(
            "Does the rank of [MASK] rise with depth?",
            "rank_of_mask_by_layer.png",
            min(len(masked), 1),
            lambda panels: plot_runs_by_layer(panels[0], masked, "mask", styles),
        ),
        Figure(
            "Which run has the highest rank on text without [MASK]?",
            "rank_without_mask_of_every_run.png",
            1,
            lambda panels: plot_runs_by_layer(panels[0], pretrained, "plain", styles),
        ),
        Figure(
            "How does the rank of the last layer change with training?",
            "rank_by_step.png",
            2 if stepped else 0,
            lambda panels: plot_by_step(panels, stepped, styles),
        ),
        Figure(
            "How far has each run come? Held-out loss",
            "held-out_loss.png",
            sum(any(run["curve"][name] for run in evaluated) for name in LOSS_AXES),
            lambda panels: plot_losses(panels, evaluated, styles),
        ),
        Figure(
            "Does fine-tuning lower the rank?",
            "rank_before_and_after_fine-tuning.png",
            len(pairs),
            lambda panels: plot_before_and_after(panels, pairs),
        ),
        Figure(
            "How does the rank change while fine-tuning?",
            "rank_while_fine-tuning.png",
            min(len(tuned), 1),
            lambda panels: plot_while_fine_tuning(panels[0], tuned, styles),
        ),
        Figure(
            "How many dimensions hold the last layer's squared length?",
            "spectra_of_the_last_layer.png",
            2,
            lambda panels: plot_spectra(panels, pretrained, styles, results["tau"]),
        ),
    ]
    figures = [figure for figure in figures if figure.panels]
    for figure in figures:
        _save(figure, folder)
    return {figure.title: figure.file for figure in figures}


def find_pairs(runs: Runs) -> list[tuple[dict, dict]]:
    """Returns the pairs (source run, run fine-tuned from it) whose members are both in `runs`.

    A source that was measured at another step than the fine-tuning began from is left out.
    """

    def place(workdir: str, step: int | None) -> tuple[pathlib.Path, int | None]:
        return checkpoint.split_name(workdir).workdir.folder.resolve(), step

    by_place = {place(run["workdir"], run["step"]): run for run in runs}
    tuned = [run for run in runs if run["fine_tuned"]]
    pairs = [(by_place.get(place(run["started_from"], run["started_step"])), run) for run in tuned]
    return [(source, run) for source, run in pairs if source]


def _save(figure: Figure, folder: pathlib.Path):
    """Draws one figure as .png and .pdf. One legend beside the panels serves all of them."""
    pyplot = plotting.pyplot()
    columns = min(figure.panels, COLUMNS)
    rows = -(-figure.panels // columns)
    size = (PANEL[0] * columns + LEGEND_WIDTH, PANEL[1] * rows)
    canvas, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for unused in axes.flat[figure.panels :]:
        unused.set_axis_off()
    panels = list(axes.flat[: figure.panels])
    figure.draw(panels)
    handles = {}  # each label once
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
    canvas.suptitle(figure.title)
    canvas.savefig(folder / figure.file, dpi=120)
    canvas.savefig((folder / figure.file).with_suffix(".pdf"))
    pyplot.close(canvas)


def plot_ranks(axes, x: list[int], tokens: Runs, label: str, style: dict):
    """Plots the mean rank over disjoint sets against `x`, with a bar from lowest to highest."""
    means = np.array([np.mean(entry["rank_by_set"] or entry["rank"]) for entry in tokens])
    lowest = np.array([min(entry["rank_by_set"] or [entry["rank"]]) for entry in tokens])
    highest = np.array([max(entry["rank_by_set"] or [entry["rank"]]) for entry in tokens])
    axes.errorbar(x, means, yerr=[means - lowest, highest - means], label=label, capsize=3, **style)


def plot_by_layer(axes, run: dict, kind: str, label: str, style: dict):
    """Plots the rank of one kind of tokens of a run against the layer."""
    known = [layer for layer in run["layers"] if "rank" in layer[kind]]
    if known:
        layers = [layer["layer"] for layer in known]
        plot_ranks(axes, layers, [layer[kind] for layer in known], label, style)
    axes.set(xlabel="layer", ylabel=RANK_LABEL)
    axes.autoscale(axis="y")  # a limit that is set stops it, and another run may be higher
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)


def plot_runs_by_layer(axes, runs: Runs, kind: str, styles: Styles):
    """Plots the rank of one kind of tokens against the layer, one line a run."""
    for run in runs:
        plot_by_layer(axes, run, kind, run["name"], styles[run["name"]])


def plot_with_and_without(panels: list, runs: Runs):
    """Plots the ranks with and without [MASK], one panel a run, all with the same scale."""
    styles = dict(zip(("plain", "real", "all"), plotting.line_styles(), strict=False))
    for panel, run in zip(panels, runs, strict=True):
        for kind, style in styles.items():
            if kind != "all" or run["tokens"]["mask"]:
                plot_by_layer(panel, run, kind, KIND_LABELS[kind], style)
        panel.set_title(run["name"], fontsize="medium")
    _share_scale(panels)


def plot_by_step(panels: list, runs: Runs, styles: Styles):
    """Plots the ranks of the last layer against the step, with and without [MASK]."""
    for panel, kind in zip(panels, ("plain", "real"), strict=True):
        for run in runs:
            known = [entry for entry in run["by_step"] if "rank" in entry[kind]]
            steps = [entry["step"] for entry in known]
            tokens = [entry[kind] for entry in known]
            plot_ranks(panel, steps, tokens, run["name"], styles[run["name"]])
        panel.set_title(KIND_LABELS[kind], fontsize="medium")
        panel.set(xlabel="step", ylabel=RANK_LABEL)
    _share_scale(panels)


def _share_scale(panels: list):
    """Gives panels of ranks the same scale, and a label to the first of each row only."""
    top = max(panel.get_ylim()[1] for panel in panels)
    for number, panel in enumerate(panels):
        panel.set_ylim(0, top)
        if number % COLUMNS:
            panel.set_ylabel("")


def plot_before_and_after(panels: list, pairs: list[tuple[dict, dict]]):
    """Plots the ranks before and after fine-tuning, one panel a pair."""
    for panel, pair in zip(panels, pairs, strict=True):
        named = zip(("before", "after"), pair, plotting.line_styles(), strict=False)
        for label, run, style in named:
            plot_by_layer(panel, run, "plain", label, style)
        panel.set_title(pair[1]["name"], fontsize="medium")
    _share_scale(panels)


def plot_while_fine_tuning(axes, runs: Runs, styles: Styles):
    """Plots the ranks that fine-tuned runs logged, on the text of their tasks."""
    for run in runs:
        curve = run["rank_curve"]
        axes.plot(curve["steps"], curve["ranks"], label=run["name"], **styles[run["name"]])
    axes.set(xlabel="step", ylabel=TUNED_RANK_LABEL)
    axes.set_ylim(bottom=0)


def plot_spectra(panels: list, runs: Runs, styles: Styles, tau: float):
    """Plots the spectrum of the last layer without [MASK]: shares and their cumulative sum."""
    shares_panel, sum_panel = panels
    for run in runs:
        values = np.asarray(run["layers"][-1]["plain"]["spectrum"])
        shares, dimensions = values / values.sum(), np.arange(1, len(values) + 1)
        # A share of the panel's diagonal: the markers are even on both scales.
        style = styles[run["name"]] | {"markevery": 0.12, "label": run["name"]}
        shares_panel.plot(dimensions, np.where(shares > 0, shares, np.nan), **style)
        sum_panel.plot(dimensions, np.cumsum(shares), **style)
    label = f"{tau:g} of the sum"
    sum_panel.axhline(tau, color=plotting.REFERENCE, linewidth=0.8, label=label)
    shares_panel.set(
        xscale="log", yscale="log", xlabel=DIMENSION_LABEL, ylabel="share of the squared length"
    )
    sum_panel.set(
        xlabel=DIMENSION_LABEL, ylabel="cumulative share of the squared length", ylim=(0, 1.02)
    )


def plot_losses(panels: list, runs: Runs, styles: Styles):
    """Plots held-out losses against tokens, words and hours of training, with unigram entropies.

    A run without words or hours is left out of that panel.
    """
    drawn = [name for name in LOSS_AXES if any(run["curve"][name] for run in runs)]
    # Runs with different seeds may have different unigram cross-entropies.
    unigrams = {round(run["curve"]["unigrams"][-1], 2) for run in runs}
    for axes, name in zip(panels, drawn, strict=True):
        label, unit = LOSS_AXES[name]
        for run in runs:
            if values := run["curve"][name]:
                style = styles[run["name"]]
                losses = run["curve"]["losses"]
                axes.plot(np.asarray(values) / unit, losses, label=run["name"], **style)
        for unigram, dashes in zip(sorted(unigrams), plotting.DASHES * len(unigrams), strict=False):
            text = f"unigram {unigram:g}"
            axes.axhline(
                unigram, color=plotting.REFERENCE, linewidth=0.8, linestyle=dashes, label=text
            )
        axes.set(xlabel=label, ylabel="held-out loss (nats per predicted token)")
