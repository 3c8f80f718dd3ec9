"""What a run shows: metrics.jsonl, TensorBoard, the loss curve, and how its speed compares with the hardware's."""

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

# Dense bf16 peak in FLOP/s per device, from the vendors' data sheets, by whole words of jax.Device.device_kind.
PEAK_FLOPS = {
    "GH200": 989e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12,
    "TPU v5p": 459e12, "TPU v6 lite": 918e12, "TPU v6e": 918e12,
}  # fmt: skip


def flops_terms(experiment: config.Experiment, vocabulary_size: int) -> dict[str, float]:
    """Model FLOPs of one training step, by term: forward and backward (3 x forward), without credit for recomputation.

    6 x parameters x tokens for the matrices, 12 x width x queries x keys per row and layer for attention (a causal one as if it were not),
    the head on predicted rows only; the encoder counted at its V slots, the decoder at L, or at M if it runs on the predicted slots only.
    """
    model, rows = experiment.model, experiment.run.batch_size
    sizes = masking.budget(experiment.masking, experiment.corpus.sequence_length)
    visible, masked, resized = sizes.visible, sizes.masked, 0

    def layer(part: config.Model, tokens: int, read: tuple[int, ...]):
        """Of one row: the matrices, and attention to each of `read` (the numbers of keys)."""
        matrices = 2 * part.width * part.feed_forward * tokens + sum(2 * part.width**2 * (tokens + keys) for keys in read)
        return 6.0 * rows * matrices, 12.0 * rows * part.width * tokens * sum(read)

    encoder, encoder_attention = (model.layers * cost for cost in layer(model, visible, (visible,)))
    tokens = masked if model.decoder_slots == "masked" else experiment.corpus.sequence_length
    read = {"self": (tokens,), "self+cross": (tokens, visible), "cross": (visible,)}[model.decoder_attention]
    decoder, decoder_attention = (model.decoder_layers * cost for cost in layer(model.decoder, tokens, read))
    if model.decoder.width != model.width:  # what the decoder reads, and what the head reads, brought to the other width
        resized = 6.0 * rows * model.width * model.decoder.width * (tokens + masked + (visible if "cross" in model.decoder_attention else 0))
    head = rows * 6.0 * masked * model.width * (model.width + maelm.table_rows(vocabulary_size))
    return {
        "encoder matrices": encoder,
        "encoder attention": encoder_attention,
        "decoder matrices": decoder + resized,
        "decoder attention": decoder_attention,
        "head": head,
    }


def measured_peak(dtype: str, size: int = 2048, seconds: float = 0.5) -> float:
    """FLOP/s of a size^3 matrix product on the first device: what is compared with where the device is not in the table."""
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
    """What MFU is a share of."""

    flops_per_second: float | None  # of all devices together; None: unknown
    source: str  # where the figure is from, or why there is none


def peak_flops(dtype: str) -> Peak:
    """The data sheet's figure for an accelerator; on CPU that of a matrix product measured here; none for an unknown accelerator."""
    device, count = jax.devices()[0], jax.device_count()
    for name, peak in PEAK_FLOPS.items():
        if re.search(rf"\b{re.escape(name)}\b", device.device_kind):
            return Peak(peak * count, f"{count} x {device.device_kind}, data sheet, bf16")
    if device.platform == "cpu":  # pretended CPU devices share the same cores, so the host's rate is the whole of it
        return Peak(measured_peak(dtype), f"a {dtype} matrix product measured on this {device.device_kind}")
    return Peak(None, f"the peak of {device.device_kind} is not in PEAK_FLOPS of maelm_jax/training/metrics.py")


def describe_peak(peak: Peak) -> str:
    """In words, for the start of a run."""
    if peak.flops_per_second is None:
        return f"MFU is left out: {peak.source}"
    return f"MFU is against {peak.flops_per_second / 1e12:.3g} TFLOP/s ({peak.source})"


def path_of(workdir: str) -> pathlib.Path:
    return storage.local_path(workdir) / "metrics.jsonl"


class Writer:
    """Appends one JSON object a logged step to metrics.jsonl, and the same to TensorBoard. Silent on processes other than 0."""

    def __init__(self, workdir: str, step: int):
        """Lines past `step` are cut: the run goes on from there, and the file reads as one run. A workdir in a bucket is written to by `send`."""
        self.workdir = workdir
        self.path = path_of(workdir)
        self._board = None
        if jax.process_index():
            return
        if self.path.exists():
            kept = [line for line, values in _lines(self.path) if values["step"] <= step]
            storage.write(self.path, "".join(f"{line}\n" for line in kept))
        from tensorboardX import SummaryWriter

        self._board = SummaryWriter(str(storage.local_path(workdir) / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, step: int, values: dict[str, float | None]):
        if self._board is None:
            return
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            if value is None:  # not known yet
                continue
            self._board.add_scalar(name, value, step)

    def send(self):
        """What was written so far is copied to a workdir that is in a bucket."""
        if self._board is not None:
            self._board.flush()
            storage.send(self.workdir)

    def close(self):
        if self._board is not None:
            self._board.close()
            storage.send(self.workdir)


def read(workdir: str) -> list[dict]:
    """The lines of metrics.jsonl; one that is only begun, at the end, is not among them. Raises ConfigError for a damaged file."""
    path = path_of(workdir)
    return [values for _, values in _lines(path)] if path.exists() else []


def copy_before_rollback(workdir: str, step: int):
    """Keeps what metrics.jsonl holds before a run goes back behind `step`: its Writer cuts the lines past the step it goes on from."""
    path = path_of(workdir)
    if path.exists():
        storage.write(storage.unused(path.with_name(f"metrics-before-rollback-{step}.jsonl")), path.read_bytes())


def _lines(path: pathlib.Path) -> list[tuple[str, dict]]:
    """(line, its values) of each whole line; a kill may have cut the last. Raises ConfigError, with the line's number, for what is no such line."""
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            text = line.decode()
            values = json.loads(text)
            if type(values["step"]) is not int:
                raise ValueError("its step is no whole number")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise config.ConfigError(
                f"{path}: line {number} is damaged ({' '.join(str(error).split())[:100]}); remove the line, or copy the file from elsewhere"
            ) from error
        found.append((text, values))
    return found


def plot(workdir: str, unigram: float | None = None) -> pathlib.Path:
    """Draws loss_curve.png: training loss (thin), evaluation loss (dots), the unigram cross-entropy as the line to get below."""
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
    axes.set(xlabel="step", ylabel="masked cross-entropy (nats per token)", title=pathlib.Path(workdir).name)
    axes.legend()
    path = storage.local_path(workdir) / "loss_curve.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
