"""Labels for words (task `conll`): named entities, parts of speech.

Files have a line for each word, as those of CoNLL-2003. Columns stand between spaces or tabs, a
blank line between sentences. A line whose first column is -DOCSTART- holds no word.

A label belongs to the first token of its word. The other tokens of the word have none.
"""

import itertools
import pathlib
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from maelm_jax import config, storage
from maelm_jax.encoders import families
from maelm_jax.finetuning import heads, labelled_data, metrics
from maelm_jax.finetuning.batches import NO_LABEL, Features
from maelm_jax.finetuning.labels import OneOf
from maelm_jax.finetuning.task import Column, Encoded, Splits, Task, describe_counts
from maelm_jax.model import layers, ops

DOCUMENT = "-DOCSTART-"
COLUMNS = re.compile(r"[ \t]+")
# A line before a sentence in MultiCoNER and CoNLL-U, as "# id 7b1f domain=en" or "# text = ...".
# Behind the word "#" stands a label instead. In CoNLL-U, such a line can hold anything.
COMMENT = re.compile(r"#\s+(id\s|newdoc\b|newpar\b|[\w.]+\s*=)")
CONLL_U_COLUMNS = 10
# CoNLL-U numbers the words in its first of ten columns. "1-2  don't" repeats words 1 and 2 as they
# are written, "8.1" is a word that is not written.
NOT_A_WORD = re.compile(r"\d+[-.]\d+")
SPECIAL_TOKENS = 2  # `<s>` and `</s>` of a row
WORD_BEFORE = "a"  # a word is encoded after it, for the first word of a text has other tokens
UNPREDICTED = "_"  # stands for the label of a word without a prediction in a file


class Sentence(typing.NamedTuple):
    """The words of a sentence and their labels."""

    words: list[str]
    labels: list[str]  # [] if they are not read


class Slots(typing.NamedTuple):
    """The output of the model for n rows of T slots."""

    classes: np.ndarray  # int32 [n, T]
    probabilities: np.ndarray  # float32 [n, T], of these classes


class TokenClassifier(nnx.Module):
    """Scores of C classes of each slot, as in stock models: dropout, linear D to C."""

    def __init__(self, model: config.Model, classes: int, rngs: nnx.Rngs):
        self.out = layers.Linear(model.encoder.width, classes, model.encoder_settings, rngs)
        self.rate = model.dropout.hidden

    def __call__(
        self, states: Float[Array, "B T D"], keys: Key[Array, " B"] | None
    ) -> Float[Array, "B T C"]:
        return self.out(ops.dropout(states, self.rate, keys)).astype(jnp.float32)


class TokenTask(Task):
    """Labels for the words of sentences. The labels are those of the training file.

    The loss is the cross-entropy of the labelled slots.
    """

    names = ("conll",)
    module = "token"
    unit = "sentences"
    ending = ".txt"
    _weights: tuple[float, ...] = ()  # of the labels in the loss

    # Data.

    def _paths(self) -> list:
        names = ("train_file", "dev_file")
        return [
            labelled_data.existing_file(f"Finetune.{name}", getattr(self.settings, name))
            for name in names
        ]

    def check_files(self):
        self._paths()

    def read(self) -> Splits:
        train_path, dev_path = self._paths()
        train, dev = (
            read_sentences(path, self.settings.conll, True) for path in (train_path, dev_path)
        )
        self.labels = labelled_data.sort_labels(
            label for sentence in train for label in sentence.labels
        )
        if len(self.labels) < 2:
            raise config.ConfigError(
                f"{train_path}: every word has the label {self.labels[0]!r}. "
                "Give a file with two labels or more, or correct Conll.label_column"
            )
        self._note_unknown_labels(dev_path, dev)
        if not self.has_entities:
            self.notes.append("the labels are not B-X, I-X and O: scored by the accuracy of words")
        return Splits(train, {"": dev})

    def read_file(self, path, labelled):
        sentences = read_sentences(path, self.settings.conll, labelled)
        self._note_unknown_labels(path, sentences)
        return sentences

    def _note_unknown_labels(self, path: pathlib.Path | str, sentences: list[Sentence]):
        """Notes the labels of a scored file that the training file lacks. They count as missed.

        Raises ConfigError if the labels of training are those of entities, and one of these is not.
        """
        used = {label for sentence in sentences for label in sentence.labels}
        unknown = labelled_data.sort_labels(used - set(self.labels))
        others = [label for label in unknown if not metrics.is_of_entity(label)]
        if others and self.has_entities:
            raise config.ConfigError(
                f"{path}: the label {others[0]!r} is not B-X, I-X or O, as those of training "
                "are. Correct it, or Conll.label_column"
            )
        if unknown:
            words = sum(label in unknown for sentence in sentences for label in sentence.labels)
            self.notes.append(
                f"{path}: {words} words count as missed, because the training file lacks their "
                f"labels: {', '.join(unknown)[:200]}"
            )

    @property
    def has_entities(self) -> bool:
        """Whether the labels are those of entities."""
        return all(map(metrics.is_of_entity, self.labels))

    @property
    def main_metric(self):
        return "f1" if self.has_entities else "accuracy"

    @property
    def columns(self):
        return (Column(f"words {self.main_metric}", self.main_metric),)

    def encode(self, examples, input_format, which) -> Encoded:
        """Encodes each sentence as `<s> words </s>`, with a space between two words.

        The layout has, for each sentence, the slot of each word's first token, or -1: int [words].
        """
        vocabulary, length = input_format.vocabulary, input_format.length
        class_of = {label: number for number, label in enumerate(self.labels)}
        texts = [
            f"{WORD_BEFORE} {word}" if number else word
            for words, _ in examples
            for number, word in enumerate(words)
        ]
        encoded, skipped = iter(input_format.encode(texts)), len(vocabulary.encode(WORD_BEFORE))
        ids, slots = [], []
        cut = lost = 0
        for words, _ in examples:
            tokens_of_words = [
                tokens[skipped:] if number else tokens
                for number, tokens in enumerate(itertools.islice(encoded, len(words)))
            ]
            tokens = list(itertools.chain(*tokens_of_words))
            kept = tokens[: length - SPECIAL_TOKENS]
            sizes = np.asarray(list(map(len, tokens_of_words)))
            first = np.cumsum(sizes) - sizes
            has_token = (sizes > 0) & (first < len(kept))
            cut += len(kept) < len(tokens)
            lost += int((~has_token).sum())
            ids.append(np.asarray([vocabulary.bos, *kept, vocabulary.eos], np.int32))
            slots.append(np.where(has_token, first + 1, -1))
        if cut:
            self.notes.append(f"{which}: {cut} of {len(ids)} sentences cut to {length} tokens")
        if lost:
            count = sum(len(words) for words, _ in examples)
            self.notes.append(f"{which}: {lost} of {count} words have no token, or were cut off")
        targets = np.full((len(ids), max(map(len, ids))), NO_LABEL, np.int32)
        for row, (_, labels), in_row in zip(targets, examples, slots, strict=True):
            for label, slot in zip(labels, in_row, strict=False):  # no labels in a file to predict
                if slot >= 0:
                    row[slot] = class_of.get(label, NO_LABEL)
        context = np.zeros(len(ids), np.int32)
        return Encoded(Features(ids, targets, context, has_slot_targets=True), slots)

    def encode_training(self, examples, input_format):
        features = super().encode_training(examples, input_format)
        if self.settings.class_weights == "balanced":
            labelled = features.targets[features.targets != NO_LABEL]
            self._weights = self.kind.balanced(labelled).weights
        return features

    @property
    def kind(self) -> OneOf:
        """The labels of a word."""
        return OneOf(self.labels, weights=self._weights)

    # Model.

    def create_head(self, model, rngs):
        is_transforming = families.choose_family(model.encoder).classifier.transforms_tokens
        kind = heads.Classifier if is_transforming else TokenClassifier
        return kind(model, len(self.labels), rngs)

    def scores(self, head, states, batch, keys):
        return head(states, keys)

    def loss(self, scores, batch):
        labelled = (batch.targets != NO_LABEL).astype(jnp.float32) * batch.weights[:, None]
        losses, right = self.kind.losses(scores, jnp.maximum(batch.targets, 0))
        return heads.weighted_sums(losses, right, labelled)

    def predict(self, scores) -> Slots:
        """Returns the likeliest class of each slot, and its probability."""
        classes = jnp.argmax(scores, axis=2).astype(jnp.int32)
        return Slots(classes, jax.nn.softmax(scores, axis=2).max(axis=2))

    # Results.

    def _counts(self, train: Features) -> np.ndarray:
        """Returns the number of words that have each label."""
        return np.bincount(train.targets[train.targets != NO_LABEL], minlength=len(self.labels))

    def describe_training(self, train):
        counts = self._counts(train)
        return [describe_counts(self.labels, counts, int(counts.sum()), "training words")]

    def constant_outputs(self, train, dev):
        counts = self._counts(train)
        shape = len(dev.examples), int(dev.features.lengths.max())
        return Slots(np.full(shape, counts.argmax()), np.ones(shape, np.float32))

    def _predicted(self, dev, outputs: Slots) -> list[list[str | None]]:
        """Returns the labels of the words.

        A word without a token in its row is in no entity. If the labels are not those of entities,
        it has no label, and counts as wrong.
        """
        fallback = metrics.OUTSIDE if self.has_entities else None
        return [
            [self.labels[row[slot]] if slot >= 0 else fallback for slot in slots]
            for row, slots in zip(outputs.classes, dev.layout, strict=True)
        ]

    def class_report(self, dev, outputs):
        gold = [sentence.labels for sentence in dev.examples]
        predicted = self._predicted(dev, outputs)
        if self.has_entities:
            return metrics.by_entity(gold, predicted)
        number = {label: index for index, label in enumerate(self.labels)}
        # A label that the training file lacks, and a missing prediction, are of no class.
        truth, found = (
            np.asarray([number.get(label, len(number)) for label in itertools.chain(*labels)])
            for labels in (gold, predicted)
        )
        return metrics.by_class(self.labels, truth, found)

    def score(self, dev, outputs):
        gold = [sentence.labels for sentence in dev.examples]
        return metrics.words(gold, self._predicted(dev, outputs), self.has_entities)

    def write(self, dev, outputs, folder, stem):
        """Writes a word and its label on each line, and a blank line after each sentence."""
        blocks = [
            "".join(
                f"{word} {label or UNPREDICTED}\n"
                for word, label in zip(sentence.words, labels, strict=True)
            )
            for sentence, labels in zip(dev.examples, self._predicted(dev, outputs), strict=True)
        ]
        path = folder / f"{stem}.txt"
        storage.write(path, "\n".join(blocks))
        return path

    def endings(self, input_file):
        return (labelled_data.ending_of(input_file) or self.ending, self.ending)

    def write_predictions(self, input_file, dev, outputs, path, with_all):
        """Writes each line of the input. A line of a word also gets its label and a probability."""
        labels = itertools.chain(*self._predicted(dev, outputs))
        rows = zip(outputs.probabilities, dev.layout, strict=True)
        probabilities = (row[slot] if slot >= 0 else None for row, slots in rows for slot in slots)
        lines = []
        for line, cells in read_lines(input_file, self.settings.conll, labelled=False):
            if cells:
                label, probability = next(labels), next(probabilities)
                shown = UNPREDICTED if probability is None else f"{probability:.6f}"
                separator = "\t" if "\t" in line else " "
                line = separator.join((line.rstrip(" \t"), label or UNPREDICTED, shown))
            lines.append(line)
        storage.write(path, "".join(f"{line}\n" for line in lines))


def read_sentences(
    path: str | pathlib.Path, settings: config.Conll, labelled: bool
) -> list[Sentence]:
    """Reads a file of words. Without `labelled`, the label column can be missing.

    Raises:
        ConfigError: A line has other columns than the first one, the file has no word, or it cannot
            be read. The message names file and line.
    """
    sentences, current = [], Sentence([], [])
    for _, cells in read_lines(path, settings, labelled):
        if cells:
            current.words.append(cells[settings.word_column])
            if labelled:
                current.labels.append(cells[settings.label_column])
        elif cells is None and current.words:
            sentences.append(current)
            current = Sentence([], [])
    if current.words:
        sentences.append(current)
    if not sentences:
        raise config.ConfigError(
            f"{path}: holds no word. Give a file with a line for each word of a sentence"
        )
    return sentences


class Line(typing.NamedTuple):
    """A line of a file of words."""

    text: str
    cells: list[str] | None  # of a word; [] if the line is passed over; None between two sentences


def read_lines(
    path: str | pathlib.Path, settings: config.Conll, labelled: bool
) -> typing.Iterator[Line]:
    """Yields the lines of a file of words. Raises ConfigError as `read_sentences`."""
    lines = [(line, COLUMNS.split(line.strip(" \t"))) for line in labelled_data.read_lines(path)]
    words = [cells for _, cells in lines if cells[0] not in ("", DOCUMENT)]
    first = next((cells for cells in words if not cells[0].startswith("#")), [*words, []][0])
    expected = len(first)
    is_conll_u = expected == CONLL_U_COLUMNS and first[0][0].isdigit()
    is_inside = is_checked = False  # whether a word of the sentence was there, or of the file
    for number, (line, cells) in enumerate(lines, start=1):
        is_other = line.startswith("# ") and len(cells) != expected
        is_comment = is_other or COMMENT.match(line) or (is_conll_u and line.startswith("#"))
        if is_comment and not is_inside:
            yield Line(line, [])
            continue
        if cells[0] in ("", DOCUMENT):
            is_inside = False
            yield Line(line, None)
            continue
        if len(cells) == CONLL_U_COLUMNS and NOT_A_WORD.fullmatch(cells[0]):
            yield Line(line, [])
            continue
        if not is_checked:
            _check_columns(f"{path}:{number}: {line[:50]!r}", len(cells), settings, labelled)
            is_checked = True
        if len(cells) != expected:
            raise config.ConfigError(
                f"{path}:{number}: {len(cells)} columns, the first word has {expected}: "
                f"{line[:50]!r}. Columns stand between spaces or tabs, and a blank line between "
                "sentences"
            )
        is_inside = True
        yield Line(line, cells)


def _check_columns(line: str, count: int, settings: config.Conll, labelled: bool):
    """Raises ConfigError if a line of so many columns has no word, or no label of its own."""
    word, label = settings.word_column, settings.label_column
    is_wrong = not -count <= word < count
    if labelled:
        is_wrong |= not -count <= label < count or word % count == label % count
    if is_wrong:
        raise config.ConfigError(
            f"{line} has {count} columns. Correct Conll.word_column={word} or "
            f"Conll.label_column={label}; the first column is 0, -1 is the last"
        )
