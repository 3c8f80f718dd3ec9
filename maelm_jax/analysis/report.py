"""Writes the output of `analyze`: ranks.json with every number, the figures, and report.md.

Figures are black and grey. Dashes and markers distinguish the lines, also when printed.
"""

import collections.abc
import itertools
import json
import pathlib

import numpy as np

from maelm_jax import config, outputs, storage
from maelm_jax.analysis import ranks
from maelm_jax.training import metrics

INK = ("0.0", "0.35", "0.6")
DASHES = ("-", "--", ":", "-.")
# Seven markers share no factor with three inks and four dashes. Of up to 21 lines, two with the
# same marker differ in both ink and dashes.
MARKERS = "os^Dvx*"
SETS = {
    "plain": "without [MASK] in the input",
    "real": "real tokens of masked input",
    "mask": "[MASK]",
    "all": "all tokens of masked input",
}


def started_from(experiment: config.Experiment) -> str | None:
    """Workdir whose parameters a run started from: that of Finetune.init_from or Run.init_from."""
    finetune = getattr(experiment, "finetune", None)
    return finetune.init_from if finetune else experiment.run.init_from


def curve(workdir: str, experiment: config.Experiment) -> dict:
    """Reads the evaluations of a pretraining run.

    Args:
        workdir: Workdir of the run.
        experiment: Settings of the run.

    Returns:
        Lists `steps`, `losses` (nats) and `hours` (of training until the evaluation), and
        `unigram`, the unigram cross-entropy in nats. Hours are steps times the run's median step
        time, so start-up, evaluation and other work on the machine do not count.
    """
    lines = metrics.read(workdir)
    seconds = median_step_seconds(
        lines, experiment.run.batch_size * experiment.corpus.sequence_length
    )
    result: dict = {"steps": [], "losses": [], "hours": [], "unigram": None}
    for line in lines:
        if "unigram" in line:
            result["unigram"] = line["unigram"]
            hours = line["step"] * (seconds or 0.0) / 3600
            for name, value in (
                ("steps", line["step"]),
                ("losses", line["eval_loss"]),
                ("hours", hours),
            ):
                result[name].append(value)
    return result


def median_step_seconds(lines: list[dict], tokens_per_step: int) -> float | None:
    """Median time of a step in seconds, or None if no step is timed.

    A line of metrics.jsonl gives the time of every step since the line before. A line of an older
    version has no `step_seconds`; its time follows from `tokens_per_second`.

    Args:
        lines: Lines of the run's metrics.jsonl.
        tokens_per_step: Tokens of a training step.
    """
    seconds, steps, before = [], [], 0
    for line in lines:
        if line.get("tokens_per_second"):
            seconds.append(line.get("step_seconds") or tokens_per_step / line["tokens_per_second"])
            steps.append(max(line["step"] - before, 1))
        before = line["step"]
    if not seconds:
        return None
    order = np.argsort(seconds)
    halfway = np.searchsorted(np.cumsum(np.asarray(steps)[order]), sum(steps) / 2)
    return float(np.asarray(seconds)[order][halfway])


def write(results: dict, workdir: str) -> str:
    """Writes ranks.json, the figures and report.md into `workdir`.

    Args:
        results: What `analyze.py` measured.
        workdir: Folder to write into.

    Returns:
        The main tables and the path of the report, as text to print.
    """
    folder = pathlib.Path(workdir)
    with outputs.writing("--workdir", workdir):
        folder.mkdir(parents=True, exist_ok=True)
        figures = draw(results, folder)
        storage.write(folder / "ranks.json", json.dumps(_rounded(results)) + "\n")
        storage.write(folder / "report.md", markdown(results, figures))
    summary = "\n\n".join(
        part
        for part in (runs_table(results), last_layer_table(results), mask_table(results))
        if part
    )
    return f"{summary}\n\n{folder / 'report.md'}"


def _rounded(value):
    """Rounds floats to seven digits, the precision of float32 states."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


# Tables


def table(
    header: collections.abc.Sequence[str], rows: collections.abc.Iterable[collections.abc.Sequence]
) -> str:
    """Markdown table with aligned columns; all columns but the first are right-aligned."""
    cells = [list(map(str, header)), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    line = lambda row: (  # noqa: E731
        "| "
        + " | ".join(
            c.ljust(w) if n == 0 else c.rjust(w)
            for n, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
    )
    rule = (
        "|"
        + "|".join("-" * (w + 2) if n == 0 else "-" * (w + 1) + ":" for n, w in enumerate(widths))
        + "|"
    )
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])


def cell(found: dict | None) -> str:
    """Text of a rank with its interval, or the reason why there is none."""
    if found is None or found.get("tokens") == 0:
        return "-"
    if "rank" not in found:
        return f"({found['tokens']:,} tokens: too few)"
    half = found["rank_by_set"]["half"]
    return str(found["rank"]) + (
        f" ({found['rank_by_set']['mean']:.1f} ± {half:.1f})" if half is not None else ""
    )


def runs_table(results: dict) -> str:
    """Table of the runs with their losses at the last step and after equal training time.

    The equal time is the training time of the shortest run.
    """
    trained = [run for run in results["runs"] if run["curve"]["hours"]]
    least = min((run["curve"]["hours"][-1] for run in trained), default=0.0)

    def row(run):
        masking, model, found = run["masking"], run["model"], run["curve"]
        shares = f"{masking['encoder_mask_fraction']:g}"
        if masking["random_fraction"] or masking["keep_fraction"]:
            shares += f" (random {masking['random_fraction']:g}, kept {masking['keep_fraction']:g})"
        losses = ["-"] * 4
        if found["hours"]:
            # NaN: the run had no evaluation by then.
            at = np.interp(least, found["hours"], found["losses"], left=np.nan)
            shown = "-" if np.isnan(at) else f"{at:.3f}"
            losses = [
                f"{found['losses'][-1]:.3f}",
                f"{found['hours'][-1]:.2f}",
                shown,
                f"{found['unigram']:.3f}",
            ]
        sizes = f"{model['layers']} x {model['width']}"
        return (
            run["name"],
            sizes,
            model["decoder_layers"],
            shares,
            f"{masking['rate']:g}",
            run["step"],
            f"{run['tokens']['plain']:,}",
            *losses,
        )

    header = [
        "run",
        "encoder",
        "decoder",
        "delta",
        "rate",
        "step",
        "tokens measured",
        "held-out loss",
        "hours",
        f"loss at {least:.2f} h",
        "unigram",
    ]
    return table(header, map(row, results["runs"]))


def last_layer_table(results: dict) -> str:
    """Table of the ranks of the last layer, one column for each set of tokens."""
    rows = []
    for run in results["runs"]:
        last = run["layers"][-1]
        rows.append(
            [
                run["name"],
                run["model"]["width"],
                *(cell(last.get(name)) for name in SETS),
                last["plain"]["centred_rank"],
            ]
        )
    return table(["last layer", "width", *SETS.values(), "without [MASK], centred"], rows)


def mask_table(results: dict) -> str | None:
    """Table of what the encoders keep for [MASK], or None if no run has a rank of [MASK].

    The column of the real tokens is for comparison: a part of them lies outside their own span too.
    """
    rows = []
    for run in results["runs"]:
        known = [layer for layer in run["layers"] if "mask_alone" in layer]
        if known:
            first, last = known[0], known[-1]
            alone = last["mask_alone"]
            ends = f"{first['mask']['rank']} -> {last['mask']['rank']}"
            spectrum = np.asarray(last["real"]["spectrum"])
            real = 1 - spectrum[: last["real"]["rank"]].sum() / spectrum.sum()
            shares = (
                f"{share:.1%}"
                for share in (alone["share_outside"], real, alone["variance_outside"])
            )
            rows.append([run["name"], ends, alone["dimensions"], *shares])
    header = [
        "[MASK] in the last layer",
        "rank, first -> last",
        "dimensions of its own",
        "length outside",
        "real tokens' own",
        "variance outside",
    ]
    return table(header, rows) if rows else None


def markdown(results: dict, figures: dict[str, str]) -> str:
    """Text of report.md. `figures` is {title: file name}."""
    tau = results["tau"]
    parts = [
        "# Effective rank",
        *(f"Note: {note}." for note in results["notes"]),
        runs_table(results),
    ]
    if left := [
        run["name"]
        for run in results["runs"]
        if run["masking"]["keep_fraction"] or run["masking"]["random_fraction"]
    ]:
        parts.append(
            f"{', '.join(left)}: some tokens to predict are read as they are, or random ones in "
            "their place. So the held-out loss is not that of the "
            "other runs, and what is called real tokens of masked input is all but [MASK], such "
            "tokens among it."
        )
    parts += [
        f"The effective rank at tau = {tau:g} is the smallest k such that the k largest squared "
        "singular values of the (tokens x width) matrix of "
        f"hidden states hold at least {tau:g} of their sum; the states are not centred. Tokens are "
        "held-out text with <s> and </s>, without "
        f"padding; masks are those of each run's pretraining, seed {results['seed']}. In brackets: "
        f"mean and {ranks.CONFIDENCE:.0%} interval over "
        "disjoint sets of tokens, whose ranks lie a little lower the smaller the sets are; the "
        "figures show these. "
        f"Nothing is reported from fewer than {ranks.LEAST_PER_DIMENSION} tokens a dimension. "
        "Layer 0 is what enters the first layer. "
        "Hours are steps times the median step time.",
        last_layer_table(results),
    ]
    if masked := mask_table(results):
        parts += [
            masked,
            f"Dimensions of its own: of the span that holds {tau:g} of the squared length of "
            "[MASK]'s states, those at more than "
            f"{ranks.ALONE_DEGREES:g} degrees from the same span of the real tokens beside it. "
            "Outside: the share of [MASK]'s squared length, and "
            "of its variance, that lies outside the real tokens' span; of the real tokens' own "
            "length a share lies outside too, and only what "
            "exceeds it is [MASK]'s.",
        ]
    parts += [f"## {title}\n\n![{title}]({name})" for title, name in figures.items()]
    parts.append("## Every layer")
    for run in results["runs"]:
        lines = [
            [layer["layer"], *(cell(layer.get(name)) for name in SETS)] for layer in run["layers"]
        ]
        sets = (
            f"{run['sets']} disjoint sets"
            if run["sets"] > 1
            else "one set: too few tokens for intervals"
        )
        origin = f", started from {run['started_from']}" if run["started_from"] else ""
        parts.append(
            f"### {run['name']}\n\n`{run['workdir']}`, step {run['step']}{origin}; {run['rows']:,} "
            f"rows of {run['length']}; {sets}."
        )
        parts.append(table(["layer", *SETS.values()], lines))
    return "\n\n".join(parts) + "\n"


# Figures


def draw(results: dict, folder: pathlib.Path) -> dict[str, str]:
    """Draws every figure that has data into `folder`; returns {title: file name}."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = results["runs"]
    pairs = before_and_after_pairs(runs)
    pretrained = [run for run in runs if not any(run is after for _, after in pairs)]
    masked = [run for run in runs if any("rank" in layer["mask"] for layer in run["layers"])]
    plots = {
        "Rank by layer, with and without [MASK]": (
            len(pretrained),
            lambda axes: with_and_without(axes, pretrained),
        ),
        "Rank of [MASK] by layer": (
            1 if masked else 0,
            lambda axes: by_layer(axes[0], [(run["name"], run, "mask") for run in masked]),
        ),
        "Rank without [MASK] of every run": (
            1,
            lambda axes: by_layer(axes[0], [(run["name"], run, "plain") for run in pretrained]),
        ),
        "Rank before and after fine-tuning": (
            len(pairs),
            lambda axes: before_and_after(axes, pairs),
        ),
        "Spectra of the last layer": (2, lambda axes: spectra(axes, pretrained, results["tau"])),
        "Held-out loss": (
            1 if any(run["curve"]["steps"] for run in runs) else 0,
            lambda axes: losses(axes[0], runs),
        ),
    }
    drawn = {}
    for title, (panels, plot) in plots.items():
        if not panels:
            continue
        columns = min(panels, 3)
        rows = -(-panels // columns)
        figure, axes = pyplot.subplots(
            rows,
            columns,
            figsize=(1.6 + 4.2 * columns, 3.6 * rows),
            squeeze=False,
            layout="constrained",
        )
        for unused in axes.flat[panels:]:
            unused.set_axis_off()
        plot(list(axes.flat))
        figure.suptitle(title)
        drawn[title] = (
            title.lower().replace("[", "").replace("]", "").replace(",", "").replace(" ", "_")
            + ".png"
        )
        figure.savefig(folder / drawn[title], dpi=120)
        pyplot.close(figure)
    return drawn


def styles() -> collections.abc.Iterator[dict]:
    """Yields line styles that differ without colour."""
    for number in itertools.count():
        ink, dashes, marker = (
            INK[number % len(INK)],
            DASHES[number % len(DASHES)],
            MARKERS[number % len(MARKERS)],
        )
        yield {
            "color": ink,
            "linestyle": dashes,
            "marker": marker,
            "markersize": 4,
            "linewidth": 1.3,
        }


def by_layer(axes, lines: collections.abc.Iterable[tuple[str, dict, str]]):
    """Plots rank against layer, one line for each (label, run, set of tokens).

    The rank is the mean over disjoint sets; the error bar is its interval.
    """
    for (label, run, name), style in zip(lines, styles(), strict=False):
        known = [
            (layer["layer"], layer[name])
            for layer in run["layers"]
            if "rank" in layer.get(name, {})
        ]
        if known:
            numbers, found = zip(*known, strict=True)
            means = [one["rank_by_set"]["mean"] for one in found]
            bars = [one["rank_by_set"]["half"] or 0.0 for one in found]
            axes.errorbar(numbers, means, yerr=bars, label=label, capsize=3, **style)
    axes.set(
        xlabel="layer",
        ylabel=f"effective rank\n(mean of disjoint sets, {ranks.CONFIDENCE:.0%} interval)",
    )
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize="small")


def with_and_without(axes: list, runs: list[dict]):
    """Plots the ranks with and without [MASK], one panel a run, all with the same scale."""
    for panel, run in zip(axes, runs, strict=False):
        by_layer(
            panel,
            [
                (SETS[name], run, name)
                for name in ("plain", "real", "all")
                if name != "all" or run["tokens"]["mask"]
            ],
        )
        panel.set_title(run["name"], fontsize="medium")
    top = max(panel.get_ylim()[1] for panel in axes[: len(runs)])
    for panel in axes[: len(runs)]:
        panel.set_ylim(0, top)


def before_and_after_pairs(runs: list[dict]) -> list[tuple[dict, dict]]:
    """Pairs (source run, run that started from it) whose members are both among `runs`.

    Paths are resolved first, so a run may be named by different paths.
    """
    place = lambda path: pathlib.Path(path).resolve()  # noqa: E731
    known = {place(run["workdir"]): run for run in runs}
    return [
        (known[place(run["started_from"])], run)
        for run in runs
        if run["started_from"] and place(run["started_from"]) in known
    ]


def before_and_after(axes: list, pairs: list[tuple[dict, dict]]):
    """Plots the ranks before and after fine-tuning, one panel a pair."""
    for panel, (before, after) in zip(axes, pairs, strict=False):
        by_layer(panel, [("before", before, "plain"), ("after", after, "plain")])
        panel.set_title(after["name"], fontsize="medium")


def spectra(axes: list, runs: list[dict], tau: float):
    """Plots the spectrum of the last layer without [MASK]: shares and their cumulative sum."""
    for run, style in zip(runs, styles(), strict=False):
        values = np.asarray(run["layers"][-1]["plain"]["spectrum"])
        shares, dimensions = values / values.sum(), np.arange(1, len(values) + 1)
        style["markevery"] = 0.12  # of the panel's diagonal: even on both scales
        axes[0].plot(dimensions, np.where(shares > 0, shares, np.nan), label=run["name"], **style)
        axes[1].plot(dimensions, np.cumsum(shares), label=run["name"], **style)
    axes[1].axhline(tau, color="0.5", linewidth=0.8, label=f"{tau:g} of the sum")
    axes[0].set(
        xscale="log", yscale="log", xlabel="dimension", ylabel="share of the squared length"
    )
    axes[1].set(xlabel="dimension", ylabel="share, added up", ylim=(0, 1.02))
    for panel in axes[:2]:
        panel.legend(fontsize="small")


def losses(axes, runs: list[dict]):
    """Plots the held-out losses against the step, with the unigram cross-entropies."""
    for run, style in zip(runs, styles(), strict=False):
        if run["curve"]["steps"]:
            axes.plot(run["curve"]["steps"], run["curve"]["losses"], label=run["name"], **style)
    unigrams = sorted(
        {round(run["curve"]["unigram"], 2) for run in runs if run["curve"]["unigram"]}
    )
    # Runs with different seeds may have different unigram cross-entropies.
    for unigram, dashes in zip(unigrams, itertools.cycle(DASHES), strict=False):
        axes.axhline(
            unigram, color="0.5", linewidth=0.8, linestyle=dashes, label=f"unigram {unigram:g}"
        )
    axes.set(xlabel="step", ylabel="held-out loss (nats per predicted token)")
    axes.legend(fontsize="small")
