"""Aligned tables, as Markdown and for the terminal."""

import collections.abc

import tabulate

tabulate.MIN_PADDING = 0  # no wider than the header

Cells = collections.abc.Sequence  # of one row; each cell is printed with str()


def markdown(header: Cells, rows: collections.abc.Iterable[Cells], left: int = 1) -> str:
    """Returns a Markdown table. The first `left` columns are left-aligned, the others right."""
    return _format(header, rows, left, "pipe")


def plain(header: Cells, rows: collections.abc.Iterable[Cells], left: int = 1) -> str:
    """Returns a table for the terminal. The first `left` columns are left-aligned."""
    return _format(header, rows, left, "plain")


def latex(header: Cells, rows: collections.abc.Iterable[Cells], left: int = 1) -> str:
    """Returns a tabular of LaTeX for the package booktabs. Signs of LaTeX in cells are escaped."""
    return _format(header, rows, left, "latex_booktabs")


def _format(header: Cells, rows: collections.abc.Iterable[Cells], left: int, layout: str) -> str:
    alignment = ["left" if number < left else "right" for number in range(len(header))]
    cells = [[str(cell) for cell in row] for row in rows]
    # tabulate would align numbers by itself, and shorten them.
    return tabulate.tabulate(
        cells,
        [str(cell) for cell in header],
        tablefmt=layout,
        colalign=alignment if cells else None,
        disable_numparse=True,
    )
