"""The table over tasks and pretrained runs: Markdown and JSON with the paper's columns, and a plot of the differences to the first run."""

import pathlib

from maelm_jax.finetuning import run

# (column, task, metric, factor to percent), in the order of the paper's tables.
COLUMNS = (
    ("MNLI-m", "mnli", "matched_accuracy", 100), ("MNLI-mm", "mnli", "mismatched_accuracy", 100), ("QQP", "qqp", "accuracy", 100),
    ("QNLI", "qnli", "accuracy", 100), ("SST-2", "sst2", "accuracy", 100), ("CoLA", "cola", "mcc", 100), ("RTE", "rte", "accuracy", 100),
    ("MRPC", "mrpc", "accuracy", 100), ("STS-B", "stsb", "spearman", 100), ("WNLI", "wnli", "accuracy", 100),
    ("Own", "own", "accuracy", 100),
    ("SQuAD1 EM", "squad1", "exact", 1), ("SQuAD1 F1", "squad1", "f1", 1), ("SQuAD2 EM", "squad2", "best_exact", 1),
    ("SQuAD2 F1", "squad2", "best_f1", 1),
)  # fmt: skip
AVERAGED = ("MNLI-m", "QQP", "QNLI", "SST-2", "CoLA", "RTE", "MRPC", "STS-B")  # what the paper's GLUE average is over

ORDER = (*(column for column, *_ in COLUMNS[:11]), "AVG", *(column for column, *_ in COLUMNS[11:]))

Reports = dict[str, dict[str, dict]]  # {pretrained run: {task: grid.summary}}


def values(reports: Reports) -> dict[str, dict[str, dict]]:
    """{run: {column: {median, least, highest}}} in percent. `AVG` is there for runs with every averaged task."""
    result = {}
    for label, tasks in reports.items():
        row = {}
        for column, task, metric, factor in COLUMNS:
            found = tasks.get(task, {}).get("metrics", {}).get(metric)
            if found:
                row[column] = {name: value * factor for name, value in found.items()}
        if all(column in row for column in AVERAGED):
            row["AVG"] = {"median": sum(row[column]["median"] for column in AVERAGED) / len(AVERAGED)}
        result[label] = row
    return result


def aligned(lines: list[tuple[str, ...]]) -> str:
    """A Markdown table whose columns line up; the first line is its header."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["| " + " | ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))) + " |"
             for line in lines]  # fmt: skip
    rule = "|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([shown[0], rule, *shown[1:]])


def markdown(reports: Reports) -> str:
    """The table of medians with least and highest of the seeds, the chosen cells, and what is to be known about the data."""
    rows = values(reports)
    columns = [column for column in ORDER if any(column in row for row in rows.values())]

    def cell(found: dict | None) -> str:
        if found is None:
            return "-"
        several = found.get("highest", found["median"]) > found.get("least", found["median"])
        return f"{found['median']:.1f}" + (f" ({found['least']:.1f}-{found['highest']:.1f})" if several else "")

    parts = [aligned([("", *columns), *((label, *(cell(row.get(column)) for column in columns)) for label, row in rows.items())])]
    seeds = sorted({report["seeds"] for tasks in reports.values() for report in tasks.values()})
    seeds = " or ".join(map(str, seeds))
    parts.append(f"Medians over {seeds} seed(s), least and highest in brackets. CoLA: Matthews correlation; STS-B: Spearman's; all x 100.")
    names = list(dict.fromkeys(task for tasks in reports.values() for task in tasks))
    chosen = [(task, *(reports[label].get(task, {}).get("chosen", "-") for label in reports)) for task in names]
    parts += ["Chosen cells (batch, learning rate, epochs, warm-up):", aligned([("task", *reports), *chosen])]
    grids = [(label, task, report) for label, tasks in reports.items() for task, report in tasks.items() if len(report["cells"]) > 1]
    for label, task, report in grids:
        number = lambda value: "diverged" if value is None else f"{value:.4f}"  # noqa: E731
        lines = [(row["name"], *(number(row[name]) for name in ("median", "least", "highest"))) for row in report["cells"]]
        parts += [f"{task}, {label}: {report['main_metric']} of every cell", aligned([("cell", "median", "least", "highest"), *lines])]
    notes = dict.fromkeys(f"- {task}: {note}" for tasks in reports.values() for task, report in tasks.items() for note in report["notes"])
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])]) + "\n"


def write(reports: Reports, folder: pathlib.Path) -> list[pathlib.Path]:
    """table.md, table.json and, for two runs or more, differences.png; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(markdown(reports))
    run.write_json(folder / "table.json", {"columns": values(reports), "reports": reports})
    paths = [folder / "table.md", folder / "table.json"]
    return [*paths, plot(reports, folder)] if len(reports) > 1 else paths


def plot(reports: Reports, folder: pathlib.Path) -> pathlib.Path:
    """differences.png: each run's median minus the first run's, per column. The bar reaches from the least to the highest of its own seeds, the
    grey one on the zero line over those of the first run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = values(reports)
    first, *others = rows
    columns = [column for column, *_ in COLUMNS if all(column in row for row in rows.values())]
    figure, axes = pyplot.subplots(figsize=(2 + 0.9 * max(len(columns), 3), 4), layout="constrained")
    bars = lambda row, column: [[row[column]["median"] - row[column]["least"]], [row[column]["highest"] - row[column]["median"]]]  # noqa: E731
    for place, column in enumerate(columns):
        named = {"label": first} if place == 0 else {}
        axes.errorbar([place - 0.2], [0.0], yerr=bars(rows[first], column), fmt="o", color="0.6", capsize=3, **named)
        for number, label in enumerate(others):
            shift = place + 0.2 * (number - (len(others) - 1) / 2) + 0.1
            difference = rows[label][column]["median"] - rows[first][column]["median"]
            named = {"label": label} if place == 0 else {}
            axes.errorbar([shift], [difference], yerr=bars(rows[label], column), fmt="o", color=f"C{number}", capsize=3, **named)
    axes.axhline(0.0, color="0.6", linewidth=1)
    axes.set_xticks(range(len(columns)), columns, rotation=30)
    axes.set(ylabel="points above the first run (median; least to highest seed)")
    if columns:
        axes.legend()
    path = folder / "differences.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
