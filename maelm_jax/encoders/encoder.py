"""A pretrained encoder in memory that turns texts into vectors and predicts masked tokens."""

import collections.abc
import dataclasses
import functools
import os
import typing

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from maelm_jax import config, progress
from maelm_jax.data import vocabularies
from maelm_jax.encoders import export, family, inference, recipes, source
from maelm_jax.model import maelm, model_inputs
from maelm_jax.model.kernels import backends

Pooling = typing.Literal["mean", "first"]
TEXTS_AT_ONCE = 1000  # of `fill_mask`: a mask has a logit for each id of the vocabulary


class Candidate(typing.NamedTuple):
    """A token that may stand at a mask."""

    token: str
    probability: float


@dataclasses.dataclass(frozen=True, eq=False)
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
        module_files: The modules of sentence-transformers that came with the encoder, {path in
             its folder: content}. `encode` applies them, `save_pretrained` writes them.
        objective: What the encoder read of the masked tokens in pretraining. `encode` does not use
            it.
    """

    params: dict[str, np.ndarray]
    model: config.Model
    vocabulary: vocabularies.Vocabulary
    length: int
    head: family.FineTunedHead | None = None
    step: int | None = None
    module_files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    objective: config.Objective = dataclasses.field(default_factory=config.Objective)

    def __repr__(self):
        own = self.model.encoder
        count = sum(value.size for value in self.params.values())
        step = "" if self.step is None else f", step {self.step}"
        return (
            f"Encoder({own.layers} layers of width {own.width}, {count:,} parameters, "
            f"{self.vocabulary.size:,} ids, inputs up to {self.length} tokens{step})"
        )

    @classmethod
    def load(cls, path: str | os.PathLike, step: int | None = None) -> "Encoder":
        """Loads an encoder as `maelm_jax.load_encoder`."""
        found = source.find_encoder(path, step)
        found.require_bidirectional()
        return cls.read(found)

    @classmethod
    def read(cls, found: source.EncoderSource) -> "Encoder":
        """Reads the encoder of a source, also a causal one. Raises ConfigError as `load`."""
        vocabulary, params = found.loaded_vocabulary, found.read_params()
        return cls(
            params,
            found.model,
            vocabulary,
            found.length,
            family.find_head(params, found.results),
            found.step,
            source.read_module_files(found.path),
            found.objective,
        )

    def left_to_right(self, name: str = "this encoder") -> "Encoder":
        """Returns the encoder that predicts each token from those before it, by the same head.

        A decoder takes no part. Raises ConfigError if it was not trained so.
        """
        self.objective.require_next_tokens(name)
        tree = maelm.encoder_and_head(traverse_util.unflatten_dict(self.params, sep="/"))
        return dataclasses.replace(
            self,
            params=traverse_util.flatten_dict(tree, sep="/"),
            model=dataclasses.replace(self.model, decoder=None, causal=True),
            objective=self.objective.left_to_right,
        )

    def round_weights(self) -> "Encoder":
        """Returns the encoder with its weights rounded to bfloat16, in float32 arrays."""
        import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)

        params = {path: x.astype("bfloat16").astype(np.float32) for path, x in self.params.items()}
        return dataclasses.replace(self, params=params)

    def save_pretrained(self, folder: str | os.PathLike):
        """Writes a new folder for stock transformers and sentence-transformers.

        Raises:
            ConfigError: The folder exists, or no stock model computes the encoder.
        """
        export.check_format("huggingface", self, "the encoder")
        with export.write_atomically(folder) as temporary:
            export.write("huggingface", temporary, self)

    def tree(self) -> dict:
        """Returns the parameters of the encoder as a tree, for `maelm.apply`."""
        return traverse_util.unflatten_dict(self.params, sep="/")["encoder"]

    def prediction_tree(self) -> dict:
        """Returns the parameters of `maelm.create`, which has no pooler, as a tree."""
        tree = traverse_util.unflatten_dict(self.params, sep="/")
        return {name: part for name, part in tree.items() if name != "pooler"}

    @functools.cached_property
    def recipe(self) -> recipes.Recipe:
        """What `encode` does by default. Raises ConfigError if that is not computed here."""
        stated = recipes.read(self.module_files)
        length = min(stated.length or self.length, self.model.encoder.max_positions)
        return dataclasses.replace(stated, length=length)

    def choose_recipe(self, pooling: Pooling | None) -> recipes.Recipe:
        """Returns what `encode` does with this pooling."""
        if pooling is None:
            return self.recipe
        if pooling not in typing.get_args(Pooling):
            raise config.ConfigError(f"pooling must be 'mean' or 'first', got {pooling!r}")
        modes = ("cls",) if pooling == "first" else ("mean",)
        return recipes.Recipe(modes, length=self.length)

    def encode(
        self, texts: list[str], pooling: Pooling | None = None, normalize: bool = False
    ) -> np.ndarray:
        """Embeds texts.

        Args:
            texts: The texts. Each is cut to the longest input.
            pooling: "mean" over the hidden states of all tokens, `<s>` and `</s>` included, or
                "first", the hidden state of `<s>`. Both leave out the modules, the prompt and the
                length that a folder of sentence-transformers has. None gives the vectors that
                sentence-transformers gives with such a folder, and the mean without one.
            normalize: Whether each vector is divided by its Euclidean norm.

        Returns:
            float32 [texts, width].

        Raises:
            ConfigError: There is no such pooling, `texts` is no list of strings, or the folder
                has a module that is not computed here.
        """
        chosen = self.choose_recipe(pooling)
        encoded = self.vocabulary.encode_batch(chosen.prepare(_checked(texts)))
        return self.encode_ids(encoded, chosen, normalize)

    def encode_ids(
        self, encoded: list[list[int]], chosen: recipes.Recipe, normalize: bool = False
    ) -> np.ndarray:
        """Embeds texts as `encode`, from their ids without `<s>` and `</s>`."""
        rows, width = self.add_ends(encoded, chosen.length), self.model.encoder.width
        vectors = np.zeros((len(rows), width * len(chosen.modes)), np.float32)
        prompt_length = 0
        if chosen.prompt and not chosen.pools_prompt:
            prompt_length = 1 + len(self.vocabulary.encode(*chosen.prepare([""])))
        is_short = len(rows) <= 1000
        with progress.Bar(total=len(rows), unit="text", desc="embedding", disable=is_short) as bar:
            for batch in inference.pack_texts(rows, self.vocabulary.pad):
                pooled = self._pool(batch, chosen.modes, prompt_length)
                vectors[batch.texts] = np.asarray(pooled)[: len(batch.texts)]
                bar.update(len(batch.texts))
        for step in chosen.steps:
            vectors = step(vectors)
        return recipes.normalize(vectors) if normalize else vectors

    def add_ends(self, encoded: list[list[int]], length: int | None = None) -> list[list[int]]:
        """Returns `<s>` ids `</s>` for the ids of each text, cut to `length` tokens.

        The default is the longest input.
        """
        bos, eos = self.vocabulary.bos, self.vocabulary.eos
        kept = (length or self.length) - 2
        return [[bos, *ids[:kept], eos] for ids in encoded]

    def hidden_states(self, rows: list[list[int]]) -> list[np.ndarray]:
        """Computes the last hidden states of texts.

        Args:
            rows: The ids of each text, with `<s>` and `</s>` (`add_ends`).

        Returns:
            For each text float32 [tokens, width].
        """
        states: list[np.ndarray] = [np.zeros(0)] * len(rows)
        for batch in inference.pack_texts(rows, self.vocabulary.pad):
            computed = np.asarray(self._states(batch.ids, batch.positions, batch.segments))
            for index, number in enumerate(batch.texts):
                states[number] = batch.select(computed, index)
        return states

    def fill_mask(self, texts: list[str], top: int = 5) -> list[list[list[Candidate]]]:
        """Predicts the tokens that stand at `[MASK]` or `<mask>` in texts.

        With MAE-LM the encoder reads the other tokens only, and the decoder predicts. The encoder
        reads the masks if it read more than half of them in pretraining (`objective`). All
        masks of a text are predicted at once, from its other tokens.

        Args:
            texts: The texts, each with one mask or more.
            top: The number of candidates for each mask.

        Returns:
            For each text, for each of its masks in order, the likeliest tokens, likeliest first.

        Raises:
            ConfigError: `texts` is no list of strings, a text has no mask or is longer than
                `length`, or the source has no prediction head.
        """
        if not 1 <= top <= self.vocabulary.size:
            raise config.ConfigError(f"top must be from 1 to {self.vocabulary.size}, got {top!r}")
        self.check_predicts()
        rows = [self._masked_ids(text, number) for number, text in enumerate(_checked(texts))]
        masks = [[index == self.vocabulary.mask for index in row] for row in rows]
        found = []
        for start in range(0, len(rows), TEXTS_AT_ONCE):
            part = slice(start, start + TEXTS_AT_ONCE)
            found += [
                [self._candidates(scores, top) for scores in of_text]
                for of_text in self.masked_logits(rows[part], masks[part])
            ]
        return found

    def __reduce__(self):
        """Pickles the encoder without the functions that it has compiled."""
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def masked_logits(self, rows: list[list[int]], masks: list[list[bool]]) -> list[np.ndarray]:
        """Computes the logits at masked tokens.

        Args:
            rows: The ids of each text, with `<s>` and `</s>`. Those at masked tokens are not read.
            masks: Whether each token of each text is masked.

        Returns:
            For each text float32 [masked tokens, vocabulary].
        """
        logits: list[np.ndarray] = [np.zeros(0)] * len(rows)
        for batch in inference.pack_texts(rows, self.vocabulary.pad):
            masked = np.zeros(batch.ids.shape, bool)
            for index, number in enumerate(batch.texts):
                masked[(batch.owners == index) & (batch.segments > 0)] = masks[number]
            # Few masks in a row, as in rows of pretraining, or many.
            length = masked.shape[1]
            most = length // 8 if masked.sum(1).max() <= length // 8 else length
            budget = model_inputs.Budget(length, most)
            computed = np.asarray(
                self.compute_logits(batch.ids, batch.positions, batch.segments, masked, budget)
            )
            owners = batch.owners[masked]
            of_masks = np.concatenate(
                [scores[: row.sum()] for scores, row in zip(computed, masked, strict=True)]
            )[:, : self.vocabulary.size]
            for index, number in enumerate(batch.texts):
                logits[number] = of_masks[owners == index]
        return logits

    def check_predicts(self, name: str = "this encoder"):
        """Raises ConfigError without a prediction head, or without the decoder that it reads."""
        needed = {"head", "decoder"} if self.model.decoder else {"head"}
        modules = {path.split("/")[0] for path in self.params}
        if missing := " and no ".join(sorted(needed - modules)):
            raise config.ConfigError(
                f"{name} has no {missing}, so it predicts no tokens: load the workdir of its "
                "pretraining, or its export"
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

    def _candidates(self, logits: np.ndarray, top: int) -> list[Candidate]:
        """Returns the likeliest tokens by their logits [vocabulary]."""
        shares = np.exp(logits - logits.max(), dtype=np.float64)
        shares /= shares.sum()
        return [
            Candidate(
                # A special id has no text but a name.
                self.vocabulary.decode([index]) or self.vocabulary.pieces[index],
                float(shares[index]),
            )
            for index in np.argsort(-shares, kind="stable")[:top]
        ]

    def _compute_states(
        self, params: dict, ids: jax.Array, positions: jax.Array, segments: jax.Array
    ) -> jax.Array:
        """Returns the states float32 [rows, slots, width] of ids [rows, slots]. To be compiled."""
        vocabulary, target = self.vocabulary, backends.one_device()
        graph = maelm.encoder_graph(self.model, vocabulary.size, vocabulary.pad, target)
        return maelm.apply(graph, params)(ids, positions, segments).astype(jnp.float32)

    @functools.cached_property
    def _device_tree(self) -> dict:
        return jax.device_put(self.tree())

    @functools.cached_property
    def _states(self) -> collections.abc.Callable[..., jax.Array]:
        """`_compute_states` of ids, positions and segments. Each shape is compiled once."""
        return functools.partial(jax.jit(self._compute_states), self._device_tree)

    @functools.cached_property
    def _pool(self) -> collections.abc.Callable[..., jax.Array]:
        """Maps a PackedBatch, modes and the length of a prompt to `recipes.pool_states`."""

        @functools.partial(jax.jit, static_argnames="modes")
        def pool(params, ids, positions, segments, owners, modes, prompt_length):
            states = self._compute_states(params, ids, positions, segments)
            return recipes.pool_states(states, positions, segments, owners, modes, prompt_length)

        return lambda batch, modes, prompt_length: pool(
            self._device_tree,
            batch.ids,
            batch.positions,
            batch.segments,
            batch.owners,
            modes,
            prompt_length,
        )

    @property
    def reads_masks(self) -> bool:
        """Whether the encoder reads `<mask>` at the tokens that are predicted."""
        return self.objective.visible_mask_fraction > 0.5

    @functools.cached_property
    def compute_logits(self) -> collections.abc.Callable[..., jax.Array]:
        """Maps ids, positions, segments and masked [rows, slots] to logits at masked slots.

        The last argument is a Budget. The result is float32 [rows, budget.masked, table rows].
        """
        vocabulary, target = self.vocabulary, backends.one_device()
        graph, _ = maelm.create(self.model, vocabulary.size, vocabulary.special, target)

        @functools.partial(jax.jit, static_argnames="budget")
        def logits(params, ids, positions, segments, masked, budget):
            masked_visible = masked if self.reads_masks else jnp.zeros_like(masked)
            is_causal = self.model.causal  # each token is predicted from those before it
            inputs = model_inputs.split(
                ids,
                segments,
                positions,
                masked,
                masked_visible,
                budget,
                ids if is_causal else vocabulary.mask,
                self.objective.masking.renumber,
            )
            return maelm.apply(graph, params)(inputs)

        return functools.partial(logits, jax.device_put(self.prediction_tree()))


def _checked(texts: typing.Iterable) -> list[str]:
    """Returns the texts as a list. Raises ConfigError if one of them is no string."""
    if isinstance(texts, str):
        raise config.ConfigError("texts is one string: give a list, as in encode(['A text.'])")
    checked = list(texts)
    for number, text in enumerate(checked):
        if not isinstance(text, str):  # tokenizers joins a pair without a word
            raise config.ConfigError(
                f"texts[{number}] is {type(text).__name__}, no string: {text!r:.60}"
            )
    # tokenizers refuses numpy.str_ and lone surrogates, which a table has "?" for too.
    return [text.encode("utf-8", "replace").decode("utf-8") for text in checked]
