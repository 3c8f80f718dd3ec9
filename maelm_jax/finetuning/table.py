"""The table of results: tasks by encoders, as Markdown, as JSON and as a figure."""

import pathlib
import typing

from maelm_jax import plotting, tables
from maelm_jax.finetuning import session

# (column, task, metric, factor to percent), in the order of the paper's tables.
COLUMNS = (
    ("MNLI-m", "mnli", "matched_accuracy", 100), ("MNLI-mm", "mnli", "mismatched_accuracy", 100),
    ("QQP", "qqp", "accuracy", 100), ("QNLI", "qnli", "accuracy", 100),
    ("SST-2", "sst2", "accuracy", 100), ("CoLA", "cola", "mcc", 100),
    ("RTE", "rte", "accuracy", 100),
    ("MRPC", "mrpc", "accuracy", 100), ("STS-B", "stsb", "spearman", 100),
    ("WNLI", "wnli", "accuracy", 100), ("Own", "own", "accuracy", 100),
    ("SQuAD1 EM", "squad1", "exact", 1), ("SQuAD1 F1", "squad1", "f1", 1),
    ("SQuAD2 EM", "squad2", "best_exact", 1), ("SQuAD2 F1", "squad2", "best_f1", 1),
)  # fmt: skip
# The columns of AVG, which is the paper's average of GLUE.
AVERAGED = ("MNLI-m", "QQP", "QNLI", "SST-2", "CoLA", "RTE", "MRPC", "STS-B")

ORDER = (*(column for column, *_ in COLUMNS[:11]), "AVG", *(column for column, *_ in COLUMNS[11:]))

Reports = dict[str, dict[str, dict]]  # {label of the encoder: {task: result of grid.summary}}


def values(reports: Reports) -> dict[str, dict[str, dict]]:
    """The values of the table, in percent.

    Returns:
        {encoder: {column: {"median", "least", "highest"}}}. "AVG" has a median only, and only for
        encoders that have every column of AVERAGED.
    """
    result = {}
    for label, tasks in reports.items():
        row = {}
        for column, task, metric, factor in COLUMNS:
            found = tasks.get(task, {}).get("metrics", {}).get(metric)
            if found:
                row[column] = {name: value * factor for name, value in found.items()}
        if all(column in row for column in AVERAGED):
            row["AVG"] = {
                "median": sum(row[column]["median"] for column in AVERAGED) / len(AVERAGED)
            }
        result[label] = row
    return result


def missing(reports: Reports, tasks: typing.Iterable[str]) -> dict[str, list[str]]:
    """{task: encoders without a result}, for `tasks` and all tasks that some encoder has."""
    names = dict.fromkeys([*tasks, *(task for found in reports.values() for task in found)])
    without = {
        task: [label for label, found in reports.items() if task not in found] for task in names
    }
    return {task: labels for task, labels in without.items() if labels}


def markdown(reports: Reports, tasks: typing.Iterable[str] = ()) -> str:
    """The table as Markdown: values, chosen cells, all cells of each grid, and notes.

    Args:
        reports: The results so far.
        tasks: All planned tasks. The text names those without a result.
    """
    rows = values(reports)
    columns = [column for column in ORDER if any(column in row for row in rows.values())]

    def cell(found: dict | None) -> str:
        if found is None:
            return "-"
        several = found.get("highest", found["median"]) > found.get("least", found["median"])
        return f"{found['median']:.1f}" + (
            f" ({found['least']:.1f}-{found['highest']:.1f})" if several else ""
        )

    parts = [
        tables.markdown(
            ("", *columns),
            [
                (label, *(cell(row.get(column)) for column in columns))
                for label, row in rows.items()
            ],
        )
    ]
    seeds = sorted({report["seeds"] for tasks in reports.values() for report in tasks.values()})
    seeds = " or ".join(map(str, seeds))
    parts.append(
        f"Medians over {seeds} seed(s), least and highest in brackets. "
        "CoLA: Matthews correlation; STS-B: Spearman's; all x 100."
    )
    if lacking := missing(reports, tasks):
        listed = "; ".join(f"{task} with {', '.join(labels)}" for task, labels in lacking.items())
        parts.append(f"Partial: no result yet of {listed}.")
    names = list(dict.fromkeys(task for found in reports.values() for task in found))
    chosen = [
        (task, *(reports[label].get(task, {}).get("chosen", "-") for label in reports))
        for task in names
    ]
    parts += [
        "Chosen cells (batch, learning rate, epochs, warm-up):",
        tables.markdown(("task", *reports), chosen),
    ]
    grids = [
        (label, task, report)
        for label, tasks in reports.items()
        for task, report in tasks.items()
        if len(report["cells"]) > 1
    ]
    for label, task, report in grids:
        number = lambda value: "diverged" if value is None else f"{value:.4f}"  # noqa: E731
        lines = [
            (row["name"], *(number(row[name]) for name in ("median", "least", "highest")))
            for row in report["cells"]
        ]
        parts += [
            f"{task}, {label}: {report['main_metric']} of every cell",
            tables.markdown(("cell", "median", "least", "highest"), lines),
        ]
    notes = dict.fromkeys(
        f"- {task}: {note}"
        for tasks in reports.values()
        for task, report in tasks.items()
        for note in report["notes"]
    )
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])]) + "\n"


def write(
    reports: Reports, folder: pathlib.Path, tasks: typing.Iterable[str] = ()
) -> list[pathlib.Path]:
    """Writes table.md, table.json and, for two encoders or more, differences.png.

    Args:
        reports: The results so far.
        folder: Folder to write to. It is made if needed.
        tasks: All planned tasks.

    Returns:
        Paths of the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(markdown(reports, tasks))
    session.write_json(
        folder / "table.json",
        {"columns": values(reports), "missing": missing(reports, tasks), "reports": reports},
    )
    paths = [folder / "table.md", folder / "table.json"]
    return [*paths, plot(reports, folder)] if len(reports) > 1 else paths


def plot(reports: Reports, folder: pathlib.Path) -> pathlib.Path:
    """Writes the figure of `figure_of` to differences.png and returns its path."""
    pyplot = plotting.pyplot()
    figure, path = figure_of(reports), folder / "differences.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def figure_of(reports: Reports):
    """A matplotlib Figure of the differences to the first encoder, by column.

    A marker is the median of an encoder minus the median of the first one. Its bar extends from
    the lowest to the highest seed of the encoder. The title names the columns that are left out,
    because some encoder does not have them.
    """
    pyplot = plotting.pyplot()
    rows = values(reports)
    first = next(iter(rows))
    named = [column for column, *_ in COLUMNS if any(column in row for row in rows.values())]
    columns = [column for column in named if all(column in row for row in rows.values())]
    size = (3.5 + 0.9 * max(len(columns), 3), 4.5)
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    axes.axhline(0.0, color="0.6", linewidth=1, label=f"median of {first}")
    step = min(0.2, 0.8 / len(rows))
    for number, ((label, row), style) in enumerate(
        zip(rows.items(), plotting.line_styles(), strict=False)
    ):
        shift = step * (number - (len(rows) - 1) / 2)
        medians = [row[column]["median"] for column in columns]
        below = [
            median - row[column]["least"] for median, column in zip(medians, columns, strict=True)
        ]
        above = [
            row[column]["highest"] - median for median, column in zip(medians, columns, strict=True)
        ]
        axes.errorbar(
            [place + shift for place in range(len(columns))],
            [median - rows[first][column]["median"]
             for median, column in zip(medians, columns, strict=True)],
            yerr=[below, above], fmt=style["marker"], color=style["color"], capsize=3, label=label,
        )  # fmt: skip
    axes.set_xticks(range(len(columns)), columns, rotation=30)
    axes.set(ylabel=f"points above {first}\n(median; least to highest seed)")
    left_out = [column for column in named if column not in columns]
    note = f"\nnot of every run: {', '.join(left_out)}" if left_out else ""
    axes.set_title(f"Scores beside those of {first}{note}", fontsize="medium", wrap=True)
    figure.legend(loc="outside right upper")
    return figure
