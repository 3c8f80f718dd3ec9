"""Finds and reads the pretrained encoders that the commands start from.

A source is one of:

- a workdir of maelm_jax.train or maelm_jax.finetune,
- a folder that maelm_jax.export wrote, in any format,
- a folder of stock transformers, of a family in families.py, with its tokenizer.json,
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

from maelm_jax import config, gin_files, storage
from maelm_jax.data import vocabularies
from maelm_jax.encoders import (
    decoder_file,
    families,
    layouts,
    published,
    tokenizer,
    weight_files,
)
from maelm_jax.model import keys, maelm
from maelm_jax.training import checkpoint, run_record, sharding

# Of a fine-tuned run: the fingerprint of its data, with the checkpoint step of its encoder, and its
# scores, which are written last.
INPUTS, RESULTS = "inputs.json", "results.json"
ORIGIN = "origin.json"  # of a run that started from an encoder
# Of a folder of sentence-transformers: the list of the modules that it applies to an encoder, such
# as pooling, and the settings of the encoder in it.
MODULES = "modules.json"
MODULE_SETTINGS = ("sentence_bert_config.json", "config_sentence_transformers.json")


def read_record(workdir: str | os.PathLike, name: str) -> dict[str, typing.Any]:
    """Reads RESULTS, INPUTS or ORIGIN of a run. Returns {} if there is no such file."""
    path = pathlib.Path(workdir) / name
    return storage.read_json(path) if path.is_file() else {}


@dataclasses.dataclass(frozen=True)
class EncoderSource:
    """A pretrained encoder on disk, with the decoder and the head if the source has them.

    Attributes:
        path: The file or folder.
        kind: What it is, in words.
        settings: The fields of config.Model that the source determines. A stock encoder has no
            decoder: its `decoder_layers` is 0.
        vocabulary: The path for data.vocabularies.load; None if the source has no vocabulary.
        length: The longest input in tokens, with `<s>` and `</s>`.
        experiment: The settings of a workdir; None for every other source.
        step: The step of a workdir's checkpoint; None for every other source.
        results: The results.json of a fine-tuned run; {} for every other source.
        mask_fraction: The share of the masked positions at which the encoder read `<mask>` in
            pretraining: 0 in MAE-LM, 1 in MLM.
        renumber: `Masking.renumber` of the pretraining.
    """

    path: str
    kind: str
    settings: dict[str, typing.Any]
    vocabulary: str | None
    length: int
    mask_fraction: float
    _read_tensors: collections.abc.Callable[[], dict[str, np.ndarray]]
    experiment: config.Experiment | None = None
    step: int | None = None
    results: dict[str, typing.Any] = dataclasses.field(default_factory=dict)
    renumber: bool = False

    def write_origin(self, workdir: str | os.PathLike):
        """Records this source in the workdir of a run that starts from it, as ORIGIN.

        The source may be moved, deleted or replaced while the run goes on.
        """
        content = {
            "path": self.path,
            "kind": self.kind,
            "step": self.step,
            "length": self.length,
            "has_decoder": self.settings["decoder_layers"] > 0,
        }
        storage.write(pathlib.Path(workdir) / ORIGIN, json.dumps(content, indent=1) + "\n")

    @functools.cached_property
    def model(self) -> config.Model:
        """The model of the source. What the source leaves open has the value of the defaults."""
        if self.experiment:  # the run may have been trained on another kind of device
            return dataclasses.replace(self.experiment.model, attention_backend="auto")
        return _make_model(self.settings, self.path)

    def require_bidirectional(self):
        """Raises ConfigError for a run of `Model.causal`, which is a first phase."""
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
        fields = config.field_names(config.Model, part="decoder")
        if run and any(getattr(run, name) != getattr(self.model, name) for name in fields):
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
                "model.pt, and its sentencepiece.model or tokenizer.json, and give the folder"
            )
        if self.experiment:
            return run_record.load_vocabulary(self.path)
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

    Returns:
        {path in the folder: content}; {} if there is no modules.json.

    Raises:
        ConfigError: modules.json is damaged, or a module or a link leads out of the folder.
    """
    folder = pathlib.Path(folder).expanduser().absolute()
    if not (folder / MODULES).is_file():
        return {}
    with storage.reading(folder / MODULES):
        names = [module["path"] for module in storage.read_json(folder / MODULES)]
        files = [folder / name for name in (MODULES, *MODULE_SETTINGS)]
        files += [file for name in names if name for file in sorted((folder / name).glob("*"))]
    inside = [folder.resolve()]
    if folder.parent.name == "snapshots":  # the cache of the Hub links to files in `blobs`
        inside.append(folder.parent.parent.resolve() / "blobs")
    content = {}
    for file in filter(pathlib.Path.is_file, files):
        if file.suffix == ".py":  # an export has code of this package only
            continue
        if not any(file.resolve().is_relative_to(path) for path in inside):
            raise config.ConfigError(
                f"{file} leads out of {folder}, to {file.resolve()}. An export would copy it: "
                "replace it with the file itself if it belongs there"
            )
        content[str(file.relative_to(folder))] = file.read_bytes()
    return content


def find_encoder(path: str | os.PathLike, step: int | None = None) -> EncoderSource:
    """Finds the pretrained encoder at `path`.

    Args:
        path: A local file or folder, one of the kinds that the module docstring lists.
        step: The step of a workdir's checkpoint; None for the newest.

    Raises:
        ConfigError: `path` does not exist, a run cannot start from it, or it is no workdir and
            `step` is given.
    """
    storage.require_local(os.fspath(path))
    folder = pathlib.Path(path).expanduser()
    if (folder / gin_files.RECORD).is_file():
        return find_workdir(str(folder), step)
    if step is not None and folder.exists():
        raise config.ConfigError(
            f"step {step}: {path} is no workdir, so it has no checkpoints by step. "
            "Leave the step out, or name a workdir"
        )
    if folder.is_file():
        return _find_published(folder, None)
    if (folder / "model.pt").is_file():
        return _find_published(folder / "model.pt", str(folder))
    if (folder / "config.json").is_file():
        with storage.reading(folder / "config.json"):
            return _find_stock_folder(folder)
    near = run_record.near(str(path))
    if folder.is_dir():
        names = ", ".join(sorted(item.name for item in folder.iterdir())[:6]) or "nothing"
        raise config.ConfigError(
            f"{path} is neither a workdir (config.gin), an exported or stock folder (config.json) "
            f"nor a checkpoint; it holds {names}{near}"
        )
    raise config.ConfigError(f"{path}: no such file or folder{near}. Hub names are not downloaded")


def find_workdir(path: str, step: int | None) -> EncoderSource:
    """Finds the encoder of a run. `run_record.fetch` must have fetched a workdir in a bucket.

    Raises ConfigError if it has no such checkpoint.
    """
    folder = storage.local_path(path)
    experiment = gin_files.load([str(folder / gin_files.RECORD)])
    results, origin = read_record(folder, RESULTS), read_record(folder, ORIGIN)
    step = checkpoint.pick_step(path, step)
    length = experiment.corpus.sequence_length
    if origin:  # the encoder that the run started from may have trained further positions
        with storage.reading(folder / ORIGIN):
            length = max(length, origin["length"])

    def read_tensors():
        tree = checkpoint.read_params(path, step)
        params = traverse_util.flatten_dict(tree, sep="/")
        size = vocabularies.load(folder / "vocabulary").size
        _check_shapes(params, _parameter_shapes(experiment.model, size), f"{path}, step {step}")
        return params

    parts = (config.field_names(config.Model, part=part) for part in ("encoder", "decoder"))
    return EncoderSource(
        path=path,
        kind="workdir",
        settings={name: getattr(experiment.model, name) for part in parts for name in part},
        vocabulary=str(folder / "vocabulary"),
        length=results.get("max_length", length),
        mask_fraction=experiment.visible_mask_fraction,
        _read_tensors=read_tensors,
        experiment=experiment,
        step=step,
        results=results,
        renumber=experiment.masking.renumber,
    )


def _find_stock_folder(folder: pathlib.Path) -> EncoderSource:
    """Returns the source in a folder of config.json, weights, a vocabulary and maybe a decoder."""
    content = storage.read_json(folder / "config.json")
    if not vocabularies.files_in(folder):
        raise config.ConfigError(
            f"{folder} has no tokenizer.json; transformers makes it: "
            f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
        )
    stock = families.read_family(content, str(folder))
    tokenizer.check_options(stock, folder)
    settings = stock.read_settings(content)
    settings |= {"decoder_layers": 0, "decoder_relative_bias": False}
    model, rows = _make_model(settings, str(folder)), content["vocab_size"]
    decoder = decoder_file.read_settings(folder, content, model.width)
    whole = _make_model(settings | decoder.model, str(folder)) if decoder else model

    def read_tensors():
        pad = (stock.defaults | content)["pad_token_id"]
        tensors = weight_files.read_folder(folder)
        shapes = layouts.unpad_shapes(_parameter_shapes(model, rows), rows)
        params = stock.import_params(tensors, model, pad, shapes, str(folder))
        class_name = (content.get("architectures") or ["Model"])[0]
        if not class_name.endswith(("Model", "ForMaskedLM", "BertForPreTraining")):
            print(f"{folder}: the head of {class_name} is ignored")
        if decoder:
            tensors = weight_files.read_safetensors(folder / decoder_file.FILE)
            params |= {path: value.astype(np.float32) for path, value in tensors.items()}
            shapes = layouts.unpad_shapes(_parameter_shapes(whole, rows), rows)
            decoder_file.check(folder, content, whole, tensors, shapes)
        return params

    return EncoderSource(
        path=str(folder),
        kind=f"{content['model_type']} folder",
        settings=settings | (decoder.model if decoder else {}),
        vocabulary=tokenizer.choose_vocabulary(
            folder, content.get("pad_token_id") if stock.skips_positions else None
        ),
        length=tokenizer.read_longest_input(folder, model.max_positions),
        mask_fraction=decoder.mask_fraction if decoder else 1.0,
        _read_tensors=read_tensors,
        renumber=decoder.renumber if decoder else False,
    )


def _find_published(file: pathlib.Path, vocabulary: str | None) -> EncoderSource:
    stored = published.read(file)
    model, rows = _make_model(stored.settings, str(file)), len(stored.tensors[published.TOKENS])
    if vocabulary is not None:
        loaded = vocabularies.load(vocabulary)
        published.check_special_ids(loaded.special, loaded.size, vocabulary)

    def read_tensors():
        shapes = layouts.unpad_shapes(_parameter_shapes(model, rows), rows)
        return published.import_params(stored.tensors, model, shapes, str(file))

    return EncoderSource(
        path=str(file),
        kind="checkpoint of the reference",
        settings=stored.settings,
        vocabulary=vocabulary,
        length=min(stored.length or model.max_positions, model.max_positions),
        mask_fraction=0.0 if model.decoder_layers else 1.0,
        _read_tensors=read_tensors,
    )


def _make_model(settings: dict[str, typing.Any], path: str) -> config.Model:
    """Returns the model with these settings. Raises ConfigError if no model can have them.

    A checkpoint of the published code may leave the number of heads and the largest distance open.
    """
    default = config.Model().without_decoder
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


@functools.lru_cache(maxsize=4)
def _parameter_shapes(model: config.Model, vocabulary_size: int) -> layouts.Shapes:
    """Returns {path: shape} of the parameters of a model."""
    special = config.SpecialIds.of_size(vocabulary_size)
    _, init = maelm.create(model, vocabulary_size, special)
    tree = jax.eval_shape(init, keys.make_key(0))
    return {path: leaf.shape for path, leaf in traverse_util.flatten_dict(tree, sep="/").items()}
