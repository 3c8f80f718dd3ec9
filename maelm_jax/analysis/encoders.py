"""Any pretrained encoders, and the same documents for each of them, for `analyze --encoders`."""

import os

import numpy as np

from maelm_jax import config
from maelm_jax.analysis import runs
from maelm_jax.analysis.runs import TrainedRun
from maelm_jax.data import packing, sources
from maelm_jax.encoders.encoder import Encoder

LONGEST_ROW = 512
# Every masked token is replaced by [MASK], so that each encoder is measured with and without.
MASKING = config.Masking(encoder_mask_fraction=1.0)


def open_encoders(paths: list[str], text: str) -> list[TrainedRun]:
    """Loads encoders of any kind. All get rows of one length, the longest that all can read.

    Args:
        paths: Workdirs, exported or stock folders, checkpoints of the published code.
        text: Glob of the files to measure on.

    Raises:
        ConfigError: There is no such encoder, or it cannot be computed here.
    """
    loaded = [Encoder.load(path) for path in paths]
    length = min(LONGEST_ROW, *(encoder.length for encoder in loaded))
    return [
        _as_run(path, encoder, text, length) for path, encoder in zip(paths, loaded, strict=True)
    ]


def _as_run(path: str, encoder: Encoder, text: str, length: int) -> TrainedRun:
    """Returns an encoder in the form of a run. Its step is that of a workdir, or 0."""
    experiment = config.Experiment(
        config.Vocabulary(),
        config.Corpus(text_files=text, sequence_length=length),
        MASKING,
        encoder.model,
        config.Optimizer(),
        config.Mesh(),
        config.Run(),
    )
    name, step = os.path.basename(os.path.abspath(path)), encoder.step or 0
    return TrainedRun(name, path, experiment, None, encoder.vocabulary, step, encoder.tree())


def rows_of_text(encoders: list[TrainedRun], tokens: int) -> list[np.ndarray]:
    """Reads the same text for every encoder, each with its own tokenizer.

    Args:
        encoders: Encoders of `open_encoders`.
        tokens: Sets the amount of text: see `sources.first_texts`.

    Returns:
        For each encoder the token ids, int32 [R, L].

    Raises:
        ConfigError: The text is missing or too short for a rank.
    """
    corpus = encoders[0].experiment.corpus
    texts = sources.first_texts(corpus, tokens)
    rows = []
    for encoder in encoders:
        packed = packing.pack(texts, encoder.vocabulary, corpus.sequence_length).rows
        rows.append(packed.astype(np.int32))
        unmasked = runs.unmasked_tokens(encoder, rows[-1])
        runs.check_enough(encoder, unmasked, "tokens", "--text")
    return rows
