"""Names and layouts of the reference implementation's parameters (yumeng5/MAE-LM; reference.md section 4) <-> ours.

The table below is the whole mapping; every tensor on either side must be accounted for.
"""

import numpy as np

from maelm_jax.config import ConfigError

_LAYER = {
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.out_proj": "out",
    "self_attn_layer_norm": "attention_norm",
    "fc1": "up",
    "fc2": "down",
    "final_layer_norm": "output_norm",
}
_ENCODER, _DECODER = "encoder.sentence_encoder.", "gen_decoder.sentence_encoder."


def _names(layers: int, decoder_layers: int, relative: bool):
    """(reference name, our path, layer or None, transposed) of every tensor of a model."""
    yield _ENCODER + "embed_tokens.weight", "encoder/token_embedding", None, False
    for prefix, room, depth in ((_ENCODER, "encoder", layers), (_DECODER, "decoder", decoder_layers)):
        if not depth:
            continue
        yield prefix + "embed_positions.weight", f"{room}/position_embedding", None, False
        yield prefix + "emb_layer_norm.weight", f"{room}/norm/scale", None, False
        yield prefix + "emb_layer_norm.bias", f"{room}/norm/bias", None, False
        for layer in range(depth):
            for theirs, ours in _LAYER.items():
                weight = "scale" if ours.endswith("norm") else "kernel"
                yield f"{prefix}layers.{layer}.{theirs}.weight", f"{room}/blocks/{ours}/{weight}", layer, weight == "kernel"
                yield f"{prefix}layers.{layer}.{theirs}.bias", f"{room}/blocks/{ours}/bias", layer, False
    if relative:
        yield _ENCODER + "relative_attention_bias.weight", "encoder/relative_bias/table", None, False
    head = "gen_decoder.lm_head." if decoder_layers else "encoder.lm_head."
    yield head + "dense.weight", "head/dense/kernel", None, True
    yield head + "dense.bias", "head/dense/bias", None, False
    yield head + "layer_norm.weight", "head/norm/scale", None, False
    yield head + "layer_norm.bias", "head/norm/bias", None, False
    yield head + "bias", "head/bias", None, False


def from_reference(tensors: dict[str, np.ndarray], ours: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our parameters, as {path: array}, with the values of `tensors` ({reference name: array}).

    `ours` ({path: array}) gives the shapes; rows that pad the token table and the head's bias keep its values. Raises ConfigError
    that lists every tensor that is missing, left over, or of another shape.
    """
    result = {path: np.array(value) for path, value in ours.items()}
    left, wrong = set(tensors), []
    layers = result["encoder/blocks/query/kernel"].shape[0]
    decoder_layers = result["decoder/blocks/query/kernel"].shape[0] if "decoder/blocks/query/kernel" in result else 0
    for name, path, layer, transposed in _names(layers, decoder_layers, "encoder/relative_bias/table" in result):
        if name not in tensors:
            wrong.append(f"{name} is missing")
            continue
        left.discard(name)
        value = tensors[name].T if transposed else tensors[name]
        slot = result[path] if layer is None else result[path][layer]
        padded = path in ("encoder/token_embedding", "head/bias") and value.shape[0] <= slot.shape[0] and value.shape[1:] == slot.shape[1:]
        if value.shape != slot.shape and not padded:
            wrong.append(f"{name} has shape {value.shape}, expected {slot.shape}")
            continue
        slot[: value.shape[0]] = value
    wrong += [f"{name} is not a tensor of this model" for name in sorted(left)]
    if wrong:
        raise ConfigError("the weights do not fit the model: " + "; ".join(wrong))
    return result


def to_reference(ours: dict[str, np.ndarray], vocabulary_size: int) -> dict[str, np.ndarray]:
    """{reference name: array} of parameters given as {path: array}; tied copies and padding rows left out."""
    layers = ours["encoder/blocks/query/kernel"].shape[0]
    decoder_layers = ours["decoder/blocks/query/kernel"].shape[0] if "decoder/blocks/query/kernel" in ours else 0
    result = {}
    for name, path, layer, transposed in _names(layers, decoder_layers, "encoder/relative_bias/table" in ours):
        value = np.asarray(ours[path]) if layer is None else np.asarray(ours[path][layer])
        if path in ("encoder/token_embedding", "head/bias"):
            value = value[:vocabulary_size]
        result[name] = value.T if transposed else value
    return result
