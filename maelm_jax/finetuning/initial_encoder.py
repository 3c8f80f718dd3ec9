"""The encoder that a fine-tuning run starts from: what --init_from names."""

import dataclasses
import functools
import hashlib
import os
import re

import jax
import numpy as np

from maelm_jax import config
from maelm_jax.data.vocabularies import Vocabulary
from maelm_jax.encoders import adoption, families, opened


@dataclasses.dataclass(frozen=True)
class InitialEncoder:
    """An encoder to start from.

    Attributes:
        name: Its name in --init_from, with the prefix.
        source: Where it comes from.
        is_random: Whether only its model and vocabulary are used, with fresh weights.
    """

    name: str
    source: opened.OpenedModel
    is_random: bool

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary that its token ids belong to."""
        return self.source.vocabulary

    @property
    def label(self) -> str:
        """A short name for tables and folders: tiny for runs/tiny, random-tiny for its control."""
        # Also of `.` and `..`, which have no name themselves.
        folder = os.path.basename(os.path.abspath(self.name.removeprefix(config.RANDOM)))
        folder = re.sub("@[0-9a-f]{40}$", "", folder)  # the commit of one on the Hub
        return f"random-{folder}" if self.is_random else folder

    @property
    def step(self) -> int | None:
        """The step of the workdir's checkpoint. None: fresh weights, or no workdir."""
        return None if self.is_random else self.source.step

    @functools.cached_property
    def fingerprint(self) -> str | None:
        """A hash of its weights. None: fresh weights, which the seed of a run draws."""
        if self.is_random:
            return None
        digest = hashlib.sha256()
        for path, weights in sorted(self.source.params.items()):
            digest.update(path.encode())
            digest.update(np.ascontiguousarray(weights))
        return digest.hexdigest()[:16]

    def with_shape(self, experiment: config.Experiment) -> config.Experiment:
        """Returns the settings with the shape of this encoder in them."""
        encoder = dataclasses.replace(experiment.encoder, **self.source.settings)
        length = min(experiment.corpus.sequence_length, encoder.max_positions)
        corpus = dataclasses.replace(experiment.corpus, sequence_length=length)
        return dataclasses.replace(experiment, encoder=encoder, corpus=corpus)

    def load_into(self, params: dict) -> dict:
        """Returns drawn parameters with this encoder, and with its pooler if it has one."""
        source = self.source
        loaded = adoption.load_params(
            source.params, {"encoder": params["encoder"]}, source.vocabulary.size, source.path
        )
        # The training step donates its state: the run must not share memory with the source.
        params = params | {"encoder": jax.tree.map(jax.numpy.copy, loaded.params["encoder"])}
        pooler = self._pooler_path()
        if "classifier" in params and pooler:
            dense = {
                part: adoption.shard_like(fresh, self.source.params[f"{pooler}/{part}"])
                for part, fresh in params["classifier"]["dense"].items()
            }
            params["classifier"] = params["classifier"] | {"dense": dense}
        return params

    def _pooler_path(self) -> str | None:
        """Returns the path of a pooler in the parameters, or None if there is none.

        In a fine-tuned run of a family whose classifier begins with the pooler (BERT), it is there.
        """
        if "pooler/kernel" in self.source.params:
            return "pooler"
        names = families.choose_family(self.source.model.encoder).classifier_names
        has_pooler = "pooler" in names["dense"] and "classifier/dense/kernel" in self.source.params
        return "classifier/dense" if has_pooler else None


def load(name: str, step: int | None = None) -> InitialEncoder:
    """Finds the encoder that one name in --init_from stands for (see `opened.find_model`).

    `step` is that of the workdir's checkpoint; None: the newest. It has no effect after
    config.RANDOM.

    Raises:
        ConfigError: There is no such encoder or step, or the encoder has no vocabulary.
    """
    is_random = name.startswith(config.RANDOM)
    path = name.removeprefix(config.RANDOM)
    found = opened.find_model(path, None if is_random else step)
    found.require_bidirectional()
    _ = found.vocabulary  # without one, no task can be read
    # runs/tiny for ./runs/tiny/. Of a name on the Hub, the branch may have moved on a resume.
    spelling = found.hub_name or os.path.normpath(os.path.expanduser(path))
    name = config.RANDOM + spelling if is_random else spelling
    return InitialEncoder(name, found, is_random)
