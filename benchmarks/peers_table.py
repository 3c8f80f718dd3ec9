"""Draws the table and the figure of what against_peers.py has measured.

    python benchmarks/peers_table.py --output=runs/peers

Writes peers.md and, for each size, peers-SIZE.png into --output, and prints the table. Values are
means over seeds; +- is half of their range. With one seed, the interval of BLiMP is over pairs. The
seconds of peers_on_gpu.py are those of a GPU, without the start.

steps          of the rows in `batch`
ms a step      CPU time, of the fastest turn on a quiet core (or GPU time)
startup        CPU seconds of imports, compilation and all else before the first step
CPU s          that the whole run took; more than the budget if other work shared the machine
loss           nats of a masked token, at 15% of the held-out text
bits a char.   loss / ln 2 / characters of a token: the same loss without the vocabulary's share
BERT's loss    seconds until the curve of the arm crosses the final loss of `bert`, and their share
               of the time of `bert`
BLiMP          % of minimal pairs, mean over paradigms
SST-2 ...      linear probes: accuracy in %; of CoLA 100 x Matthews correlation
"""

import argparse
import itertools
import json
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from maelm_jax import plotting, tables

TITLES = {
    "bert": "BERT, PyTorch (run_mlm)",
    "bert_recipe": "BERT, PyTorch, our recipe",
    "mpnet": "MPNet, PyTorch",
    "modernbert": "ModernBERT, PyTorch",
    "modernbert_recipe": "ModernBERT, PyTorch, our recipe",
    "modernbert_mask": "ModernBERT, PyTorch, always [MASK]",
    "modernbert_ours": "ModernBERT, PyTorch, our recipe and attention",
    "mlm": "MLM, ours",
    "mlm_modern": "MLM, ModernBERT's layers, ours",
    "mae_lm": "MAE-LM, ours",
    "mae_lm_cheap": "MAE-LM, cheap decoder, ours",
    "mae_lm_modern": "MAE-LM, cheap, ModernBERT's layers, ours",
}
# Colour and dashes: black and blue for PyTorch, warm and green for ours; full lines for the arms
# with ModernBERT's layers.
STYLES = {
    "bert": ("black", ":"),
    "bert_recipe": ("black", "-."),
    "mpnet": ("0.5", ":"),
    "modernbert": ("black", "-"),
    "modernbert_recipe": ("#0072B2", "-"),
    "modernbert_mask": ("0.5", "-"),
    "modernbert_ours": ("#56B4E9", "-"),
    "mlm": ("#D55E00", ":"),
    "mlm_modern": ("#D55E00", "-"),
    "mae_lm": ("#CC79A7", ":"),
    "mae_lm_cheap": ("#009E73", ":"),
    "mae_lm_modern": ("#009E73", "-"),
}
TASKS = ("SST-2", "CoLA", "MRPC", "RTE", "QQP", "MNLI")
HEADER = (
    "arm",
    "size",
    "seeds",
    "batch",
    "rate",
    "steps",
    "M tokens",
    "ms a step",
    "startup",
    "CPU s",
    "loss",
    "bits a char.",
    "BERT's loss",
    "BLiMP",
    *TASKS,
)
# Largest difference of a loss that PyTorch and JAX compute of the same weights, in nats.
SAME_LOSS = 1e-3


def main():
    """Writes the table and the figures."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--output", type=pathlib.Path, required=True, help="that of against_peers")
    folder = flags.parse_args().output
    files = sorted(folder.glob("*-s[0-9]*.json"))
    runs = [{"gpu": None} | json.loads(file.read_text()) for file in files]
    if not runs:
        sys.exit(f"{folder}: no finished run there")
    check_same_loss(runs)
    rows = []
    for size in sorted({run["size"] for run in runs}):
        of_size = [run for run in runs if run["size"] == size]
        rows += [row_of(arm, of_size) for arm in TITLES if runs_of(arm, of_size)]
        draw(of_size, folder / f"peers-{size}.png")
    rows.append(row_of_constant_answer(runs))
    table = tables.markdown(HEADER, rows)
    (folder / "peers.md").write_text(table + "\n")
    print(table)


def runs_of(arm: str, runs: list[dict]) -> list[dict]:
    """Returns the runs of an arm."""
    return [run for run in runs if run["arm"] == arm]


def check_same_loss(runs: list[dict]):
    """Ends the command if PyTorch and JAX computed different losses of the same weights."""
    for run in runs:
        checked = run["checked_loss"]
        if checked and abs(checked["pytorch"] - checked["jax"]) > SAME_LOSS:
            sys.exit(f"{run['arm']}, seed {run['seed']}: PyTorch and JAX disagree: {checked}")


def row_of(arm: str, runs: list[dict]) -> list[str]:
    """Returns the cells of an arm; `runs` are those of all arms of a size."""
    own = runs_of(arm, runs)
    first = own[0]
    rate = "recipe" if first["learning_rate"] is None else f"{first['learning_rate']:g}"
    seconds = [value for run in own if (value := seconds_to_peer(run, runs))]
    reached = "not reached" if runs_of("bert", runs) else "-"
    if len(seconds) == len(own):
        whole = runs_of("bert", runs)[0]["curve"][-1]["seconds"]
        reached = f"{mean_of(seconds, '.0f')} ({np.mean(seconds) / whole:.0%})"
    blimp = [100 * run["blimp"]["accuracy"] for run in own if run["blimp"]]
    cells = mean_of(blimp, ".1f")
    if len(blimp) == 1:
        cells = f"{blimp[0]:.1f} +- {100 * first['blimp']['half']:.1f}"
    return [
        TITLES[arm],
        first["size"],
        ", ".join(str(run["seed"]) for run in own),
        first["batch_size"],
        rate,
        f"{first['steps']:,}",
        f"{first['curve'][-1]['tokens'] / 1e6:.1f}",
        f"{1000 * first['step_seconds']:.{1 if first['gpu'] else 0}f}",
        "-" if first["gpu"] else f"{first['startup_seconds']:.0f}",
        mean_of([run["cpu_seconds"] for run in own if not run["gpu"]], ".0f"),
        mean_of([run["curve"][-1]["loss"] for run in own], ".3f"),
        mean_of([run["curve"][-1]["bits_per_character"] for run in own], ".3f"),
        reached,
        cells,
        *(probe_of(task, own) for task in TASKS),
    ]


def row_of_constant_answer(runs: list[dict]) -> list[str]:
    """Returns the cells of what needs no encoder: a coin for pairs, the most frequent class."""
    probed = [run["probes"] for run in runs if run["probes"]]
    shares = [
        mean_of(
            [100 * probes[task]["most frequent class"] for probes in probed if task in probes][:1],
            ".1f",
        )
        for task in TASKS
    ]
    return ["constant answer", *["-"] * (len(HEADER) - len(TASKS) - 2), "50.0", *shares]


def mean_of(values: list[float], form: str) -> str:
    """Returns the mean, with half of the range if there is more than one value."""
    if not values:
        return "-"
    text = f"{np.mean(values):{form}}"
    return f"{text} +- {np.ptp(values) / 2:{form}}" if len(values) > 1 else text


def probe_of(task: str, runs: list[dict]) -> str:
    """Returns the mean score of a probe over the folds of the seeds that have it."""
    scores = [run["probes"][task]["folds"] for run in runs if task in (run["probes"] or {})]
    return mean_of([100 * np.mean(folds) for folds in scores], ".1f")


def seconds_to_peer(run: dict, runs: list[dict]) -> float | None:
    """Returns the seconds until a run has the final loss of `bert`, the mean over its seeds.

    Between checkpoints the loss is taken as linear. None: it does not get there, or there is no
    such run.
    """
    peers = runs_of("bert", runs)
    if not peers:
        return None
    target, curve = np.mean([peer["curve"][-1]["loss"] for peer in peers]), run["curve"]
    if curve[0]["loss"] <= target:
        return curve[0]["seconds"]
    for before, after in itertools.pairwise(curve):
        if after["loss"] <= target:
            share = (before["loss"] - target) / (before["loss"] - after["loss"])
            return before["seconds"] + share * (after["seconds"] - before["seconds"])
    return None


def draw(runs: list[dict], file: pathlib.Path):
    """Draws the held-out loss over time and over tokens, a line for each run."""
    gpu = runs[0]["gpu"]
    time, unit = ("GPU time", 1) if gpu else ("CPU time of one core", 60)
    included = "seconds, without the start" if gpu else "minutes, imports and compilation included"
    pyplot = plotting.pyplot()
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.8), sharey=True, layout="constrained")
    for arm, (colour, dashes) in STYLES.items():
        for number, run in enumerate(runs_of(arm, runs)):
            losses = [point["loss"] for point in run["curve"]]
            times = [point["seconds"] / unit for point in run["curve"]]
            tokens = [point["tokens"] / 1e6 for point in run["curve"]]
            style = {"color": colour, "linestyle": dashes, "marker": "o", "markersize": 3}
            if number == 0:  # the other seeds took the same steps, on any machine
                panels[0].plot(times, losses, label=TITLES[arm], **style)
            panels[1].plot(tokens, losses, **style)
    panels[0].set(
        xlabel=f"{time} ({included})",
        ylabel="held-out loss (nats a masked token, 15% masked)",
    )
    panels[1].set(xlabel="tokens read (millions)")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    for panel in panels:
        panel.grid(alpha=0.3)
    equal = "tokens" if gpu else time
    figure.suptitle(f"Which encoder of {runs[0]['size']} learns most from the same {equal}?")
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
