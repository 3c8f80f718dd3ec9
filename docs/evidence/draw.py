"""Draws every figure of docs/evidence.md and prints its tables, from the JSON files of this folder.

    python docs/evidence/draw.py

The text of docs/evidence.md has the printed tables. tests/test_evidence.py compares them.
"""

import json
import pathlib
import sys
import typing

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

import finetune_vs_transformers

from maelm_jax import plotting, tables
from maelm_jax.analysis import ranks

HERE = pathlib.Path(__file__).resolve().parent
FIGURES = HERE
OBJECTIVES = {"mae": "MAE-LM", "mlm": "MLM"}
RECIPES = {"adamw": "AdamW", "muon": "Muon", "muon40": "Muon, mask rate 0.40"}
MILLION = 10**6


def main():
    """Writes the figures and prints the tables."""
    draw_all()
    for name, table in all_tables().items():
        print(f"## {name}\n\n{table}\n")


def draw_all():
    """Writes every figure into FIGURES."""
    draw_recipe(read("recipe"))
    draw_tuning(read("finetuning"))
    draw_encoders(read("encoders"))
    draw_delta(read("delta"))


def all_tables() -> dict[str, str]:
    """The tables of docs/evidence.md, in Markdown."""
    return {
        "screening": screening_table(read("screening")),
        "variations": screening_table(read("variations"), has_times=False),
        "recipe": recipe_table(read("recipe"), read("step_times")),
        "continued": screening_table(read("continued")),
        "exact": exact_table(read("finetuning_exact")),
        "finetuning": tuning_table(read("finetuning")),
        "encoders": encoders_table(read("encoders")),
        "delta": delta_table(read("delta")),
        "longer": longer_table(read("longer")),
    }


def read(name: str) -> dict:
    """The content of a JSON file of this folder."""
    return json.loads((HERE / f"{name}.json").read_text())


def mean_and_interval(values: typing.Sequence[float]) -> str:
    """The mean over seeds and its 95% interval; of one seed, no interval."""
    interval = ranks.interval(values)
    return f"{interval.mean:.2f}" + (f" ± {interval.half:.2f}" if interval.half else "")


def screening_table(runs: dict, has_times: bool = True) -> str:
    """One row a run: tokens, loss and rank; the time of a step, if nothing disturbed it."""
    rows = []
    for name, run in runs.items():
        steps, loss = run["losses"][-1]
        seconds = run["seconds_a_step"]
        times = (f"{1000 * seconds:.0f}", f"{steps * seconds / 60:.1f}") if has_times else ()
        rows.append((
            name, f"{run['tokens'] / MILLION:.1f}", f"{loss:.3f}", f"{run['unigram'] - loss:.2f}",
            *times, run["ranks"][-1][1],
        ))  # fmt: skip
    header = (
        "run", "million tokens", "held-out loss", "below unigram",
        *(("ms a step", "minutes") if has_times else ()), "rank of the last layer",
    )  # fmt: skip
    return tables.markdown(header, rows)


def groups(runs: dict) -> dict[tuple[str, str], list[dict]]:
    """The runs of recipe.json by (recipe, objective); one for each seed."""
    result: dict[tuple[str, str], list[dict]] = {}
    for name, run in runs.items():
        recipe, objective, _ = name.split("-")
        result.setdefault((recipe, objective), []).append(run)
    return result


def recipe_table(runs: dict, timed: dict) -> str:
    """One row for each recipe and objective: means over seeds with their intervals.

    Args:
        runs: The content of recipe.json.
        timed: The content of step_times.json: short runs, each alone on the machine.
    """
    rows = []
    for (recipe, objective), seeds in groups(runs).items():
        gains = [run["unigram"] - run["losses"][-1][1] for run in seeds]
        last = [run["ranks"][-1] for run in seeds]
        rows.append((
            OBJECTIVES[objective], RECIPES[recipe], len(seeds), mean_and_interval(gains),
            f"{1000 * timed[f'{recipe}-{objective}']['seconds_a_step']:.0f}",
            ", ".join(str(rank[1]) for rank in last), ", ".join(str(rank[2]) for rank in last),
        ))  # fmt: skip
    header = (
        "objective", "recipe", "seeds", "nats below unigram", "ms a step",
        "rank without [MASK], each seed", "rank of real tokens beside [MASK], each seed",
    )  # fmt: skip
    return tables.markdown(header, rows, left=2)


def draw_recipe(runs: dict):
    """Loss and rank of the last layer by tokens, one line a seed."""
    pyplot = plotting.pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
    for (key, seeds), style in zip(groups(runs).items(), plotting.line_styles(), strict=False):
        label = f"{OBJECTIVES[key[1]]}, {RECIPES[key[0]]}"
        for run in seeds:
            for axes, points in ((left, run["losses"]), (right, run["ranks"])):
                steps, values = np.asarray(points, float)[:, :2].T
                tokens = steps * run["tokens_a_step"] / MILLION
                axes.plot(tokens, values, **style, alpha=0.8, label=label)
            label = None  # one entry of the legend for all seeds
    unigram = next(iter(runs.values()))["unigram"]
    left.axhline(unigram, color=plotting.REFERENCE, linewidth=1, label="unigram cross-entropy")
    left.set(title="Muon and more masks: lower at equal tokens", ylabel="held-out loss (nats)")
    title = "MLM's rank is above MAE-LM's in every seed"
    right.set(title=title, ylabel="effective rank, last layer, of 128")
    for axes in (left, right):
        axes.set_xlabel("million tokens read")
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.savefig(FIGURES / "recipe.png", dpi=130)


def differences(content: dict) -> dict[str, finetune_vs_transformers.Difference]:
    """The difference of means of each task, maelm_jax minus transformers, and its interval."""
    return {
        task: finetune_vs_transformers.difference(scores["maelm_jax"], scores["transformers"])
        for task, scores in content["scores"].items()
    }


def exact_table(content: dict) -> str:
    """One row a task: how far the logits of two trainings without randomness are apart."""
    rows = [
        (task, values["steps"], f"{values['difference']:.1e}", f"{values['deviation']:.2f}",
         f"{values['same_labels']:.1f}%")
        for task, values in content["agreements"].items()
    ]  # fmt: skip
    header = (
        "task", "steps", "largest difference of a logit", "standard deviation of the logits",
        "same label",
    )  # fmt: skip
    return tables.markdown(header, rows)


def tuning_table(content: dict) -> str:
    """One row a task: both means, their difference and its interval."""
    rows = []
    for task, (mean, low, high) in differences(content).items():
        ours, theirs = (
            content["scores"][task][program] for program in ("maelm_jax", "transformers")
        )
        rows.append((
            task, *(f"{np.mean(x):.2f} (sd {np.std(x, ddof=1):.2f})" for x in (ours, theirs)),
            len(ours), f"{mean:+.2f}", f"{low:+.2f} to {high:+.2f}",
        ))  # fmt: skip
    header = ("task", "maelm_jax", "transformers", "seeds", "difference", "95% interval")
    return tables.markdown(header, rows)


def draw_tuning(content: dict):
    """The differences of means with their intervals."""
    pyplot = plotting.pyplot()
    figure, axes = pyplot.subplots(figsize=(6.5, 2.6), layout="constrained")
    by_task = differences(content)
    for row, (mean, low, high) in enumerate(by_task.values()):
        ends = [[mean - low], [high - mean]]
        axes.errorbar(mean, -row, xerr=ends, fmt="o", color=plotting.COLOURS[1], capsize=4)
    axes.axvline(0.0, color=plotting.REFERENCE, linewidth=1)
    axes.set(
        yticks=[-row for row in range(len(by_task))], yticklabels=by_task,
        xlabel="maelm_jax minus transformers (points; mean and 95% interval)",
        title="Fine-tuning MiniLM-L6: same scores in both programs?",
        ylim=(0.5 - len(by_task), 0.5),
    )  # fmt: skip
    figure.savefig(FIGURES / "finetuning.png", dpi=130)


def encoders_table(content: dict) -> str:
    """One row for the last layer of each encoder."""
    rows = []
    for run in content["runs"]:
        last = run["layers"][-1]
        rows.append((
            run["name"], run["width"], last["plain"], last["real"], last["all"],
            f"{run['layers'][1]['mask']} -> {last['mask']}",
        ))  # fmt: skip
    header = (
        "encoder", "width", "without [MASK]", "real tokens beside [MASK]",
        "all tokens of masked input", "[MASK], layer 1 -> last layer",
    )  # fmt: skip
    return tables.markdown(header, rows)


def draw_encoders(content: dict):
    """The rank by layer without and with [MASK], and of [MASK] itself."""
    pyplot = plotting.pyplot()
    runs = content["runs"]
    size = (5.2 * len(runs), 4)
    figure, panels = pyplot.subplots(
        1, len(runs), figsize=size, layout="constrained", squeeze=False
    )
    kinds = {
        "plain": "no [MASK] in the input", "real": "real tokens beside [MASK]", "mask": "[MASK]",
    }  # fmt: skip
    for axes, run in zip(panels[0], runs, strict=True):
        for (kind, label), style in zip(kinds.items(), plotting.line_styles(), strict=False):
            points = [(layer["layer"], layer[kind]) for layer in run["layers"] if layer[kind]]
            axes.plot(*zip(*points, strict=True), **style, label=label)
        axes.set(
            title=f"{run['name']}, width {run['width']}", xlabel="layer (0 is the input)",
            ylabel="effective rank",
        )  # fmt: skip
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(FIGURES / "encoders.png", dpi=130)


def by_delta(runs: dict) -> dict[float, dict]:
    """The runs named delta-PERCENT-sSEED, by their share of [MASK]s that the encoder reads."""
    shares = {int(name.split("-")[1]) / 100: run for name, run in runs.items() if "losses" in run}
    return dict(sorted(shares.items()))


def spread(scores: typing.Sequence[float]) -> str:
    """The median of scores, their least and their highest."""
    return f"{np.median(scores):.1f} ({min(scores):.1f} to {max(scores):.1f})"


def delta_table(runs: dict) -> str:
    """One row for each delta, and one for fresh weights."""
    rows = []
    for delta, run in by_delta(runs).items():
        gain, last = run["unigram"] - run["losses"][-1][1], run["ranks"][-1]
        rows.append((f"{delta:g}", f"{gain:.2f}", *last[1:], *map(spread, run["scores"].values())))
    (fresh,) = (run["scores"] for run in runs.values() if "losses" not in run)
    rows.append(("fresh weights", "", "", "", *map(spread, fresh.values())))
    header = (
        "delta", "nats below unigram", "rank without [MASK]", "rank of real tokens beside [MASK]",
        *(f"{task}, median of {len(scores)} seeds" for task, scores in fresh.items()),
    )  # fmt: skip
    return tables.markdown(header, rows)


def longer_table(runs: dict) -> str:
    """One row for the run, and one for the same model with fresh weights."""
    rows = []
    for name, run in runs.items():
        logged = ("", "", "", "")
        if "losses" not in run and not name.startswith("random-"):
            continue
        if "losses" in run:
            steps, loss = run["losses"][-1]
            minutes = steps * run["seconds_a_step"] / 60
            gain, rank = run["unigram"] - loss, run["ranks"][-1][1]
            logged = (f"{run['tokens'] / MILLION:.1f}", f"{minutes:.0f}", f"{gain:.2f}", rank)
        label = "pretrained" if "losses" in run else "fresh weights"
        rows.append((label, *logged, *map(spread, run["scores"].values())))
    header = (
        "encoder", "million tokens", "minutes of one core", "nats below unigram",
        "rank without [MASK]", "sst2, median of 3 seeds",
    )  # fmt: skip
    return tables.markdown(header, rows)


def draw_delta(runs: dict):
    """Rank of the last layer and fine-tuning scores by delta."""
    pyplot = plotting.pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4), layout="constrained")
    deltas, by_share = list(by_delta(runs)), by_delta(runs).values()
    styles = plotting.line_styles()
    kinds = ((1, "without [MASK] in the input"), (2, "real tokens beside [MASK]"))
    for (column, label), style in zip(kinds, styles, strict=False):
        values = [run["ranks"][-1][column] for run in by_share]
        left.plot(deltas, values, **style, label=label)
    left.set(title="Rank of the last layer", ylabel="effective rank, of 128")
    (fresh,) = (run["scores"] for run in runs.values() if "losses" not in run)
    for task, style in zip(fresh, plotting.line_styles(), strict=False):
        scores = np.asarray([run["scores"][task] for run in by_share])
        middle = np.median(scores, axis=1)
        errors = [middle - scores.min(1), scores.max(1) - middle]
        right.errorbar(deltas, middle, errors, **style, capsize=3, label=task)
        right.axhline(
            np.median(fresh[task]), color=style["color"], linestyle=":", linewidth=1,
            label=f"{task}, fresh weights",
        )  # fmt: skip
    right.set(title="Fine-tuning: median, least and highest of the seeds", ylabel="score (percent)")
    for axes in (left, right):
        axes.set_xlabel("delta, the share of [MASK]s that the encoder reads")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(FIGURES / "delta.png", dpi=130)


if __name__ == "__main__":
    main()
