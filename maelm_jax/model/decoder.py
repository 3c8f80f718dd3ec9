"""The shallow decoder (paper section 3), which is discarded after pretraining.

Axis letters: B rows, T slots that the decoder computes, V slots that the encoder reads, D width of
the encoder, E width of the decoder.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maelm_jax import config
from maelm_jax.model import layers, stack
from maelm_jax.model.kernels.backends import Target
from maelm_jax.model.model_inputs import SlotInfo
from maelm_jax.model.positions import RelativeBias


class Decoder(nnx.Module):
    """The decoder, which has no dropout.

    By default it has bidirectional self-attention over all slots. If its width differs from the
    encoder's, a linear map resizes the encoder's states.
    """

    def __init__(self, model: config.Model, rngs: nnx.Rngs, target: Target | None = None):
        settings = model.decoder_settings
        own = settings.stack
        if own.positions == "learned":
            self.position_embedding = layers.create_embedding(own.max_positions, settings, rngs)
        self.norm = layers.LayerNorm(settings)
        self.relative_bias = RelativeBias(settings, rngs) if model.decoder.relative_bias else None
        self.blocks = stack.create(settings, rngs, model.decoder.attention)
        self.resizes = own.width != model.encoder.width
        if self.resizes:
            shape = (model.encoder.width, own.width)
            self.resize = layers.Linear(*shape, settings, rngs, own.biases)
        self.settings = settings
        self.decoder = model.decoder
        self.target = target

    def __call__(
        self,
        x: Float[Array, "B T D"],
        slots: SlotInfo,
        encoded: Float[Array, "B V D"],
        encoded_slots: SlotInfo,
    ) -> Float[Array, "B T E"]:
        """Returns the states of `slots`, E wide.

        `x` has the encoder's states, or [MASK] embeddings. Only cross-attention reads `encoded`,
        the encoder's states.
        """
        own = self.settings.stack
        x = self._resize_states(x)
        if own.positions == "learned":
            rows = jnp.take(self.position_embedding[...], slots.positions, axis=0)
            x = x + rows.astype(x.dtype)
        x = layers.zero_empty_slots(self.norm(x), slots.segments)
        bias, cross = self.relative_bias, None
        if "cross" in self.decoder.attention:
            terms = layers.compute_terms(own, slots, encoded_slots, x.dtype, bias)
            visible = jnp.where(encoded_slots.segments > 0, encoded_slots.segments, -1)
            has_keys = (slots.segments[:, :, None] == visible[:, None, :]).any(axis=2)
            cross = layers.CrossAttentionInputs(self._resize_states(encoded), terms, has_keys)
        terms = layers.compute_terms(own, slots, slots, x.dtype, bias, self.decoder.causal)
        return stack.run(self.blocks, x, terms, self.settings, self.target, cross=cross)

    def _resize_states(self, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        return self.resize(x) if self.resizes else x
