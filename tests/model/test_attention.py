"""Local attention in blocks, which backend `auto` takes, and what a training step calls of cuDNN, which runs nowhere here."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import mesh_of

from maelm_jax import config, gin_files
from maelm_jax.model import attention, ops, positions
from maelm_jax.model.kernels import attention_cudnn, backends
from maelm_jax.model.kernels.backends import Backend, Call, Target
from maelm_jax.pretraining import objective

CPU, H100 = Target("cpu", "cpu"), Target("gpu", "NVIDIA H100", has_cudnn=True)
V5E, V4 = Target("tpu", "TPU v5 lite"), Target("tpu", "TPU v4")
BASE = Call(12, 64, 440, 440, jnp.dtype("bfloat16"), 0.0, True)
LAYERS = 3


@pytest.mark.parametrize("block", [4, 5, 16])
def test_blocks_of_a_window_see_what_the_window_does(block):
    """Three segments, every third token dropped, empty slots at the end. 4 is half of the window, 16 is most of the row."""
    at = np.concatenate([np.arange(length)[np.arange(length) % 3 != 1] for length in (30, 7, 14)])
    segments = np.repeat([1, 2, 3], [20, 5, 9])
    at, segments = (jnp.asarray(np.pad(x, (0, 37 - len(x)))[None], jnp.int32) for x in (at, segments))
    q, k, v, weight = jax.random.normal(jax.random.key(0), (4, 1, 37, 8))
    weight = jnp.where((segments > 0)[:, :, None], weight, 0.0)

    def attended(qkv, block, is_divided):
        mask = positions.make_window_mask(segments, at, 8, block, jnp.dtype("float32"))
        terms = attention.ScoreTerms(mask=mask, block=block if is_divided else None)
        return (attention.attend(*qkv, heads=2, terms=terms).states * weight).sum()

    value_and_gradient = jax.jit(jax.value_and_grad(attended), static_argnums=(1, 2))
    results = [value_and_gradient((q, k, v), *how) for how in ((block, True), (37, False))]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *results)


@pytest.mark.parametrize(
    "target,changes,backend,reason",
    [
        (CPU, {}, "xla", "cpu"),
        (V5E, {}, "pallas_tpu", "TPU v5 lite"),
        (V5E, {"dropout_rate": 0.1}, "pallas_tpu", ""),
        (V5E, {"dtype": jnp.dtype("float32")}, "xla", "float32"),
        (V5E, {"heads": 11}, "xla", "11 heads"),
        (V5E, {"head_size": 48}, "xla", "48"),
        (V5E, {"queries": 436}, "xla", "436 queries"),
        (V5E, {"has_dense_mask": True}, "xla", "window"),
        (V5E, {"queries": 2048, "keys": 2048}, "xla", "102 MiB"),
        (V4, {}, "pallas_tpu", ""),
        (V4, {"queries": 512, "keys": 512}, "xla", "13 MiB"),
        (V5E._replace(tensor=4, sharded_rows=True), {}, "xla", "12 heads"),
        (V5E._replace(tensor=2, sharded_rows=True), {}, "pallas_tpu", ""),
        (V5E._replace(devices=4), {}, "xla", "4 devices"),
        (H100, {}, "cudnn", "NVIDIA H100"),
        (H100, {"has_dense_mask": True}, "cudnn", ""),
        (H100, {"head_size": 96}, "cudnn", ""),
        (H100, {"dropout_rate": 0.1}, "xla", "Dropout.attention=0"),
        (H100, {"queries": 441}, "xla", "441 queries"),
        (H100, {"head_size": 100}, "xla", "100"),
        (H100, {"dtype": jnp.dtype("float32")}, "xla", "float32"),
        (Target("gpu", "Tesla T4"), {}, "xla", "Tesla T4"),
    ],
)
def test_auto_takes_the_fused_backend_that_can_compute_the_call_and_says_why(target, changes, backend, reason):
    choice = backends.choose_backend("auto", BASE._replace(**changes), target)
    assert choice.backend == backend and reason in choice.reason


@pytest.mark.parametrize(
    "platform,capability,expected",
    [
        ("gpu", "9.0", ("gpu", True)),
        ("cuda", "8.0", ("gpu", True)),
        ("gpu", "7.5", ("gpu", False)),
        ("gpu", "gfx942", ("gpu", False)),
        ("tpu", None, ("tpu", False)),
    ],
)
def test_cudnn_is_for_nvidia_gpus_from_ampere_on(platform, capability, expected):
    device = types.SimpleNamespace(platform=platform, device_kind="any", compute_capability=capability)
    target = backends.device_target(device)
    assert (target.platform, target.has_cudnn) == expected


def test_a_backend_that_cannot_compute_is_refused():
    for backend, changes, target in (("cudnn", {}, CPU), ("pallas_tpu", {"heads": 11}, CPU), ("cudnn", {"dropout_rate": 0.1}, H100)):
        with pytest.raises(config.ConfigError, match="Compute.attention_backend"):
            backends.choose_backend(backend, BASE._replace(**changes), target)
    assert backends.choose_backend("pallas_tpu", BASE, CPU).backend == "pallas_tpu"


@pytest.fixture
def cudnn_installed(monkeypatch):
    """JAX asks for the version of cuDNN before it writes a call of it, and the CPU's JAX has none."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)


@pytest.mark.usefixtures("cudnn_installed")
@pytest.mark.parametrize("bias_heads,masked,kind", [(4, False, "ScaleBiasSoftmax"), (0, True, "Softmax"), (0, False, "Softmax")])
def test_each_layer_calls_cudnn_once_forward_and_once_backward(bias_heads, masked, kind):
    """One call in the body of each loop over layers: the backward loop keeps the softmax statistics and calls no forward kernel."""
    rows, slots, heads, width = 2, 24, 4, 128

    def loss(x, bias):
        mask = positions.Mask(jnp.ones((rows, slots), jnp.int32), jnp.ones((rows, slots), jnp.int32)) if masked else None
        named = jax.checkpoint_policies.save_only_these_names(ops.SAVED)
        policy = jax.checkpoint_policies.save_from_both_policies(named, attention_cudnn.saves_outputs)

        @functools.partial(jax.checkpoint, prevent_cse=False, policy=policy)
        def layer(x, _):
            terms = attention.ScoreTerms(bias, mask, backend=Backend("cudnn", H100))
            return attention.attend(x, x, x, heads=heads, terms=terms).states, None

        return jax.lax.scan(layer, x, jnp.arange(LAYERS))[0].astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((rows, slots, width), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((rows, bias_heads, slots, slots), jnp.bfloat16) if bias_heads else None
    text = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(x, bias).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f"@__cudnn$fmha{kind}(") == 1
    assert text.count(f"@__cudnn$fmha{kind}Backward(") == 1
    assert "4x24x24xf32" not in text, "float32 scores"


@pytest.mark.usefixtures("cudnn_installed")
def test_the_step_of_modern_base_gives_cudnn_no_bias_and_takes_no_gradient_of_one(monkeypatch):
    monkeypatch.setattr(backends, "mesh_target", lambda mesh: H100._replace(sharded_rows=True))
    experiment = gin_files.load(["modern_base.gin"], ["BATCH_SIZE=2", "Encoder.layers=2", "Decoder.layers=2", "Vocabulary.size=512"])
    inputs = objective.abstract_step(experiment, mesh_of(1, 1, 1))
    text = inputs.train_step.trace(*inputs.arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert set(re.findall(r"@__cudnn\$fmha(\w+)\(", text)) == {"Softmax", "SoftmaxBackward"}
    assert not re.search(r"\d+x(384x384|512x512)x(bf16|f32)", text), "an array of scores or of a mask"


@pytest.mark.parametrize("head_size,causal", [(32, False), (64, True), (128, True), (128, False)])
def test_masks_given_to_cudnn_hide_what_those_of_xla_hide(monkeypatch, head_size, causal):
    """JAX's own attention stands in for cuDNN. 128 leaves no room for the segments in a head. Slots 13 to 15 are empty."""
    calls, heads = [], 2
    by_jax = jax.nn.dot_product_attention

    def stand_in(*args, implementation, **settings):
        calls.append((implementation, args[4] is None))
        return by_jax(*args, implementation="xla", **settings)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    segments = jnp.asarray([[1] * 5 + [2] * 2 + [3] * 6 + [0] * 3, [4] * 12 + [32767] + [0] * 3], jnp.int32)
    q, k, v, weight = jax.random.normal(jax.random.key(0), (4, 2, 16, heads * head_size)).astype(jnp.bfloat16)
    weight = jnp.where((segments > 0)[:, :, None], weight, 0)

    def attended(q, k, v, backend):
        terms = attention.ScoreTerms(mask=positions.Mask(segments, segments, causal), backend=Backend(backend, H100))
        states = attention.attend(q, k, v, heads=heads, terms=terms).states
        return (states * weight).astype(jnp.float32).sum(), states

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        ours, theirs = (jax.value_and_grad(attended, argnums=(0, 1, 2), has_aux=True)(q, k, v, backend) for backend in ("cudnn", "xla"))
    assert calls == [("cudnn", head_size < 128)]
    seen = (segments > 0)[:, :, None]
    for a, b in zip((ours[0][1], *ours[1]), (theirs[0][1], *theirs[1]), strict=True):
        a, b = (jnp.where(seen, x, 0).astype(jnp.float32) for x in (a, b))
        assert jnp.linalg.norm(a - b) < 0.01 * jnp.linalg.norm(b)
    assert not ours[1][1][:, 13:].any(), "empty keys receive no gradient"


@pytest.mark.usefixtures("cudnn_installed")
@pytest.mark.parametrize("tensor,has_bias", [(1, False), (2, True)])
def test_on_several_devices_the_calls_are_not_left_to_a_partitioner(tensor, has_bias):
    """XLA cannot partition the calls inside the `shard_map` over rows: they stand in one over heads, which divides them."""
    rows, slots, heads, width = 8, 24, 4, 128
    mesh = mesh_of(4 // tensor, 2, tensor)
    by_row = jax.sharding.PartitionSpec(("data", "fsdp"))

    def loss(x, bias):
        mask = None if has_bias else positions.Mask(*[jnp.ones(x.shape[:2], jnp.int32)] * 2)
        target = H100._replace(devices=mesh.size, tensor=tensor, sharded_rows=True)
        terms = attention.ScoreTerms(bias, mask, backend=Backend("cudnn", target))
        states = attention.attend(x, x, x, heads=heads, terms=terms).states
        return jax.lax.psum(states.astype(jnp.float32).sum(), ("data", "fsdp"))

    gradient = jax.grad(loss, argnums=(0, 1) if has_bias else 0)
    summed = jax.shard_map(gradient, mesh=mesh, in_specs=(by_row, by_row), out_specs=by_row, axis_names={"data", "fsdp"}, check_vma=False)
    x = jax.ShapeDtypeStruct((rows, slots, width), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((rows, heads, slots, slots), jnp.bfloat16) if has_bias else None
    text = jax.jit(summed).trace(x, bias).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__cudnn$fmha") >= 2 and "CustomSPMDPartitioning" not in text
    shape = f"{rows // (mesh.size // tensor)}x{heads // tensor}x24xf32"
    assert shape in text, "the statistics of this device's rows and heads"
