"""Reads files with a line for each word, as those of CoNLL-2003.

Columns stand between spaces or tabs, a blank line between sentences. Lines whose first column is
-DOCSTART- separate documents and hold no word. The file can be packed (.gz, .xz or .zst).
"""

import dataclasses
import pathlib
import re

from maelm_jax import config
from maelm_jax.data import readers
from maelm_jax.finetuning import samples

DOCUMENT = "-DOCSTART-"
COLUMNS = re.compile(r"[ \t]+")
LONGEST_SHOWN = 50  # characters of a line in a message


@dataclasses.dataclass
class Sentences:
    """The sentences of a file."""

    words: list[list[str]]
    labels: list[list[str]]  # of the words; empty lists if they are not read
    notes: list[str] = dataclasses.field(default_factory=list)  # for the user

    def sample(self, count: int | None) -> "Sentences":
        """Returns a sample of the sentences as a dev set. None: all of them."""
        numbers = samples.numbers(count, len(self.words))
        if numbers is None:
            return self
        note = samples.dev_note(len(numbers), len(self.words), "sentences")
        words, labels = ([of[number] for number in numbers] for of in (self.words, self.labels))
        return Sentences(words, labels, [*self.notes, note])


def read(path: str | pathlib.Path, settings: config.Conll, labelled: bool) -> Sentences:
    """Reads a file. Without `labelled`, the label column can be missing.

    Raises:
        ConfigError: A line has other columns than the first one, the file has no word, or it cannot
            be read. The message names file and line.
    """
    reader = _Reader(str(path), settings, labelled)
    for number, (offset, line) in enumerate(readers.lines(str(path)), start=1):
        reader.add(number, readers.decode(line, str(path), offset).strip(" \t"))
    reader.end_sentence()
    if not reader.sentences.words:
        raise config.ConfigError(
            f"{path}: holds no word. Give a file with a line for each word of a sentence."
        )
    return reader.sentences


class _Reader:
    """Collects sentences line by line."""

    def __init__(self, path: str, settings: config.Conll, labelled: bool):
        self.path, self.settings, self.labelled = path, settings, labelled
        self.sentences = Sentences([], [])
        self.words: list[str] = []  # of the current sentence
        self.labels: list[str] = []
        self.columns: int | None = None  # of the first line with a word
        self.first_line = 0

    def add(self, number: int, line: str):
        """Reads one line. Raises ConfigError when its columns are wrong."""
        cells = COLUMNS.split(line) if line else []
        if not cells or cells[0] == DOCUMENT:
            self.end_sentence()
            return
        if self.columns is None:
            self.columns, self.first_line = len(cells), number
            self._check_settings(number, line)
        if len(cells) != self.columns:
            raise config.ConfigError(
                f"{self.path}:{number}: {len(cells)} columns, line {self.first_line} has "
                f"{self.columns}: {line[:LONGEST_SHOWN]!r}. Columns stand between spaces or tabs, "
                "and a blank line between sentences."
            )
        self.words.append(cells[self.settings.word_column])
        if self.labelled:
            self.labels.append(cells[self.settings.label_column])

    def _check_settings(self, number: int, line: str):
        """Raises ConfigError when the columns of the settings do not exist, or are the same."""
        names = ("word_column", "label_column") if self.labelled else ("word_column",)
        chosen = {name: getattr(self.settings, name) for name in names}
        for name, column in chosen.items():
            if column >= self.columns:
                raise config.ConfigError(
                    f"{self.path}:{number}: no column {column}, the line has {self.columns}: "
                    f"{line[:LONGEST_SHOWN]!r}. Correct Conll.{name}; the first column is 0."
                )
        if len({column % self.columns for column in chosen.values()}) < len(chosen):
            raise config.ConfigError(
                f"{self.path}:{number}: the word and the label are the same column of "
                f"{self.columns}: {line[:LONGEST_SHOWN]!r}. Give a file with both, or correct "
                "Conll.word_column or Conll.label_column."
            )

    def end_sentence(self):
        """Ends the current sentence, if it has a word."""
        if self.words:
            self.sentences.words.append(self.words)
            self.sentences.labels.append(self.labels)
            self.words, self.labels = [], []
