"""Where a fine-tuning run starts from: the one place that knows what `--init_from` can name."""

import collections.abc
import dataclasses
import pathlib

from maelm_jax import config
from maelm_jax.data import vocabulary as vocabularies
from maelm_jax.data.vocabulary import Vocabulary

RANDOM = "random:"  # before a run's name: its model and vocabulary with fresh weights, as the control


@dataclasses.dataclass(frozen=True)
class Start:
    """An encoder to start from."""

    name: str  # as given
    gin_file: str  # settings that say what the encoder is (Model) and what it was made with
    vocabulary: Vocabulary
    encoder: collections.abc.Callable[[dict], dict]  # fresh encoder parameters -> those to start with, laid out alike

    @property
    def label(self) -> str:
        """A short name for tables and folders."""
        path = self.name.removeprefix(RANDOM).rstrip("/")
        return ("random-" if self.name.startswith(RANDOM) else "") + pathlib.Path(path).name


def load(name: str) -> Start:
    """`RUN` (a workdir of maelm_jax.train, or a fine-tuned one) or `random:RUN`. Raises ConfigError when it is no such folder."""
    folder = pathlib.Path(name.removeprefix(RANDOM))
    if not (folder / "config.gin").is_file() or not (folder / "vocabulary").is_dir():
        raise config.ConfigError(f"--init_from={name}: {folder} holds no config.gin and vocabulary/; give the workdir of a pretrained run")

    restored: list[dict] = []  # read once for all runs of a grid

    def encoder(fresh: dict) -> dict:
        import jax

        from maelm_jax.training import checkpoint

        if name.startswith(RANDOM):
            return fresh
        if not restored:
            restored.append(checkpoint.restore_params(str(folder), {"encoder": fresh})[1]["encoder"])
        return jax.tree.map(jax.numpy.copy, restored[0])

    return Start(name, str(folder / "config.gin"), vocabularies.load(folder / "vocabulary"), encoder)
