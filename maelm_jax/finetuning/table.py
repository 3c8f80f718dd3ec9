"""The table of results: tasks by encoders, as Markdown, LaTeX, .csv and JSON, and as a figure."""

import csv
import io
import typing

import numpy as np
import scipy.stats

from maelm_jax import plotting, storage, tables
from maelm_jax.training.workdir import TABLE, Workdir

MARKDOWN_FILE, JSON_FILE, FIGURE_FILE = "table.md", TABLE, "differences.png"
LATEX_FILE, CSV_FILE = "table.tex", "table.csv"
CSV_COLUMNS = (
    *("encoder", "column", "centre", "value", "least", "highest", "n", "seeds"),
    *("difference", "pairs", "p", "baseline"),
)
SIGNIFICANT = 0.05
ROUNDING = 1e-9  # points: differences that are closer to each other are equal
# The columns of AVG, which is the paper's average of GLUE.
AVERAGED = (
    "MNLI-m accuracy",
    "QQP accuracy",
    "QNLI accuracy",
    "SST-2 accuracy",
    "CoLA mcc",
    "RTE accuracy",
    "MRPC accuracy",
    "STS-B spearman",
)
AVERAGE = "AVG"
MAJORITY = "majority baseline"  # row of Task.constant_outputs

Reports = dict[str, dict[str, dict]]  # {label of the encoder: {task: report of a grid}}


def labels(workdir: Workdir) -> dict[str, str]:
    """Returns {encoder, as in --init_from: its label in the table of a folder, if there is one}."""
    return {
        report["init_from"]: label
        for label, by_task in read(workdir).items()
        for report in by_task.values()
    }


def values(reports: Reports) -> dict[str, dict[str, dict]]:
    """Returns the values of the table, in percent.

    Returns:
        {encoder: {column: {"median", "least", "highest", "by_seed", "baseline"}}}. AVERAGE has a
        median only, and only for encoders that have every column of AVERAGED.
    """
    rows = {}
    for label, by_task in reports.items():
        row = {}
        for report in by_task.values():
            row |= report["columns"]
            if all(column in row for column in AVERAGED):
                total = sum(row[column]["median"] for column in AVERAGED)
                row[AVERAGE] = {"median": total / len(AVERAGED)}
        rows[label] = row
    return rows


def missing(reports: Reports, tasks: typing.Iterable[str]) -> dict[str, list[str]]:
    """Returns {task: encoders without a result}, for `tasks` and all finished tasks."""
    names = dict.fromkeys([*tasks, *(task for _, task, _ in _entries(reports))])
    without = {
        task: [label for label, by_task in reports.items() if task not in by_task] for task in names
    }
    return {task: labels for task, labels in without.items() if labels}


def markdown(reports: Reports, tasks: typing.Iterable[str] = ()) -> str:
    """Returns the table as Markdown: values, chosen cells, all cells of each grid, and notes.

    `tasks` are all planned tasks. The text names those without a result.
    """
    legend = (
        f"{_describe_centre(reports)}, least and highest in brackets, all x 100. The {MAJORITY} "
        "always gives the answer that is commonest in training."
    )
    parts = [tables.markdown(*_values_table(reports)), legend]
    if differences := _differences_table(reports):
        legend = (
            f"Mean difference from {next(iter(reports))} in points, with the p of a paired t-test "
            "over the seeds that both have. One seed, or equal differences, have no p."
        )
        parts += [legend, tables.markdown(*differences)]
    if lacking := missing(reports, tasks):
        listed = "; ".join(f"{task} with {', '.join(labels)}" for task, labels in lacking.items())
        parts.append(f"Partial: no result yet of {listed}.")
    chosen = [
        (
            task,
            *(by_task[task]["chosen"] if task in by_task else "-" for by_task in reports.values()),
        )
        for task in dict.fromkeys(task for _, task, _ in _entries(reports))
    ]
    parts += [
        "Chosen cells (batch, learning rate, epochs, warm-up):",
        tables.markdown(("task", *reports), chosen),
    ]
    for label, task, report in _entries(reports):
        if len(report["cells"]) > 1:
            parts.append(f"{task}, {label}: {report['main_metric']} of every cell")
            parts.append(_cells_table(report))
    parts.append("\n".join(_notes(reports)))
    return "\n\n".join(filter(None, parts)) + "\n"


def centre(reports: Reports) -> str:
    """Returns what the middle value of the seeds is: of two, the median is their mean."""
    return "mean" if {report["seeds"] for _, _, report in _entries(reports)} == {2} else "median"


def _describe_centre(reports: Reports) -> str:
    seeds = sorted({report["seeds"] for _, _, report in _entries(reports)})
    numbers = " or ".join(map(str, seeds))
    if seeds == [1]:
        return "Values of one seed"
    of_two = " (of two, the mean)" if 2 in seeds and len(seeds) > 1 else ""
    return f"{centre(reports).capitalize()}s over {numbers} seeds{of_two}"


class Comparison(typing.NamedTuple):
    """The differences of one encoder to another in one column, paired by seed."""

    mean: float  # points
    pairs: int
    p: float | None  # two-sided, of a paired t-test; None for one pair or equal differences


def compare(value: dict, first: dict) -> Comparison | None:
    """Returns the comparison of a value with that of the first encoder; None without pairs."""
    own, base = value.get("by_seed", {}), first.get("by_seed", {})
    differences = np.array([own[seed] - base[seed] for seed in own if seed in base])
    if not len(differences):
        return None
    p = None
    if np.ptp(differences) > ROUNDING:
        p = float(scipy.stats.ttest_1samp(differences, 0.0).pvalue)
    return Comparison(float(differences.mean()), len(differences), p)


def _differences_table(reports: Reports) -> "_Table | None":
    """Returns the comparisons with the first encoder; None if there are none."""
    (_, first), *others = values(reports).items() if reports else [("", {})]
    compared = {
        label: {column: compare(value, first.get(column, {})) for column, value in row.items()}
        for label, row in others
    }
    columns = dict.fromkeys(
        column for row in compared.values() for column, found in row.items() if found
    )
    if not columns:
        return None

    def text_of(found: Comparison | None) -> str:
        if found is None:
            return "-"
        p = "no p" if found.p is None else f"p {found.p:.2g}"
        return f"{found.mean:+.1f} ({p}, {found.pairs} seed{'s' * (found.pairs > 1)})"

    lines = [
        (label, *(text_of(row.get(column)) for column in columns))
        for label, row in compared.items()
    ]
    return _Table(("", *columns), lines)


def csv_text(reports: Reports) -> str:
    """Returns a line for each encoder and column, with the comparison with the first encoder."""
    rows = values(reports)
    first = next(iter(rows.values()), {})
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for label, row in rows.items():
        for column, value in row.items():
            by_seed = value.get("by_seed", {})
            middle = "mean" if len(by_seed) == 2 or column == AVERAGE else "median"
            compared = compare(value, first.get(column, {})) if row is not first else None
            writer.writerow(
                (
                    *(label, column, middle),
                    *(value["median"], value.get("least"), value.get("highest")),
                    *(len(by_seed) or None, " ".join(sorted(by_seed, key=int))),
                    *((compared.mean, compared.pairs, compared.p) if compared else (None,) * 3),
                    value.get("baseline"),
                )
            )
    return output.getvalue()


def latex(reports: Reports) -> str:
    """Returns the values as LaTeX. A star marks what differs from the first encoder."""
    first = next(iter(reports), "")
    seeds = dict.fromkeys(
        seed
        for row in values(reports).values()
        for value in row.values()
        for seed in value.get("by_seed", ())
    )
    text = (
        f"% {_describe_centre(reports)} ({', '.join(seeds)}), least and highest, x 100\n"
        f"% *: differs from {first}, p < {SIGNIFICANT:g} in a paired t-test over the seeds, not\n"
        "% corrected for the number of columns\n"
    )
    return f"{text}{tables.latex(*_values_table(reports, marks=True))}\n"


class _Entry(typing.NamedTuple):
    label: str  # of the encoder
    task: str
    report: dict


def _entries(reports: Reports) -> typing.Iterator[_Entry]:
    """Yields all reports, encoder by encoder."""
    for label, by_task in reports.items():
        for task, report in by_task.items():
            yield _Entry(label, task, report)


def _notes(reports: Reports) -> list[str]:
    """Returns the notes of all tasks, once each, and the encoders of those not of every encoder."""
    encoders: dict[tuple[str, str], list[str]] = {}
    for label, task, report in _entries(reports):
        for note in dict.fromkeys(report["notes"]):
            encoders.setdefault((task, note), []).append(label)
    lines = []
    for (task, note), labels in encoders.items():
        having = [label for label, by_task in reports.items() if task in by_task]
        names = (task,) if labels == having else (task, *labels)
        lines.append(f"- {', '.join(names)}: {note}")
    return lines


class _Table(typing.NamedTuple):
    header: tuple
    rows: list[tuple]


def _values_table(reports: Reports, marks: bool = False) -> _Table:
    """Returns encoders by columns. AVG stands behind the sentence tasks, as in the paper.

    With `marks`, a star marks what differs from the first encoder.
    """
    rows = values(reports)
    first = next(iter(rows.values()), {})

    def text_of(row: dict, column: str) -> str:
        text = _value_text(row.get(column))
        compared = compare(row.get(column, {}), first.get(column, {})) if marks else None
        differs = compared and compared.p is not None and compared.p < SIGNIFICANT
        return f"{text}*" if differs else text

    columns = dict.fromkeys(column for row in rows.values() for column in row)
    baseline = {
        column: {"median": value["baseline"]}
        for row in rows.values()
        for column, value in row.items()
        if "baseline" in value
    }
    lines = [
        (label, *(text_of(row, column) for column in columns))
        for label, row in [*rows.items(), (MAJORITY, baseline)]
    ]
    return _Table(("", *columns), lines)


def _value_text(value: dict | None) -> str:
    """Returns the median, and the least and highest value if they differ."""
    if value is None:
        return "-"
    median = f"{value['median']:.1f}"
    if value.get("highest", 0) > value.get("least", 0):
        return f"{median} ({value['least']:.1f}-{value['highest']:.1f})"
    return median


def _cells_table(report: dict) -> str:
    """Returns the scores of all cells of one grid."""
    names = ("median", "least", "highest")
    header = "mean" if report["seeds"] == 2 else "median", *names[1:]
    lines = [
        (
            cell["name"],
            *("diverged" if cell[name] is None else f"{cell[name]:.4f}" for name in names),
        )
        for cell in report["cells"]
    ]
    return tables.markdown(("cell", *header), lines)


def write(reports: Reports, workdir: Workdir, tasks: typing.Iterable[str] = ()):
    """Writes table.md, .csv, .tex and .json and, for two encoders or more, their differences."""
    folder = workdir.folder
    storage.write(folder / MARKDOWN_FILE, markdown(reports, tasks))
    storage.write(folder / CSV_FILE, csv_text(reports))
    storage.write(folder / LATEX_FILE, latex(reports))
    content = {"columns": values(reports), "missing": missing(reports, tasks), "reports": reports}
    storage.write_json(folder / JSON_FILE, content)
    if len(reports) > 1:
        pyplot = plotting.pyplot()
        figure = figure_of(values(reports), centre(reports))
        figure.savefig(folder / FIGURE_FILE, dpi=120)
        figure.savefig((folder / FIGURE_FILE).with_suffix(".pdf"))
        pyplot.close(figure)


def read(workdir: Workdir) -> Reports:
    """Returns the reports in the table.json of a folder; {} if there is none."""
    path = workdir.folder / JSON_FILE
    if not path.exists():
        return {}
    with storage.reading(path, "remove it, and give the commands of the table again"):
        return storage.read_json(path)["reports"]


def figure_of(values: dict[str, dict[str, dict]], centre: str = "median"):
    """Returns a matplotlib Figure of the differences to the first encoder, by column.

    A marker is the median of an encoder minus the median of the first one. Labels call the median
    `centre`. The bar extends from the lowest to the highest seed of the encoder. The title names
    the columns that are left out, because some encoder does not have them.
    """
    pyplot = plotting.pyplot()
    first, base = next(iter(values.items()))
    all_columns = dict.fromkeys(column for row in values.values() for column in row)
    all_columns.pop(AVERAGE, None)  # it has no spread
    columns = [column for column in all_columns if all(column in row for row in values.values())]
    size = (3.5 + 0.9 * max(len(columns), 3), 4.5)
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    axes.axhline(0.0, color=plotting.REFERENCE, linewidth=1, label=f"{centre} of {first}")
    step = min(0.2, 0.8 / len(values))
    for number, (style, (label, row)) in enumerate(
        zip(plotting.line_styles(), values.items(), strict=False)
    ):
        shift = step * (number - (len(values) - 1) / 2)
        cells = [row[column] for column in columns]
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
    axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
    axes.set_xlim(-0.5, max(len(columns), 1) - 0.5)
    axes.set(ylabel=f"points above {first}\n({centre}; least to highest seed)")
    left_out = [column for column in all_columns if column not in columns]
    note = f"\nleft out, not of every encoder: {', '.join(left_out)}" if left_out else ""
    axes.set_title(f"Which encoder scores above {first}?{note}", fontsize="medium", wrap=True)
    figure.legend(loc="outside right upper")
    return figure
