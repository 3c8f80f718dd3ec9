"""The TPU kernels in Pallas' interpreter against the xla backend, in float32: values, all gradients, dropout's bits."""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import mesh_of, model_of

from maelm_jax.model import attention, positions
from maelm_jax.model.kernels import backends

RATE = 0.2
NAMES = ("states", "dq", "dk", "dv", "d_bias")
BACKENDS = {name: backends.Backend(name, backends.Target("cpu", "cpu")) for name in ("xla", "pallas_tpu")}


class Case(typing.NamedTuple):
    queries: int
    keys: int
    heads: int
    head_size: int
    bias: bool = False
    segments: bool = False
    causal: bool = False
    dropout: bool = False


def inputs_of(case: Case, rows: int = 2) -> dict:
    numbers = np.random.default_rng(0)
    width = case.heads * case.head_size

    def normal(*shape):
        return jnp.asarray(numbers.normal(size=shape), jnp.float32)

    def segments(slots):  # 0 at some, so that there are empty keys, and queries that see no key
        return jnp.asarray(np.sort(numbers.integers(0, 3, (rows, slots)), axis=1)[:, ::-1], jnp.int32)

    bias = normal(rows, case.heads, case.queries, case.keys) if case.bias else None
    keys = jax.random.split(jax.random.key(1), rows) if case.dropout else None
    mask = positions.Mask(segments(case.queries), segments(case.keys), case.causal) if case.segments else None
    return {
        "arrays": (normal(rows, case.queries, width), normal(rows, case.keys, width), normal(rows, case.keys, width), bias),
        "d_states": normal(rows, case.queries, width),
        "mask": mask,
        "dropout_keys": keys,
        "heads": case.heads,
    }


def results(backend: str, *, arrays, d_states, mask, dropout_keys, heads) -> dict[str, jax.Array]:
    """The states, and the gradients of queries, keys, values and bias."""

    def states(q, k, v, bias):
        terms = attention.ScoreTerms(bias, mask, backend=BACKENDS[backend])
        return attention.attend(q, k, v, heads=heads, terms=terms, dropout_rate=RATE, dropout_keys=dropout_keys).states

    @jax.jit
    def states_and_gradients(arrays, d_states):
        value, pull = jax.vjp(states, *arrays)
        return value, *pull(d_states)

    values = zip(NAMES, states_and_gradients(arrays, d_states), strict=True)
    return {name: value for name, value in values if value is not None}


@pytest.mark.parametrize(
    "case",
    [
        Case(8, 8, 2, 64),
        Case(40, 8, 4, 32, bias=True, segments=True, dropout=True),
        Case(40, 40, 2, 128, bias=True, segments=True, causal=True, dropout=True),
        pytest.param(Case(440, 512, 12, 64, bias=True, segments=True, dropout=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_kernels_agree_with_xla(case):
    inputs = inputs_of(case)
    expected, actual = (results(name, **inputs) for name in ("xla", "pallas_tpu"))
    assert set(expected) == set(actual)
    for name, value in expected.items():
        assert float(jnp.linalg.norm(value)) > 0.0, f"{name} is zero, so the comparison shows nothing"
        error = float(jnp.linalg.norm(actual[name] - value) / jnp.linalg.norm(value))
        assert error < 2e-6, f"{name} differs by {error:.1e} of its norm"


def test_a_carrier_sums_the_gradients_of_a_bias_that_layers_share():
    case = Case(16, 24, 2, 64, bias=True)
    inputs = inputs_of(case)
    layers, (q, k, v, bias) = 3, inputs["arrays"]

    def with_carrier(bias):
        """The sum over layers, the carrier going from one to the next through the scan, as in the model."""

        def layer(carrier, scale):
            terms = attention.ScoreTerms(bias, None, carrier, backend=BACKENDS["pallas_tpu"])
            output = attention.attend(q * scale, k, v, heads=case.heads, terms=terms)
            return output.carrier, (output.states * inputs["d_states"]).sum()

        return jax.lax.scan(layer, bias, jnp.arange(1.0, layers + 1.0))[1].sum()

    def by_xla(bias):
        terms = attention.ScoreTerms(bias)
        attend = functools.partial(attention.attend, heads=case.heads, terms=terms)
        states = [attend(q * scale, k, v).states for scale in range(1, layers + 1)]
        return sum((x * inputs["d_states"]).sum() for x in states)

    expected, actual = jax.jit(jax.grad(by_xla))(bias), jax.jit(jax.grad(with_carrier))(bias)
    assert float(jnp.linalg.norm(expected)) > 0.0
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


def test_devices_divide_the_heads_of_a_kernel():
    """Rows by `shard_map`, as in training, heads over `tensor`: the same states and gradients as on one device."""
    case = Case(16, 16, 4, 64, bias=True, dropout=True)
    inputs, mesh = inputs_of(case), mesh_of(2, 1, 2)
    (q, k, v, bias), d_states = inputs["arrays"], inputs["d_states"]

    def states(q, k, v, bias, keys, *, backend="pallas_tpu", target=None):
        settings = model_of(width=256, heads=4, attention_backend=backend).encoder_settings
        target = target or backends.this_machine()
        terms = attention.prepare_terms(attention.ScoreTerms(bias), settings, target, 16, 16, RATE)
        return attention.attend(q, k, v, heads=4, terms=terms, dropout_rate=RATE, dropout_keys=keys)

    def on_each_device(*arguments):
        return states(*arguments, target=backends.mesh_target(mesh)).states

    rows = jax.sharding.PartitionSpec(("data", "fsdp"))
    divided = jax.shard_map(on_each_device, mesh=mesh, in_specs=(rows,) * 5, out_specs=rows, axis_names={"data", "fsdp"}, check_vma=False)

    def gradients(attend):
        loss = lambda q, k, v, bias: (attend(q, k, v, bias, inputs["dropout_keys"]) * d_states).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, bias)

    actual, expected = gradients(divided), gradients(lambda *arrays: states(*arrays, backend="xla").states)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), actual, expected)
