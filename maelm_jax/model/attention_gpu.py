"""Fused attention for NVIDIA GPUs by cuDNN, with a backward pass that keeps the softmax statistics.

`jax.nn.dot_product_attention` does not name its softmax statistics, so `jax.checkpoint` would run
the forward kernel twice. This module calls JAX's cuDNN primitives directly, in a `custom_vjp` that
names them. It uses the primitives without a partitioning rule, because that rule fails inside
`shard_map`. On several devices, training/fsdp.py divides the rows and attention.py divides the
heads.

Axis letters: B rows, T queries, S keys, H heads, K size of a head, G heads of the bias (H or 1).
"""

import functools
import inspect

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maelm_jax.model.ops import save_for_backward


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(
    bias_has_gradient: bool,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H K"],
    bias: Float[Array, "B G T S"] | None,
) -> Float[Array, "B T H K"]:
    """Computes softmax(q k^T / sqrt(K) + bias) v for each head, without dropout.

    Args:
        bias_has_gradient: False if the bias is only a mask, or None.
        q: Queries, in bfloat16. T and S are even. K is a multiple of 8, at most 128.
        k: Keys.
        v: Values.
        bias: Added to the scores, or None.

    Returns:
        The sums, in the dtype of q.
    """
    return _attention_forward(bias_has_gradient, q, k, v, bias)[0]


def _attention_forward(bias_has_gradient, q, k, v, bias):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    settings = _settings(cudnn, q, bias, bias_has_gradient)
    out, statistics = cudnn._dot_product_attention_fwd_impl(
        *_operands(q, k, v, bias), is_training=True, **settings
    )
    out, statistics = save_for_backward(out), save_for_backward(statistics)
    return out, (q, k, v, bias, statistics, out)


def _attention_backward(bias_has_gradient, saved, d_out):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    q, k, v, bias, statistics, out = saved
    gradients = cudnn._dot_product_attention_bwd_impl(
        *_operands(q, k, v, bias),
        statistics,
        out,
        d_out,
        **_settings(cudnn, q, bias, bias_has_gradient),
    )
    return *gradients[:3], gradients[3] if bias_has_gradient else None


attention.defvjp(_attention_forward, _attention_backward)


def _operands(q, k, v, bias) -> tuple[Array, ...]:
    """Returns the operands of both primitives. The last six are of variants that are not used."""
    unused = jnp.zeros(0, q.dtype)
    return q, k, v, unused if bias is None else bias, *(unused,) * 6


def _settings(cudnn, q, bias, bias_has_gradient: bool) -> dict:
    """Returns the parameters of both primitives."""
    parameters = inspect.signature(cudnn._dot_product_attention_fwd_impl).parameters
    # JAX 0.12 also takes a function of the scores. None is given.
    of_scores = {"score_mod": None, "score_mod_args": ()} if "score_mod" in parameters else {}
    return of_scores | {
        "scale": q.shape[-1] ** -0.5,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (bias is not None, bias_has_gradient),
        "mask_type": cudnn.MaskType.NO_MASK,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }
