"""Where a fine-tuning run starts from: what `--init_from` names, as settings, vocabulary and encoder."""

import collections.abc
import dataclasses
import pathlib

import jax

from maelm_jax import config, gin_files
from maelm_jax.data import vocabulary as vocabularies
from maelm_jax.data.vocabulary import Vocabulary
from maelm_jax.encoders import source

RANDOM = "random:"  # before a run's name: its model and vocabulary with fresh weights, as the control
OTHERS = "base.gin"  # what else there is to set, where the encoder_source is no workdir of ours


@dataclasses.dataclass(frozen=True)
class EncoderSource:
    """An encoder to start from."""

    name: str  # as given
    gin_file: str  # the settings it was made with, as far as they are known
    fit: collections.abc.Callable[[config.Experiment], config.Experiment]  # puts the encoder's own shape into settings
    vocabulary: Vocabulary
    step: int | None  # of the run's checkpoint; None where the weights are fresh or come from elsewhere
    encoder: collections.abc.Callable[[dict], dict]  # fresh encoder parameters -> those to start with, laid out alike

    @property
    def label(self) -> str:
        """A short name for tables and folders."""
        return label_of(self.name)


def label_of(name: str) -> str:
    """What tables, folders and figures call a start that `--init_from` names so: "tiny", or "random-tiny"."""
    return ("random-" if name.startswith(RANDOM) else "") + pathlib.Path(name.removeprefix(RANDOM)).name


def load(name: str) -> EncoderSource:
    """Anything that source.find knows (a workdir, an exported or stock folder, a reference checkpoint), with or without `random:` before it.

    Raises ConfigError when there is no such thing, or it comes without the vocabulary its ids belong to.
    """
    encoder_source = source.find(name.removeprefix(RANDOM))
    if encoder_source.vocabulary is None:
        raise config.ConfigError(f"--init_from={name} has no vocabulary; put it into a folder as model.pt, with its vocabulary's file beside it")
    vocabulary = vocabularies.load(encoder_source.vocabulary)
    own = pathlib.Path(encoder_source.path) / "config.gin"
    gin_file = str(own) if own.is_file() else OTHERS

    def fit(experiment: config.Experiment) -> config.Experiment:
        if encoder_source.step is not None:  # a workdir's own settings file has said it
            return experiment
        told = {field: encoder_source.settings[field] for field in source.ENCODER if field in encoder_source.settings}
        model = dataclasses.replace(experiment.model, **told)
        length = min(experiment.corpus.sequence_length, model.max_positions)
        return dataclasses.replace(experiment, model=model, corpus=dataclasses.replace(experiment.corpus, sequence_length=length))

    restored: list[dict] = []  # read once for all runs of a grid

    def encoder(fresh: dict) -> dict:
        if name.startswith(RANDOM):
            return fresh
        if not restored:
            values = encoder_source.read(gin_files.load([gin_file]).model)
            restored.append(source.load_params(values, {"encoder": fresh}, vocabulary.size, encoder_source.path)[0]["encoder"])
        return jax.tree.map(jax.numpy.copy, restored[0])

    return EncoderSource(name, gin_file, fit, vocabulary, None if name.startswith(RANDOM) else encoder_source.step, encoder)
