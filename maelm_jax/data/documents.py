"""What a document is: text whose lines are its paragraphs, without empty lines.

A paragraph is cut into sentences. The hash of its text decides whether a document is held out for
evaluation, and whether the vocabulary is trained on it.
"""

import hashlib
import re
import typing

from maelm_jax import config

SENTENCE_CHARACTERS = 1 << 14  # at most 64 KiB of UTF-8, the limit of SentencePiece's trainer
SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*(?=\s)")


class Unavailable(config.ConfigError):
    """The source cannot be read on this machine. Rows prepared elsewhere can still be used."""


class BadFile(config.ConfigError):
    """A file of the corpus is damaged, unreadable or of another form."""


def clean(text: str) -> str:
    """Returns the text without white space around its lines and without empty lines."""
    return "\n".join(line for line in map(str.strip, text.split("\n")) if line)


def sentences(line: str) -> list[str]:
    """Cuts a line into sentences, which joined give the line again.

    A sentence ends after `.`, `!` or `?` and closing quotes and brackets, if white space follows.
    The white space begins the next sentence. An abbreviation ends a sentence too. This is harmless,
    because the cuts only decide where a row may break.

    A sentence of more than SENTENCE_CHARACTERS is cut before its last space within that length, or
    at that length. Tokenisers need this: their time grows faster than the length of a word.
    """
    ends = [match.end() for match in SENTENCE_END.finditer(line)]
    bounds = zip([0, *ends], [*ends, len(line)], strict=True)
    parts = [line[start:end] for start, end in bounds if start < end] or [line]
    if len(line) <= SENTENCE_CHARACTERS:
        return parts
    return [piece for part in parts for piece in _bounded(part)]


def _bounded(sentence: str) -> typing.Iterator[str]:
    """Cuts a sentence into pieces of at most SENTENCE_CHARACTERS."""
    start = 0
    while len(sentence) - start > SENTENCE_CHARACTERS:
        space = sentence.rfind(" ", start + 1, start + SENTENCE_CHARACTERS)
        end = space if space > 0 else start + SENTENCE_CHARACTERS
        yield sentence[start:end]
        start = end
    yield sentence[start:]


def text_hash(text: str) -> int:
    """Returns a number in [0, 2**64) that depends on the text alone."""
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
    )


def is_heldout(text: str, fraction: float) -> bool:
    """Returns whether a document belongs to the held-out split.

    Args:
        text: The document.
        fraction: Expected share of held-out documents.
    """
    return text_hash(text) < fraction * 2.0**64
