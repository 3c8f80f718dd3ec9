"""A pretrained encoder in memory that turns texts into vectors and predicts masked tokens."""

import dataclasses
import functools
import os
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from flax import traverse_util

from maelm_jax import config
from maelm_jax.data import vocabularies
from maelm_jax.encoders import (
    export_folder,
    export_formats,
    inference,
    sentence_modules,
    source,
    source_checks,
)
from maelm_jax.encoders.fine_tuned_head import FineTunedHead
from maelm_jax.model import attention, maelm

Pooling = typing.Literal["mean", "first"]
TOKENS = 16_384  # of a batch, with padding


class Candidate(typing.NamedTuple):
    """A token that may stand at a mask."""

    token: str
    probability: float


@dataclasses.dataclass(frozen=True)
class Encoder:
    """A pretrained encoder in memory.

    Attributes:
        params: {parameter path: array}. `encode` uses those of the encoder, `fill_mask` also those
            of the decoder and of the prediction head.
        model: The settings of the model.
        vocabulary: The vocabulary of the encoder.
        length: The longest input in tokens, with `<s>` and `</s>`.
        head: The head of a fine-tuned run, or None. `encode` does not use it.
        step: The step of a workdir's checkpoint; None for every other source.
        sentence_files: The modules of sentence-transformers that came with the encoder. `encode`
            does not use them. `save_pretrained` writes them.
        mask_fraction: The share of the masked positions at which the encoder read `<mask>` in
            pretraining: 0 in MAE-LM, 1 in MLM. `encode` does not use it.
        renumber: Whether the encoder's positions counted only the tokens that it read, in
            pretraining (`Masking.renumber`). `encode` does not use it.
    """

    params: dict[str, np.ndarray]
    model: config.Model
    vocabulary: vocabularies.Vocabulary
    length: int
    head: FineTunedHead | None = None
    step: int | None = None
    sentence_files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    mask_fraction: float = 0.0
    renumber: bool = False

    def __repr__(self):
        model = self.model
        count = sum(value.size for value in self.params.values())
        step = "" if self.step is None else f", step {self.step}"
        return (
            f"Encoder({model.layers} layers of width {model.width}, {count:,} parameters, "
            f"{self.vocabulary.size:,} ids, inputs up to {self.length} tokens{step})"
        )

    @classmethod
    def load(cls, path: str | os.PathLike, step: int | None = None) -> "Encoder":
        """Loads an encoder.

        Args:
            path: A workdir, an export in any format, a folder of stock transformers, or a
                checkpoint of the published code with its vocabulary beside it.
            step: The step of a workdir's checkpoint; None for the newest.

        Raises:
            ConfigError: There is no such encoder, or it cannot be computed here.
        """
        encoder_source = source.find(os.fspath(path), step)
        vocabulary = encoder_source.load_vocabulary()
        model = encoder_source.model(encoder_source.base)
        params = encoder_source.read(model)
        head = FineTunedHead.of(params, encoder_source.results)
        length, step = encoder_source.length, encoder_source.step
        sentence_files = sentence_modules.read(encoder_source.path)
        fraction = encoder_source.mask_fraction
        if fraction is None:
            fraction = 0.0 if model.decoder_layers else 1.0
        return cls(
            params,
            model,
            vocabulary,
            length,
            head,
            step,
            sentence_files,
            fraction,
            encoder_source.renumber,
        )

    def save_pretrained(self, folder: str | os.PathLike):
        """Writes a new folder for stock transformers and sentence-transformers.

        Raises:
            ConfigError: The folder exists, or no stock model computes the encoder.
        """
        export_formats.check("huggingface", self.model, self.vocabulary.special)
        with export_folder.written(folder, name="folder") as temporary:
            export_formats.write("huggingface", temporary, self)

    def tree(self) -> dict:
        """Returns the parameters of the encoder as a tree, for `maelm.apply`."""
        return traverse_util.unflatten_dict(self.params, sep="/")["encoder"]

    def encode(self, texts: list[str], pooling: Pooling = "mean") -> np.ndarray:
        """Embeds texts, in batches of similar length.

        Args:
            texts: The texts. Each is cut to the longest input.
            pooling: "mean" over the hidden states of all tokens, `<s>` and `</s>` included, or
                "first", the hidden state of `<s>`.

        Returns:
            float32 [texts, width].

        Raises:
            ConfigError: There is no such pooling, or `texts` is no list of strings.
        """
        return self.encode_ids(self.vocabulary.encode_batch(_checked(texts)), pooling)

    def encode_ids(self, encoded: list[list[int]], pooling: Pooling = "mean") -> np.ndarray:
        """Embeds texts as `encode`, from their ids without `<s>` and `</s>`."""
        if pooling not in typing.get_args(Pooling):
            raise config.ConfigError(f"pooling must be 'mean' or 'first', got {pooling!r}")
        rows = inference.with_ends(encoded, self.vocabulary, self.length)
        vectors = np.zeros((len(rows), self.model.width), np.float32)
        # The longest texts come first: if a batch does not fit in memory, the first one fails.
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
        interval = 0.5 if sys.stderr.isatty() else 30.0
        is_short = sum(map(len, rows)) <= TOKENS  # one batch or a few: no bar
        with tqdm.tqdm(
            total=len(rows), unit="text", desc="embedding", mininterval=interval, disable=is_short
        ) as bar:
            while order:
                length = min(inference.rounded_length(len(rows[order[0]])), self.length)
                # A power of two for few texts: JAX compiles one program for each shape.
                size = min(max(TOKENS // length, 1), 1 << (len(order) - 1).bit_length())
                chosen, order = order[:size], order[size:]
                # Rows of only `<s>` fill up the last batch. Without a token, the mean is 0 / 0.
                missing = [[self.vocabulary.bos]] * (size - len(chosen))
                batch = [rows[number] for number in chosen] + missing
                ids = inference.pad(batch, self.vocabulary.pad, length)
                pooled = self._pooled_states(ids, _weights(ids, self.vocabulary.pad, pooling))
                vectors[chosen] = np.asarray(pooled)[: len(chosen)]
                bar.update(len(chosen))
        return vectors

    def fill_mask(self, texts: list[str], top: int = 5) -> list[list[list[Candidate]]]:
        """Predicts the tokens that stand at `[MASK]` or `<mask>` in texts.

        With MAE-LM the encoder reads the other tokens only, and the decoder predicts. The encoder
        reads the masks if it read more than half of them in pretraining (`mask_fraction`). All
        masks of a text are predicted at once, from its other tokens.

        Args:
            texts: The texts, each with one mask or more.
            top: The number of candidates for each mask.

        Returns:
            For each text, for each of its masks in order, the likeliest tokens, likeliest first.

        Raises:
            ConfigError: `texts` is no list of strings, a text has no mask or is longer than
                `length`, or the source has no prediction head (an export of MAE-LM for transformers
                has none).
        """
        if not 1 <= top <= self.vocabulary.size:
            raise config.ConfigError(f"top must be from 1 to {self.vocabulary.size}, got {top!r}")
        self.check_predicts()
        rows = [self._masked_ids(text, number) for number, text in enumerate(_checked(texts))]
        predicted = []
        for start in range(0, len(rows), inference.LINES_AT_A_TIME):
            batch = rows[start : start + inference.LINES_AT_A_TIME]
            predicted += self._predict_masks(batch, top)
        return predicted

    def check_predicts(self, name: str = "this encoder"):
        """Raises ConfigError without a prediction head, or without the decoder that it reads."""
        needed = {"head", "decoder"} if self.model.decoder_layers else {"head"}
        if missing := " and no ".join(sorted(needed - source_checks.modules(self.params))):
            raise config.ConfigError(
                f"{name} has no {missing}, so it predicts no tokens: load the workdir of its "
                "pretraining, or an export with --format=pytorch"
            )

    def _masked_ids(self, text: str, number: int) -> list[int]:
        """Returns the ids of texts[number] with its masks. Raises ConfigError as `fill_mask`."""
        ids = [self.vocabulary.bos, *self.vocabulary.encode_masked(text), self.vocabulary.eos]
        if self.vocabulary.mask not in ids:
            raise config.ConfigError(f"texts[{number}] has no [MASK]: {text!r:.60}")
        if len(ids) > self.length:
            raise config.ConfigError(
                f"texts[{number}] has {len(ids)} tokens, and the encoder reads {self.length}: "
                "shorten it"
            )
        return ids

    def _predict_masks(self, rows: list[list[int]], top: int) -> list[list[list[Candidate]]]:
        """Returns what `fill_mask` returns, for a few texts as ids."""
        length = min(inference.rounded_length(max(map(len, rows))), self.length)
        ids = inference.pad(rows, self.vocabulary.pad, length)
        masked = ids == self.vocabulary.mask
        logits = np.asarray(self._logits(ids, masked))[:, :, : self.vocabulary.size]
        return [
            [self._candidates(logits[row, mask], top) for mask in range(masked[row].sum())]
            for row in range(len(rows))
        ]

    def _candidates(self, logits: np.ndarray, top: int) -> list[Candidate]:
        """Returns the likeliest tokens by their logits [vocabulary]."""
        shares = np.exp(logits - logits.max(), dtype=np.float64)
        shares /= shares.sum()
        return [
            Candidate(self._spelling(index), float(shares[index]))
            for index in np.argsort(-shares, kind="stable")[:top]
        ]

    def _spelling(self, index: int) -> str:
        """Returns the text of one id, and of a special id its name."""
        return self.vocabulary.decode([index]) or self.vocabulary.pieces()[index]

    @functools.cached_property
    def _logits(self) -> typing.Callable[[np.ndarray, np.ndarray], jax.Array]:
        """`inference.logits_function` with the parameters of the encoder."""
        params = traverse_util.unflatten_dict(self.params, sep="/")
        function = inference.logits_function(
            self.model, self.vocabulary, self.mask_fraction > 0.5, self.renumber
        )
        return functools.partial(function, jax.device_put(params))

    @functools.cached_property
    def _pooled_states(self) -> typing.Callable[[np.ndarray, np.ndarray], jax.Array]:
        """A function from ids and weights [texts, length] to weighted sums [texts, width].

        Each shape is compiled once.
        """
        pad = self.vocabulary.pad
        graph = maelm.encoder_graph(self.model, self.vocabulary.size, pad)
        params = jax.device_put(self.tree())

        @jax.jit
        def pooled(params, ids, weights):
            positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
            segments = (ids != pad).astype(jnp.int32)
            with attention.trace_for_one_device():
                states = maelm.apply(graph, params)(ids, positions, segments).astype(jnp.float32)
            return (states * weights[:, :, None]).sum(1)

        return functools.partial(pooled, params)


def _checked(texts: typing.Iterable) -> list[str]:
    """Returns the texts as a list. Raises ConfigError if one of them is no string."""
    if isinstance(texts, str):
        raise config.ConfigError("texts is one string: give a list, as in encode(['A text.'])")
    checked = list(texts) if isinstance(texts, typing.Iterable) else [texts]
    for number, text in enumerate(checked):
        if not isinstance(text, str):  # tokenizers joins a pair without a word
            raise config.ConfigError(
                f"texts[{number}] is {type(text).__name__}, no string: {text!r:.60}"
            )
    return [str(text) for text in checked]  # tokenizers refuses numpy.str_


def _weights(ids: np.ndarray, pad: int, pooling: Pooling) -> np.ndarray:
    """Returns the weight of each state in the vector of its text, float32 [texts, length]."""
    chosen = ids != pad if pooling == "mean" else np.arange(ids.shape[1])[None] == 0
    weights = np.broadcast_to(chosen, ids.shape).astype(np.float32)
    return weights / weights.sum(1, keepdims=True)
