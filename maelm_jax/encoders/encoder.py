"""A pretrained encoder in memory that turns texts into vectors."""

import dataclasses
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from flax import traverse_util

from maelm_jax import config
from maelm_jax.data import vocabulary as vocabularies
from maelm_jax.encoders import inference
from maelm_jax.model import maelm

Pooling = typing.Literal["mean", "first"]
TOKENS = 16_384  # of a batch, with padding
LENGTH_STEP = 16  # batches are padded to a multiple of this length, so that JAX compiles few shapes


@dataclasses.dataclass(frozen=True)
class Encoder:
    """A pretrained encoder in memory.

    Attributes:
        params: {parameter path: array}. `encode` uses those of the encoder.
        model: The settings of the model.
        vocabulary: The vocabulary of the encoder.
        length: The longest input in tokens, with `<s>` and `</s>`.
    """

    params: dict[str, np.ndarray]
    model: config.Model
    vocabulary: vocabularies.Vocabulary
    length: int

    def token_ids(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text, with `<s>` and `</s>`, cut to `length`."""
        bos, eos = self.vocabulary.bos, self.vocabulary.eos
        return [
            [bos, *ids[: self.length - 2], eos] for ids in self.vocabulary.encode_batch(texts)
        ]

    def encode(self, texts: list[str], pooling: Pooling = "mean") -> np.ndarray:
        """Embeds texts, in batches of similar length.

        Args:
            texts: The texts. Each is cut to the longest input.
            pooling: "mean" over the hidden states of all tokens, `<s>` and `</s>` included, or
                "first", the hidden state of `<s>`.

        Returns:
            float32 [texts, width].
        """
        rows = self.token_ids(texts)
        compute = self._pooled_states(pooling)
        vectors = np.zeros((len(rows), self.model.width), np.float32)
        # The longest texts come first: if a batch does not fit in memory, the first one fails.
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
        interval = 0.5 if sys.stderr.isatty() else 30.0
        with tqdm.tqdm(total=len(rows), unit="text", desc="embedding", mininterval=interval) as bar:
            while order:
                longest = -(-len(rows[order[0]]) // LENGTH_STEP) * LENGTH_STEP
                length = min(longest, self.length)
                size = max(TOKENS // length, 1)
                chosen, order = order[:size], order[size:]
                # Rows of only `<s>` fill up the last batch. Without a token, the mean is 0 / 0.
                missing = [[self.vocabulary.bos]] * (size - len(chosen))
                batch = [rows[number] for number in chosen] + missing
                ids = inference.pad(batch, self.vocabulary.pad, length)
                vectors[chosen] = np.asarray(compute(ids))[: len(chosen)]
                bar.update(len(chosen))
        return vectors

    def _pooled_states(self, pooling: Pooling) -> typing.Callable[[np.ndarray], jax.Array]:
        """Returns a compiled function from ids [texts, length] to vectors [texts, width]."""
        pad = self.vocabulary.pad
        graph = maelm.encoder_graph(self.model, self.vocabulary.size, pad)
        tree = traverse_util.unflatten_dict(self.params, sep="/")["encoder"]
        params = jax.device_put(tree)

        @jax.jit
        def pooled(params, ids):
            positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
            present = (ids != pad).astype(jnp.int32)
            states = maelm.apply(graph, params)(ids, positions, present).astype(jnp.float32)
            weights = present if pooling == "mean" else (positions == 0).astype(jnp.int32)
            weights = weights.astype(jnp.float32)[:, :, None]
            return (states * weights).sum(1) / weights.sum(1)

        return lambda ids: pooled(params, ids)
