"""Encoder, decoder and prediction head (paper section 3, and github.com/yumeng5/MAE-LM).

Axis letters: B rows, L slots of a row, V slots that the encoder reads, M masked slots, D width,
E width of the decoder, W rows of the token table, N layers.
"""

import collections.abc
import dataclasses
import typing

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from maelm_jax import config
from maelm_jax.model import layers, ops, stack
from maelm_jax.model.attention import ScoreTerms
from maelm_jax.model.decoder import Decoder
from maelm_jax.model.loss import Prediction
from maelm_jax.model.model_inputs import Inputs, SlotInfo, take_at_slots
from maelm_jax.model.positions import (
    MASKED_OUT,
    RelativeBias,
    choose_block,
    compute_rotations,
    make_window_mask,
)


def table_rows(vocabulary_size: int) -> int:
    """Returns the rows of the token table: the vocabulary padded to a multiple of 128."""
    return -(-vocabulary_size // 128) * 128


class Encoder(nnx.Module):
    """The encoder, which is kept after pretraining. With MAE-LM it reads visible tokens only."""

    def __init__(self, settings: config.Model, vocabulary_size: int, pad_id: int, rngs: nnx.Rngs):
        table = layers.create_embedding(table_rows(vocabulary_size), settings, rngs)
        self.token_embedding = nnx.Param(table[...].at[pad_id].set(0.0))
        if settings.positions == "learned":
            self.position_embedding = layers.create_embedding(
                settings.max_positions, settings, rngs
            )
        if settings.token_types:
            self.token_type_embedding = layers.create_embedding(
                settings.token_types, settings, rngs
            )
        self.norm = layers.LayerNorm(settings)
        has_bias = settings.relative_buckets != "none"
        self.relative_bias = RelativeBias(settings, rngs) if has_bias else None
        self.blocks = stack.create(settings, rngs)
        self.settings = settings

    def __call__(
        self,
        ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        keys: Key[Array, " B"] | None = None,
        all_layers: bool = False,
        types: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"] | Float[Array, "N B T D"]:
        """Encodes tokens.

        Args:
            ids: Tokens.
            positions: Position of each token in its segment.
            segments: Segment of each token. No token attends to empty ones (segment 0), and
                their states have no meaning.
            keys: Keys of dropout, one for each row. None: no dropout.
            all_layers: True returns the states of all layers.
            types: Type of each token, if there is a table of token types. None: all 0.

        Returns:
            The states after the last layer. With `all_layers`, the states that enter the first
            layer and those after each layer: N = layers + 1.
        """
        settings = self.settings
        dtype = jnp.dtype(settings.dtype)
        x = jnp.take(self.token_embedding[...], ids, axis=0)
        if settings.token_types:
            table = self.token_type_embedding[...]
            x = x + (table[0][None, None] if types is None else jnp.take(table, types, axis=0))
        if settings.positions == "learned":
            x = x + jnp.take(self.position_embedding[...], positions, axis=0)
        x = x.astype(dtype)
        keys = ops.split_keys(keys, 2)
        x = layers.zero_empty_slots(ops.dropout(self.norm(x), settings.dropout, keys[0]), segments)
        slots = SlotInfo(segments, positions)
        terms = layers.compute_terms(
            settings, slots, slots, dtype, self.relative_bias, settings.causal
        )
        if settings.local_attention:
            terms = terms._replace(local=self._compute_local_terms(slots, dtype))
        states = stack.run(self.blocks, x, terms, settings, keys[1], all_layers=all_layers)
        return jnp.concatenate([x[None], states]) if all_layers else states

    def _compute_local_terms(self, slots: SlotInfo, dtype: jnp.dtype) -> ScoreTerms:
        """Returns what changes the scores of the layers with local attention."""
        theta, window = self.settings.local_rotary_theta, self.settings.local_attention
        settings = dataclasses.replace(self.settings, rotary_theta=theta)
        block = choose_block(window, slots.positions.shape[1])
        return ScoreTerms(
            mask=make_window_mask(*slots, window, block, dtype),
            rotations=compute_rotations(settings, slots.positions, slots.positions),
            block=block,
        )


class Head(nnx.Module):
    """The prediction head: dense -> GELU -> LayerNorm. loss.py multiplies by the token table.

    If the widths differ, a linear map without bias first resizes the decoder's states.
    """

    def __init__(self, settings: config.Model, vocabulary_size: int, rngs: nnx.Rngs):
        shape = (settings.width, settings.width)
        self.dense = layers.Linear(*shape, settings, rngs, settings.biases)
        self.norm = layers.LayerNorm(settings)
        self.bias = nnx.Param(jnp.zeros(table_rows(vocabulary_size), jnp.float32))
        self.resizes = settings.decoder.width != settings.width
        if self.resizes:
            shape = (settings.decoder.width, settings.width)
            self.resize = layers.Linear(*shape, settings, rngs, use_bias=False)
        self.vocabulary_size = vocabulary_size

    def __call__(self, x: Float[Array, "B M E"], table: Float[Array, "W D"]) -> Prediction:
        """Returns the factors of the logits. Padding rows of the table have a bias of -1e9."""
        x = self.resize(x) if self.resizes else x
        x = self.norm(ops.gelu(self.dense(x)))
        real = jnp.arange(table.shape[0]) < self.vocabulary_size
        return Prediction(x, table, jnp.where(real, self.bias[...], MASKED_OUT))


class MaeLm(nnx.Module):
    """The whole model.

    It encodes the visible tokens, puts their states back at their slots, puts [MASK] embeddings at
    the masked slots, decodes, and predicts the masked slots. With `decoder_layers` 0 the head reads
    the encoder's states: the MLM baseline.
    """

    def __init__(
        self,
        settings: config.Model,
        vocabulary_size: int,
        special: config.SpecialIds,
        rngs: nnx.Rngs,
    ):
        self.encoder = Encoder(settings, vocabulary_size, special.pad, rngs)
        if settings.decoder_layers:
            self.decoder = Decoder(settings, rngs)
        self.head = Head(settings, vocabulary_size, rngs)
        self.mask_id = special.mask
        self.settings = settings

    def encode(
        self, inputs: Inputs, keys: Key[Array, " B"] | None = None, all_layers: bool = False
    ) -> Float[Array, "B V D"] | Float[Array, "N B V D"]:
        """Returns the encoder's states at `inputs.encoder_slots`.

        `keys` and `all_layers` are those of `Encoder`.
        """
        return self.encoder(
            inputs.encoder_ids,
            inputs.encoder_positions,
            take_at_slots(inputs.segments, inputs.encoder_slots),
            keys,
            all_layers,
        )

    def __call__(
        self, inputs: Inputs, keys: Key[Array, " B"] | None = None
    ) -> Float[Array, "B M W"]:
        """Returns float32 logits at `inputs.masked_slots`; empty slots have no meaning."""
        return self.predict(inputs, keys).logits

    def predict(self, inputs: Inputs, keys: Key[Array, " B"] | None = None) -> Prediction:
        """Returns the factors of the logits, from which loss.py computes the loss."""
        encoded = self.encode(inputs, keys)
        x = ops.gather_rows(encoded, inputs.encoder_index, inputs.encoder_slots)
        if self.settings.decoder_layers:
            x = self._decode(x, encoded, inputs)
        if self.settings.causal:  # a token is predicted from the state of the one before it
            x = jnp.roll(x, 1, axis=1)
        if self.settings.decoder_slots == "all":
            x = ops.gather_rows(x, inputs.masked_slots, inputs.masked_index)
        return self.head(x, self.encoder.token_embedding[...])

    def _decode(
        self, x: Float[Array, "B L D"], encoded: Float[Array, "B V D"], inputs: Inputs
    ) -> Float[Array, "B L E"] | Float[Array, "B M E"]:
        """Returns the decoder's states.

        It reads [MASK] at masked slots. Without `decoder_refills_mask` it reads the encoder's
        states at those masked slots that the encoder saw.
        """
        visible = inputs.encoder_index < encoded.shape[1]
        masked = inputs.masked_index < inputs.masked_slots.shape[1]
        refilled = masked if self.settings.decoder_refills_mask else masked & ~visible
        mask_embedding = self.encoder.token_embedding[self.mask_id].astype(x.dtype)
        x = jnp.where(refilled[:, :, None], mask_embedding[None, None], x)
        slots = SlotInfo(jnp.where(visible | masked, inputs.segments, 0), inputs.positions)
        if self.settings.decoder_slots == "masked":
            x = ops.gather_rows(x, inputs.masked_slots, inputs.masked_index)
            slots = slots.take(inputs.masked_slots)
        encoded_slots = SlotInfo(inputs.segments, inputs.positions).take(inputs.encoder_slots)
        return self.decoder(x, slots, encoded, encoded_slots)


class Definition(typing.NamedTuple):
    """A model without parameters.

    `init(key)` returns the parameters as a dict of float32 arrays. `apply(graph, parameters)`
    returns the model. init is pure: it can run under jax.jit or jax.eval_shape.
    """

    graph: nnx.GraphDef
    init: collections.abc.Callable[..., dict]


def define(build: collections.abc.Callable[[nnx.Rngs], nnx.Module]) -> Definition:
    """Returns the definition of the model that `build` creates."""

    def init(key):
        return nnx.to_pure_dict(nnx.state(build(nnx.Rngs(key)), nnx.Param))

    return Definition(nnx.graphdef(nnx.eval_shape(lambda: build(nnx.Rngs(0)))), init)


def create(settings: config.Model, vocabulary_size: int, special: config.SpecialIds) -> Definition:
    """Returns the definition of the whole model."""
    return define(lambda rngs: MaeLm(settings, vocabulary_size, special, rngs))


def encoder_graph(settings: config.Model, vocabulary_size: int, pad_id: int) -> nnx.GraphDef:
    """Returns the encoder's graph: `apply(graph, parameters["encoder"])` is an Encoder."""
    return define(lambda rngs: Encoder(settings, vocabulary_size, pad_id, rngs)).graph


def apply(graph: nnx.GraphDef, parameters: dict) -> nnx.Module:
    """Returns the module with these parameters."""
    return nnx.merge(graph, nnx.State(jax.tree.map(nnx.Param, parameters)))
