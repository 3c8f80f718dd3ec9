"""Encoder, decoder and prediction head (paper section 3, and github.com/yumeng5/MAE-LM).

Axis letters: B rows, L slots of a row, V slots that the encoder reads, M masked slots, D width,
E width of the decoder, W rows of the token table, N layers.
"""

import collections.abc
import typing

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from maelm_jax import config
from maelm_jax.model import layers, ops, stack
from maelm_jax.model.attention import ScoreTerms
from maelm_jax.model.decoder import Decoder
from maelm_jax.model.kernels.backends import Target
from maelm_jax.model.kernels.gather import gather_rows
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

    def __init__(
        self,
        model: config.Model,
        vocabulary_size: int,
        pad_id: int,
        rngs: nnx.Rngs,
        target: Target | None = None,
    ):
        settings, own = model.encoder_settings, model.encoder
        table = layers.create_embedding(table_rows(vocabulary_size), settings, rngs)
        self.token_embedding = nnx.Param(table[...].at[pad_id].set(0.0))
        if own.positions == "learned":
            self.position_embedding = layers.create_embedding(own.max_positions, settings, rngs)
        if own.token_types:
            self.token_type_embedding = layers.create_embedding(own.token_types, settings, rngs)
        self.norm = layers.LayerNorm(settings)
        has_bias = own.relative_buckets != "none"
        self.relative_bias = RelativeBias(settings, rngs) if has_bias else None
        self.blocks = stack.create(settings, rngs)
        self.model = model
        self.target = target

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
        settings, own = self.model.encoder_settings, self.model.encoder
        dtype = jnp.dtype(settings.compute.dtype)
        x = jnp.take(self.token_embedding[...], ids, axis=0)
        if own.token_types:
            table = self.token_type_embedding[...]
            x = x + (table[0][None, None] if types is None else jnp.take(table, types, axis=0))
        if own.positions == "learned":
            x = x + jnp.take(self.position_embedding[...], positions, axis=0)
        x = x.astype(dtype)
        keys = ops.split_keys(keys, 2)
        x = ops.dropout(self.norm(x), settings.dropout.hidden, keys[0])
        x = layers.zero_empty_slots(x, segments)
        slots = SlotInfo(segments, positions)
        terms = layers.compute_terms(
            own, slots, slots, dtype, self.relative_bias, self.model.causal
        )
        if own.local_attention:
            terms = terms._replace(local=self._compute_local_terms(slots, dtype))
        states = stack.run(
            self.blocks, x, terms, settings, self.target, keys[1], all_layers=all_layers
        )
        return jnp.concatenate([x[None], states]) if all_layers else states

    def _compute_local_terms(self, slots: SlotInfo, dtype: jnp.dtype) -> ScoreTerms:
        """Returns what changes the scores of the layers with local attention."""
        own, window = self.model.encoder, self.model.encoder.local_attention
        block = choose_block(window, slots.positions.shape[1])
        return ScoreTerms(
            mask=make_window_mask(*slots, window, block, dtype),
            rotations=compute_rotations(
                own.local_rotary_theta, own.head_size, slots.positions, slots.positions
            ),
            block=block,
        )


class Head(nnx.Module):
    """The prediction head: dense -> GELU -> LayerNorm. loss.py multiplies by the token table.

    If the widths differ, a linear map without bias first resizes the decoder's states.
    """

    def __init__(self, model: config.Model, vocabulary_size: int, rngs: nnx.Rngs):
        settings, width = model.encoder_settings, model.encoder.width
        self.dense = layers.Linear(width, width, settings, rngs, model.encoder.biases)
        self.norm = layers.LayerNorm(settings)
        self.bias = nnx.Param(jnp.zeros(table_rows(vocabulary_size), jnp.float32))
        states = model.decoder.stack(model.encoder).width if model.decoder else width
        self.resizes = states != width
        if self.resizes:
            self.resize = layers.Linear(states, width, settings, rngs, use_bias=False)
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
    the masked slots, decodes, and predicts the masked slots. Without a decoder the head reads the
    encoder's states: the MLM baseline.
    """

    def __init__(
        self,
        model: config.Model,
        vocabulary_size: int,
        special: config.SpecialIds,
        rngs: nnx.Rngs,
        target: Target | None = None,
    ):
        self.encoder = Encoder(model, vocabulary_size, special.pad, rngs, target)
        if model.decoder:
            self.decoder = Decoder(model, rngs, target)
        self.head = Head(model, vocabulary_size, rngs)
        self.mask_id = special.mask
        self.model = model

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
        x = gather_rows(encoded, inputs.encoder_index, inputs.encoder_slots)
        decoder = self.model.decoder
        if decoder:
            x = self._decode(x, encoded, inputs)
        if self.model.causal:  # a token is predicted from the state of the one before it
            x = jnp.roll(x, 1, axis=1)
        if not decoder or decoder.slots == "all":
            x = gather_rows(x, inputs.masked_slots, inputs.masked_index)
        return self.head(x, self.encoder.token_embedding[...])

    def _decode(
        self, x: Float[Array, "B L D"], encoded: Float[Array, "B V D"], inputs: Inputs
    ) -> Float[Array, "B L E"] | Float[Array, "B M E"]:
        """Returns the decoder's states.

        It reads [MASK] at masked slots. Without `Decoder.refills_mask` it reads the encoder's
        states at those masked slots that the encoder saw.
        """
        visible = inputs.encoder_index < encoded.shape[1]
        masked = inputs.masked_index < inputs.masked_slots.shape[1]
        refilled = masked if self.model.decoder.refills_mask else masked & ~visible
        mask_embedding = self.encoder.token_embedding[self.mask_id].astype(x.dtype)
        x = jnp.where(refilled[:, :, None], mask_embedding[None, None], x)
        slots = SlotInfo(jnp.where(visible | masked, inputs.segments, 0), inputs.positions)
        if self.model.decoder.slots == "masked":
            x = gather_rows(x, inputs.masked_slots, inputs.masked_index)
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


def create(
    model: config.Model,
    vocabulary_size: int,
    special: config.SpecialIds,
    target: Target | None = None,
) -> Definition:
    """Returns the definition of the whole model.

    `target` are the devices that will compute it: they decide which kernels do. None: all devices
    of this machine, over which XLA may shard the arrays.
    """
    return define(lambda rngs: MaeLm(model, vocabulary_size, special, rngs, target))


def encoder_graph(
    model: config.Model, vocabulary_size: int, pad_id: int, target: Target | None = None
) -> nnx.GraphDef:
    """Returns the encoder's graph: `apply(graph, parameters["encoder"])` is an Encoder.

    `target` is that of `create`.
    """
    return define(lambda rngs: Encoder(model, vocabulary_size, pad_id, rngs, target)).graph


def encoder_and_head(parameters: dict) -> dict:
    """Returns the parameters of the whole model without those that read the decoder."""
    head = {name: value for name, value in parameters["head"].items() if name != "resize"}
    return {"encoder": parameters["encoder"], "head": head}


def apply(graph: nnx.GraphDef, parameters: dict) -> nnx.Module:
    """Returns the module with these parameters."""
    return nnx.merge(graph, jax.tree.map(nnx.Param, parameters))
