"""The tables of docs/evidence.md in Markdown, from the JSON files of this folder."""

import json
import pathlib
import typing

import finetune_vs_transformers
import numpy as np

from maelm_jax import tables
from maelm_jax.analysis import ranks

HERE = pathlib.Path(__file__).resolve().parent
OBJECTIVES = {"mae": "MAE-LM", "mlm": "MLM"}
RECIPES = {
    "adamw": "AdamW, mask rate 0.15",
    "muon": "Muon, mask rate 0.15",
    "muon40": "Muon, mask rate 0.40",
}
MINILM = {
    "MiniLM": "as it is",
    "MiniLM-fresh-pooler": "as it is, fresh pooler",
    "minilm-mae": "MAE-LM, decoder without relative positions",
    "minilm-mae-relative": "MAE-LM",
    "minilm-mlm": "MLM",
    "minilm-mae-low": "MAE-LM, a fifth of the rates",
    "minilm-mlm-low": "MLM, a fifth of the rates",
}
# The runs of pair.json, and their control.
PAIR = {"mae": "MAE-LM", "mlm": "MLM", "random-mae": "fresh weights"}
# Each was written by one call of the benchmark.
TUNING = ("finetuning", "finetuning_cola", "finetuning_mrpc", "finetuning_rte")
TRAINING_SETS = {"mrpc": 3_668, "rte": 2_490}  # examples where the files have fewer than asked
MILLION = 10**6


def all_tables() -> dict[str, str]:
    """The tables of docs/evidence.md, in Markdown."""
    return {
        "screening": screening_table(read("screening")),
        "variations": screening_table(read("variations"), has_times=False),
        "adamw": screening_table(read("adamw"), has_times=False),
        "recipe": recipe_table(read("recipe"), read("step_times")),
        "continued": screening_table(read("continued")),
        "exact": exact_table(read("finetuning_exact")),
        "finetuning": tuning_table(comparisons()),
        "encoders": encoders_table(read("encoders")),
        "delta": delta_table(read("delta")),
        "longer": longer_table(read("longer")),
        "pair": pair_table(read("pair")),
        "scores": scores_table(read("pair")),
        "minilm": minilm_table(read("minilm"), minilm_ranks()),
    }


def read(name: str) -> dict:
    """The content of a JSON file of this folder."""
    return json.loads((HERE / f"{name}.json").read_text())


def minilm_ranks() -> dict[str, list[dict]]:
    """The ranks by layer of MiniLM and of the runs that continued it, by the keys of MINILM."""
    layers = {run["name"]: run["layers"] for run in read("minilm_ranks")["runs"]}
    as_it_is = {run["name"]: run["layers"] for run in read("encoders")["runs"]}
    return {"MiniLM": as_it_is["all-MiniLM-L6-v2"]} | layers


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
        rows.append(
            (
                name,
                f"{run['tokens'] / MILLION:.1f}",
                f"{loss:.3f}",
                f"{run['unigram'] - loss:.2f}",
                *times,
                run["ranks"][-1][1],
            )
        )
    header = (
        "run",
        "million tokens",
        "held-out loss",
        "below unigram",
        *(("ms a step", "minutes") if has_times else ()),
        "rank of the last layer",
    )
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
        timed: The content of step_times.json: runs of 300 steps, one core each, another run on the
            other core.
    """
    rows = []
    for (recipe, objective), seeds in groups(runs).items():
        gains = [run["unigram"] - run["losses"][-1][1] for run in seeds]
        last = [run["ranks"][-1] for run in seeds]
        rows.append(
            (
                OBJECTIVES[objective],
                RECIPES[recipe],
                len(seeds),
                mean_and_interval(gains),
                f"{1000 * timed[f'{recipe}-{objective}']['seconds_a_step']:.0f}",
                ", ".join(str(rank[1]) for rank in last),
                ", ".join(str(rank[2]) for rank in last),
            )
        )
    header = (
        "objective",
        "recipe",
        "seeds",
        "nats below unigram",
        "ms a step",
        "rank without [MASK], each seed",
        "rank of real tokens beside [MASK], each seed",
    )
    return tables.markdown(header, rows, left=2)


class Comparison(typing.NamedTuple):
    """The scores of one task from both programs, in percent."""

    task: str
    examples: int  # in training
    ours: list[float]  # one a seed
    theirs: list[float]

    @property
    def difference(self) -> finetune_vs_transformers.Difference:
        """The difference of the means, maelm_jax minus transformers, and its interval."""
        return finetune_vs_transformers.difference(self.ours, self.theirs)


def comparisons() -> list[Comparison]:
    """All tasks of the files that benchmarks/finetune_vs_transformers.py wrote."""
    return [
        Comparison(
            task,
            TRAINING_SETS.get(task, content["settings"]["examples"]),
            scores["maelm_jax"],
            scores["transformers"],
        )
        for content in map(read, TUNING)
        for task, scores in content["scores"].items()
    ]


def exact_table(content: dict) -> str:
    """One row a task: how far the logits of two trainings without randomness are apart."""
    rows = [
        (
            task,
            values["steps"],
            f"{values['difference']:.1e}",
            f"{values['deviation']:.2f}",
            f"{values['same_labels']:.1f}%",
        )
        for task, values in content["agreements"].items()
    ]
    header = (
        "task",
        "steps",
        "largest difference of a logit",
        "standard deviation of the logits",
        "same label",
    )
    return tables.markdown(header, rows)


def tuning_table(compared: list[Comparison]) -> str:
    """One row a task: both means, their difference and its interval."""
    rows = []
    for one in compared:
        mean, low, high = one.difference
        means = (f"{np.mean(x):.2f} (sd {np.std(x, ddof=1):.2f})" for x in (one.ours, one.theirs))
        rows.append(
            (
                one.task,
                f"{one.examples:,}",
                *means,
                len(one.ours),
                f"{mean:+.2f}",
                f"{low:+.2f} to {high:+.2f}",
            )
        )
    header = (
        "task",
        "training examples",
        "maelm_jax",
        "transformers",
        "seeds",
        "difference",
        "95% interval",
    )
    return tables.markdown(header, rows)


def encoders_table(content: dict) -> str:
    """One row for the last layer of each encoder."""
    rows = []
    for run in content["runs"]:
        last = run["layers"][-1]
        rows.append(
            (
                run["name"],
                run["width"],
                last["plain"],
                last["real"],
                last["all"],
                f"{run['layers'][1]['mask']} -> {last['mask']}",
            )
        )
    header = (
        "encoder",
        "width",
        "without [MASK]",
        "real tokens beside [MASK]",
        "all tokens of masked input",
        "[MASK], layer 1 -> last layer",
    )
    return tables.markdown(header, rows)


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
        "delta",
        "nats below unigram",
        "rank without [MASK]",
        "rank of real tokens beside [MASK]",
        *(f"{task}, median of {len(scores)} seeds" for task, scores in fresh.items()),
    )
    return tables.markdown(header, rows)


def longer_table(runs: dict) -> str:
    """One row for the run, and one for the same model with fresh weights."""
    (run,) = (run for run in runs.values() if "losses" in run)
    (fresh,) = (runs[name] for name in runs if name.startswith("random-"))
    steps, loss = run["losses"][-1]
    logged = (
        f"{run['tokens'] / MILLION:.1f}",
        f"{steps * run['seconds_a_step'] / 60:.0f}",
        f"{run['unigram'] - loss:.2f}",
        run["ranks"][-1][1],
    )
    rows = [
        ("pretrained", *logged, *map(spread, run["scores"].values())),
        ("fresh weights", *[""] * len(logged), *map(spread, fresh["scores"].values())),
    ]
    header = (
        "encoder",
        "million tokens",
        "minutes of one core",
        "nats below unigram",
        "rank without [MASK]",
        "sst2, median of 3 seeds",
    )
    return tables.markdown(header, rows)


def pair_table(runs: dict) -> str:
    """One row for each objective: what its pretraining took and reached."""
    rows = []
    for name, words in PAIR.items():
        if "losses" in (run := runs[name]):
            steps, loss = run["losses"][-1]
            rows.append(
                (
                    words,
                    f"{run['tokens'] / MILLION:.1f}",
                    f"{steps * run['seconds_a_step'] / 60:.0f}",
                    f"{run['unigram'] - loss:.2f}",
                    *run["ranks"][-1][1:],
                )
            )
    header = (
        "objective",
        "million tokens",
        "minutes of one core",
        "nats below unigram",
        "rank without [MASK]",
        "rank of real tokens beside [MASK]",
        "of all tokens of masked input",
    )
    return tables.markdown(header, rows)


def gain(scores: list[float], control: list[float]) -> str:
    """The difference of two means and its 95% interval, in words."""
    mean, low, high = finetune_vs_transformers.difference(scores, control)
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def scores_table(runs: dict) -> str:
    """One row a task: the scores of each encoder of PAIR, and what pretraining gained."""
    scores = {words: runs[name]["scores"] for name, words in PAIR.items()}
    fresh = scores["fresh weights"]
    rows = [
        (
            task,
            *(spread(of_tasks[task]) for of_tasks in scores.values()),
            *(gain(scores[words][task], control) for words in OBJECTIVES.values()),
        )
        for task, control in fresh.items()
    ]
    header = ("task", *scores, *(f"{words} gains" for words in OBJECTIVES.values()))
    return tables.markdown(header, rows)


def minilm_table(runs: dict, ranks: dict[str, list[dict]]) -> str:
    """One row for MiniLM as it is, and one for each objective that it was continued with.

    Args:
        runs: The content of minilm.json.
        ranks: The result of `minilm_ranks`.
    """
    rows = []
    for name, words in MINILM.items():
        run, logged, measured = runs[name], ("", ""), ("", "", "")
        if name in ranks:
            measured = tuple(ranks[name][-1][kind] for kind in ("plain", "real", "all"))
        if "losses" in run:
            gain = run["unigram"] - run["losses"][-1][1]
            logged = (f"{run['tokens'] / MILLION:.1f}", f"{gain:.2f}")
        scores = map(spread, run["scores"].values())
        rows.append((words, *logged, *measured, *scores))
    header = (
        "MiniLM",
        "million tokens",
        "nats below unigram",
        "rank without [MASK]",
        "real tokens beside [MASK]",
        "all tokens of masked input",
        *(f"{task}, median of {len(x)} seeds" for task, x in runs["MiniLM"]["scores"].items()),
    )
    return tables.markdown(header, rows)
