"""Draws docs/figures/what_encoders_read.png: what the encoder reads in MLM and in MAE-LM.

python docs/figures/what_encoders_read.py
"""

import pathlib

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch

TOKENS = ("the", "cat", "sat", "on", "the", "mat")
MASKED = (2, 5)  # masked positions
REAL, MASK, ENCODER, DECODER = "#56B4E9", "#E69F00", "#D9D9D9", "#F2F2F2"  # Okabe-Ito blue, orange
STEP = 1.15  # from one token to the next


def box(axes, x: float, y: float, width: float, text: str, color: str, height: float = 0.62):
    """Draws a labelled box centred at (x, y)."""
    corner = (x - width / 2, y - height / 2)
    style = "round,pad=0.02,rounding_size=0.1"
    axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=color))
    axes.text(x, y, text, ha="center", va="center", fontsize=9)


def tokens(axes, y: float, show: dict[int, str], masked_as: str = "[MASK]"):
    """Draws one box a position: `show` maps position to text; masked positions are orange."""
    for position, text in show.items():
        color = MASK if text == masked_as else REAL
        box(axes, position * STEP, y, 1.0, text, color)


def arrow(axes, x: float, low: float, high: float):
    """Draws an arrow upwards at `x`."""
    axes.annotate("", (x, high), (x, low), arrowprops={"arrowstyle": "-|>", "color": "0.3"})


def mlm(axes):
    """MLM: the encoder reads every position, [MASK] included."""
    masked_text = {p: "[MASK]" if p in MASKED else token for p, token in enumerate(TOKENS)}
    tokens(axes, 0, masked_text)
    box(axes, 2.5 * STEP, 1.5, 6.8, "encoder: every layer represents [MASK] as well", ENCODER, 0.9)
    for position in range(len(TOKENS)):
        arrow(axes, position * STEP, 0.35, 1.0)
    for position in MASKED:
        arrow(axes, position * STEP, 2.0, 4.95)
        box(axes, position * STEP, 5.3, 1.0, TOKENS[position], "white")


def mae_lm(axes):
    """MAE-LM: the encoder reads unmasked tokens only; the decoder puts [MASK] back."""
    visible = {p: token for p, token in enumerate(TOKENS) if p not in MASKED}
    tokens(axes, 0, visible)
    box(axes, 2.5 * STEP, 1.5, 6.8, "encoder: real tokens only, at their positions", ENCODER, 0.9)
    for position in visible:
        arrow(axes, position * STEP, 0.35, 1.0)
        arrow(axes, position * STEP, 2.0, 2.45)
    states = {p: "[MASK]" if p in MASKED else "state" for p in range(len(TOKENS))}
    tokens(axes, 2.8, states)
    box(axes, 2.5 * STEP, 4.0, 6.8, "shallow decoder, dropped after pretraining", DECODER)
    for position in range(len(TOKENS)):
        arrow(axes, position * STEP, 3.15, 3.65)
    for position in MASKED:
        arrow(axes, position * STEP, 4.35, 4.95)
        box(axes, position * STEP, 5.3, 1.0, TOKENS[position], "white")


def main():
    """Draws the figure."""
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    titles = (
        "MLM (BERT, RoBERTa): the encoder reads [MASK]",
        "MAE-LM: the encoder reads no [MASK]",
    )
    for axes, draw, title in zip(panels, (mlm, mae_lm), titles, strict=True):
        draw(axes)
        axes.text(1.3 * STEP, 5.3, "predicted:", ha="right", va="center", fontsize=9)
        axes.set(xlim=(-0.8, 6.6), ylim=(-0.6, 5.8))
        axes.set_title(title, pad=10)
        axes.axis("off")
    path = pathlib.Path(__file__).with_suffix(".png")
    figure.savefig(path, dpi=110)
    print(path)


if __name__ == "__main__":
    main()
