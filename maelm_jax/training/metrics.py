"""Metrics of a run: metrics.jsonl, TensorBoard, the loss curve, and FLOPs for MFU.

MFU (model FLOPs utilisation) is the share of the hardware's peak FLOP/s that the model uses.
"""

import json
import pathlib
import re
import time
import typing

import jax
import jax.numpy as jnp
import numpy as np

from maelm_jax import config, storage
from maelm_jax.model import maelm, masking

# Dense bf16 peak of a device in FLOP/s, from the vendors' data sheets. A key matches whole words of
# jax.Device.device_kind.
PEAK_FLOPS = {
    "GH200": 989e12, "H200": 989e12, "H100": 989e12, "A100": 312e12,
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12,
    "TPU v5p": 459e12, "TPU v6 lite": 918e12, "TPU v6e": 918e12,
}  # fmt: skip


def flops_terms(experiment: config.Experiment, vocabulary_size: int) -> dict[str, float]:
    """Counts the model FLOPs of one training step, by term.

    A step is forward and backward: 3 x forward. Recomputation in the backward pass does not count.
    Matrices take 6 x parameters x tokens. Attention takes 12 x width x queries x keys per row and
    layer; causal attention counts as full attention. The encoder counts its V slots. The decoder
    counts L slots, or M if it computes the masked slots only. The head counts M slots.

    Args:
        experiment: The settings.
        vocabulary_size: Ids of the vocabulary.

    Returns:
        FLOPs of each term, over all rows of a step.
    """
    model, rows = experiment.model, experiment.run.batch_size
    sizes = masking.budget(experiment.masking, experiment.corpus.sequence_length)
    visible, masked, resized = sizes.visible, sizes.masked, 0

    def layer(part: config.Model, tokens: int, read: tuple[int, ...]):
        """FLOPs of one layer: (matrices, attention). `read`: number of keys of each attention."""
        matrices = 2 * part.width * part.feed_forward * tokens + sum(
            2 * part.width**2 * (tokens + keys) for keys in read
        )
        return 6.0 * rows * matrices, 12.0 * rows * part.width * tokens * sum(read)

    encoder, encoder_attention = (model.layers * cost for cost in layer(model, visible, (visible,)))
    tokens = masked if model.decoder_slots == "masked" else experiment.corpus.sequence_length
    read = {"self": (tokens,), "self+cross": (tokens, visible), "cross": (visible,)}[
        model.decoder_attention
    ]
    decoder, decoder_attention = (
        model.decoder_layers * cost for cost in layer(model.decoder, tokens, read)
    )
    if model.decoder.width != model.width:  # linear maps before the decoder and before the head
        resized = (
            6.0
            * rows
            * model.width
            * model.decoder.width
            * (tokens + masked + (visible if "cross" in model.decoder_attention else 0))
        )
    head = rows * 6.0 * masked * model.width * (model.width + maelm.table_rows(vocabulary_size))
    return {
        "encoder matrices": encoder,
        "encoder attention": encoder_attention,
        "decoder matrices": decoder + resized,
        "decoder attention": decoder_attention,
        "head": head,
    }


def measured_peak(dtype: str, size: int = 2048, seconds: float = 0.5) -> float:
    """Measures the FLOP/s of a size^3 matrix product on the first device.

    It takes the place of the data sheet's figure on CPU.

    Args:
        dtype: Type of the matrices.
        size: Rows and columns of the matrices.
        seconds: Time to measure for.

    Returns:
        The best rate, in FLOP/s.
    """
    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a: a @ a)
    product(a).block_until_ready()
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        product(a).block_until_ready()
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


class Peak(typing.NamedTuple):
    """The peak FLOP/s of all devices, of which MFU is a share."""

    flops_per_second: float | None  # of all devices together. None: unknown
    source: str  # where the figure comes from, or why it is unknown


def peak_flops(dtype: str) -> Peak:
    """Returns the peak rate of all devices.

    For an accelerator in `PEAK_FLOPS` it is the data sheet's figure. On CPU it is measured with a
    matrix product. For other accelerators it is unknown.
    """
    device, count = jax.devices()[0], jax.device_count()
    for name, peak in PEAK_FLOPS.items():
        if re.search(rf"\b{re.escape(name)}\b", device.device_kind):
            return Peak(peak * count, f"{count} x {device.device_kind}, data sheet, bf16")
    # Emulated CPU devices share the same cores, so the measured rate is that of all of them.
    if device.platform == "cpu":
        return Peak(
            measured_peak(dtype), f"a {dtype} matrix product measured on this {device.device_kind}"
        )
    return Peak(
        None,
        f"the peak of {device.device_kind} is not in PEAK_FLOPS of maelm_jax/training/metrics.py",
    )


def describe_peak(peak: Peak) -> str:
    """Returns a sentence about the peak, for the start of a run."""
    if peak.flops_per_second is None:
        return f"MFU is left out: {peak.source}"
    return f"MFU is against {peak.flops_per_second / 1e12:.3g} TFLOP/s ({peak.source})"


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
            kept = [line for line, values in _lines(self.path) if values["step"] <= step]
            storage.write(self.path, "".join(f"{line}\n" for line in kept))
        from tensorboardX import SummaryWriter

        self._board = SummaryWriter(
            str(storage.local_path(workdir) / "tensorboard"), purge_step=step + 1 if step else None
        )

    def write(self, step: int, values: dict[str, float | None]):
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
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            text = line.decode()
            values = json.loads(text)
            if type(values["step"]) is not int:
                raise ValueError("its step is no whole number")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise config.ConfigError(
                f"{path}: line {number} is damaged ({' '.join(str(error).split())[:100]}); "
                "remove the line, or copy the file from elsewhere"
            ) from error
        found.append((text, values))
    return found


def plot(workdir: str, unigram: float | None = None) -> pathlib.Path:
    """Draws loss_curve.png.

    Args:
        workdir: Folder of the run.
        unigram: Cross-entropy of the unigram distribution in nats, drawn as a horizontal line. A
            model that has learned something is below it.

    Returns:
        Path of the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = read(workdir)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    trained = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    evaluated = [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]
    axes.plot(*np.transpose(trained), color="0.6", linewidth=1, label="training (one batch)")
    if evaluated:
        axes.plot(*np.transpose(evaluated), "o-", color="black", markersize=3, label="held-out")
    if unigram is not None:
        axes.axhline(unigram, linestyle="--", color="0.3", label=f"unigram {unigram:.2f}")
    axes.set(
        xlabel="step",
        ylabel="masked cross-entropy (nats per token)",
        title=pathlib.Path(workdir).name,
    )
    axes.legend()
    path = storage.local_path(workdir) / "loss_curve.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
