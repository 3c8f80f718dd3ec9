"""Invariant 2 for the modern architecture: values and gradients are those of stock PyTorch, compact rows included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import flatten, model_of, objective_of, stock_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from maelm_jax import config  # noqa: E402
from maelm_jax.encoders import layouts, modernbert  # noqa: E402
from maelm_jax.model import loss, maelm, masking  # noqa: E402

SIZE, LENGTH = 100, 32
SPECIAL = config.SpecialIds(bos=0, pad=1, eos=2, unk=3, mask=99)
MODEL = model_of(
    layers=2,
    width=32,
    heads=4,
    feed_forward=48,
    decoder_layers=0,
    max_positions=LENGTH,
    relative_buckets="none",
    normalization="pre",
    positions="rotary",
    rotary_theta=1000.0,
    feed_forward_gate=True,
    biases=False,
    init_std=0.2,
    dropout=0.0,
    attention_dropout=0.0,
)


MAPPINGS = modernbert.MODERNBERT.encoder_mappings(MODEL.encoder, SPECIAL.pad, "model.") + modernbert.MODERNBERT.language_model_mappings()


def stock_names(params: dict) -> dict[str, np.ndarray]:
    """Parameters, or their gradients, under the names of the stock model."""
    return layouts.export_tensors({path: np.asarray(value) for path, value in flatten(params).items()}, MAPPINGS, SIZE)


def close(ours, theirs, tolerance, name=""):
    assert np.abs(ours - theirs).max() < tolerance * np.abs(theirs).max(), name


@pytest.fixture(scope="module")
def models():
    graph, init = maelm.create(MODEL, SIZE, SPECIAL)
    params = jax.jit(init)(jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)  # no scale is left at 1
    stock = transformers.AutoModelForMaskedLM.from_config(stock_config("modernbert", SIZE), attn_implementation="eager").eval()
    missing, unexpected = stock.load_state_dict({name: torch.tensor(value) for name, value in stock_names(params).items()}, strict=False)
    assert not unexpected and missing in ([], ["decoder.weight"]), "every tensor is loaded; the output matrix is tied"
    return graph, params, stock


def test_masked_language_model_and_its_gradients_are_those_of_the_stock_model(models):
    graph, params, stock = models
    ids = np.random.default_rng(0).integers(4, 99, (3, LENGTH)).astype(np.int32)
    ids[:, 0], ids[0, 20:] = 0, 1
    settings = objective_of(encoder_mask_fraction=1.0, rate=0.25)
    inputs = masking.draw(jax.random.split(jax.random.key(1), 3), jnp.asarray(ids), settings, masking.budget(settings, LENGTH), SPECIAL)

    def total(params):
        return loss.masked_cross_entropy(maelm.apply(graph, params).predict(inputs), inputs).loss_nats

    value, gradient = jax.jit(jax.value_and_grad(total))(params)
    targets, weights = (np.asarray(x) for x in loss.gather_targets(inputs))
    slots = torch.tensor(np.asarray(inputs.masked_slots)).long().clamp(max=LENGTH - 1)
    masked = torch.tensor(np.asarray(inputs.encoder_ids)).long()
    logits = stock(masked, attention_mask=torch.tensor(ids != 1)).logits
    chosen = logits.gather(1, slots[:, :, None].expand(-1, -1, SIZE))
    each = torch.nn.functional.cross_entropy(chosen.flatten(0, 1), torch.tensor(targets).long().flatten(), reduction="none")
    their_loss = (each * torch.tensor(weights).flatten()).sum()
    their_loss.backward()
    assert abs(float(value) - their_loss.item()) < 1e-5 * their_loss.item()
    theirs = {name: parameter.grad.numpy() for name, parameter in stock.named_parameters()}
    for name, ours in stock_names(gradient).items():
        close(ours, theirs[name], 1e-4, name)
