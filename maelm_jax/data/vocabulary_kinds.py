"""The kinds of vocabularies: a SentencePiece model and a Hugging Face tokenizer.json.

Text never gives special ids: a literal `<mask>` or `<s>` in a text is encoded as ordinary
characters. `Vocabulary.encode_masked` reads them. A tokenizer.json must mark these tokens as
special for that.
"""

import abc
import functools
import hashlib
import itertools
import json
import os
import pathlib
import typing

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from maelm_jax import config, storage

NAMES = {
    "bos": ("<s>", "[CLS]"),
    "pad": ("<pad>", "[PAD]"),
    "eos": ("</s>", "[SEP]"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
}
SPECIAL = frozenset(itertools.chain(*NAMES.values()))
SPACE_MARKS = ("▁", "Ġ")  # pieces begin with one of them where a word begins
MOST_IDS = 1 << 22  # of a vocabulary; common ones have at most about a million


class Encoding(typing.NamedTuple):
    """The ids of a text and where they stand in it."""

    ids: list[int]
    offsets: list[tuple[int, int]]  # half-open ranges of characters; white space in front may count


class Vocabulary(abc.ABC):
    """Interface of the vocabularies.

    Attributes:
        size: Number of ids, special ids included.
        bos, pad, eos, unk, mask: The special ids.
        fingerprint: SHA-256 of the file, in hex.
    """

    FILE: str  # the file that `save` writes
    size: int
    bos: int
    pad: int
    eos: int
    unk: int
    mask: int

    def __init__(self, content: bytes):
        self.content = content
        self.fingerprint = hashlib.sha256(content).hexdigest()

    # Loaded models cannot be pickled, so worker processes load the bytes again.
    def __reduce__(self):
        return type(self), (self.content,)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The special ids, sorted."""
        return tuple(sorted({self.bos, self.pad, self.eos, self.unk, self.mask}))

    @functools.cached_property
    def special(self) -> config.SpecialIds:
        """The ids that the model and the masks depend on."""
        return config.SpecialIds(
            self.bos, self.pad, self.eos, self.unk, self.mask, _continue_words(self.pieces())
        )

    @abc.abstractmethod
    def pieces(self) -> list[str]:
        """Returns the spelling of every id, "" for an unused id."""

    @abc.abstractmethod
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text, without special ids around them.

        tokenizers uses all cores, but one in a process of workers.py. SentencePiece uses one.
        """

    def encode(self, text: str) -> list[int]:
        """Returns the ids of one text, without special ids around them."""
        return self.encode_batch([text])[0]

    @abc.abstractmethod
    def encode_with_offsets(self, text: str) -> Encoding:
        """Returns the ids of one text, without special ids around them, and their places in it."""

    def encode_masked(self, text: str) -> list[int]:
        """Returns the ids of a text in which `[MASK]` or `<mask>` stands for a masked token.

        As in transformers, other special tokens in the text give their ids too. The space before a
        mask belongs to the masked token, so it gives no id of its own.
        """
        pieces = self.pieces()
        for name in NAMES["mask"]:
            text = text.replace(name, pieces[self.mask])
        ids = self._encode_special_tokens(text)
        return [
            index
            for index, following in itertools.zip_longest(ids, ids[1:])
            if following != self.mask or pieces[index] not in SPACE_MARKS
        ]

    @abc.abstractmethod
    def _encode_special_tokens(self, text: str) -> list[int]:
        """Returns the ids of one text, in which special tokens give their ids."""

    @abc.abstractmethod
    def decode(self, ids: typing.Iterable[int]) -> str:
        """Returns the text of `ids`. `<s>`, `<pad>`, `</s>` and `<mask>` give no text."""

    def save(self, directory: str | os.PathLike) -> pathlib.Path:
        """Writes the vocabulary atomically into `directory`, which is made if it is missing.

        Returns:
            The file. `load` takes the file or the directory.
        """
        path = pathlib.Path(directory) / self.FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.write(path, self.content)
        return path


class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model. Special tokens that it lacks are appended to it."""

    FILE = "sentencepiece.model"

    def __init__(self, content: bytes):
        proto = sentencepiece_model_pb2.ModelProto.FromString(content)
        kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
        ids = {}
        for index, piece in enumerate(proto.pieces):
            if piece.type in (kinds.CONTROL, kinds.UNKNOWN, kinds.USER_DEFINED):
                if piece.type == kinds.USER_DEFINED and piece.piece in SPECIAL:
                    # Text with a literal "<mask>" gives the id of a user-defined piece.
                    piece.type = kinds.CONTROL
                ids.update(
                    {
                        key: index
                        for key, names in NAMES.items()
                        if piece.piece in names or (key == "unk" and piece.type == kinds.UNKNOWN)
                    }
                )
        for key, names in NAMES.items():
            if key not in ids:
                ids[key] = len(proto.pieces)
                proto.pieces.add(piece=names[0], score=0.0, type=kinds.CONTROL)
        proto.trainer_spec.vocab_size = len(proto.pieces)
        super().__init__(proto.SerializeToString(deterministic=True))
        self.model = sentencepiece.SentencePieceProcessor(model_proto=self.content)
        self.size = self.model.get_piece_size()
        self.bos, self.pad, self.eos, self.unk, self.mask = (ids[key] for key in NAMES)

    def pieces(self):
        return [self.model.id_to_piece(index) for index in range(self.size)]

    def encode_batch(self, texts):
        return self.model.encode(texts, out_type=int, num_threads=1)

    @functools.cached_property
    def _model_with_mask(self) -> sentencepiece.SentencePieceProcessor:
        """A processor that reads a literal mask in a text as the mask."""
        proto = sentencepiece_model_pb2.ModelProto.FromString(self.content)
        proto.pieces[self.mask].type = proto.SentencePiece.USER_DEFINED
        return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())

    def _encode_special_tokens(self, text):
        return self._model_with_mask.encode(text, out_type=int)

    def encode_with_offsets(self, text):
        result = self.model.encode(text, return_type="offset_mapping")
        return Encoding(result["ids"], result["offsets"])

    def decode(self, ids):
        silent = {self.bos, self.pad, self.eos, self.mask}
        return self.model.decode([int(i) for i in ids if int(i) not in silent])


class TokenizerJsonVocabulary(Vocabulary):
    """A Hugging Face tokenizer.json.

    Its tokens include `<s> <pad> </s> <unk> <mask>` or `[CLS] [PAD] [SEP] [UNK] [MASK]`.
    """

    FILE = "tokenizer.json"

    def __init__(self, content: bytes):
        import tokenizers

        super().__init__(content)
        stored = json.loads(content)
        for token in stored["added_tokens"]:  # those that a user added are tokens in a text
            token["special"] = token["special"] and token["content"] in SPECIAL
        self.model = tokenizers.Tokenizer.from_str(json.dumps(stored))
        self.model.encode_special_tokens = True  # a literal <mask> in a text is text
        self.model.no_truncation()
        self.model.no_padding()
        self.size = max(self.model.get_vocab(with_added_tokens=True).values()) + 1
        if self.size > MOST_IDS:
            raise ValueError(f"it has a token of id {self.size - 1}; ids must be below {MOST_IDS}")
        self.bos, self.pad, self.eos, self.unk, self.mask = map(self._special_id, NAMES)

    def _special_id(self, key: str) -> int:
        """Returns the id of a special token. A special token goes before an ordinary piece."""
        added = self.model.get_added_tokens_decoder()
        ids = [self.model.token_to_id(name) for name in NAMES[key]]
        known = [index for index in ids if index is not None]
        if not known:
            raise ValueError(f"it has no special token {' or '.join(NAMES[key])}")
        unknown = getattr(self.model.model, "unk_token", None)
        if key == "unk" and unknown in NAMES[key]:  # the one that text gets; MPNet has both
            return self.model.token_to_id(unknown)
        special = [index for index in known if index in added and added[index].special]
        return (special or known)[0]

    def pieces(self):
        return [self.model.id_to_token(index) or "" for index in range(self.size)]

    def encode_batch(self, texts):
        return [
            encoding.ids for encoding in self.model.encode_batch(texts, add_special_tokens=False)
        ]

    def encode_masked(self, text):
        mask = self.model.id_to_token(self.mask)
        for name in NAMES["mask"]:
            text = text.replace(name, mask)
        return self._encode_special_tokens(text)  # strips the space before a mask if it says so

    @functools.cached_property
    def _model_with_special_tokens(self):
        """A tokenizer that reads a literal special token in a text as that token."""
        model = type(self.model).from_str(self.model.to_str())
        model.encode_special_tokens = False
        return model

    def _encode_special_tokens(self, text):
        return self._model_with_special_tokens.encode(text, add_special_tokens=False).ids

    def encode_with_offsets(self, text):
        result = self.model.encode(text, add_special_tokens=False)
        return Encoding(result.ids, result.offsets)

    def decode(self, ids):
        silent = {self.bos, self.pad, self.eos, self.mask}
        return self.model.decode(
            [int(i) for i in ids if int(i) not in silent], skip_special_tokens=False
        )


def _continue_words(pieces: list[str]) -> tuple[bool, ...]:
    """Returns whether each piece continues the word before it.

    WordPiece marks such a piece with `##`. In other vocabularies a piece without a leading space
    mark continues a word.
    """
    if any(piece.startswith("##") and len(piece) > 2 for piece in pieces):
        return tuple(piece.startswith("##") for piece in pieces)
    return tuple(not piece.startswith(SPACE_MARKS) for piece in pieces)
