"""Metrics of a run: metrics.jsonl, TensorBoard and the loss curve."""

import json
import pathlib
import typing

import jax
import numpy as np

from maelm_jax import config, plotting, storage


def path_of(workdir: str) -> pathlib.Path:
    """Returns the path of metrics.jsonl. For a workdir in a bucket it is a local path."""
    return storage.local_path(workdir) / "metrics.jsonl"


class Writer:
    """Appends one JSON object for each logged step to metrics.jsonl, and its values to TensorBoard.

    Processes other than 0 write nothing.
    """

    def __init__(self, workdir: str, step: int):
        """Opens the files and removes lines after `step`, so that the file reads as one run.

        Args:
            workdir: Folder of the run. `send` copies the files to a workdir in a bucket.
            step: Step from which the run continues.
        """
        self.workdir = workdir
        self.path = path_of(workdir)
        self._board = None
        if jax.process_index():
            return
        if self.path.exists():
            earlier = [line for line, values in _lines(self.path) if values["step"] <= step]
            storage.write(self.path, "".join(f"{line}\n" for line in earlier))
        from tensorboardX import SummaryWriter

        self._board = SummaryWriter(
            str(storage.local_path(workdir) / "tensorboard"), purge_step=step + 1
        )

    def write(self, step: int, values: dict[str, float | int | None]):
        """Writes the values of a step. None means not known yet; TensorBoard omits it."""
        if self._board is None:
            return
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            if value is None:
                continue
            self._board.add_scalar(name, value, step)

    def send(self):
        """Copies all that is written so far to a workdir in a bucket."""
        if self._board is not None:
            self._board.flush()
            storage.send(self.workdir)

    def close(self):
        """Closes TensorBoard's file and sends all that is written."""
        if self._board is not None:
            self._board.close()
            storage.send(self.workdir)


def read(workdir: str) -> list[dict]:
    """Returns the lines of metrics.jsonl, without an incomplete last line.

    Raises:
        ConfigError: The file is damaged.
    """
    path = path_of(workdir)
    return [values for _, values in _lines(path)] if path.exists() else []


def copy_before_rollback(workdir: str, step: int):
    """Copies metrics.jsonl to metrics-before-rollback-STEP.jsonl.

    Call it before a run goes back to a checkpoint before `step`. The `Writer` of that run removes
    the later lines.
    """
    path = path_of(workdir)
    if path.exists():
        storage.write(
            storage.unused(path.with_name(f"metrics-before-rollback-{step}.jsonl")),
            path.read_bytes(),
        )


def _lines(path: pathlib.Path) -> list[tuple[str, dict]]:
    """(text, values) of each complete line. A kill may leave the last line incomplete.

    Raises ConfigError, with the number of the line, for a line that is no metrics line.
    """
    lines = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            text = line.decode()
            values = json.loads(text)
            if type(values["step"]) is not int:
                raise ValueError("its step is no whole number")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise config.ConfigError(
                f"{path}: line {number} is damaged ({' '.join(str(error).split())[:100]}). "
                "Remove the line, or copy the file from elsewhere"
            ) from error
        lines.append((text, values))
    return lines


class CurveLabels(typing.NamedTuple):
    """Names of the losses in the figure."""

    training: str = "training (one batch)"
    heldout: str = "held-out"


def plot(workdir: str, unigram: float, labels: CurveLabels) -> pathlib.Path:
    """Writes the figure of `figure_of` to loss_curve.png and returns its path."""
    figure = figure_of(workdir, unigram, labels)
    path = storage.local_path(workdir) / "loss_curve.png"
    figure.savefig(path, dpi=120)
    plotting.pyplot().close(figure)
    return path


def figure_of(workdir: str, unigram: float, labels: CurveLabels):
    """Returns a matplotlib Figure of the losses of a run.

    Args:
        workdir: Folder of the run.
        unigram: Cross-entropy of the unigram distribution in nats, drawn as a horizontal line. A
            model that has learned something is below it.
        labels: Names of the losses.
    """
    pyplot, lines = plotting.pyplot(), read(workdir)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    trained = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    evaluated = [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]
    if trained:
        axes.plot(
            *np.transpose(trained),
            color=plotting.COLOURS[-1],
            linewidth=1,
            label=labels.training,
        )
    if evaluated:
        axes.plot(*np.transpose(evaluated), label=labels.heldout, **next(plotting.line_styles()))
    label = f"unigram {unigram:.2f}"
    axes.axhline(unigram, linestyle="--", color=plotting.REFERENCE, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per predicted token)")
    axes.set_title(f"Loss of {pathlib.Path(workdir).name} by step", wrap=True)
    axes.legend()
    return figure
