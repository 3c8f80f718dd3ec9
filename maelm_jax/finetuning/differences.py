"""The figure of the table: differences of the encoders to the first one, by column."""

import pathlib

from maelm_jax import plotting

FILE = "differences.png"
WITHOUT_SPREAD = "AVG"  # a column that has a median only, and is not drawn

Values = dict[str, dict[str, dict]]  # result of table.values


def plot(values: Values, folder: pathlib.Path):
    """Writes the figure of `figure_of` to differences.png."""
    pyplot = plotting.pyplot()
    figure = figure_of(values)
    figure.savefig(folder / FILE, dpi=120)
    pyplot.close(figure)


def figure_of(values: Values):
    """A matplotlib Figure of the differences to the first encoder, by column.

    A marker is the median of an encoder minus the median of the first one. Its bar extends from
    the lowest to the highest seed of the encoder. The title names the columns that are left out,
    because some encoder does not have them.
    """
    pyplot = plotting.pyplot()
    first = next(iter(values))
    all_columns = dict.fromkeys(column for row in values.values() for column in row)
    all_columns.pop(WITHOUT_SPREAD, None)
    columns = [column for column in all_columns if all(column in row for row in values.values())]
    size = (3.5 + 0.9 * max(len(columns), 3), 4.5)
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    axes.axhline(0.0, color=plotting.REFERENCE, linewidth=1, label=f"median of {first}")
    step = min(0.2, 0.8 / len(values))
    styles = plotting.line_styles()
    for number, (label, row) in enumerate(values.items()):
        style = next(styles)
        shift = step * (number - (len(values) - 1) / 2)
        cells, base = [row[column] for column in columns], values[first]
        axes.errorbar(
            [position + shift for position in range(len(columns))],
            [row[column]["median"] - base[column]["median"] for column in columns],
            yerr=[
                [cell["median"] - cell["least"] for cell in cells],
                [cell["highest"] - cell["median"] for cell in cells],
            ],
            fmt=style["marker"],
            color=style["color"],
            capsize=3,
            label=label,
        )
    axes.set_xticks(range(len(columns)), columns, rotation=30)
    axes.set_xlim(-0.6, max(len(columns), 3) - 0.4)  # of one column, its points lie together
    axes.set(ylabel=f"points above {first}\n(median; least to highest seed)")
    left_out = [column for column in all_columns if column not in columns]
    note = f"\nleft out, not of every encoder: {', '.join(left_out)}" if left_out else ""
    axes.set_title(f"Which encoder scores above {first}?{note}", fontsize="medium", wrap=True)
    figure.legend(loc="outside right upper")
    return figure
