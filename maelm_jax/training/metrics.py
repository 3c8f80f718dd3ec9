"""Metrics of a run: metrics.jsonl, the logger of `Run.log_to`, and the loss curve."""

import collections.abc
import hashlib
import json
import os
import pathlib
import typing

import jax
import numpy as np

from maelm_jax import config, own_parts, plotting, storage
from maelm_jax.training.workdir import Workdir


@typing.runtime_checkable
class Logger(typing.Protocol):
    """Where the values of metrics.jsonl also go. Those that are None are left out."""

    def write(self, step: int, values: dict[str, float | int]):
        """Logs the values of a step."""

    def close(self):
        """Sends what is not sent yet."""


# (workdir, step from which the run continues) -> its logger
OpenLogger = collections.abc.Callable[[Workdir, int], Logger]


def find_logger(name: str) -> OpenLogger:
    """Returns what opens the logger of `Run.log_to`.

    A function of the user's own is called as function(folder, settings), with the workdir and
    {"Section.field": value}, and returns a `Logger`. Raises ConfigError if it does not exist, or
    if a package is missing.
    """
    if name == "tensorboard":
        return TensorBoard
    if name == "wandb":
        _import_wandb()
        return WeightsAndBiases
    function = own_parts.load_function("Run.log_to", name, ("folder", "settings"))

    def open_own(workdir: Workdir, _: int):
        logger = function(str(workdir), config.values(workdir.read_settings()))
        if not isinstance(logger, Logger):
            raise config.ConfigError(
                f"Run.log_to={name} returns {logger!r}. Return an object with the methods "
                "write(step, values) and close()"
            )
        return logger

    return open_own


class TensorBoard:
    """Writes the events of TensorBoard into the workdir."""

    def __init__(self, workdir: Workdir, step: int):
        from tensorboardX import SummaryWriter  # takes a second where PyTorch is installed

        self._board = SummaryWriter(str(workdir.tensorboard_folder), purge_step=step + 1)

    def write(self, step: int, values: dict[str, float | int]):
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def flush(self):
        """Writes what is in memory to the disk."""
        self._board.flush()

    def close(self):
        self._board.close()


def _import_wandb():
    try:
        import wandb

        _ = wandb.init  # a folder wandb/ of earlier runs can be imported as an empty package
    except (ImportError, AttributeError) as error:
        raise config.ConfigError(
            "Run.log_to='wandb' needs the package wandb: pip install wandb"
        ) from error
    return wandb


class WeightsAndBiases:
    """Logs to Weights & Biases. A run that resumes goes on with the same run there.

    WANDB_PROJECT, WANDB_MODE and the other variables of wandb count. Its files are not in the
    workdir, because they hold links that lead out.
    """

    def __init__(self, workdir: Workdir, _: int):
        wandb = _import_wandb()
        # The first line names the time of the first start, so a new run has another id.
        first = workdir.environment_file.read_text().partition("\n")[0]
        path = workdir.path if workdir.in_bucket else workdir.folder.resolve()
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "maelm_jax"),
            name=workdir.name,
            id=hashlib.sha256(f"{path} {first}".encode()).hexdigest()[:16],
            resume="allow",
            config=config.values(workdir.read_settings()),
        )

    def write(self, step: int, values: dict[str, float | int]):
        self._run.log(values, step=step)

    def close(self):
        self._run.finish()


class Writer:
    """Appends one JSON object for each logged step to metrics.jsonl, and its values to a logger.

    Processes other than 0 write nothing.
    """

    def __init__(self, workdir: Workdir, step: int, open_logger: OpenLogger = TensorBoard):
        """Removes lines after `step`, from which the run continues. The file reads as one run.

        `open_logger` opens the logger: now, or TensorBoard at the first line.
        """
        self._workdir, self._path, self._step = workdir, workdir.metrics_file, step
        self._open_logger = open_logger
        self._logger: Logger | None = None
        if self._path.exists() and not jax.process_index():
            earlier = [values for values in read(workdir) if values["step"] <= step]
            storage.write(self._path, "".join(f"{json.dumps(values)}\n" for values in earlier))
        if open_logger is not TensorBoard and not jax.process_index():
            self._open()

    def _open(self):
        self._logger = self._open_logger(self._workdir, self._step)
        # It stays open: if the workdir is renamed, its lines go into the renamed file.
        self._file = self._path.open("a", buffering=1)

    def write(self, step: int, values: dict[str, float | int | None]):
        """Writes the values of a step. None means not known yet; the logger does not get it."""
        if jax.process_index():
            return
        if self._logger is None:
            self._open()
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        known = {name: value for name, value in values.items() if value is not None}
        if known:
            self._logger.write(step, known)

    def send(self):
        """Makes all lines survive a loss of power, and copies them to a workdir in a bucket."""
        if self._logger is not None:
            os.fsync(self._file.fileno())
            if isinstance(self._logger, TensorBoard):
                self._logger.flush()
            self._workdir.send()

    def close(self):
        """Closes the files and sends all that is written."""
        if self._logger is not None:
            self.send()
            self._logger.close()
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
    unit: str,
    baseline_name: str = "",
    baseline: float | None = None,
    trained_label: str = "training (one batch)",
    heldout_label: str = "held-out",
):
    """Writes a figure of the losses by tokens, as .png and .pdf.

    The last of `curves` is the run, after the runs that it goes on from. `unit` is that of the
    losses. `baseline` is a loss, drawn as a horizontal line. A model that has learned something is
    below it.
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
    if baseline is not None:
        label = f"{baseline_name} {baseline:.2f}"
        axes.axhline(baseline, linestyle="--", color=plotting.REFERENCE, label=label)
    axes.set(xlabel="tokens", ylabel=f"loss ({unit})")
    names = ", then ".join(curve.name for curve in curves)
    axes.set_title(f"Loss of {names} by tokens trained on", wrap=True)
    axes.legend()
    figure.savefig(path, dpi=120)
    figure.savefig(path.with_suffix(".pdf"))
    pyplot.close(figure)
