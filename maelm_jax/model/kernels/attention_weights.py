"""The weights of attention, softmax(q k^T + bias), and their gradient.

Axis letters: B rows, H heads, T queries, S keys, K size of a head, G heads of the bias (H, or 1 for
a bias that all heads share).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maelm_jax.model.kernels.linear import product
from maelm_jax.model.ops import save_for_backward


@jax.custom_vjp
def attention_weights(
    q: Float[Array, "B H T K"], k: Float[Array, "B H S K"], bias: Float[Array, "B G T S"]
) -> Float[Array, "B H T S"]:
    """Computes the softmax of q k^T + bias over the keys. q is already divided by sqrt(K).

    Scores and softmax are computed in float32. The weights have the dtype of q. The backward pass
    casts the gradient of the scores to the dtype of q, so that its matrix products run in that
    dtype. Automatic differentiation would run them in float32.
    """
    return _attention_weights_forward(q, k, bias)[0]


def _attention_weights_forward(q, k, bias):
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k, preferred_element_type=jnp.float32) + bias.astype(
        jnp.float32
    )
    weights = save_for_backward(jax.nn.softmax(scores, axis=-1).astype(q.dtype))
    return weights, (q, k, weights, bias)


def _attention_weights_backward(saved, d_weights):
    q, k, weights, bias = saved
    wide = weights.astype(jnp.float32)
    weighted = wide * d_weights.astype(jnp.float32)
    d_scores = weighted - wide * weighted.sum(axis=-1, keepdims=True)
    d_bias = d_scores if bias.shape[1] == q.shape[1] else d_scores.sum(axis=1, keepdims=True)
    d_scores = d_scores.astype(q.dtype)
    return (
        product("bhts,bhsk->bhtk", d_scores, k),
        product("bhts,bhtk->bhsk", d_scores, q),
        d_bias.astype(bias.dtype),
    )


attention_weights.defvjp(_attention_weights_forward, _attention_weights_backward)
