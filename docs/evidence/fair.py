"""Draws docs/evidence/fair.png from fair.json and prints the figures of docs/evidence.md.

Of each checkpoint, fair.json has the loss of `maelm_jax.evaluate --all_steps` and the ranks of all
layers. Arms of width 32 begin with w32. fedA is A's encoder when it reads [MASK], which it does not
in training.
"""

import json
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from maelm_jax import plotting, tables

HERE = pathlib.Path(__file__).resolve().parent
ARMS = {
    "A": "A: MAE-LM, decoder of 2 layers",
    "B": "B: as A, the encoder reads [MASK]",
    "C": "C: MLM, 2 layers more, no decoder",
    "D": "D: as C, 80/10/10",
    "fresh": "fresh weights",
}
DEPTHS = {"": 4, "w32": 8}  # layers of A's encoder, where all arms are compared
TITLES = {"": "4 + 2 layers, width 128", "w32": "8 + 2 layers, width 32"}
SEEDS, LAST = (0, 1, 2), (1, 2000)  # the last step of fresh weights is 1
PRINTED = ("plain_0.9", "plain_0.99", "gap_0.9", "mask_0.9", "mask_dimensions_0.9")


def last_ranks(records: list[dict], size: str, arm: str, kind: str) -> np.ndarray:
    """Returns the ranks of the last step, [seeds, layers]. NaN: not measured."""
    if kind == "gap_0.9":
        return np.subtract(*(last_ranks(records, size, arm, x) for x in ("all_0.9", "plain_0.9")))
    of_arm = [one for one in records if (one["size"], one["arm"]) == (size, arm)]
    return np.array([one[kind] for one in of_arm if one["step"] in LAST], float)


def print_tables(records: list[dict]):
    """Prints the layers that are compared, from lowest to highest seed, and one layer by step."""
    for size, depth in DEPTHS.items():
        rows = []
        for arm in (*ARMS, "fedA"):
            measured = [last_ranks(records, size, arm, kind) for kind in PRINTED]
            layers = sorted({depth, measured[0].shape[1] - 1})
            rows += [(arm, n, *(span(ranks[:, n]) for ranks in measured)) for n in layers]
        print(tables.markdown(("arm", "layer", *PRINTED), rows))
        fields = ("arm", "seed", "step", "loss")
        trained = [one for one in records if one["size"] == size and "loss" in one]
        rows = [(*map(one.get, fields), one["plain_0.9"][depth]) for one in trained]
        print(tables.markdown((*fields, f"plain_0.9, layer {depth}"), rows))


def span(values: np.ndarray) -> str:
    """Returns the lowest and the highest value in words."""
    return " to ".join(f"{value:.0f}" for value in np.unique([values.min(), values.max()]))


def draw(records: list[dict]):
    """Draws rank and gap by layer: medians of the seeds, bars from the lowest to the highest."""
    figure, panels = plotting.pyplot().subplots(2, 2, figsize=(10, 7.4), layout="constrained")
    for size, (top, bottom) in zip(DEPTHS, panels.T, strict=True):
        for (arm, label), style in zip(ARMS.items(), plotting.line_styles(), strict=False):
            draw_seeds(top, last_ranks(records, size, arm, "plain_0.9"), style, label)
            if arm != "fresh":
                draw_seeds(bottom, last_ranks(records, size, arm, "gap_0.9"), style, label)
        top.set(title=TITLES[size], ylabel="effective rank without [MASK] (tau 0.9)")
        top.set_ylim(bottom=0)
        bottom.set(xlabel="layer (0 is the input)", ylim=(-10, 7))
        bottom.set_ylabel("rank with minus without [MASK]")
        for axes in (top, bottom):
            axes.axvline(DEPTHS[size], color=plotting.REFERENCE, linewidth=1)
            axes.grid(alpha=0.3)
    lines = panels[0, 0].get_legend_handles_labels()
    figure.legend(*lines, fontsize=8, ncols=3, loc="outside lower center")
    figure.suptitle(
        "At equal depth, distance from the output (grey) and tokens, MLM's rank is higher"
    )
    figure.savefig(HERE / "fair.png", dpi=110)


def draw_seeds(axes, ranks: np.ndarray, style: dict, label: str):
    """Draws one line. `ranks` is [seeds, layers]."""
    middle = np.median(ranks, 0)
    bars = [middle - ranks.min(0), ranks.max(0) - middle]
    axes.errorbar(range(len(middle)), middle, bars, capsize=2, label=label, **style)


if __name__ == "__main__":
    fair = json.loads((HERE / "fair.json").read_text())
    print_tables(fair)
    draw(fair)
