"""LayerNorm and its gradient.

Axis letters: B rows, T tokens of a sequence, D width.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maelm_jax.model.ops import save_for_backward


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(
    x: Float[Array, "B T D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    epsilon: float,
) -> Float[Array, "B T D"]:
    """Normalises the last axis with the biased variance, as PyTorch does.

    It computes in float32, in two passes (mean, variance). The result has the dtype of x.
    """
    return _layer_norm_forward(x, scale, bias, epsilon)[0]


def _layer_norm_forward(x, scale, bias, epsilon):
    wide = x.astype(jnp.float32)
    mean = save_for_backward(wide.mean(axis=-1, keepdims=True))
    inverse = save_for_backward(
        jax.lax.rsqrt(jnp.square(wide - mean).mean(axis=-1, keepdims=True) + epsilon)
    )
    y = (wide - mean) * inverse * scale[None, None]
    if bias is not None:
        y = y + bias[None, None]
    return y.astype(x.dtype), (x, mean, inverse, scale, bias)


def _layer_norm_backward(epsilon, saved, dy):
    x, mean, inverse, scale, bias = saved
    normal, dy = (x.astype(jnp.float32) - mean) * inverse, dy.astype(jnp.float32)
    d = dy * scale[None, None]
    dx = inverse * (
        d - d.mean(axis=-1, keepdims=True) - normal * (d * normal).mean(axis=-1, keepdims=True)
    )
    d_bias = None if bias is None else dy.sum(axis=(0, 1))
    return dx.astype(x.dtype), (dy * normal).sum(axis=(0, 1)), d_bias


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)
