"""Finds and loads the pretrained encoders that train, finetune, export and embed start from.

A source is one of:

- a workdir of maelm_jax.train or maelm_jax.finetune,
- a folder that maelm_jax.export wrote, in any format,
- a stock MPNet or RoBERTa folder with its tokenizer.json,
- a checkpoint of the reference implementation (.pt, or a .npz test case).

`find` reads the settings of the model. `Pretrained.read` reads its weights.
"""

import collections.abc
import dataclasses
import pathlib
import typing

import jax
import numpy as np
from flax import traverse_util

from maelm_jax import config, gin_files, json_files, storage, workdirs
from maelm_jax.data import vocabulary as vocabularies
from maelm_jax.encoders import huggingface, published, pytorch
from maelm_jax.encoders import tensors as tables
from maelm_jax.model import keys, maelm
from maelm_jax.training import checkpoint_params

# The fields of config.Model that determine the parameters and the function of each stack.
ENCODER = (
    "layers", "width", "heads", "feed_forward", "max_positions", "relative_buckets", "num_buckets",
    "max_distance", "layer_norm_eps",
)  # fmt: skip
DECODER = ("decoder_layers", "decoder_relative_bias")
TUNED = {"classifier", "span"}  # the heads of fine-tuned runs


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A pretrained encoder on disk, with the decoder and the head if the source has them.

    Attributes:
        path: The file or folder.
        kind: What it is, in words.
        settings: The fields of config.Model that the source determines. A stock encoder has no
            decoder: its `decoder_layers` is 0.
        vocabulary: The path for data.vocabulary.load; None if the source has no vocabulary.
        step: The step of a workdir's checkpoint; None for every other source.
    """

    path: str
    kind: str
    settings: dict[str, typing.Any]
    vocabulary: str | None
    _weights: collections.abc.Callable[[config.Model], dict[str, np.ndarray]]
    step: int | None = None

    def model(self, base: config.Model) -> config.Model:
        """Returns `base` with the settings of the source.

        Raises:
            ConfigError: The settings of the source and the rest of `base` contradict each other.
        """
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
            vocabulary have one row for each id.

        Raises:
            ConfigError: Weights are missing, unknown or of the wrong shape. The message lists them.
        """
        values = self._weights(self.model(base))
        if "encoder/token_embedding" not in values:
            raise config.ConfigError(
                f"{self.path} holds no encoder, only "
                f"{', '.join(sorted({path.split('/')[0] for path in values}))}"
            )
        if self.vocabulary:
            size = vocabularies.load(self.vocabulary).size
            if len(values["encoder/token_embedding"]) < size:
                raise config.ConfigError(
                    f"{self.path}: {len(values['encoder/token_embedding'])} rows of tokens, but "
                    f"its vocabulary has {size} ids"
                )
            values |= {path: values[path][:size] for path in tables.VOCABULARY if path in values}
        return values

    def check_vocabulary(self, vocabulary: vocabularies.Vocabulary):
        """Checks that `vocabulary` has the same ids as the weights of the source.

        Raises:
            ConfigError: The source has another vocabulary.
        """
        if (
            self.vocabulary
            and vocabularies.load(self.vocabulary).fingerprint != vocabulary.fingerprint
        ):
            raise config.ConfigError(
                f"Vocabulary.file is not the vocabulary of {self.path}, whose weights are for its "
                "own ids: leave it out"
            )


def find(path: str, step: int | None = None) -> Pretrained:
    """Finds the pretrained encoder at `path`.

    Args:
        path: A local file or folder, one of the kinds that the module docstring lists.
        step: The step of a workdir's checkpoint; None for the newest.

    Raises:
        ConfigError: `path` does not exist, or a run cannot start from it.
    """
    storage.require_local(path)
    place = pathlib.Path(path)
    if place.is_file():
        return _reference(place, None)
    if (place / "config.gin").is_file():
        return _workdir(place, step)
    if (place / "model.pt").is_file():
        return _reference(place / "model.pt", str(place))
    if (place / "config.json").is_file():
        return _folder(place)
    if not place.exists():
        raise config.ConfigError(f"{path}: no such file or folder{workdirs.near(path)}")
    held = ", ".join(sorted(item.name for item in place.iterdir())[:6]) or "nothing"
    raise config.ConfigError(
        f"{path} is neither a workdir (config.gin), an exported or stock folder (config.json) nor "
        f"a checkpoint; it holds {held}{workdirs.near(path)}"
    )


def _workdir(place: pathlib.Path, step: int | None) -> Pretrained:
    model, step = (
        gin_files.load([str(place / "config.gin")]).model,
        checkpoint_params.pick_step(str(place), step),
    )

    def weights(_):
        values = flat(checkpoint_params.read_params(str(place), step))
        _check_shapes(
            values,
            _shapes(model, vocabularies.load(place / "vocabulary").size),
            f"{place}, step {step}",
        )
        return values

    settings = {name: getattr(model, name) for name in (*ENCODER, *DECODER)}
    return Pretrained(str(place), "workdir", settings, str(place / "vocabulary"), weights, step)


def _folder(place: pathlib.Path) -> Pretrained:
    content = json_files.read_object(place / "config.json")
    if not vocabularies.files_in(place):
        raise config.ConfigError(
            f"{place} has no tokenizer.json; transformers makes it: "
            f"AutoTokenizer.from_pretrained('{place}').save_pretrained('{place}')"
        )
    ours = content.get("format") == "maelm_jax"
    if ours:
        settings = pytorch.settings(content, (*ENCODER, *DECODER), str(place / "config.json"))
    else:
        settings = huggingface.settings(content, str(place)) | {
            "decoder_layers": 0,
            "decoder_relative_bias": False,
        }
    reader = pytorch.read if ours else huggingface.read

    def weights(model):
        shapes = _shapes(model, content["vocabulary_size" if ours else "vocab_size"])
        return reader(content, huggingface.weights_of(place), shapes, str(place))

    _check_settings(settings, str(place))
    return Pretrained(
        str(place),
        "folder of ours" if ours else f"{content['model_type']} folder",
        settings,
        str(place),
        weights,
    )


def _reference(file: pathlib.Path, vocabulary: str | None) -> Pretrained:
    settings, tensors = published.read(file)
    _check_settings(settings, str(file))

    def weights(model):
        return published.take(
            tensors, _shapes(model, tensors[published.TOKENS].shape[0]), str(file)
        )

    return Pretrained(str(file), "checkpoint of the reference", settings, vocabulary, weights)


def _check_settings(settings: dict[str, typing.Any], where: str):
    """Raises a one-line ConfigError if no model can have the settings of a source."""
    for name, value in settings.items():
        most = (
            json_files.MOST_LAYERS
            if name in ("layers", "decoder_layers")
            else json_files.LARGEST
        )
        if isinstance(value, (int, float)) and not 0 <= value <= most:  # true for NaN as well
            raise config.ConfigError(
                f"{where}: {name} is {json_files.shown(value)}, not a number from 0 to {most}"
            )
    not_told = {
        "heads": 1,
        "max_distance": max(config.Model().max_distance, settings.get("num_buckets") or 0),
    }
    try:
        dataclasses.replace(config.Model(), **(not_told | settings))
    except (config.ConfigError, TypeError) as error:  # gin appends lines to the message
        raise config.ConfigError(
            f"{where}: not an encoder that a run can start from: {str(error).splitlines()[0]}"
        ) from error


def _check_shapes(values: dict[str, typing.Any], shapes: dict[str, tuple[int, ...]], where: str):
    """Raises ConfigError if the parameters of a workdir contradict its config.gin or vocabulary.

    A fine-tuned run holds only the encoder and its own head, so only the encoder is compared.
    """
    rooms = {path.split("/")[0] for path in values}
    wanted = {"encoder"} if rooms & TUNED else {path.split("/")[0] for path in shapes}
    wrong = []
    for path in sorted({*values, *shapes}):
        if path.split("/")[0] not in (rooms | wanted) - TUNED:
            continue
        there, asked = (
            values[path].shape if path in values else "missing",
            shapes.get(path, "no parameter"),
        )
        if there != asked:
            wrong.append(f"{path} is {there} in the checkpoint, {asked} by the settings")
    if wrong:
        raise config.ConfigError(
            f"{where}: config.gin or vocabulary/ contradicts the checkpoint: {tables.listed(wrong)}"
        )


def _shapes(model: config.Model, vocabulary_size: int) -> dict[str, tuple[int, ...]]:
    """Returns {path: shape} of the parameters of a model."""
    init = maelm.create(
        model, vocabulary_size, config.SpecialIds(0, 1, 2, 3, vocabulary_size - 1)
    )[1]
    return {path: leaf.shape for path, leaf in flat(jax.eval_shape(init, keys.of_seed(0))).items()}


def nested(values: dict[str, typing.Any]) -> dict:
    """Returns {path: leaf} as a parameter tree: a dict for each part of the paths."""
    return traverse_util.unflatten_dict(values, sep="/")


def flat(params: dict) -> dict[str, typing.Any]:
    """Returns a parameter tree as {path: leaf}, with paths such as encoder/norm/scale."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(str(key.key) for key in keys): leaf for keys, leaf in leaves}


def adopt(
    experiment: config.Experiment, encoder_source: Pretrained
) -> tuple[config.Experiment, list[str]]:
    """Adapts the settings of a run to the source that it starts from.

    The run takes the vocabulary of the source unless Vocabulary.file is set. It takes the encoder
    settings of a source that is not a workdir, and the decoder settings if both have a decoder.
    The settings of a workdir must equal those of the run, because the user can pass its config.gin.

    Returns:
        The new settings, and the changes in words.

    Raises:
        ConfigError: The settings of a workdir differ from those of the run.
    """
    before = experiment.model
    wanted = {
        name: value
        for name, value in encoder_source.settings.items()
        if name in (*ENCODER, *DECODER)
    }
    if not (before.decoder_layers and wanted.get("decoder_layers")):
        wanted = {name: value for name, value in wanted.items() if name not in DECODER}
    if wanted.get("relative_buckets") == "none":
        wanted["decoder_relative_bias"] = False
    changed = {name: value for name, value in wanted.items() if getattr(before, name) != value}
    if changed and encoder_source.step is not None:
        listed = "; ".join(
            f"Model.{name} is {value!r} there, {getattr(before, name)!r} here"
            for name, value in changed.items()
        )
        path = encoder_source.path
        raise config.ConfigError(
            f"Run.init_from {path} does not fit this model: {listed} (its settings: "
            f"{path}/config.gin)"
        )
    said = [
        f"Model.{name}: {getattr(before, name)!r} -> {value!r}" for name, value in changed.items()
    ]
    vocabulary = experiment.vocabulary
    if encoder_source.vocabulary and vocabulary.file is None:
        vocabulary = dataclasses.replace(vocabulary, file=encoder_source.vocabulary)
        said.append(f"Vocabulary.file: None -> {encoder_source.vocabulary!r}")
    return dataclasses.replace(
        experiment, model=dataclasses.replace(before, **changed), vocabulary=vocabulary
    ), said


def load_params(
    values: dict[str, np.ndarray], params: dict, vocabulary_size: int, where: str
) -> tuple[dict, list[str], list[str]]:
    """Loads the weights of a source into the parameters of a run.

    A top-level module (encoder, decoder or head) is loaded completely or not at all. The encoder is
    always loaded.

    Args:
        values: {parameter path: array} of the source, from `Pretrained.read`.
        params: The parameter tree of the run; its arrays give the shapes and the shardings.
        vocabulary_size: The number of ids. Tables over the vocabulary are padded with zero rows.
        where: The source, for error messages.

    Returns:
        The new parameter tree, the modules that keep the values of `params`, and the modules of
        `values` that the run does not have.

    Raises:
        ConfigError: Weights are missing, unknown or of the wrong shape. The message lists them.
    """
    ours = flat(params)
    rooms = {path.split("/")[0] for path in values}
    unused = sorted(rooms - {path.split("/")[0] for path in ours})
    wrong = [
        f"{path} is not a parameter of this model"
        for path in values
        if path not in ours and path.split("/")[0] not in unused
    ]
    fresh = set()

    def leaf(keys, old):
        path = "/".join(str(key.key) for key in keys)
        room = path.split("/")[0]
        if room not in rooms and room != "encoder":
            fresh.add(room)
            return old
        if path not in values:
            wrong.append(f"{path} is missing")
            return old
        value = values[path]
        rows = (vocabulary_size,) if path in tables.VOCABULARY else old.shape[:1]
        if value.shape != (*rows, *old.shape[1:]):
            wrong.append(f"{path} has shape {value.shape}, expected {(*rows, *old.shape[1:])}")
            return old
        if len(value) < len(old):
            value = np.concatenate(
                [value, np.zeros((len(old) - len(value), *old.shape[1:]), np.float32)]
            )
        return jax.make_array_from_callback(old.shape, old.sharding, lambda index: value[index])

    result = jax.tree_util.tree_map_with_path(leaf, params)
    if wrong:
        raise config.ConfigError(f"{where} does not fit this model: " + "; ".join(wrong))
    return result, sorted(fresh), unused
