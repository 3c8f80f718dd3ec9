"""Labelled examples as token ids."""

import dataclasses
import functools
import typing

import numpy as np
import tqdm

from maelm_jax.data.vocabularies import Vocabulary
from maelm_jax.finetuning.input_format import InputFormat

NO_LABEL = -1  # target of a slot that is not predicted
TEXTS_AT_ONCE = 10_000  # texts that are tokenised between two steps of the progress bar


@dataclasses.dataclass(frozen=True)
class Features:
    """n tokenised examples.

    Attributes:
        ids: n arrays of token ids, int32, without padding.
        targets: One of: classes, int32 [n]; scores from 0 to 1, float32 [n]; 1 for each label of
            the text and 0 for the others, float32 [n, classes]; first and last slot of the answer,
            int32 [n, 2]; the class of each slot or NO_LABEL, int32 [n, longest row].
        context: The slot at which the second sentence or SQuAD's context begins, int32 [n]; 0 where
            there is one sentence.
        has_slot_targets: Whether `targets` are classes of slots.
    """

    ids: list[np.ndarray]
    targets: np.ndarray
    context: np.ndarray
    has_slot_targets: bool = False

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, int32 [n]."""
        return np.asarray([len(row) for row in self.ids], np.int32)

    def select(self, indices: np.ndarray) -> "Features":
        """The examples with these indices, in this order."""
        return dataclasses.replace(
            self,
            ids=[self.ids[i] for i in indices],
            targets=self.targets[indices],
            context=self.context[indices],
        )


def encode(vocabulary: Vocabulary, texts: list[str]) -> list[list[int]]:
    """The token ids of each text. Shows a progress bar when there are many texts."""
    rows: list[list[int]] = []
    with tqdm.tqdm(
        total=len(texts),
        desc="tokenising",
        unit="text",
        unit_scale=True,
        leave=False,
        disable=len(texts) <= 2 * TEXTS_AT_ONCE,
    ) as bar:
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            rows += vocabulary.encode_batch(texts[start : start + TEXTS_AT_ONCE])
            bar.update(len(rows) - start)
    return rows


class EncodedSentences(typing.NamedTuple):
    """Token ids of examples that consist of sentences."""

    ids: list[np.ndarray]  # int32, one array an example
    second: np.ndarray  # int32: slot at which the second sentence begins, 0 without one
    cut: int  # number of examples that were too long and lost tokens


def sentences(examples: list[tuple[str, ...]], input_format: InputFormat) -> EncodedSentences:
    """Encodes examples as `<s> A </s>`, those of two sentences as `<s> A </s> B </s>`.

    Args:
        examples: One or two sentences each, all the same number.
        input_format: Its `length` is the largest number of tokens. `kept_sizes` says what is cut
            off.
    """
    vocabulary, length, pair = input_format
    sentence_count = len(examples[0])
    encoded = [
        encode(vocabulary, [example[i] for example in examples]) for i in range(sentence_count)
    ]
    special_tokens = 2 if sentence_count == 1 else 2 + pair.separators
    cut, rows, starts = 0, [], []
    for parts in zip(*encoded, strict=True):
        sizes = tuple(map(len, parts))
        kept = kept_sizes(sizes, length - special_tokens)
        cut += kept != sizes
        first, *second = (part[:size] for part, size in zip(parts, kept, strict=True))
        if second:
            prefix = input_format.prefix(first)
            row, start = [*prefix, *second[0], vocabulary.eos], len(prefix)
        else:
            row, start = [vocabulary.bos, *first, vocabulary.eos], 0
        rows.append(np.asarray(row, np.int32))
        starts.append(start)
    return EncodedSentences(rows, np.asarray(starts, np.int32), cut)


def kept_sizes(sizes: tuple[int, ...], budget: int) -> tuple[int, ...]:
    """How many tokens of each sentence are kept, at most `budget` in all.

    The longer sentence loses its last token until both fit. Of equally long ones, the second does.
    """
    if sum(sizes) <= budget:
        return sizes
    if len(sizes) == 1:
        return (budget,)
    a, b = sizes
    if min(a, b) <= budget // 2:  # the shorter one stays whole, the longer one gets the rest
        return (a, budget - a) if a <= b else (budget - b, b)
    return budget - budget // 2, budget // 2
