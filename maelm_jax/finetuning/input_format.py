"""How an encoder reads the examples of a task."""

import typing

from maelm_jax import config
from maelm_jax.data.vocabularies import Vocabulary
from maelm_jax.encoders import families
from maelm_jax.encoders.family import PairFormat


class InputFormat(typing.NamedTuple):
    """What turns text into token ids for an encoder."""

    vocabulary: Vocabulary
    length: int  # largest number of tokens of an example
    pair: PairFormat  # of two sentences, or of question and context

    def prefix(self, first: list[int]) -> list[int]:
        """Returns the tokens before the second of two sentences. `first` are those of the first."""
        separators = [self.vocabulary.eos] * self.pair.separators
        return [self.vocabulary.bos, *first, *separators]


def of(experiment: config.Experiment, vocabulary: Vocabulary) -> InputFormat:
    """Returns the input format of a run whose encoder has this vocabulary."""
    return InputFormat(
        vocabulary, length_of(experiment), families.choose_pair_format(experiment.model)
    )


def length_of(experiment: config.Experiment) -> int:
    """Returns the largest number of tokens of an example."""
    return min(experiment.finetune.max_length, experiment.model.max_positions)
