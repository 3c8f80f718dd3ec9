"""Model FLOPs of a training step, and the peak FLOP/s of the devices, for MFU.

MFU (model FLOPs utilisation) is the share of the hardware's peak FLOP/s that the model uses.
"""

import dataclasses
import re
import typing

import jax

from maelm_jax import config
from maelm_jax.model import maelm, masking, model_inputs

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
    masked slots only. The head counts M slots. With `Objective.causal_share`, each term is that of
    the two kinds of rows in their shares. A head of an objective's own does not count.
    """
    if share := experiment.objective.causal_share:
        objective = dataclasses.replace(experiment.objective, causal_share=0.0)
        masked = dataclasses.replace(experiment, objective=objective)
        of_masked, of_causal = (
            flops_terms(each, vocabulary_size) for each in (masked, experiment.left_to_right)
        )
        return {
            term: (1 - share) * value + share * of_causal[term] for term, value in of_masked.items()
        }
    own, rows, length = (
        experiment.encoder,
        experiment.run.batch_size,
        experiment.corpus.sequence_length,
    )
    sizes = masking.budget(experiment.objective, length)
    visible, masked = sizes.visible, sizes.masked
    encoder = _stack_flops(own, rows, visible, (visible,))
    encoder_attention = encoder.attention
    if own.local_attention:
        unseen = 1.0 - min(own.local_attention, visible) / visible
        local = own.layers - len(range(0, own.layers, own.global_every))
        encoder_attention *= 1.0 - unseen * local / own.layers
    head = 0.0
    if experiment.objective.kind.predicts_tokens:
        head = rows * 6.0 * masked * own.width * (own.width + maelm.table_rows(vocabulary_size))
    decoder = StackFlops(0.0, 0.0)
    if experiment.decoder:
        decoder = _decoder_flops(experiment.decoder, own, rows, length, sizes)
    return {
        "encoder matrices": encoder.matrices,
        "encoder attention": encoder_attention,
        "decoder matrices": decoder.matrices,
        "decoder attention": decoder.attention,
        "head": head,
    }


def flops_per_token(encoder: config.Encoder) -> float:
    """Counts the model FLOPs of training the encoder on a token, without attention scores."""
    return _stack_flops(encoder, rows=1, tokens=1, keys=(1,)).matrices


def _decoder_flops(
    decoder: config.Decoder,
    encoder: config.Encoder,
    rows: int,
    length: int,
    sizes: model_inputs.Budget,
) -> StackFlops:
    """FLOPs of the decoder, with the linear maps that resize states before it and the head."""
    visible, masked = sizes.visible, sizes.masked
    tokens = masked if decoder.slots == "masked" else length
    keys = {"self": (tokens,), "self+cross": (tokens, visible), "cross": (visible,)}
    own = decoder.stack(encoder)
    flops = _stack_flops(own, rows, tokens, keys[decoder.attention])
    if own.width == encoder.width:
        return flops
    resized = tokens + masked + (visible if "cross" in decoder.attention else 0)
    matrices = 6.0 * rows * encoder.width * own.width * resized
    return flops._replace(matrices=flops.matrices + matrices)


def _stack_flops(stack: config.Stack, rows: int, tokens: int, keys: tuple[int, ...]) -> StackFlops:
    """FLOPs of the layers. `keys`: number of keys that each attention of a layer reads."""
    matrices = stack.feed_forward_kernels * stack.width * stack.feed_forward * tokens
    matrices += sum(2 * stack.width**2 * (tokens + count) for count in keys)
    attention = stack.width * tokens * sum(keys)
    return StackFlops(stack.layers * 6.0 * rows * matrices, stack.layers * 12.0 * rows * attention)


def peak_flops() -> float | None:
    """Returns the peak FLOP/s of all devices, from `PEAK_FLOPS`. None: it is unknown, as on CPU."""
    kind = jax.devices()[0].device_kind
    for name, peak in PEAK_FLOPS.items():
        if re.search(rf"\b{re.escape(name)}\b", kind):
            return peak * jax.device_count()
    return None
