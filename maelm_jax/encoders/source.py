"""Finds and reads the pretrained encoders that the commands start from.

A source is one of:

- a workdir of maelm_jax.train or maelm_jax.finetune,
- a folder that maelm_jax.export wrote, in any format,
- a folder of stock transformers, of a family in families.py, with its tokenizer.json,
- a folder of sentence-transformers with such an encoder,
- such a folder by its name on the Hub (hub.py),
- a checkpoint of the reference implementation (.pt).

`find_encoder` reads the settings of the model. `EncoderSource.read_params` reads its weights. No
code in a source runs.
"""

import collections.abc
import dataclasses
import functools
import json
import os
import pathlib
import typing

import jax
import numpy as np
from flax import traverse_util

from maelm_jax import config, storage
from maelm_jax.data import vocabularies
from maelm_jax.encoders import (
    decoder_file,
    families,
    hub,
    layouts,
    published,
    recipes,
    tokenizer,
    weight_files,
)
from maelm_jax.encoders.results import Results
from maelm_jax.model import keys, maelm
from maelm_jax.training import checkpoint, sharding
from maelm_jax.training.workdir import PUBLISHED_WEIGHTS, RUNS, STOCK_CONFIG, Kind, Workdir

ADAPTER = "adapter_config.json"  # of PEFT, beside the weights that it changes


@dataclasses.dataclass(eq=False)
class EncoderSource:
    """A pretrained encoder on disk, with the decoder and the head if the source has them.

    Attributes:
        path: The file or folder.
        kind: What it is, in words.
        settings: {field of config.Encoder: value} of those that the source determines.
        decoder: The decoder; None if the source has none.
        objective: What it was pretrained for, and what its encoder read of the masked tokens.
        vocabulary: The path for data.vocabularies.load; None if the source has no vocabulary.
        length: The longest input in tokens, with `<s>` and `</s>`.
        workdir: The run; None for every other source.
        experiment: The settings of a workdir; None for every other source.
        step: The step of a workdir's checkpoint; None for every other source. If the newest was
            asked for, and the run prunes it before it is read, this becomes the newest of then.
        results: The results of a fine-tuned run; None for every other source.
        dropout: The dropout that it states.
        hub_name: ORG/NAME@COMMIT of what was downloaded; None for every other source.
    """

    path: str
    kind: str
    settings: dict[str, typing.Any]
    decoder: config.Decoder | None
    objective: config.Objective
    vocabulary: str | None
    length: int
    _read_tensors: collections.abc.Callable[[], dict[str, np.ndarray]]
    dropout: config.Dropout = dataclasses.field(default_factory=config.Dropout)
    workdir: Workdir | None = None
    experiment: config.Experiment | None = None
    step: int | None = None
    results: Results | None = None
    hub_name: str | None = None

    def write_origin(self, workdir: Workdir):
        """Records this source in the workdir of a run that starts from it.

        The source may be moved, deleted or replaced while the run goes on.
        """
        content = {
            "path": self.hub_name or self.path,
            "kind": self.kind,
            "step": self.step,
            "length": self.length,
            "has_decoder": self.decoder is not None,
        }
        storage.write_json(workdir.origin_file, content)

    @functools.cached_property
    def model(self) -> config.Model:
        """The model of the source. What the source leaves open has the value of the defaults."""
        if self.experiment:  # the run may have been trained on another kind of device
            model = self.experiment.model
            compute = dataclasses.replace(model.compute, attention_backend="auto")
            return dataclasses.replace(model, compute=compute)
        encoder = _make_encoder(self.settings, self.path)
        causal = self.objective.name == "causal"
        return config.Model(encoder, self.decoder, causal, dropout=self.dropout)

    def require_bidirectional(self):
        """Raises ConfigError for a run that predicts next tokens, which is a first phase."""
        if self.model.causal:
            raise config.ConfigError(
                f"{self.path} has a causal encoder, which predicts next tokens. Train it further "
                "as MLM (Run.continue_from) or MAE-LM (Run.init_from) first"
            )

    def read_params(self, run: config.Model | None = None) -> dict[str, np.ndarray]:
        """Reads the weights of the source.

        Args:
            run: The model of a run that starts from the source. The decoder is left out unless the
                run has the same one.

        Returns:
            {parameter path: float32 array}. The paths start with encoder/, and with decoder/,
            head/ or the head of a fine-tuned run if the source has them. Tables over the
            vocabulary have one row for each id.

        Raises:
            ConfigError: Weights are missing, unknown or of the wrong shape. The message lists them.
        """
        params = self._read_tensors()
        own = self.model.decoder and self.model.decoder.canonical(self.model.encoder)
        if run and (run.decoder and run.decoder.canonical(run.encoder)) != own:
            params = {path: x for path, x in params.items() if not path.startswith("decoder/")}
        if self.vocabulary:
            size, rows = self.loaded_vocabulary.size, len(params["encoder/token_embedding"])
            if rows < size:
                raise config.ConfigError(
                    f"{self.path}: {rows} rows of tokens, but its vocabulary has {size} ids"
                )
            params |= {path: params[path][:size] for path in layouts.VOCABULARY if path in params}
        return params

    @functools.cached_property
    def loaded_vocabulary(self) -> vocabularies.Vocabulary:
        """The vocabulary of the source, loaded once.

        Raises:
            ConfigError: The source has no vocabulary, or a run had another one when it began.
        """
        if self.vocabulary is None:
            raise config.ConfigError(
                f"{self.path} is a checkpoint without a vocabulary. Make a folder of it, named "
                "model.pt, and its sp.model and dict.txt, or its tokenizer.json. Give the folder"
            )
        if self.workdir:
            return self.workdir.load_vocabulary()
        return vocabularies.load(self.vocabulary)

    def check_vocabulary(self, vocabulary: vocabularies.Vocabulary):
        """Raises ConfigError if `vocabulary` has other ids than the weights of the source."""
        if self.vocabulary and self.loaded_vocabulary.fingerprint != vocabulary.fingerprint:
            raise config.ConfigError(
                f"Vocabulary.file is another file than the vocabulary of {self.path}, whose "
                "weights are for its own ids: leave it out"
            )


def read_module_files(folder: str | os.PathLike) -> dict[str, bytes]:
    """Reads the modules that sentence-transformers applies to the encoder in a folder.

    Before version 2.0 of sentence-transformers the encoder itself was in a folder of its own. Its
    settings are returned as if it was not.

    Returns:
        {plain relative name: content}; {} if there is no modules.json. A name stands in a folder of
        a module, or is one of MODULES and MODULE_SETTINGS.

    Raises:
        ConfigError: modules.json is damaged, or a module or a link leads out of the folder.
    """
    folder = pathlib.Path(folder).expanduser().absolute()
    modules = find_modules(folder)
    if not modules:
        return {}
    first, *others = (module["path"] for module in modules)
    names = {name: name for name in (recipes.MODULES, recipes.PROMPTS)}
    names |= {name: f"{first}/{name}" if first else name for name in recipes.ENCODER_SETTINGS}
    for module in filter(None, others):  # else it is the encoder itself
        found = [f"{module}/{file.name}" for file in sorted((folder / module).glob("*"))]
        # An export has code of this package only.
        names |= {name: name for name in found if not name.endswith(".py")}
    files = {name: storage.inside(folder, place).path for name, place in names.items()}
    content = {name: file.read_bytes() for name, file in files.items() if file.is_file()}
    if first:
        modules = [modules[0] | {"path": ""}, *modules[1:]]
        content[recipes.MODULES] = json.dumps(modules, indent=2).encode()
    return content


def find_modules(folder: pathlib.Path) -> list[dict[str, typing.Any]]:
    """Returns the modules that modules.json lists; [] if there is no such file.

    Raises ConfigError if it is damaged, or the path of a module leads out of the folder.
    """
    file = folder / recipes.MODULES
    if not file.is_file():
        return []
    with storage.reading(file):
        modules = [dict(module) for module in storage.read_json(file)]
        paths = [storage.inside(folder, module["path"]).name for module in modules]
        return [module | {"path": path} for module, path in zip(modules, paths, strict=True)]


def find_encoder(path: str | os.PathLike, step: int | None = None) -> EncoderSource:
    """Finds the pretrained encoder at `path`.

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
        found = find_encoder(downloaded.folder)
        return dataclasses.replace(found, hub_name=downloaded.name)
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
        modules = find_modules(folder)
        inner = folder / modules[0]["path"] if modules else folder
        return dataclasses.replace(_find_stock_folder(inner), path=str(folder))
    near = place.describe_neighbours()
    if kind is not Kind.ABSENT:
        names = ", ".join(sorted(item.name for item in folder.iterdir())[:6]) or "nothing"
        raise config.ConfigError(
            f"{path} is neither a workdir (config.gin), an exported or stock folder (config.json) "
            f"nor a checkpoint; it holds {names}{near}"
        )
    raise config.ConfigError(f"{path}: no such file or folder{near}")


def find_workdir(workdir: Workdir, wanted: int | None) -> EncoderSource:
    """Finds the encoder of a run. `Workdir.fetch` must have fetched a workdir in a bucket.

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
        _check_shapes(params, _parameter_shapes(experiment.model, size), name)
        return params

    fields = config.field_names(config.Encoder)
    found = EncoderSource(
        path=str(workdir),
        kind="workdir",
        settings={name: getattr(experiment.encoder, name) for name in fields},
        decoder=experiment.decoder,
        objective=experiment.objective,
        vocabulary=str(workdir.vocabulary_folder),
        length=(results and results.max_length) or length,
        _read_tensors=read_tensors,
        workdir=workdir,
        experiment=experiment,
        step=step,
        results=results,
    )
    return found


def _find_stock_folder(folder: pathlib.Path) -> EncoderSource:
    """Returns the source in a folder of config.json, weights, a vocabulary and maybe a decoder."""
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

    return EncoderSource(
        path=str(folder),
        kind=kind,
        settings=settings,
        decoder=decoder.decoder if decoder else None,
        objective=objective,
        dropout=dropout,
        vocabulary=vocabulary,
        length=tokenizer.read_longest_input(folder, own.max_positions),
        _read_tensors=read_tensors,
    )


def _find_published(file: pathlib.Path, vocabulary: str | None) -> EncoderSource:
    stored = published.read(file)
    own, rows = _make_encoder(stored.settings, str(file)), len(stored.tensors[published.TOKENS])
    model = config.Model(own, stored.decoder)
    if vocabulary is not None:
        loaded = vocabularies.load(vocabulary)
        published.check_special_ids(loaded.special, loaded.size, vocabulary)

    def read_tensors():
        shapes = _unpadded_shapes(model, rows)
        return published.import_params(stored.tensors, model, shapes, str(file))

    return EncoderSource(
        path=str(file),
        kind="checkpoint of the reference",
        settings=stored.settings,
        decoder=stored.decoder,
        objective=config.Objective(name="mae_lm" if stored.decoder else "mlm"),
        vocabulary=vocabulary,
        length=min(stored.length or own.max_positions, own.max_positions),
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


def _check_shapes(params: dict[str, np.ndarray], shapes: layouts.Shapes, checkpoint_name: str):
    """Raises ConfigError if the parameters of a workdir contradict its config.gin or vocabulary.

    A fine-tuned run holds only the encoder and its own head, so only the encoder is compared.
    """
    stored = {path: value.shape for path, value in params.items()}
    if any(path.split("/")[0] in sharding.TASK_HEADS for path in stored):
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
