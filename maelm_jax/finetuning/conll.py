"""Reads files with a line for each word, as those of CoNLL-2003.

Columns stand between spaces or tabs, a blank line between sentences. Lines whose first column is
-DOCSTART- separate documents and hold no word. The file can be packed (.gz, .xz or .zst).
"""

import pathlib
import re
import typing

from maelm_jax import config
from maelm_jax.finetuning import tables

DOCUMENT = "-DOCSTART-"
COLUMNS = re.compile(r"[ \t]+")


class Sentence(typing.NamedTuple):
    """The words of a sentence and their labels."""

    words: list[str]
    labels: list[str]  # [] if they are not read


def read(path: str | pathlib.Path, settings: config.Conll, labelled: bool) -> list[Sentence]:
    """Reads a file. Without `labelled`, the label column can be missing.

    Raises:
        ConfigError: A line has other columns than the first one, the file has no word, or it cannot
            be read. The message names file and line.
    """
    sentences, current, expected = [], Sentence([], []), None
    for number, line in enumerate(tables.read_lines(path), start=1):
        cells = COLUMNS.split(line.strip(" \t"))
        if cells[0] in ("", DOCUMENT):
            if current.words:
                sentences.append(current)
                current = Sentence([], [])
            continue
        if expected is None:
            expected = len(cells)
            _check_columns(f"{path}:{number}: {line[:50]!r}", expected, settings, labelled)
        if len(cells) != expected:
            raise config.ConfigError(
                f"{path}:{number}: {len(cells)} columns, the first line has {expected}: "
                f"{line[:50]!r}. Columns stand between spaces or tabs, and a blank line between "
                "sentences"
            )
        current.words.append(cells[settings.word_column])
        if labelled:
            current.labels.append(cells[settings.label_column])
    if current.words:
        sentences.append(current)
    if not sentences:
        raise config.ConfigError(
            f"{path}: holds no word. Give a file with a line for each word of a sentence"
        )
    return sentences


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
