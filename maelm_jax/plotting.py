"""Styles that all figures share: colour-blind-safe colours, markers and dashes."""

import itertools
import typing

# The colour-blind-safe palette of Okabe and Ito, without its yellow, which is too light for a line.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Four dashes and nine markers share no factor, so 36 lines differ without colour.
MARKERS = ("o", "s", "^", "D", "v", "*", "X", "P", "<")
DASHES = ("-", "--", ":", "-.")
REFERENCE = "0.5"  # grey of reference lines


def pyplot():
    """Returns matplotlib.pyplot with a backend that needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def line_styles() -> typing.Iterator[dict]:
    """Yields the keyword arguments of `Axes.plot` for one line after the other."""
    styles = zip(*map(itertools.cycle, (COLOURS, MARKERS, DASHES)), strict=False)
    for colour, marker, dashes in styles:
        yield {
            "color": colour,
            "marker": marker,
            "linestyle": dashes,
            "markersize": 4.5,
            "linewidth": 1.3,
        }
