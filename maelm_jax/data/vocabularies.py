"""Loads the vocabulary that converts text to ids and back.

A vocabulary is a SentencePiece BPE trained here, a SentencePiece model file or a Hugging Face
tokenizer.json (vocabulary_kinds.py). One trained here has `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3,
then the pieces, and `<mask>` last. This is the layout of MPNet and of the reference.
"""

import dataclasses
import os
import pathlib

from maelm_jax import config
from maelm_jax.data.vocabulary_kinds import (
    NAMES,
    SentencePieceVocabulary,
    TokenizerJsonVocabulary,
    Vocabulary,
)

# Every vocabulary must be able to encode this text of known and unknown characters.
TRIAL = "Text, \N{GREEK SMALL LETTER ALPHA}\N{BRAIN}\N{PRIVATE USE ONE} 1"


def files_in(directory: str | os.PathLike) -> list[pathlib.Path]:
    """Returns the vocabulary files in a directory. `load` reads the first."""
    files = [
        pathlib.Path(directory) / kind.FILE
        for kind in (SentencePieceVocabulary, TokenizerJsonVocabulary)
    ]
    return [file for file in files if file.is_file()]


def with_size_of_file(settings: config.Vocabulary) -> config.Vocabulary:
    """Returns the settings with the size of the vocabulary in their file, if they name one.

    Raises:
        ConfigError: The file is no vocabulary.
    """
    if not settings.file:
        return settings
    return dataclasses.replace(settings, size=load(settings.file).size)


def load(path: str | os.PathLike) -> Vocabulary:
    """Reads a vocabulary.

    Args:
        path: A SentencePiece model, a tokenizer.json, or a directory that holds one of them.

    Raises:
        ConfigError: The path is none of these, or the vocabulary does not work.
    """
    path = pathlib.Path(path).expanduser()
    if path.is_dir():
        files = files_in(path)
        if not files:
            raise config.ConfigError(
                f"{path} holds neither {SentencePieceVocabulary.FILE} nor "
                f"{TokenizerJsonVocabulary.FILE}. Name a folder or a file with a vocabulary"
            )
        path = files[0]
    if not path.is_file():
        raise config.ConfigError(
            f"no vocabulary {path}. Name a SentencePiece .model or a tokenizer.json "
            "(Vocabulary.file=None trains one)"
        )
    kind = TokenizerJsonVocabulary if path.suffix == ".json" else SentencePieceVocabulary
    try:
        vocabulary = kind(path.read_bytes())
        _try_out(vocabulary)
        return vocabulary
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # protobuf and sentencepiece raise their own types. tokenizers raises Exception, and its
        # panics are BaseExceptions.
        reason = " ".join(str(error).split())[:200]
        raise config.ConfigError(
            f"{path} cannot be read as {kind.FILE}: {reason}. Correct it, or name another one"
        ) from error


def _try_out(vocabulary: Vocabulary):
    """Raises ValueError unless the vocabulary is consistent and encodes text."""
    if len(vocabulary.special_ids) < len(NAMES):
        raise ValueError("two of its special tokens have the same id")
    ids, offsets = vocabulary.encode_with_offsets(TRIAL)
    if ids != vocabulary.encode(TRIAL) or len(offsets) != len(ids):
        raise ValueError("it encodes the same text differently each time")
    if not all(0 <= index < vocabulary.size for index in ids):
        raise ValueError("text gets ids that it does not have")
    if set(ids) & {vocabulary.bos, vocabulary.pad, vocabulary.eos, vocabulary.mask}:
        raise ValueError("text gets special ids")
    vocabulary.decode(ids)
