"""Finds and reads the pretrained encoders that the commands start from.

A source is one of:

- a workdir of maelm_jax.train or maelm_jax.finetune,
- a folder that maelm_jax.export wrote, in any format,
- a folder of stock transformers, of a family in families.py, with its tokenizer.json,
- a checkpoint of the reference implementation (.pt, or a .npz test case).

`find` reads the settings of the model. `EncoderSource.read` reads its weights.
"""

import collections.abc
import dataclasses
import pathlib
import typing

import numpy as np
from flax import traverse_util

from maelm_jax import config, gin_files, json_files, storage
from maelm_jax.data import vocabularies
from maelm_jax.encoders import (
    families,
    huggingface,
    layouts,
    origin,
    published,
    pytorch,
    run_results,
    source_checks,
    weight_files,
)
from maelm_jax.training import checkpoint, run_record

# The fields of config.Model that determine the parameters and the function of each stack.
ENCODER_FIELDS = (
    "layers",
    "width",
    "heads",
    "feed_forward",
    "max_positions",
    "token_types",
    "relative_buckets",
    "num_buckets",
    "max_distance",
    "layer_norm_eps",
    "family",
    "normalization",
    "positions",
    "rotary_theta",
    "local_attention",
    "global_every",
    "local_rotary_theta",
    "feed_forward_gate",
    "biases",
)
DECODER_FIELDS = ("decoder_layers", "decoder_relative_bias")
# Those of a decoder of another kind than the paper's. Only workdirs have one.
DECODER_KIND = ("decoder_width", "decoder_attention", "decoder_causal", "decoder_slots")


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
        step: The step of a workdir's checkpoint; None for every other source.
        results: The results.json of a fine-tuned run; {} for every other source.
        ignored_head: The stock class whose head is not read, or None.
        pad: The id of padding that a stock folder's config.json states, or None.
        mask_fraction: The share of the masked positions at which the encoder read `<mask>` in
            pretraining. None: 0 with a decoder (MAE-LM), 1 without (MLM).
        renumber: `Masking.renumber` of the pretraining.
        base: Supplies the settings that the source does not determine, such as those of training.
    """

    path: str
    kind: str
    settings: dict[str, typing.Any]
    vocabulary: str | None
    length: int
    _read_params: collections.abc.Callable[[config.Model], dict[str, np.ndarray]]
    step: int | None = None
    results: dict[str, typing.Any] = dataclasses.field(default_factory=dict)
    ignored_head: str | None = None
    pad: int | None = None
    mask_fraction: float | None = None
    renumber: bool = False
    base: config.Model = dataclasses.field(default_factory=config.Model)

    def as_origin(self) -> origin.Origin:
        """Returns the record of this source in a run that starts from it."""
        has_decoder = bool(self.settings.get("decoder_layers"))
        return origin.Origin(self.path, self.kind, self.step, self.length, has_decoder)

    def model(self, base: config.Model) -> config.Model:
        """Returns `base` with the settings of the source.

        The decoder is that of the source: a workdir has its own, others the paper's or none.

        Raises:
            ConfigError: The settings of the source and the rest of `base` contradict each other.
        """
        if "decoder_layers" in self.settings:
            base = base.without_decoder
        try:
            return dataclasses.replace(base, **self.settings)
        except config.ConfigError as error:  # gin appends lines to the message
            raise config.ConfigError(
                f"{self.path} does not fit the other settings: {str(error).splitlines()[0]}"
            ) from error

    def read(self, base: config.Model) -> dict[str, np.ndarray]:
        """Reads the weights of the source.

        Args:
            base: Supplies the settings that the source does not determine (see published.read).

        Returns:
            {parameter path: float32 array}. The paths start with encoder/, and with decoder/,
            head/ or the head of a fine-tuned run if the source has them. Tables over the
            vocabulary have one row for each id. The paper's decoder is left out if `base` has one
            of another kind.

        Raises:
            ConfigError: Weights are missing, unknown or of the wrong shape. The message lists them.
        """
        if self.ignored_head:
            print(f"{self.path}: the head of {self.ignored_head} is ignored")
        params = self._read_params(self.model(base))
        if self.step is None and base.decoder_layers and not base.has_plain_decoder:
            params = {path: x for path, x in params.items() if not path.startswith("decoder/")}
        if "encoder/token_embedding" not in params:
            modules = ", ".join(sorted(source_checks.modules(params)))
            raise config.ConfigError(f"{self.path} holds no encoder, only {modules}")
        if self.vocabulary:
            vocabulary = vocabularies.load(self.vocabulary)
            rows = len(params["encoder/token_embedding"])
            source_checks.check_vocabulary(vocabulary, rows, self.pad, self.path)
            size = vocabulary.size
            params |= {path: params[path][:size] for path in layouts.VOCABULARY if path in params}
        return params

    def load_vocabulary(self) -> vocabularies.Vocabulary:
        """Loads the vocabulary of the source.

        Raises:
            ConfigError: The source has no vocabulary.
        """
        if self.vocabulary is None:
            raise config.ConfigError(
                f"{self.path} is a checkpoint without a vocabulary. Make a folder of it, named "
                "model.pt, and its sentencepiece.model or tokenizer.json, and give the folder"
            )
        return vocabularies.load(self.vocabulary)

    def check_vocabulary(self, vocabulary: vocabularies.Vocabulary):
        """Checks that `vocabulary` has the same ids as the weights of the source.

        Raises:
            ConfigError: The source has another vocabulary.
        """
        if not self.vocabulary:
            return
        if vocabularies.load(self.vocabulary).fingerprint != vocabulary.fingerprint:
            raise config.ConfigError(
                f"Vocabulary.file is another file than the vocabulary of {self.path}, whose "
                "weights are for its own ids: leave it out"
            )


def find(path: str, step: int | None = None) -> EncoderSource:
    """Finds the pretrained encoder at `path`.

    Args:
        path: A local file or folder, one of the kinds that the module docstring lists.
        step: The step of a workdir's checkpoint; None for the newest.

    Raises:
        ConfigError: `path` does not exist, a run cannot start from it, or it is no workdir and
            `step` is given.
    """
    storage.require_local(path)
    folder = pathlib.Path(path).expanduser()
    if (folder / "config.gin").is_file():
        return _workdir(folder, step)
    if step is not None and folder.exists():
        raise config.ConfigError(
            f"step {step}: {path} is no workdir, so it has no checkpoints by step. "
            "Leave the step out, or name a workdir"
        )
    if folder.is_file():
        return _published_checkpoint(folder, None)
    if (folder / "model.pt").is_file():
        return _published_checkpoint(folder / "model.pt", str(folder))
    if (folder / "config.json").is_file():
        return _weight_folder(folder)
    if not folder.exists():
        raise config.ConfigError(
            f"{path}: no such file or folder{run_record.near(path)}. Hub names are not downloaded"
        )
    names = ", ".join(sorted(item.name for item in folder.iterdir())[:6]) or "nothing"
    raise config.ConfigError(
        f"{path} is neither a workdir (config.gin), an exported or stock folder (config.json) nor "
        f"a checkpoint; it holds {names}{run_record.near(path)}"
    )


def _workdir(folder: pathlib.Path, step: int | None) -> EncoderSource:
    experiment = gin_files.load([str(folder / "config.gin")])
    model, results = experiment.model, run_results.read(folder)
    step = checkpoint.pick_step(str(folder), step)

    def read_params(_):
        tree = checkpoint.read_params(str(folder), step)
        params = traverse_util.flatten_dict(tree, sep="/")
        vocabulary = vocabularies.load(folder / "vocabulary")
        shapes = source_checks.parameter_shapes(model, vocabulary.size)
        source_checks.check_shapes(params, shapes, f"{folder}, step {step}")
        return params

    fields = (*ENCODER_FIELDS, *DECODER_FIELDS, *DECODER_KIND)
    return EncoderSource(
        path=str(folder),
        kind="workdir",
        settings={name: getattr(model, name) for name in fields},
        vocabulary=str(folder / "vocabulary"),
        length=run_results.longest_input(experiment, results, origin.read(folder)),
        _read_params=read_params,
        step=step,
        results=results,
        mask_fraction=experiment.visible_mask_fraction,
        renumber=experiment.masking.renumber,
        # The run may have been trained on another kind of device.
        base=dataclasses.replace(model, attention_backend="auto"),
    )


def _weight_folder(folder: pathlib.Path) -> EncoderSource:
    """Returns the source in a folder of config.json, safetensors and a vocabulary."""
    content = json_files.read_object(folder / "config.json")
    if not vocabularies.files_in(folder):
        raise config.ConfigError(
            f"{folder} has no tokenizer.json; transformers makes it: "
            f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
        )
    if content.get("format") == pytorch.FORMAT:
        return _exported_pytorch(folder, content)
    return _stock_folder(folder, content)


def _exported_pytorch(folder: pathlib.Path, content: dict) -> EncoderSource:
    file = str(folder / "config.json")
    fields = (*ENCODER_FIELDS, *DECODER_FIELDS, *pytorch.FIELDS)
    settings = pytorch.settings(content, fields, file)
    source_checks.check_settings(settings, str(folder))

    def read_params(model):
        shapes = source_checks.parameter_shapes(model, content["vocabulary_size"])
        return pytorch.read(content, weight_files.open_folder(folder), shapes, str(folder))

    length = run_results.stated_length(folder, settings["max_positions"])
    fraction, renumber = pytorch.mask_fraction(content, file), pytorch.renumber(content, file)
    return EncoderSource(
        str(folder),
        "folder of ours",
        settings,
        str(folder),
        length,
        read_params,
        mask_fraction=fraction,
        renumber=renumber,
    )


def _stock_folder(folder: pathlib.Path, content: dict) -> EncoderSource:
    family = families.of_config(content, str(folder))
    huggingface.check_tokenizer(content, folder)
    settings = family.model_settings(content)
    settings |= {"decoder_layers": 0, "decoder_relative_bias": False}
    source_checks.check_settings(settings, str(folder))

    def read_params(model):
        shapes = source_checks.parameter_shapes(model, content["vocab_size"])
        pad = (family.defaults | content)["pad_token_id"]
        tensors = weight_files.open_folder(folder)
        return family.import_params(tensors, model, pad, shapes, str(folder))

    return EncoderSource(
        path=str(folder),
        kind=f"{content['model_type']} folder",
        settings=settings,
        vocabulary=huggingface.vocabulary_of(folder),
        length=run_results.stated_length(folder, settings["max_positions"]),
        _read_params=read_params,
        ignored_head=huggingface.ignored_head(content),
        pad=content.get("pad_token_id"),
    )


def _published_checkpoint(file: pathlib.Path, vocabulary: str | None) -> EncoderSource:
    stored = published.read(file)
    source_checks.check_settings(stored.settings, str(file))
    if vocabulary is not None:
        loaded = vocabularies.load(vocabulary)
        published.check_special_ids(loaded.special, loaded.size, vocabulary)

    def read_params(model):
        shapes = source_checks.parameter_shapes(model, stored.tensors[published.TOKENS].shape[0])
        return published.import_params(stored.tensors, shapes, str(file))

    kind, length = "checkpoint of the reference", stored.settings["max_positions"]
    return EncoderSource(str(file), kind, stored.settings, vocabulary, length, read_params)
