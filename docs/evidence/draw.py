"""Draws every figure of docs/evidence.md and prints its tables, from the JSON files of this folder.

    python docs/evidence/draw.py

The text of docs/evidence.md has the printed tables. tests/test_evidence.py compares them.
"""

import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import page_tables

from maelm_jax import plotting

FIGURES = pathlib.Path(__file__).resolve().parent
COLOURS = {"MAE-LM": plotting.COLOURS[2], "MLM": plotting.COLOURS[1]}  # in every figure


def main():
    """Writes the figures and prints the tables."""
    draw_all()
    for name, table in page_tables.all_tables().items():
        print(f"## {name}\n\n{table}\n")


def draw_all():
    """Writes every figure into FIGURES."""
    draw_recipe(page_tables.read("recipe"))
    draw_tuning(page_tables.comparisons())
    draw_encoders(page_tables.read("encoders"))
    draw_delta(page_tables.read("delta"))
    draw_pair(page_tables.read("pair"))
    draw_minilm(page_tables.read("minilm"), page_tables.minilm_ranks())


def draw_recipe(runs: dict):
    """Loss and rank of the last layer by tokens, one line a seed."""
    pyplot = plotting.pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
    groups = page_tables.groups(runs).items()
    for (key, seeds), style in zip(groups, plotting.line_styles(), strict=False):
        objective = page_tables.OBJECTIVES[key[1]]
        label, style = f"{objective}, {page_tables.RECIPES[key[0]]}", dict(style)
        style["color"] = COLOURS[objective]
        for run in seeds:
            for axes, points in ((left, run["losses"]), (right, run["ranks"])):
                steps, values = np.asarray(points, float)[:, :2].T
                tokens = steps * run["tokens_a_step"] / page_tables.MILLION
                axes.plot(tokens, values, **style, alpha=0.8, label=label)
            label = None  # one entry of the legend for all seeds
    unigram = next(iter(runs.values()))["unigram"]
    left.axhline(unigram, color=plotting.REFERENCE, linewidth=1, label="unigram cross-entropy")
    label = "held-out loss (nats a token, at mask rate 0.15)"
    left.set(title="Muon and more masks: lower loss at equal tokens", ylabel=label)
    title = "MLM's rank is above MAE-LM's in every seed"
    right.set(title=title, ylabel="effective rank of the last layer (width 128)")
    for axes in (left, right):
        axes.set_xlabel("million tokens read")
        axes.grid(alpha=0.3)
        axes.set_xlim(left=0)
    left.legend(fontsize=7)
    figure.savefig(FIGURES / "recipe.png", dpi=130)


def draw_tuning(compared: list[page_tables.Comparison]):
    """The differences of means with their intervals."""
    pyplot = plotting.pyplot()
    size = (7, 1.6 + 0.5 * len(compared))
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    for row, one in enumerate(compared):
        mean, low, high = one.difference
        ends = [[mean - low], [high - mean]]
        axes.errorbar(mean, -row, xerr=ends, fmt="o", color=plotting.COLOURS[1], capsize=4)
    axes.axvline(0.0, color=plotting.REFERENCE, linewidth=1)
    axes.set(
        yticks=[-row for row in range(len(compared))],
        yticklabels=[f"{one.task}, {len(one.ours)} seeds" for one in compared],
        xlabel="maelm_jax minus transformers (points of the score; mean and 95% interval)",
        title="Fine-tuning MiniLM-L6: no difference between the programs shows",
        ylim=(0.5 - len(compared), 0.5),
    )
    figure.savefig(FIGURES / "finetuning.png", dpi=130)


def draw_encoders(content: dict):
    """The rank by layer without and with [MASK], and of [MASK] itself."""
    pyplot = plotting.pyplot()
    runs = content["runs"]
    size = (5.2 * len(runs), 4)
    figure, panels = pyplot.subplots(
        1, len(runs), figsize=size, layout="constrained", squeeze=False
    )
    kinds = {
        "plain": "no [MASK] in the input",
        "real": "real tokens beside [MASK]",
        "mask": "[MASK]",
        "all": "all tokens of masked input",
    }
    for axes, run in zip(panels[0], runs, strict=True):
        for (kind, label), style in zip(kinds.items(), plotting.line_styles(), strict=False):
            points = [(layer["layer"], layer[kind]) for layer in run["layers"] if layer[kind]]
            axes.plot(*zip(*points, strict=True), **style, label=label)
        axes.set(
            title=f"{run['name']}, width {run['width']}",
            xlabel="layer (0 is the input)",
            ylabel="effective rank (dimensions)",
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle("With [MASK] in the input, the rank of all tokens is not higher")
    figure.savefig(FIGURES / "encoders.png", dpi=130)


def draw_delta(runs: dict):
    """Rank of the last layer and the score of SST-2 by delta. CoLA's medians are 0."""
    pyplot = plotting.pyplot()
    deltas, by_share = list(page_tables.by_delta(runs)), page_tables.by_delta(runs).values()
    (fresh,) = (run["scores"]["sst2"] for run in runs.values() if "losses" not in run)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained")
    kinds = ((1, "without [MASK] in the input"), (2, "real tokens beside [MASK]"))
    for (column, label), size in zip(kinds, (9, 4), strict=True):  # the values are equal
        values = [run["ranks"][-1][column] for run in by_share]
        style = next(plotting.line_styles()) | {"markersize": size, "markerfacecolor": "none"}
        left.plot(deltas, values, **style, label=label)
    left.set(title="The rank of the last layer rises", ylabel="effective rank (width 128)")
    left.margins(y=0.15)
    left.set_ylim(bottom=0)
    scores = np.asarray([run["scores"]["sst2"] for run in by_share])
    middle = np.median(scores, axis=1)
    errors = [middle - scores.min(1), scores.max(1) - middle]
    label, colour = "median; lowest to highest of 3 seeds", plotting.COLOURS[0]
    right.errorbar(deltas, middle, errors, fmt="o", color=colour, capsize=3, label=label)
    right.axhspan(
        min(fresh),
        max(fresh),
        color=plotting.REFERENCE,
        alpha=0.25,
        label="fresh weights, lowest to highest",
    )
    right.set(title="SST-2 has no order", ylabel="accuracy (percent)")
    for axes in (left, right):
        axes.set_xlabel("delta: share of [MASK]s that the encoder reads")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(FIGURES / "delta.png", dpi=130)


def draw_pair(runs: dict):
    """Loss and rank of the last layer by tokens, and what pretraining gains on each task."""
    pyplot = plotting.pyplot()
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    tasks = list(runs["random-mae"]["scores"])
    for (name, words), style in zip(
        page_tables.OBJECTIVES.items(), plotting.line_styles(), strict=False
    ):
        run, style = runs[name], dict(style) | {"color": COLOURS[words]}
        for axes, points in ((left, run["losses"]), (middle, run["ranks"])):
            steps, values, *masked = np.asarray(points, float).T
            tokens = steps * run["tokens_a_step"] / page_tables.MILLION
            axes.plot(tokens, values, **style, label=words)
            if masked:
                label = f"{words}, all tokens of masked input"
                axes.plot(tokens, masked[1], **style | {"linestyle": ":"}, label=label)
        gains = np.asarray(
            [
                page_tables.finetune_vs_transformers.difference(
                    run["scores"][task], runs["random-mae"]["scores"][task]
                )
                for task in tasks
            ]
        )
        rows = -np.arange(len(tasks)) - (0.15 if name == "mlm" else -0.15)
        errors = [gains[:, 0] - gains[:, 1], gains[:, 2] - gains[:, 0]]
        marks = {"color": style["color"], "marker": style["marker"], "linestyle": "none"}
        right.errorbar(gains[:, 0], rows, xerr=errors, capsize=3, label=words, **marks)
    left.axhline(run["unigram"], color=plotting.REFERENCE, linewidth=1, label="unigram")
    left.set(title="MLM's loss is lower", ylabel="held-out loss (nats, at mask rate 0.15)")
    middle.set(title="and the rank of its last layer higher", ylabel="effective rank (width 128)")
    middle.set_ylim(bottom=0)
    for axes in (left, middle):
        axes.set_xlabel("million tokens read")
    right.axvline(0.0, color=plotting.REFERENCE, linewidth=1)
    right.set(
        title="What pretraining gains over fresh weights",
        yticks=-np.arange(len(tasks)),
        yticklabels=tasks,
        xlabel="points of the score (mean and 95% interval, 3 seeds)",
    )
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(FIGURES / "pair.png", dpi=130)


def draw_minilm(runs: dict, ranks: dict[str, list[dict]]):
    """The loss by tokens of MiniLM's continued pretraining, and the rank by layer after it."""
    pyplot = plotting.pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4.6), layout="constrained")
    for (name, words), style in zip(
        page_tables.MINILM.items(), plotting.line_styles(), strict=False
    ):
        style = dict(style)
        if (objective := words.split(",")[0]) in COLOURS:
            style["color"] = COLOURS[objective]
        if name in ranks:
            points = [(layer["layer"], layer["plain"]) for layer in ranks[name]]
            right.plot(*zip(*points, strict=True), **style, label=words)
        run = runs[name]
        if "losses" in run:
            steps, losses = np.asarray(run["losses"], float).T
            tokens = steps * run["tokens_a_step"] / page_tables.MILLION
            left.plot(tokens, losses, **style, label=words)
            unigram = run["unigram"]
    left.axhline(unigram, color=plotting.REFERENCE, linewidth=1, label="unigram cross-entropy")
    label = "held-out loss (nats a token, at mask rate 0.15)"
    title = "MAE-LM's fresh decoder learns slowly at low rates"
    left.set(title=title, xlabel="million tokens read", ylabel=label)
    right.set(
        title="The last layer's rank falls least with MLM at low rates",
        xlabel="layer (0 is the input)",
        ylabel="effective rank (width 384)",
    )
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    lines = {line.get_label(): line for line in (*right.lines, left.lines[-1])}
    figure.legend(lines.values(), lines.keys(), fontsize=8, ncols=4, loc="outside lower center")
    figure.savefig(FIGURES / "minilm.png", dpi=130)


if __name__ == "__main__":
    main()
