"""Model FLOPs of a training step, and the peak FLOP/s of the devices, for MFU.

MFU (model FLOPs utilisation) is the share of the hardware's peak FLOP/s that the model uses.
"""

import re
import typing

import jax

from maelm_jax import config
from maelm_jax.model import maelm, masking

# Dense bf16 peak of a device in FLOP/s, from the vendors' data sheets. A key matches whole words of
# jax.Device.device_kind, and the first key that matches counts.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}


class StackFlops(typing.NamedTuple):
    """FLOPs of a stack of layers in one training step."""

    matrices: float
    attention: float


def flops_terms(experiment: config.Experiment, vocabulary_size: int) -> dict[str, float]:
    """Counts the model FLOPs of one training step over all its rows, by term.

    A step is forward and backward: 3 x forward. Recomputation in the backward pass does not count.
    Matrices take 6 x parameters x tokens. Attention takes 12 x width x queries x keys per row and
    layer; a layer with local attention has the keys of its window. Causal attention counts as full
    attention. The encoder counts its V slots. The decoder counts L slots, or M if it computes the
    masked slots only. The head counts M slots.
    """
    model, rows = experiment.model, experiment.run.batch_size
    sizes = masking.budget(experiment.masking, experiment.corpus.sequence_length)
    visible, masked = sizes.visible, sizes.masked
    encoder = _stack_flops(model, model.layers, rows, visible, (visible,))
    encoder_attention = encoder.attention
    if model.local_attention:
        unseen = 1.0 - min(model.local_attention, visible) / visible
        local = model.layers - len(range(0, model.layers, model.global_every))
        encoder_attention *= 1.0 - unseen * local / model.layers
    tokens = masked if model.decoder_slots == "masked" else experiment.corpus.sequence_length
    slots = {"self": (tokens,), "self+cross": (tokens, visible), "cross": (visible,)}
    attended = slots[model.decoder_attention]
    decoder = _stack_flops(model.decoder, model.decoder_layers, rows, tokens, attended)
    resized = 0.0  # by the linear maps before the decoder and before the head
    if model.decoder.width != model.width:
        resized_tokens = tokens + masked
        if "cross" in model.decoder_attention:
            resized_tokens += visible
        resized = 6.0 * rows * model.width * model.decoder.width * resized_tokens
    head = rows * 6.0 * masked * model.width * (model.width + maelm.table_rows(vocabulary_size))
    return {
        "encoder matrices": encoder.matrices,
        "encoder attention": encoder_attention,
        "decoder matrices": decoder.matrices + resized,
        "decoder attention": decoder.attention,
        "head": head,
    }


def _stack_flops(
    part: config.Model, layers: int, rows: int, tokens: int, keys: tuple[int, ...]
) -> StackFlops:
    """FLOPs of `layers` layers. `keys`: number of keys that each attention of a layer reads."""
    matrices = part.feed_forward_kernels * part.width * part.feed_forward * tokens
    matrices += sum(2 * part.width**2 * (tokens + count) for count in keys)
    attention = part.width * tokens * sum(keys)
    return StackFlops(layers * 6.0 * rows * matrices, layers * 12.0 * rows * attention)


def peak_flops() -> float | None:
    """Returns the peak FLOP/s of all devices, from `PEAK_FLOPS`. None: it is unknown, as on CPU."""
    kind = jax.devices()[0].device_kind
    for name, peak in PEAK_FLOPS.items():
        if re.search(rf"\b{re.escape(name)}\b", kind):
            return peak * jax.device_count()
    return None
