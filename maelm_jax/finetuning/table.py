"""The table of results: tasks by encoders, as Markdown, as JSON, and as a figure of differences."""

import typing

from maelm_jax import plotting, storage, tables
from maelm_jax.training.workdir import TABLE, Workdir

MARKDOWN_FILE, JSON_FILE, FIGURE_FILE = "table.md", TABLE, "differences.png"
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


def values(reports: Reports) -> dict[str, dict[str, dict]]:
    """Returns the values of the table, in percent.

    Returns:
        {encoder: {column: {"median", "least", "highest", "baseline"}}}. AVERAGE has a median only,
        and only for encoders that have every column of AVERAGED.
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
    """Returns {task: encoders without a result}, for `tasks` and those that some encoder has."""
    names = dict.fromkeys([*tasks, *(task for _, task, _ in _entries(reports))])
    without = {
        task: [label for label, by_task in reports.items() if task not in by_task] for task in names
    }
    return {task: labels for task, labels in without.items() if labels}


def markdown(reports: Reports, tasks: typing.Iterable[str] = ()) -> str:
    """Returns the table as Markdown: values, chosen cells, all cells of each grid, and notes.

    `tasks` are all planned tasks. The text names those without a result.
    """
    seeds = sorted({report["seeds"] for _, _, report in _entries(reports)})
    legend = (
        f"Medians over {' or '.join(map(str, seeds))} seed(s), least and highest in brackets, all "
        f"x 100. The {MAJORITY} always gives the answer that is commonest in training."
    )
    parts = [_values_table(reports), legend]
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


def _values_table(reports: Reports) -> str:
    """Returns encoders by columns. AVG stands behind the sentence tasks, as in the paper."""
    rows = values(reports)
    columns = dict.fromkeys(column for row in rows.values() for column in row)
    baseline = {
        column: {"median": value["baseline"]}
        for row in rows.values()
        for column, value in row.items()
        if "baseline" in value
    }
    lines = [
        (label, *(_value_text(row.get(column)) for column in columns))
        for label, row in [*rows.items(), (MAJORITY, baseline)]
    ]
    return tables.markdown(("", *columns), lines)


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
    lines = [
        (
            cell["name"],
            *("diverged" if cell[name] is None else f"{cell[name]:.4f}" for name in names),
        )
        for cell in report["cells"]
    ]
    return tables.markdown(("cell", *names), lines)


def write(reports: Reports, workdir: Workdir, tasks: typing.Iterable[str] = ()):
    """Writes table.md, table.json and, for two encoders or more, differences.png."""
    folder = workdir.folder
    storage.write(folder / MARKDOWN_FILE, markdown(reports, tasks))
    content = {"columns": values(reports), "missing": missing(reports, tasks), "reports": reports}
    storage.write_json(folder / JSON_FILE, content)
    if len(reports) > 1:
        pyplot = plotting.pyplot()
        figure = figure_of(values(reports))
        figure.savefig(folder / FIGURE_FILE, dpi=120)
        pyplot.close(figure)


def read(workdir: Workdir) -> Reports:
    """Returns the reports in the table.json of a folder; {} if there is none."""
    path = workdir.folder / JSON_FILE
    if not path.exists():
        return {}
    with storage.reading(path, "remove it, and give the commands of the table again"):
        return storage.read_json(path)["reports"]


def figure_of(values: dict[str, dict[str, dict]]):
    """Returns a matplotlib Figure of the differences to the first encoder, by column.

    A marker is the median of an encoder minus the median of the first one. Its bar extends from
    the lowest to the highest seed of the encoder. The title names the columns that are left out,
    because some encoder does not have them.
    """
    pyplot = plotting.pyplot()
    first, base = next(iter(values.items()))
    all_columns = dict.fromkeys(column for row in values.values() for column in row)
    all_columns.pop(AVERAGE, None)  # it has no spread
    columns = [column for column in all_columns if all(column in row for row in values.values())]
    size = (3.5 + 0.9 * max(len(columns), 3), 4.5)
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    axes.axhline(0.0, color=plotting.REFERENCE, linewidth=1, label=f"median of {first}")
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
    axes.set_xlim(-0.6, max(len(columns), 3) - 0.4)  # of one column, its points lie together
    axes.set(ylabel=f"points above {first}\n(median; least to highest seed)")
    left_out = [column for column in all_columns if column not in columns]
    note = f"\nleft out, not of every encoder: {', '.join(left_out)}" if left_out else ""
    axes.set_title(f"Which encoder scores above {first}?{note}", fontsize="medium", wrap=True)
    figure.legend(loc="outside right upper")
    return figure
