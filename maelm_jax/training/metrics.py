"""Metrics of a run: metrics.jsonl, TensorBoard and the loss curve."""

import json
import os
import pathlib
import typing

import jax
import numpy as np

from maelm_jax import plotting, storage
from maelm_jax.training.workdir import Workdir


class Writer:
    """Appends one JSON object for each logged step to metrics.jsonl, and its values to TensorBoard.

    Processes other than 0 write nothing.
    """

    def __init__(self, workdir: Workdir, step: int):
        """Removes lines after `step`, from which the run continues. The file reads as one run."""
        self._workdir, self._path, self._step = workdir, workdir.metrics_file, step
        self._board = None
        if self._path.exists() and not jax.process_index():
            earlier = [values for values in read(workdir) if values["step"] <= step]
            storage.write(self._path, "".join(f"{json.dumps(values)}\n" for values in earlier))

    def write(self, step: int, values: dict[str, float | int | None]):
        """Writes the values of a step. None means not known yet; TensorBoard omits it."""
        if jax.process_index():
            return
        if self._board is None:  # now, because the import takes a second where PyTorch is installed
            from tensorboardX import SummaryWriter

            folder = str(self._workdir.tensorboard_folder)
            self._board = SummaryWriter(folder, purge_step=self._step + 1)
            # It stays open: if the workdir is renamed, its lines go into the renamed file.
            self._file = self._path.open("a", buffering=1)
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            if value is not None:
                self._board.add_scalar(name, value, step)

    def send(self):
        """Makes all lines survive a loss of power, and copies them to a workdir in a bucket."""
        if self._board is not None:
            os.fsync(self._file.fileno())
            self._board.flush()
            self._workdir.send()

    def close(self):
        """Closes the files and sends all that is written."""
        if self._board is not None:
            self.send()
            self._board.close()
            self._file.close()


def read(workdir: Workdir) -> list[dict]:
    """Returns the lines of metrics.jsonl, without an incomplete last line.

    Raises ConfigError if the file is damaged.
    """
    path, lines = workdir.metrics_file, []
    if not path.exists():
        return []
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        with storage.reading(
            f"{path}: line {number}", "remove it, or copy the file from elsewhere"
        ):
            values = json.loads(text)
            int(values["step"])
        lines.append(values)
    return lines


class Curve(typing.NamedTuple):
    """The logged losses of a run, or of a part of a chain of runs."""

    name: str
    lines: list[dict]  # of metrics.jsonl
    first_token: int  # tokens of the runs before it
    tokens_per_step: int  # with padding
    text_tokens_per_step: float  # without, the mean: what tokens_per_second counts
    evaluated: tuple  # what decides the loss of held-out rows: whether it is causal, and masks
    words_per_step: float | None = None  # None: not recorded

    def tokens_after(self, step: int) -> int:
        """Returns the tokens trained on until a step of this run."""
        return self.first_token + step * self.tokens_per_step

    def hours_after(self) -> dict[int, float]:
        """Returns the hours of training until each logged step, without evaluations and pauses.

        Until the first line with a speed, steps are taken to be as fast as in that line.
        """
        hours, total, counted = {}, 0.0, 0
        for line in self.lines:
            if speed := line.get("tokens_per_second"):
                total += (line["step"] - counted) * self.text_tokens_per_step / speed / 3600
                counted = line["step"]
            hours[line["step"]] = total
        return hours

    def points(self, key: str) -> np.ndarray:
        """Returns the tokens trained on and the value, for each line that has `key`, [n, 2]."""
        lines = [line for line in self.lines if key in line]
        points = [(self.tokens_after(line["step"]), line[key]) for line in lines]
        return np.array(points).reshape(-1, 2)


def read_curves(workdir: Workdir, last_step: int | None = None) -> list[Curve]:
    """Returns the logged losses of a run, after those of the runs that it goes on from.

    Lines after `last_step` of the run are left out. A run before it whose workdir is gone is left
    out, with those before that.
    """
    curves: list[Curve] = []
    while recorded := workdir.read_settings():
        parent, rows = workdir.read_parent(), workdir.read_rows() or {}
        words = rows.get("words_per_row")
        tokens = rows.get("tokens_per_row", recorded.corpus.sequence_length)
        curve = Curve(
            words_per_step=words and words * recorded.run.batch_size,
            name=workdir.name,
            lines=[
                line for line in read(workdir) if last_step is None or line["step"] <= last_step
            ],
            first_token=parent.tokens if parent else 0,
            tokens_per_step=recorded.tokens_per_step,
            text_tokens_per_step=tokens * recorded.run.batch_size,
            evaluated=(recorded.evaluated.objective,),
        )
        curves.insert(0, curve)
        if not parent:
            break
        workdir, last_step = parent.workdir, parent.step
    return curves


def plot(
    path: pathlib.Path,
    curves: list[Curve],
    baseline_name: str,
    baseline: float,
    trained_label: str = "training (one batch)",
    heldout_label: str = "held-out",
):
    """Writes a figure of the losses by tokens, as .png and .pdf.

    The last of `curves` is the run, after the runs that it goes on from. `baseline` is a loss in
    nats, drawn as a horizontal line. A model that has learned something is below it.
    """
    pyplot = plotting.pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    style = next(plotting.line_styles())
    for curve in curves:
        is_last = curve is curves[-1]
        trained, evaluated = curve.points("loss"), curve.points("eval_loss")
        axes.plot(
            *trained.T,
            color=plotting.COLOURS[-1],
            linewidth=1,
            label=trained_label if is_last else None,
        )
        axes.plot(*evaluated.T, label=heldout_label if is_last else None, **style)
        if curve.first_token:
            axes.axvline(curve.first_token, color=plotting.REFERENCE, linewidth=0.8)
    label = f"{baseline_name} {baseline:.2f}"
    axes.axhline(baseline, linestyle="--", color=plotting.REFERENCE, label=label)
    axes.set(xlabel="tokens", ylabel="loss (nats per predicted token)")
    names = ", then ".join(curve.name for curve in curves)
    axes.set_title(f"Loss of {names} by tokens trained on", wrap=True)
    axes.legend()
    figure.savefig(path, dpi=120)
    figure.savefig(path.with_suffix(".pdf"))
    pyplot.close(figure)
