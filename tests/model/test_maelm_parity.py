"""Invariant 2: the reference implementation's own numbers, computed by its code in float64 (tests/data/reference/*.npz).

MAELM_REFERENCE_DIR may name a folder of further cases of the same layout.
"""

import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from testing import model_of

from maelm_jax import config
from maelm_jax.encoders import layouts, published
from maelm_jax.model import loss, maelm, model_inputs

FOLDERS = [pathlib.Path(__file__).parents[1] / "data" / "reference"] + [pathlib.Path(d) for d in [os.environ.get("MAELM_REFERENCE_DIR")] if d]
CASES = sorted(path for folder in FOLDERS for path in folder.glob("*.npz"))


def close(ours, theirs, tolerance, name=""):
    """Largest difference relative to the array's largest value."""
    scale = max(np.abs(theirs).max(), 1e-30)
    assert np.abs(np.asarray(ours) - theirs).max() / scale < tolerance, name


def fill_up(rows, size):
    """Zeros for the ids that the table holds beyond the vocabulary."""
    return np.concatenate([rows, np.zeros((size - len(rows), *rows.shape[1:]), rows.dtype)])


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_reference(path):
    data = np.load(path)
    case = json.loads(str(data["config"]))
    plain_mlm = case["mode"] == "mlm"
    settings = model_of(
        layers=case["layers"],
        width=case["dim"],
        heads=case["heads"],
        feed_forward=case["ffn"],
        max_positions=case["max_positions"],
        decoder_layers=0 if plain_mlm else case["decoder_layers"],
        num_buckets=case["rel_pos_bins"],
        max_distance=case["max_rel_pos"],
        relative_buckets="reference" if case.get("rel_pos", 1) else "none",
        dropout=0.0,
        attention_dropout=0.0,
    )
    special = config.SpecialIds(bos=0, pad=1, eos=2, unk=3, mask=case["vocab_size"] - 1)
    graph, init = maelm.create(settings, case["vocab_size"], special)
    ours = traverse_util.flatten_dict(jax.eval_shape(init, jax.random.key(0)), sep="/")
    weights = {key.removeprefix("weights/"): data[key] for key in data.files if key.startswith("weights/")}
    shapes = layouts.unpad_shapes({path: value.shape for path, value in ours.items()}, case["vocab_size"])
    taken = published.import_params(weights, settings, shapes, path.name)
    padded = {name: fill_up(value, ours[name].shape[0]) if name in layouts.VOCABULARY else value for name, value in taken.items()}
    parameters = traverse_util.unflatten_dict(padded, sep="/")

    ids, masked, padding = (jnp.asarray(data[f"batch/{name}"]) for name in ("tokens", "masked", "padding"))
    ids, masked = ids.astype(jnp.int32), masked.astype(bool)
    segments = (~padding.astype(bool)).astype(jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    visible = segments.astype(bool) & (plain_mlm | ~masked)
    sizes = model_inputs.Budget(int(visible.sum(1).max()), int(masked.sum(1).max()))
    masked_visible = masked if plain_mlm else jnp.zeros_like(masked)
    inputs = model_inputs.split(ids, segments, positions, masked, masked_visible, sizes, special.mask)

    def mean_loss(parameters):
        model = maelm.apply(graph, parameters)
        prediction = model.predict(inputs)
        sums = loss.masked_cross_entropy(prediction, inputs)
        return sums.loss_nats / sums.count, (sums, prediction.logits, model.encode(inputs))

    with jax.default_matmul_precision("highest"):
        (mean, (sums, logits, hidden)), gradient = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))(parameters)

    assert float(sums.count) == data["expected/count"]
    close(mean, data["expected/loss"], 1e-5, "loss")
    slots = np.asarray(inputs.encoder_index)[data["expected/enc_b"], data["expected/enc_pos"]]
    close(np.asarray(hidden)[data["expected/enc_b"], slots], data["expected/enc_hidden"], 1e-5, "hidden states")
    slots = np.asarray(inputs.masked_index)[data["expected/masked_b"], data["expected/masked_pos"]]
    close(np.asarray(logits)[data["expected/masked_b"], slots, : case["vocab_size"]], data["expected/logits"], 1e-5, "logits")

    gradient = traverse_util.flatten_dict(jax.tree.map(np.asarray, gradient), sep="/")
    close(np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradient.values())), data["expected/grad_norm"], 1e-4, "norm")
    ours = published.to_reference(gradient, settings, case["vocab_size"])
    theirs = {key.removeprefix("expected/grad/"): data[key] for key in data.files if key.startswith("expected/grad/")}
    assert set(ours) == set(theirs)
    for name in theirs:
        if name.endswith("k_proj.bias"):  # analytically zero
            assert np.abs(ours[name]).max() < 1e-6
        else:
            close(ours[name], theirs[name], 1e-4, name)
