"""Encoder, decoder and prediction head (paper section 3, reference.md section 3).

Axis letters: B rows, L slots of a row, V slots the encoder reads, M predicted slots, D width, W rows of the token table (the vocabulary
padded to a multiple of 128).
"""

import collections.abc

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from maelm_jax import config
from maelm_jax.model import layers
from maelm_jax.model.masking import Inputs


def table_rows(vocabulary_size: int) -> int:
    """Rows of the token table: the vocabulary padded to a multiple of 128. Padding rows are never predicted and never exported."""
    return -(-vocabulary_size // 128) * 128


def _embedding(rows: int, settings: config.Model, rngs: nnx.Rngs) -> nnx.Param:
    return nnx.Param(nnx.initializers.normal(settings.init_std)(rngs.params(), (rows, settings.width), jnp.float32))


def _zero_at_empty(x: Float[Array, "B T D"], segments: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    return jnp.where((segments > 0)[:, :, None], x, jnp.zeros((), x.dtype))


class Encoder(nnx.Module):
    """Reads the visible tokens only; the part that is kept after pretraining."""

    def __init__(self, settings: config.Model, vocabulary_size: int, pad_id: int, rngs: nnx.Rngs):
        table = _embedding(table_rows(vocabulary_size), settings, rngs)
        self.token_embedding = nnx.Param(table[...].at[pad_id].set(0.0))
        self.position_embedding = _embedding(settings.max_positions, settings, rngs)
        self.norm = layers.LayerNorm(settings.width)
        if settings.relative_buckets != "none":
            self.relative_bias = layers.RelativeBias(settings, rngs)
        self.blocks = layers.stack(settings, settings.layers, rngs)
        self.settings = settings

    def __call__(
        self, ids: Int[Array, "B T"], positions: Int[Array, "B T"], segments: Int[Array, "B T"], keys: Key[Array, " B"] | None = None
    ) -> Float[Array, "B T D"]:
        """Hidden states after the last layer; tokens of segment 0 are empty: never attended to, and of no meaning in the output.

        `keys` are dropout's, one a row; None for evaluation.
        """
        settings = self.settings
        dtype = jnp.dtype(settings.dtype)
        x = (jnp.take(self.token_embedding[...], ids, axis=0) + jnp.take(self.position_embedding[...], positions, axis=0)).astype(dtype)
        keys = layers.split_keys(keys, 2)
        x = _zero_at_empty(layers.dropout(self.norm(x), settings.dropout, keys[0]), segments)
        bias = layers.within_segment(segments, dtype)
        if settings.relative_buckets != "none":
            bias = bias + self.relative_bias(positions, dtype)
        return layers.run_stack(self.blocks, x, bias, settings.dropout, settings.attention_dropout, keys[1], settings.rematerialise)


class Decoder(nnx.Module):
    """Shallow, full length, bidirectional, without dropout; discarded after pretraining."""

    def __init__(self, settings: config.Model, rngs: nnx.Rngs):
        self.position_embedding = _embedding(settings.max_positions, settings, rngs)
        self.norm = layers.LayerNorm(settings.width)
        if settings.decoder_relative_bias:
            self.relative_bias = layers.RelativeBias(settings, rngs)
        self.blocks = layers.stack(settings, settings.decoder_layers, rngs)
        self.settings = settings

    def __call__(self, x: Float[Array, "B L D"], positions: Int[Array, "B L"], segments: Int[Array, "B L"]) -> Float[Array, "B L D"]:
        x = self.norm(x + jnp.take(self.position_embedding[...], positions, axis=0).astype(x.dtype))
        bias = layers.within_segment(segments, x.dtype)
        if self.settings.decoder_relative_bias:
            bias = bias + self.relative_bias(positions, x.dtype)
        return layers.run_stack(self.blocks, _zero_at_empty(x, segments), bias, rematerialise=self.settings.rematerialise)


class Head(nnx.Module):
    """dense -> GELU -> LayerNorm; the logits are its output times the token table, plus `bias`."""

    def __init__(self, settings: config.Model, vocabulary_size: int, rngs: nnx.Rngs):
        self.dense = layers.linear(settings.width, settings.width, settings, rngs)
        self.norm = layers.LayerNorm(settings.width)
        self.bias = nnx.Param(jnp.zeros(table_rows(vocabulary_size), jnp.float32))
        self.vocabulary_size = vocabulary_size

    def __call__(self, x: Float[Array, "B M D"], table: Float[Array, "W D"]) -> Float[Array, "B M W"]:
        """Logits in float32; -1e9 at the rows that pad the table."""
        x = self.norm(layers.gelu(self.dense(x)))
        logits = jnp.einsum("bmd,wd->bmw", x, table.astype(x.dtype), preferred_element_type=jnp.float32)
        real = jnp.arange(table.shape[0]) < self.vocabulary_size
        return logits + jnp.where(real, self.bias[...], layers.MASKED_OUT)[None, None]


class MaeLm(nnx.Module):
    """The whole of it: gather visible tokens -> encode -> put back, [MASK] elsewhere -> decode -> predict masked slots.

    With `decoder_layers` 0 the head reads the encoder's states: the MLM baseline.
    """

    def __init__(self, settings: config.Model, vocabulary_size: int, special: config.SpecialIds, rngs: nnx.Rngs):
        self.encoder = Encoder(settings, vocabulary_size, special.pad, rngs)
        if settings.decoder_layers:
            self.decoder = Decoder(settings, rngs)
        self.head = Head(settings, vocabulary_size, rngs)
        self.mask_id = special.mask
        self.settings = settings

    def encode(self, inputs: Inputs, keys: Key[Array, " B"] | None = None) -> Float[Array, "B V D"]:
        """The encoder's last hidden states at its own slots (`inputs.encoder_slots`)."""
        length = inputs.ids.shape[1]
        read = inputs.encoder_slots < length
        slots = jnp.minimum(inputs.encoder_slots, length - 1)
        positions = jnp.where(read, jnp.take_along_axis(inputs.positions, slots, axis=1), 0)
        segments = jnp.where(read, jnp.take_along_axis(inputs.segments, slots, axis=1), 0)
        return self.encoder(inputs.encoder_ids, positions, segments, keys)

    def __call__(self, inputs: Inputs, keys: Key[Array, " B"] | None = None) -> Float[Array, "B M W"]:
        """float32 logits at `inputs.masked_slots` (of no meaning where those are empty). `keys` are dropout's, one a row; None for evaluation."""
        encoded = self.encode(inputs, keys)
        x = layers.gather_rows(encoded, inputs.encoder_index, inputs.encoder_slots)
        if self.settings.decoder_layers:
            known = inputs.encoder_index < encoded.shape[1]
            masked = inputs.masked_index < inputs.masked_slots.shape[1]
            mask_row = self.encoder.token_embedding[self.mask_id].astype(x.dtype)
            x = jnp.where((masked & ~known)[:, :, None], mask_row[None, None], x)
            x = self.decoder(x, inputs.positions, jnp.where(known | masked, inputs.segments, 0))
        x = layers.gather_rows(x, inputs.masked_slots, inputs.masked_index)
        return self.head(x, self.encoder.token_embedding[...])


def create(settings: config.Model, vocabulary_size: int, special: config.SpecialIds) -> tuple[nnx.GraphDef, collections.abc.Callable]:
    """(graph, init): `init(key)` gives the parameters as a plain dict of float32 arrays, `apply(graph, parameters)` the model again.

    init is pure and can run under jax.jit with output shardings, or jax.eval_shape.
    """

    def init(key):
        return nnx.to_pure_dict(nnx.state(MaeLm(settings, vocabulary_size, special, nnx.Rngs(key)), nnx.Param))

    graph = nnx.graphdef(nnx.eval_shape(lambda: MaeLm(settings, vocabulary_size, special, nnx.Rngs(0))))
    return graph, init


def apply(graph: nnx.GraphDef, parameters: dict) -> MaeLm:
    """The module with these parameters."""
    return nnx.merge(graph, nnx.State(jax.tree.map(nnx.Param, parameters)))
