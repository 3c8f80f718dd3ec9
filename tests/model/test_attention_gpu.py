"""The cuDNN backend: what a training step calls, seen in the program lowered for CUDA. cuDNN itself runs nowhere here."""

import functools

import jax
import jax.numpy as jnp
import pytest

from maelm_jax.model import attention, attention_choice, ops

LAYERS = 3
GPU = attention_choice.Target("gpu", "NVIDIA H100", 1)


def lowered_for_cuda(bias_heads: int, masked: bool) -> str:
    """The gradient of layers that share a bias, kept values as in the model, as StableHLO."""
    rows, slots, heads, width = 2, 24, 4, 128

    def loss(x, bias):
        mask = attention.Mask(jnp.ones((rows, slots), jnp.int32), jnp.ones((rows, slots), jnp.int32)) if masked else None
        policy = jax.checkpoint_policies.save_only_these_names(ops.SAVED)

        @functools.partial(jax.checkpoint, prevent_cse=False, policy=policy)
        def layer(x, _):
            return attention.attention(x, x, x, heads=heads, terms=attention.ScoreTerms(bias, mask)).states, None

        return jax.lax.scan(layer, x, jnp.arange(LAYERS))[0].astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((rows, slots, width), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((rows, bias_heads, slots, slots), jnp.bfloat16) if bias_heads else None
    with attention_choice.traced_for(GPU):
        return jax.jit(jax.grad(loss, argnums=(0, 1))).trace(x, bias).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("bias_heads,masked,kind", [(4, False, "ScaleBiasSoftmax"), (0, True, "ScaleBiasSoftmax"), (0, False, "Softmax")])
def test_each_layer_calls_cudnn_once_forward_and_once_backward(bias_heads, masked, kind):
    """One call in the body of each loop over layers: the backward loop keeps the softmax statistics and calls no forward kernel."""
    text = lowered_for_cuda(bias_heads, masked)
    assert text.count(f"@__cudnn$fmha{kind}(") == 1
    assert text.count(f"@__cudnn$fmha{kind}Backward(") == 1
    assert "4x24x24xf32" not in text, "float32 scores"


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("bias_heads", [1, 4])
def test_on_several_devices_the_calls_are_not_left_to_a_partitioner(tensor, bias_heads):
    """XLA cannot partition the calls inside the `shard_map` over rows: they stand in one over heads, which divides them."""
    rows, slots, heads, width = 8, 24, 4, 128
    mesh = jax.make_mesh((4 // tensor, 2, tensor), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    target = attention_choice.Target("gpu", "NVIDIA H100", mesh.size, tensor, sharded_rows=True)
    by_row = jax.sharding.PartitionSpec(("data", "fsdp"))

    def loss(x, bias):
        with attention_choice.traced_for(target):
            states = attention.attention(x, x, x, heads=heads, terms=attention.ScoreTerms(bias)).states
        return jax.lax.psum(states.astype(jnp.float32).sum(), ("data", "fsdp"))

    summed = jax.shard_map(
        jax.grad(loss, argnums=(0, 1)), mesh=mesh, in_specs=(by_row, by_row), out_specs=by_row, axis_names={"data", "fsdp"}, check_vma=False
    )
    x = jax.ShapeDtypeStruct((rows, slots, width), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((rows, bias_heads, slots, slots), jnp.bfloat16)
    text = jax.jit(summed).trace(x, bias).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__cudnn$fmha") >= 2 and "CustomSPMDPartitioning" not in text
    shape = f"{rows // (mesh.size // tensor)}x{heads // tensor}x24xf32"
    assert shape in text, "the statistics of this device's rows and heads"
