"""A pretrained model that was opened: from a workdir, an export, a stock folder or a checkpoint.

A model can be opened from:

- a workdir of maelm_jax.train or maelm_jax.finetune,
- a folder that maelm_jax.export wrote, in any format,
- a folder of stock transformers, of a family in families.py, with its tokenizer.json,
- a folder of sentence-transformers with such an encoder,
- such a folder by its name on the Hub (hub.py),
- a checkpoint of the reference implementation (.pt).

`find_model` reads the settings of the model. Its vocabulary and its weights are read when they are
needed. `load_model` reads all of it. No code in a folder runs.
"""

import collections.abc
import dataclasses
import functools
import os
import pathlib
import typing

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from maelm_jax import config, progress, storage
from maelm_jax.data import vocabularies
from maelm_jax.encoders import (
    decoder_file,
    export,
    families,
    family,
    hub,
    inference,
    layouts,
    published,
    read_back,
    recipes,
    tokenizer,
    weight_files,
)
from maelm_jax.encoders.results import Results
from maelm_jax.model import keys, maelm, model_inputs
from maelm_jax.model.kernels import backends
from maelm_jax.training import checkpoint, sharding
from maelm_jax.training.workdir import PUBLISHED_WEIGHTS, RUNS, STOCK_CONFIG, Kind, Workdir

ADAPTER = "adapter_config.json"  # of PEFT, beside the weights that it changes
Pooling = typing.Literal["mean", "first"]
TEXTS_AT_ONCE = 1000  # of `fill_mask`: a mask has a logit for each id of the vocabulary
# What `OpenedModel` reads of a folder. Its other cached properties are made of that.
READ = ("vocabulary", "params", "head", "module_files")


class Candidate(typing.NamedTuple):
    """A token that may stand at a mask."""

    token: str
    probability: float


@dataclasses.dataclass(eq=False)
class OpenedModel:
    """A pretrained encoder, with the decoder and the head if the folder has them.

    Attributes:
        model: The settings of the model. What the folder leaves open has the value of the defaults.
        length: The longest input in tokens, with `<s>` and `</s>`.
        path: The file or folder.
        kind: What it is, in words.
        objective: What it was pretrained for, and what its encoder read of the masked tokens.
        settings: {field of config.Encoder: value} of those that the folder determines.
        vocabulary_path: The path for data.vocabularies.load; None if there is no vocabulary.
        workdir: The run; None for everything else.
        experiment: The settings of a workdir; None for everything else.
        step: The step of a workdir's checkpoint; None for everything else. If the newest was asked
            for, and the run prunes it before it is read, this becomes the newest of then.
        results: The results of a fine-tuned run; None for everything else.
        hub_name: ORG/NAME@COMMIT of what was downloaded; None for everything else.
    """

    model: config.Model
    length: int
    path: str
    kind: str
    objective: config.Objective = dataclasses.field(default_factory=config.Objective)
    settings: dict[str, typing.Any] = dataclasses.field(default_factory=dict)
    vocabulary_path: str | None = None
    workdir: Workdir | None = None
    experiment: config.Experiment | None = None
    step: int | None = None
    results: Results | None = None
    hub_name: str | None = None
    _read_tensors: collections.abc.Callable[[], dict[str, np.ndarray]] | None = None

    @property
    def name(self) -> str:
        """What a user calls it: the name on the Hub, or else the path."""
        return self.hub_name or self.path

    def replace(self, **changes: typing.Any) -> "OpenedModel":
        """Returns the model with other attributes. The others are shared."""
        other = object.__new__(type(self))
        vars(other).update(self._stored() | changes)
        return other

    def _stored(self) -> dict[str, typing.Any]:
        """Returns the attributes, of READ those that have been read."""
        stored = {*READ, *(field.name for field in dataclasses.fields(self))}
        return {name: value for name, value in vars(self).items() if name in stored}

    def __repr__(self):
        own = self.model.encoder
        count = sum(value.size for value in self.params.values())
        step = "" if self.step is None else f", step {self.step}"
        return (
            f"Encoder({own.layers} layers of width {own.width}, {count:,} parameters, "
            f"{self.vocabulary.size:,} ids, inputs up to {self.length} tokens{step})"
        )

    def __getstate__(self):
        """Pickles all that can be read, without the functions that it has compiled."""
        return self.read()._stored()

    def write_origin(self, workdir: Workdir):
        """Records this model in the workdir of a run that starts from it.

        Its folder may be moved, deleted or replaced while the run goes on.
        """
        content = {
            "path": self.name,
            "kind": self.kind,
            "step": self.step,
            "length": self.length,
            "has_decoder": self.model.decoder is not None,
        }
        storage.write_json(workdir.origin_file, content)

    def require_bidirectional(self):
        """Raises ConfigError for a run that predicts next tokens, which is a first phase."""
        if self.model.causal:
            raise config.ConfigError(
                f"{self.name} has a causal encoder, which predicts next tokens. Train it further "
                "as MLM (Run.continue_from) or MAE-LM (Run.init_from) first"
            )

    def read_params(self, run: config.Model | None = None) -> dict[str, np.ndarray]:
        """Reads the weights, or returns those that `params` has read.

        Args:
            run: The model of a run that starts from this one. The decoder is left out unless the
                run has the same one.

        Returns:
            {parameter path: float32 array}. The paths start with encoder/, and with decoder/,
            head/ or the head of a fine-tuned run if the folder has them. Tables over the
            vocabulary have one row for each id.

        Raises:
            ConfigError: Weights are missing, unknown or of the wrong shape. The message lists them.
        """
        params = dict(self.params) if "params" in vars(self) else self._read_tensors()
        own = self.model.decoder and self.model.decoder.canonical(self.model.encoder)
        if run and (run.decoder and run.decoder.canonical(run.encoder)) != own:
            params = {path: x for path, x in params.items() if not path.startswith("decoder/")}
        if self.vocabulary_path:
            size, rows = self.vocabulary.size, len(params["encoder/token_embedding"])
            if rows < size:
                raise config.ConfigError(
                    f"{self.path}: {rows} rows of tokens, but its vocabulary has {size} ids"
                )
            params |= {path: params[path][:size] for path in layouts.VOCABULARY if path in params}
        return params

    @functools.cached_property
    def vocabulary(self) -> vocabularies.Vocabulary:
        """The vocabulary, loaded once.

        Raises:
            ConfigError: There is no vocabulary, or a run had another one when it began.
        """
        if self.vocabulary_path is None:
            raise config.ConfigError(
                f"{self.path} is a checkpoint without a vocabulary. Make a folder of it, named "
                "model.pt, and its sp.model and dict.txt, or its tokenizer.json. Give the folder"
            )
        if self.workdir:
            return self.workdir.load_vocabulary()
        return vocabularies.load(self.vocabulary_path)

    def check_vocabulary(self, vocabulary: vocabularies.Vocabulary):
        """Raises ConfigError if `vocabulary` has other ids than the weights."""
        if self.vocabulary_path and self.vocabulary.fingerprint != vocabulary.fingerprint:
            raise config.ConfigError(
                f"Vocabulary.file is another file than the vocabulary of {self.path}, whose "
                "weights are for its own ids: leave it out"
            )

    @functools.cached_property
    def params(self) -> dict[str, np.ndarray]:
        """The weights as `read_params` returns them, read once."""
        params = self.read_params()
        self._read_tensors = None  # that of a published checkpoint holds the weights too
        return params

    @functools.cached_property
    def head(self) -> family.FineTunedHead | None:
        """The head of a fine-tuned run, or None. `encode` does not use it."""
        return family.find_head(self.params, self.results)

    @functools.cached_property
    def module_files(self) -> dict[str, bytes]:
        """The modules of sentence-transformers, {path in the folder: content}.

        `encode` applies them, `save_pretrained` writes them.
        """
        return recipes.read_module_files(self.path)

    def read(self) -> "OpenedModel":
        """Reads the vocabulary, the weights and the modules, and returns itself.

        Raises ConfigError if one of them is missing or damaged.
        """
        for part in READ:
            getattr(self, part)
        return self

    def left_to_right(self) -> "OpenedModel":
        """Returns the encoder that predicts each token from those before it, by the same head.

        A decoder takes no part. Raises ConfigError if it was not trained so.
        """
        self.objective.require_next_tokens(self.name)
        tree = maelm.encoder_and_head(traverse_util.unflatten_dict(self.params, sep="/"))
        return self.replace(
            params=traverse_util.flatten_dict(tree, sep="/"),
            model=dataclasses.replace(self.model, decoder=None, causal=True),
            objective=self.objective.left_to_right,
        )

    def round_weights(self) -> "OpenedModel":
        """Returns the model with its weights rounded to bfloat16, in float32 arrays."""
        import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)

        params = {path: x.astype("bfloat16").astype(np.float32) for path, x in self.params.items()}
        return self.replace(params=params)

    def write(self, format: str, folder: pathlib.Path, dtype: str = "float32") -> export.Written:
        """Writes every file of an export except the model card, and reads them back.

        `dtype` is that of .safetensors. Raises ConfigError as `export.write`, and RunError if what
        is read back is not this model. The heads of an objective that predicts no tokens, which no
        format holds, are left out, and a printed line names them.
        """
        if self.left_out:
            names = ", ".join(self.left_out)
            print(f"left out, as no format holds the head of an objective: {names}")
        encoder = self.without_left_out()
        written = export.write(format, folder, encoder, dtype)
        read_back.check(format, find_model(folder), encoder, dtype)
        return written

    @property
    def left_out(self) -> tuple[str, ...]:
        """The parameters that no export holds.

        They are a head of the objective's own, and a token head that predicts no tokens.
        """
        heads = {sharding.OWN_HEAD}
        if not self.objective.kind.predicts_tokens:
            heads.add("head")
        return tuple(path for path in self.params if path.split("/")[0] in heads)

    def without_left_out(self) -> "OpenedModel":
        """Returns the model that an export holds."""
        left_out = self.left_out
        return self.replace(params={k: x for k, x in self.params.items() if k not in left_out})

    def save_pretrained(self, folder: str | os.PathLike):
        """Writes a new folder for stock transformers and sentence-transformers.

        Raises:
            ConfigError: The folder exists, or no stock model computes the encoder.
        """
        export.check_format("huggingface", self)
        with export.write_atomically(folder) as temporary:
            self.write("huggingface", temporary)

    def tree(self) -> dict:
        """Returns the parameters of the encoder as a tree, for `maelm.apply`."""
        return traverse_util.unflatten_dict(self.params, sep="/")["encoder"]

    def read_objective_tree(self) -> dict:
        """Returns the parameters of pretraining, which has no pooler, as a tree."""
        tree = traverse_util.unflatten_dict(self.read_params(), sep="/")
        return {name: part for name, part in tree.items() if name != "pooler"}

    def read_prediction_tree(self) -> dict:
        """Returns the parameters of `maelm.create` as a tree."""
        tree = self.read_objective_tree()
        return {name: part for name, part in tree.items() if name != sharding.OWN_HEAD}

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
            prompt_length = min(prompt_length, chosen.length - 1)  # the end is left in any case
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
                `length`, or there is no prediction head.
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

    def check_predicts(self):
        """Raises ConfigError without a prediction head, or without the decoder that it reads."""
        self.objective.require_tokens(self.name)
        needed = {"head", "decoder"} if self.model.decoder else {"head"}
        modules = {path.split("/")[0] for path in self.params}
        if missing := " and no ".join(sorted(needed - modules)):
            raise config.ConfigError(
                f"{self.name} has no {missing}, so it predicts no tokens: load the workdir of its "
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

        return functools.partial(logits, jax.device_put(self.read_prediction_tree()))


def load_model(path: str | os.PathLike, step: int | None = None) -> OpenedModel:
    """Opens a model with a bidirectional encoder, and reads all of it.

    Arguments and errors are those of `maelm_jax.load_encoder`.
    """
    found = find_model(path, step)
    found.require_bidirectional()
    return found.read()


def find_model(path: str | os.PathLike, step: int | None = None) -> OpenedModel:
    """Finds the pretrained model at `path`, and reads its settings.

    Args:
        path: A local file or folder, one of the kinds that the module docstring lists,
            WORKDIR@STEP, or a name on the Hub, ORG/NAME or ORG/NAME@REVISION.
        step: The step of a workdir's checkpoint; None for the newest.

    Raises:
        ConfigError: `path` does not exist, a run cannot start from it, or it is no workdir and
            `step` is given.
    """
    path = os.fspath(path)
    storage.require_local(path)
    if hub.is_name(path):
        if step is not None:
            raise config.ConfigError(
                f"step {step}: {path} is a name on the Hub, which has no checkpoints by step. "
                "Leave the step out, or give ORG/NAME@REVISION"
            )
        downloaded = hub.download(path)
        return find_model(downloaded.folder).replace(hub_name=downloaded.name)
    place, step = checkpoint.choose_step(path, step)
    path, folder, kind = place.path, place.folder, place.kind
    if kind in RUNS:
        return find_workdir(Workdir(folder), step)
    if step is not None and folder.exists():
        raise config.ConfigError(
            f"step {step}: {path} is no workdir, so it has no checkpoints by step. "
            "Leave the step out, or name a workdir"
        )
    if kind is Kind.PUBLISHED:
        is_file = folder.is_file()
        file, vocabulary = (folder, None) if is_file else (folder / PUBLISHED_WEIGHTS, str(folder))
        return _find_published(file, vocabulary)
    if kind in (Kind.EXPORT, Kind.STOCK):
        modules = recipes.find_modules(folder)
        inner = folder / modules[0]["path"] if modules else folder
        return _find_stock_folder(inner).replace(path=str(folder))
    near = place.describe_neighbours()
    if kind is not Kind.ABSENT:
        names = ", ".join(sorted(item.name for item in folder.iterdir())[:6]) or "nothing"
        raise config.ConfigError(
            f"{path} is neither a workdir (config.gin), an exported or stock folder (config.json) "
            f"nor a checkpoint; it holds {names}{near}"
        )
    raise config.ConfigError(f"{path}: no such file or folder{near}")


def find_workdir(workdir: Workdir, wanted: int | None) -> OpenedModel:
    """Finds the model of a run. `Workdir.fetch` must have fetched a workdir in a bucket.

    `wanted` is the step of its checkpoint; None: the newest. Raises ConfigError if it has no such
    checkpoint.
    """
    storage.require_own_files(workdir.folder)
    experiment = workdir.read_settings()
    results, origin = Results.of_run(workdir), workdir.read_origin()
    step = checkpoint.pick_step(workdir, wanted)
    length = experiment.corpus.sequence_length
    if origin:  # the encoder that the run started from may have trained further positions
        with storage.reading(workdir.origin_file):
            length = max(length, origin["length"])

    def read_tensors():
        found.step, tree = checkpoint.read_kept(workdir, found.step, wanted)
        params = traverse_util.flatten_dict(tree, sep="/")
        size = vocabularies.load(workdir.vocabulary_folder).size
        name = f"{workdir}, step {found.step}"
        shapes = _parameter_shapes(experiment.model, size)
        _check_shapes(params, shapes, name, experiment.objective.kind.predicts_tokens)
        return params

    fields = config.field_names(config.Encoder)
    model = experiment.model  # which may have been trained on another kind of device
    compute = dataclasses.replace(model.compute, attention_backend="auto")
    found = OpenedModel(
        model=dataclasses.replace(model, compute=compute),
        length=(results and results.max_length) or length,
        objective=experiment.objective,
        path=str(workdir),
        kind="workdir",
        settings={name: getattr(experiment.encoder, name) for name in fields},
        vocabulary_path=str(workdir.vocabulary_folder),
        _read_tensors=read_tensors,
        workdir=workdir,
        experiment=experiment,
        step=step,
        results=results,
    )
    return found


def _find_stock_folder(folder: pathlib.Path) -> OpenedModel:
    """Returns the model in a folder of config.json, weights, a vocabulary and maybe a decoder."""
    content = storage.read_json(folder / STOCK_CONFIG)
    if (folder / ADAPTER).exists():
        raise config.ConfigError(
            f"{folder} holds an adapter ({ADAPTER}), which changes the weights and is not read. "
            "PEFT's merge_and_unload() puts it into them. Without it, remove its files"
        )
    if not vocabularies.files_in(folder):
        raise config.ConfigError(
            f"{folder} has no tokenizer.json; transformers makes it: "
            f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
        )
    with storage.reading(folder / STOCK_CONFIG):
        stock = families.read_family(content, str(folder))
        settings, dropout = stock.read_settings(content), stock.read_dropout(content)
        own, rows = _make_encoder(settings, str(folder)), int(content["vocab_size"])
        decoder = decoder_file.read_settings(folder, content, own.width)
        objective = decoder.objective if decoder else config.Objective(name="mlm")
        if stock.causal_class and content.get("is_decoder"):
            objective = config.Objective(name="causal")
        elif share := content.get(families.CAUSAL_SHARE):
            objective = dataclasses.replace(objective, causal_share=share)
        kind = f"{content['model_type']} folder"
    tokenizer.check_options(stock, folder)
    vocabulary = tokenizer.choose_vocabulary(
        stock, folder, content.get("pad_token_id") if stock.skips_positions else None
    )
    if decoder:
        whole = config.Model(own, decoder.decoder)
        decoder_file.check(folder, content, whole, _unpadded_shapes(whole, rows))

    def read_tensors():
        pad = (stock.defaults | content)["pad_token_id"]
        tensors = weight_files.read_folder(folder)
        shapes = _unpadded_shapes(config.Model(own), rows)
        params = stock.import_params(tensors, own, pad, shapes, str(folder))
        class_name = (content.get("architectures") or ["Model"])[0]
        read = ("Model", "ForMaskedLM", "ForCausalLM", "BertForPreTraining")
        if not class_name.endswith(read):
            print(f"{folder}: the head of {class_name} is ignored")
        if decoder:
            tensors = weight_files.read_safetensors(folder / decoder_file.FILE)
            params |= {path: value.astype(np.float32) for path, value in tensors.items()}
        return params

    own_decoder = decoder.decoder if decoder else None
    return OpenedModel(
        model=config.Model(own, own_decoder, objective.name == "causal", dropout=dropout),
        length=tokenizer.read_longest_input(folder, own.max_positions),
        objective=objective,
        path=str(folder),
        kind=kind,
        settings=settings,
        vocabulary_path=vocabulary,
        _read_tensors=read_tensors,
    )


def _find_published(file: pathlib.Path, vocabulary: str | None) -> OpenedModel:
    stored = published.read(file)
    own, rows = _make_encoder(stored.settings, str(file)), len(stored.tensors[published.TOKENS])
    model = config.Model(own, stored.decoder)
    if vocabulary is not None:
        loaded = vocabularies.load(vocabulary)
        published.check_special_ids(loaded.special, loaded.size, vocabulary)

    def read_tensors():
        shapes = _unpadded_shapes(model, rows)
        return published.import_params(stored.tensors, model, shapes, str(file))

    return OpenedModel(
        model=model,
        length=min(stored.length or own.max_positions, own.max_positions),
        objective=config.Objective(name="mae_lm" if stored.decoder else "mlm"),
        path=str(file),
        kind="checkpoint of the reference",
        settings=stored.settings,
        vocabulary_path=vocabulary,
        _read_tensors=read_tensors,
    )


def _make_encoder(settings: dict[str, typing.Any], path: str) -> config.Encoder:
    """Returns the encoder with these settings. Raises ConfigError if none can have them.

    A checkpoint of the published code may leave the number of heads and the largest distance open.
    """
    default = config.Encoder()
    unstated = {"max_distance": max(default.max_distance, settings.get("num_buckets", 0))}
    if "heads" not in settings:
        unstated["heads"] = default.heads if settings["width"] % default.heads == 0 else 1
    try:
        return dataclasses.replace(default, **(unstated | settings))
    except config.ConfigError as error:
        raise config.ConfigError(
            f"{path}: not an encoder that a run can start from: {error}"
        ) from error


def _check_shapes(
    params: dict[str, np.ndarray],
    shapes: layouts.Shapes,
    checkpoint_name: str,
    predicts_tokens: bool,
):
    """Raises ConfigError if the parameters of a workdir contradict its config.gin or vocabulary.

    Of a fine-tuned run, and of an objective that predicts no tokens, only the encoder is compared:
    they have heads of their own. No settings say what `own_head` must hold.
    """
    stored = {
        path: value.shape
        for path, value in params.items()
        if path.split("/")[0] != sharding.OWN_HEAD
    }
    if not predicts_tokens or any(path.split("/")[0] in sharding.TASK_HEADS for path in stored):
        stored, shapes = (
            {path: shape for path, shape in part.items() if path.startswith("encoder/")}
            for part in (stored, shapes)
        )
    if faults := layouts.compare_shapes(stored, shapes):
        raise config.ConfigError(
            f"{checkpoint_name}: config.gin or vocabulary/ contradicts the checkpoint: "
            f"{layouts.list_faults(faults)}"
        )


def _unpadded_shapes(model: config.Model, rows: int) -> layouts.Shapes:
    """Returns {path: shape}, with `rows` rows in tables over the vocabulary.

    A stranger's config.json may state any number of rows. No memory is taken for them.
    """
    return layouts.unpad_shapes(_parameter_shapes(model, len(vocabularies.NAMES)), rows)


@functools.lru_cache(maxsize=4)
def _parameter_shapes(model: config.Model, vocabulary_size: int) -> layouts.Shapes:
    """Returns {path: shape} of the parameters of a model."""
    special = config.SpecialIds.of_size(vocabulary_size)
    _, init = maelm.create(model, vocabulary_size, special)
    tree = jax.eval_shape(init, keys.make_key(0))
    return {path: leaf.shape for path, leaf in traverse_util.flatten_dict(tree, sep="/").items()}


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
