"""The encoder that a fine-tuning run starts from: what --init_from names."""

import collections.abc
import dataclasses
import functools
import os
import pathlib

import jax
import numpy as np

from maelm_jax import config, storage
from maelm_jax.data.vocabularies import Vocabulary
from maelm_jax.encoders import adoption, families, source

# The settings of an encoder that is not a workdir. The encoder itself gives only its shape.
DEFAULT_GIN_FILE = "base.gin"


@dataclasses.dataclass(frozen=True)
class InitialEncoder:
    """An encoder to start from.

    Attributes:
        name: Its name in --init_from, with the prefix.
        gin_file: The config.gin of the workdir, or DEFAULT_GIN_FILE.
        fit: Returns settings with the shape of this encoder in them.
        vocabulary: The vocabulary that its token ids belong to.
        length: The longest input in tokens whose positions are trained.
        step: The step of the workdir's checkpoint. None for fresh weights and for an encoder that
            is not a workdir.
        load_encoder: Takes freshly drawn encoder parameters `fresh`. Returns the parameters to
            start with, in the tree and sharding of `fresh`.
        load_pooler: The same for the first linear map of a classifier. Returns `fresh` if the
            encoder came without a pooler.
    """

    name: str
    gin_file: str
    fit: collections.abc.Callable[[config.Experiment], config.Experiment]
    vocabulary: Vocabulary
    length: int
    step: int | None
    load_encoder: collections.abc.Callable[[dict], dict]
    load_pooler: collections.abc.Callable[[dict], dict] = lambda fresh: fresh

    @property
    def label(self) -> str:
        """A short name for tables and folders."""
        return label_of(self.name)


def normalised(name: str) -> str:
    """Returns one spelling of a name in --init_from: runs/tiny for ./runs/tiny/."""
    prefix = config.RANDOM if name.startswith(config.RANDOM) else ""
    path = name.removeprefix(prefix)
    if storage.in_bucket(path):
        return name
    return prefix + os.path.normpath(os.path.expanduser(path))


def label_of(name: str) -> str:
    """The short name of an encoder: "tiny" for runs/tiny, "random-tiny" for random:runs/tiny."""
    # Also of `.` and `..`, which have no name themselves.
    folder = os.path.basename(os.path.abspath(name.removeprefix(config.RANDOM)))
    return f"random-{folder}" if name.startswith(config.RANDOM) else folder


def load(name: str, step: int | None = None) -> InitialEncoder:
    """Finds the encoder that one name in --init_from stands for.

    Args:
        name: What source.find_encoder accepts: a workdir, an exported or stock folder, or a
            checkpoint of the reference implementation. config.RANDOM may stand before it.
        step: Step of the workdir's checkpoint. None: the newest. It has no effect after RANDOM.

    Raises:
        ConfigError: There is no such encoder or step, or the encoder has no vocabulary.
    """
    is_random = name.startswith(config.RANDOM)
    encoder_source = source.find_encoder(
        name.removeprefix(config.RANDOM), None if is_random else step
    )
    vocabulary = encoder_source.load_vocabulary()
    config_file = pathlib.Path(encoder_source.path) / "config.gin"
    gin_file = str(config_file) if config_file.is_file() else DEFAULT_GIN_FILE

    def fit(experiment: config.Experiment) -> config.Experiment:
        if encoder_source.step is not None:  # its config.gin has the shape already
            return experiment
        shape = {
            field: encoder_source.settings[field]
            for field in config.field_names(config.Model, part="encoder")
            if field in encoder_source.settings
        }
        model = dataclasses.replace(experiment.model, **shape)
        length = min(experiment.corpus.sequence_length, model.max_positions)
        corpus = dataclasses.replace(experiment.corpus, sequence_length=length)
        return dataclasses.replace(experiment, model=model, corpus=corpus)

    @functools.lru_cache(maxsize=1)  # a grid needs the weights for every run
    def stored_params() -> dict[str, np.ndarray]:
        return encoder_source.read_params()

    def load_encoder(fresh: dict) -> dict:
        if is_random:
            return fresh
        params = stored_params()
        if "token_type_embedding" not in fresh:
            params = without_token_types(params)
        loaded = adoption.load_params(
            params, {"encoder": fresh}, vocabulary.size, encoder_source.path
        )
        # The training step donates its state: the run must not share memory with stored_params.
        return jax.tree.map(jax.numpy.copy, loaded.params["encoder"])

    def load_pooler(fresh: dict) -> dict:
        if is_random:
            return fresh
        values = stored_params()
        path = _pooler_path(encoder_source, values)
        if path is None:
            return fresh
        return {part: adoption.shard_like(fresh[part], values[f"{path}/{part}"]) for part in fresh}

    step = None if is_random else encoder_source.step
    return InitialEncoder(
        name, gin_file, fit, vocabulary, encoder_source.length, step, load_encoder, load_pooler
    )


def _pooler_path(encoder_source: source.EncoderSource, params: dict[str, np.ndarray]) -> str | None:
    """Returns the path of the pooler in the parameters of a source, or None if it has none.

    In a fine-tuned run of a family whose classifier begins with the pooler (BERT), it is there.
    """
    if "pooler/kernel" in params:
        return "pooler"
    is_pooler = "pooler" in families.choose_family(encoder_source.model).classifier_names["dense"]
    return "classifier/dense" if is_pooler and "classifier/dense/kernel" in params else None


def without_token_types(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Adds the row of a token-type table of one row to every position, which is the same function.

    Earlier versions did so with RoBERTa. Other tables are left as they are.
    """
    types, positions = "encoder/token_type_embedding", "encoder/position_embedding"
    if types not in params or len(params[types]) != 1:
        return params
    rest = {path: value for path, value in params.items() if path != types}
    return rest | {positions: params[positions] + params[types]}
