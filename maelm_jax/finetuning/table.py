"""The table of results: tasks by encoders, as Markdown and as JSON."""

import pathlib
import typing

from maelm_jax import json_files, storage, tables
from maelm_jax.finetuning import differences, initial_encoder, results

MARKDOWN_FILE, JSON_FILE = "table.md", "table.json"
# (column, task, metric, factor to percent), in the order of the paper's tables.
COLUMNS = (
    ("MNLI-m", "mnli", "matched_accuracy", 100),
    ("MNLI-mm", "mnli", "mismatched_accuracy", 100),
    ("QQP", "qqp", "accuracy", 100),
    ("QNLI", "qnli", "accuracy", 100),
    ("SST-2", "sst2", "accuracy", 100),
    ("CoLA", "cola", "mcc", 100),
    ("RTE", "rte", "accuracy", 100),
    ("MRPC", "mrpc", "accuracy", 100),
    ("STS-B", "stsb", "spearman", 100),
    ("WNLI", "wnli", "accuracy", 100),
    ("Own", "own", "accuracy", 100),
    ("Own labels", "own", "micro_f1", 100),
    ("Own scores", "own", "spearman", 100),
    ("SQuAD1 EM", "squad1", "exact", 1),
    ("SQuAD1 F1", "squad1", "f1", 1),
    ("SQuAD2 EM", "squad2", "best_exact", 1),
    ("SQuAD2 F1", "squad2", "best_f1", 1),
    ("Words F1", "conll", "f1", 100),
    ("Words accuracy", "conll", "accuracy", 100),
)
# The columns of AVG, which is the paper's average of GLUE.
AVERAGED = ("MNLI-m", "QQP", "QNLI", "SST-2", "CoLA", "RTE", "MRPC", "STS-B")

ORDER = [column for column, *_ in COLUMNS]
ORDER.insert(ORDER.index("SQuAD1 EM"), "AVG")  # behind the sentence tasks

Reports = dict[str, dict[str, dict]]  # {label of the encoder: {task: result of grid.summary}}

# Types in a report that is read from a file.
REPORT_FIELDS = {
    "task": str,
    "main_metric": str,
    "chosen": str,
    "seeds": int,
    "metrics": dict,
    "cells": list,
    "notes": list,
    "model": str | None,
}
SPREAD_FIELDS = dict.fromkeys(("median", "least", "highest"), results.NUMBER)
CELL_FIELDS = {"name": str} | dict.fromkeys(("median", "least", "highest"), results.NUMBER | None)


def values(reports: Reports) -> dict[str, dict[str, dict]]:
    """The values of the table, in percent.

    Returns:
        {encoder: {column: {"median", "least", "highest"}}}. "AVG" has a median only, and only for
        encoders that have every column of AVERAGED.
    """
    result = {}
    for label, by_task in reports.items():
        row = {}
        for column, task, metric, factor in COLUMNS:
            spread = by_task.get(task, {}).get("metrics", {}).get(metric)
            if spread:
                row[column] = {name: value * factor for name, value in spread.items()}
        if all(column in row for column in AVERAGED):
            row["AVG"] = {
                "median": sum(row[column]["median"] for column in AVERAGED) / len(AVERAGED)
            }
        result[label] = row
    return result


def missing(reports: Reports, tasks: typing.Iterable[str]) -> dict[str, list[str]]:
    """{task: encoders without a result}, for `tasks` and all tasks that some encoder has."""
    names = dict.fromkeys([*tasks, *(task for _, task, _ in _all(reports))])
    without = {
        task: [label for label, by_task in reports.items() if task not in by_task] for task in names
    }
    return {task: labels for task, labels in without.items() if labels}


def markdown(reports: Reports, tasks: typing.Iterable[str] = ()) -> str:
    """The table as Markdown: values, chosen cells, all cells of each grid, and notes.

    Args:
        reports: The results so far.
        tasks: All planned tasks. The text names those without a result.
    """
    seeds = sorted({report["seeds"] for _, _, report in _all(reports)})
    legend = (
        f"Medians over {' or '.join(map(str, seeds))} seed(s), least and highest in brackets. "
        "CoLA: Matthews correlation; STS-B and own scores: Spearman's; own labels: F1 of all "
        "labels together; all x 100."
    )
    parts = [_values_table(reports), legend]
    if lacking := missing(reports, tasks):
        listed = "; ".join(f"{task} with {', '.join(labels)}" for task, labels in lacking.items())
        parts.append(f"Partial: no result yet of {listed}.")
    parts += [
        "Chosen cells (batch, learning rate, epochs, warm-up):",
        _chosen_table(reports),
    ]
    for label, task, report in _all(reports):
        if len(report["cells"]) > 1:
            parts.append(f"{task}, {label}: {report['main_metric']} of every cell")
            parts.append(_cells_table(report))
    if notes := _notes(reports):
        parts.append("\n".join(notes))
    return "\n\n".join(parts) + "\n"


def _notes(reports: Reports) -> list[str]:
    """The notes of all tasks, once each, and the encoders of those that do not hold for all."""
    encoders: dict[tuple[str, str], list[str]] = {}
    for label, task, report in _all(reports):
        for note in dict.fromkeys(report["notes"]):
            encoders.setdefault((task, note), []).append(label)
    having = {task: sum(task in by_task for by_task in reports.values()) for task, _ in encoders}
    lines = []
    for (task, note), labels in encoders.items():
        names = (task,) if len(labels) == having[task] else (task, *labels)
        lines.append(f"- {', '.join(names)}: {note}")
    return lines


class _Entry(typing.NamedTuple):
    label: str  # of the encoder
    task: str
    report: dict


def _all(reports: Reports) -> typing.Iterator[_Entry]:
    """Yields all reports, encoder by encoder."""
    for label, by_task in reports.items():
        for task, report in by_task.items():
            yield _Entry(label, task, report)


def _values_table(reports: Reports) -> str:
    """Encoders by columns."""
    rows = values(reports)
    columns = [column for column in ORDER if any(column in row for row in rows.values())]
    lines = [
        (label, *(_value_text(row.get(column)) for column in columns))
        for label, row in rows.items()
    ]
    return tables.markdown(("", *columns), lines)


def _value_text(value: dict | None) -> str:
    """Median, and least and highest value if they differ."""
    if value is None:
        return "-"
    median = f"{value['median']:.1f}"
    if value.get("highest", value["median"]) > value.get("least", value["median"]):
        return f"{median} ({value['least']:.1f}-{value['highest']:.1f})"
    return median


def _chosen_table(reports: Reports) -> str:
    """The chosen cell of each task, by encoder."""
    names = dict.fromkeys(task for _, task, _ in _all(reports))
    lines = [
        (task, *(by_task.get(task, {}).get("chosen", "-") for by_task in reports.values()))
        for task in names
    ]
    return tables.markdown(("task", *reports), lines)


def _cells_table(report: dict) -> str:
    """The scores of all cells of one grid."""
    names = ("median", "least", "highest")
    lines = [(row["name"], *(_score_text(row[name]) for name in names)) for row in report["cells"]]
    return tables.markdown(("cell", *names), lines)


def _score_text(score: float | None) -> str:
    return "diverged" if score is None else f"{score:.4f}"


def write(reports: Reports, folder: pathlib.Path, tasks: typing.Iterable[str] = ()):
    """Writes table.md, table.json and, for two encoders or more, differences.png.

    Args:
        reports: The results so far.
        folder: Folder to write to. It is made if needed.
        tasks: All planned tasks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    storage.write(folder / MARKDOWN_FILE, markdown(reports, tasks))
    stored = {
        label: {task: _stored(label, task, report) for task, report in by_task.items()}
        for label, by_task in reports.items()
    }
    results.write_json(
        folder / JSON_FILE,
        {"columns": values(reports), "missing": missing(reports, tasks), "reports": stored},
    )
    if len(reports) > 1:
        differences.plot(values(reports), folder)
    else:  # the figure of a table that was removed
        (folder / differences.FILE).unlink(missing_ok=True)


def _stored(label: str, task: str, report: dict) -> dict:
    """A report as table.json has it: the path of its model is relative to the table's folder."""
    model = report.get("model")
    return report if model is None else report | {"model": str(_model_path(label, task, model))}


def _model_path(label: str, task: str, model: str) -> pathlib.Path:
    """The path of a model inside the folder of its table.

    `model` is any path of the model. Earlier versions stored the path from the directory in which
    the command ran.
    """
    cell_and_seed = pathlib.Path(model).parts[-2:]
    return pathlib.Path(label, task, *cell_and_seed)


def read(folder: pathlib.Path) -> Reports:
    """Reads the reports in the table.json of a folder.

    Returns:
        The reports. Their models are folders inside `folder`. {} if there is no table.json.

    Raises:
        ConfigError: table.json is damaged, or another program wrote it.
    """
    path = folder / JSON_FILE
    if not path.exists():
        return {}
    remedy = f"remove {path} and give the commands of the table again (finished runs are skipped)"
    reports = json_files.read(path, _is_table, remedy)["reports"]
    for label, by_task in reports.items():
        for task, report in by_task.items():
            if report["model"] is not None:
                report["model"] = str(folder / _model_path(label, task, report["model"]))
    return reports


def labels(folder: pathlib.Path) -> dict[str, str]:
    """{normalised name of an encoder: its label} of the table in a folder, if it has one."""
    return {
        initial_encoder.normalised(report["init_from"]): label
        for label, _, report in _all(read(folder))
        if "init_from" in report
    }


def _is_table(value) -> bool:
    """Whether a value from a JSON file is {"reports": Reports}."""
    return json_files.has_fields(value, {"reports": dict}) and all(
        isinstance(by_task, dict) and all(map(_is_report, by_task.values()))
        for by_task in value["reports"].values()
    )


def _is_report(value) -> bool:
    """Whether a value from a JSON file is a result of grid.summary."""
    return (
        json_files.has_fields(value, REPORT_FIELDS)
        and all(
            json_files.has_fields(spread, SPREAD_FIELDS) for spread in value["metrics"].values()
        )
        and all(json_files.has_fields(cell, CELL_FIELDS) for cell in value["cells"])
    )
