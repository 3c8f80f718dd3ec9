"""Labels for words (task `conll`) as training sees them: tokenised sentences, scores, predictions.

A label belongs to the first token of its word. The other tokens of the word have none.
"""

import collections.abc
import dataclasses
import os
import pathlib
import unicodedata

import numpy as np

from maelm_jax import config, storage
from maelm_jax.finetuning import conll_files, features, metrics
from maelm_jax.finetuning.conll_files import Sentences
from maelm_jax.finetuning.input_format import InputFormat
from maelm_jax.finetuning.task_data import DevSet, Head, TaskData

NAME = "conll"
SPECIAL_TOKENS = 2  # `<s>` and `</s>` of a row
UNPREDICTED = "_"  # stands for the label of a word without a prediction in a file


def load(settings: config.Finetune, input_format: InputFormat) -> TaskData:
    """Reads and tokenises the files of the task. The labels are those of the training file."""
    train_path, dev_path = locate(settings.conll)
    train = conll_files.read(train_path, settings.conll, labelled=True)
    dev = conll_files.read(dev_path, settings.conll, labelled=True).sample(settings.dev_examples)
    labels = tuple(sorted({label for sentence in train.labels for label in sentence}))
    if len(labels) < 2:
        raise config.ConfigError(
            f"{train_path}: every word has the label {labels[0]!r}. "
            "Give a file with two labels or more, or correct Conll.label_column."
        )
    rows = encode(train, labels, input_format, "training")
    entities = all(map(metrics.is_of_entity, labels))
    _check_labels(dev, labels, dev_path, "dev")
    dev_sets = {"": dev_set(dev, labels, input_format, "dev")}
    notes = train.notes + dev.notes
    if not entities:
        notes.append("the labels are not B-X, I-X and O: scored by the accuracy of words")
    main = "f1" if entities else "accuracy"
    return TaskData(
        NAME, Head("token", len(labels)), labels, main, rows.features, dev_sets, {}, notes
    )


def _check_labels(sentences: Sentences, labels: tuple[str, ...], path, which: str):
    """Notes labels that are not in `labels`, those of the training file.

    `which` names the sentences in the note. Raises ConfigError if the labels of the training file
    are those of entities and another one is not.
    """
    unknown = sorted({label for of_words in sentences.labels for label in of_words} - set(labels))
    if unknown:
        note = f"{which}: labels that the training file lacks: {', '.join(unknown)}"
        sentences.notes.append(note)
    others = [label for label in unknown if not metrics.is_of_entity(label)]
    if others and all(map(metrics.is_of_entity, labels)):
        raise config.ConfigError(
            f"{path}: the label {others[0]!r} is not B-X, I-X or O, as those of the training file "
            "are. Correct it, or Conll.label_column."
        )


def locate(settings: config.Conll) -> list[pathlib.Path]:
    """The training file and the dev file. Raises ConfigError when one is missing."""
    paths = [pathlib.Path(path).expanduser() for path in (settings.train_file, settings.dev_file)]
    if absent := [str(path) for path in paths if not os.path.isfile(path)]:
        raise config.ConfigError(
            f"{NAME}: no file {' or '.join(absent)}. Correct Conll.train_file or Conll.dev_file."
        )
    return paths


def read_file(
    path: str,
    settings: config.Finetune,
    input_format: InputFormat,
    labels: tuple[str, ...],
    labelled: bool = False,
) -> DevSet:
    """Reads a file to predict. See tasks.read_file."""
    sentences = conll_files.read(path, settings.conll, labelled)
    if labelled:
        _check_labels(sentences, labels, path, path)
    return dev_set(sentences, labels, input_format, path)


@dataclasses.dataclass(frozen=True)
class WordRows:
    """Tokenised sentences."""

    features: features.Features
    slots: list[np.ndarray]  # of each sentence, int [words]: slot of a word's first token, or -1


def encode(
    sentences: Sentences, labels: tuple[str, ...], input_format: InputFormat, which: str
) -> WordRows:
    """Encodes each sentence as `<s> words </s>`, and notes how many sentences were cut.

    Args:
        sentences: The sentences. Notes are added to them.
        labels: Names of the classes. A word with another label, or without one, has no target.
        input_format: Its vocabulary encodes the words with a space between two of them.
        which: Names the sentences in notes.
    """
    vocabulary, length = input_format.vocabulary, input_format.length
    class_of = {label: index for index, label in enumerate(labels)}
    ids, slots = [], []
    cut = lost = 0
    for words in sentences.words:
        tokens, offsets = vocabulary.encode_with_offsets(" ".join(words))
        kept = tokens[: length - SPECIAL_TOKENS]
        first = first_tokens(words, np.asarray(offsets, np.int64).reshape(-1, 2))
        first[first >= len(kept)] = -1
        cut += len(kept) < len(tokens)
        lost += int((first < 0).sum())
        ids.append(np.asarray([vocabulary.bos, *kept, vocabulary.eos], np.int32))
        slots.append(np.where(first < 0, -1, first + 1))
    if cut:
        sentences.notes.append(f"{which}: {cut} of {len(ids)} sentences cut to {length} tokens")
    if lost:
        words = sum(map(len, sentences.words))
        sentences.notes.append(f"{which}: {lost} of {words} words have no encoded token")
    targets = np.full((len(ids), max(map(len, ids))), features.NO_LABEL, np.int32)
    for row, of_words, in_row in zip(targets, sentences.labels, slots, strict=True):
        for label, slot in zip(of_words, in_row, strict=False):  # no labels in a file to predict
            if slot >= 0:
                row[slot] = class_of.get(label, features.NO_LABEL)
    context = np.zeros(len(ids), np.int32)
    return WordRows(features.Features(ids, targets, context, has_slot_targets=True), slots)


def first_tokens(words: collections.abc.Sequence[str], offsets: np.ndarray) -> np.ndarray:
    """Index of the first token of each word; -1 for a word that has none of its own.

    It is the token that a stock tokenizer counts as the first one of the word
    (`word_ids` of transformers): a token for the space before the word is one of the word.

    Args:
        words: The words of the text, which has one space between two of them.
        offsets: First character of each token and the one after its last, int [tokens, 2].
    """
    sizes = np.asarray([len(word) for word in words])
    starts = np.concatenate([[0], np.cumsum(sizes + 1)[:-1]])
    # The first token that ends inside the word or after it.
    tokens = np.searchsorted(offsets[:, 1], starts, side="right")
    begins, ends = np.append(offsets, [[np.iinfo(np.int64).max] * 2], axis=0).T
    # A vocabulary has no token for a word of zero-width characters. Such a word can lie inside the
    # token of the next word.
    has_token = (begins[tokens] < starts + sizes) & [_is_visible(word) for word in words]
    is_space = (tokens > 0) & (begins[tokens - 1] >= starts - 1) & (ends[tokens - 1] == starts)
    tokens = np.where(is_space, tokens - 1, tokens)
    token_of_word = np.full(len(words), -1)
    with_token = np.flatnonzero(has_token)
    # A token of two words is that of the first one.
    _, first = np.unique(tokens[with_token], return_index=True)
    token_of_word[with_token[first]] = tokens[with_token[first]]
    return token_of_word


def _is_visible(word: str) -> bool:
    """Returns whether a word has a character that is not a control, format or space character."""
    return any(unicodedata.category(character)[0] not in "CZ" for character in word)


def dev_set(
    sentences: Sentences, labels: tuple[str, ...], input_format: InputFormat, which: str
) -> DevSet:
    """Sentences to predict. `which` names them in notes."""
    rows = encode(sentences, labels, input_format, which)
    labelling = _Labelling(sentences, rows.slots, labels)
    return DevSet(
        rows.features,
        labelling.score,
        labelling.write,
        (".txt",),
        sentences.notes,
        f"{len(sentences.words):,} sentences",
        sentences.labels,
    )


@dataclasses.dataclass(frozen=True)
class _Labelling:
    """Turns outputs of the model, the class of each slot, into labels, scores and files."""

    sentences: Sentences
    slots: list[np.ndarray]
    labels: tuple[str, ...]

    @property
    def entities(self) -> bool:
        """Whether the labels are those of entities."""
        return all(map(metrics.is_of_entity, self.labels))

    def predicted(self, outputs: np.ndarray) -> list[list[str | None]]:
        """The labels of the words.

        A word without a token in its row is in no entity. If the labels are not those of entities,
        it has no label, and counts as wrong.
        """
        fallback = metrics.OUTSIDE if self.entities else None
        return [
            [self.labels[row[slot]] if slot >= 0 else fallback for slot in slots]
            for row, slots in zip(outputs, self.slots, strict=True)
        ]

    def score(self, outputs: np.ndarray) -> dict[str, float]:
        return metrics.words(self.sentences.labels, self.predicted(outputs), self.entities)

    def write(self, outputs: np.ndarray, folder: pathlib.Path, stem: str) -> pathlib.Path:
        """Writes a word and its label on each line, and a blank line after each sentence."""
        sentences = zip(self.sentences.words, self.predicted(outputs), strict=True)
        blocks = [
            "".join(
                f"{word} {label or UNPREDICTED}\n"
                for word, label in zip(words, labels, strict=True)
            )
            for words, labels in sentences
        ]
        path = folder / f"{stem}.txt"
        storage.write(path, "\n".join(blocks))
        return path
