"""Vocabularies: they convert text to ids and back. `load` reads one from a file.

A vocabulary is a SentencePiece model, trained here (vocabulary_training.py) or elsewhere, or a
Hugging Face tokenizer.json. One trained here has `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, then the
pieces, and `<mask>` last. This is the layout of MPNet and of the reference.

Special tokens in a text are read by one rule everywhere, in training, fine-tuning and prediction.
Tokens that somebody added to the vocabulary are recognised, as transformers does, with the spaces
around them treated as the file says (lstrip, rstrip, normalized). A literal `<s>`, `<pad>`, `</s>`,
`<unk>` or `<mask>` of the model itself is ordinary text, except in `Vocabulary.encode_masked`.
"""

import abc
import collections.abc
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
import typing

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from maelm_jax import config, storage

NAMES = {
    "bos": ("<s>", "[CLS]", "<bos>", "<|begin_of_text|>"),
    "pad": ("<pad>", "[PAD]"),
    "eos": ("</s>", "[SEP]", "<eos>", "<|end_of_text|>"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]", "<|mask|>"),
}
MOST_IDS_PER_PIECE = 2  # of a tokenizer.json, which may leave ids unused
SPECIAL = frozenset(itertools.chain(*NAMES.values()))
# Beside the files of a saved vocabulary: their SHA-256, as sha256sum writes it.
CHECKSUMS = "vocabulary.sha256"
# The names that the scripts of the published code give to a SentencePiece model and to fairseq's
# dictionary of its pieces, which decides the ids.
PUBLISHED_MODEL, DICTIONARY = "sp.model", "dict.txt"
PADDING_WORD = re.compile(r"madeupword\d{4}")  # fairseq fills a dictionary up with them
# A vocabulary must encode the first text, and say where each character of the second is.
TRIAL = "Text, \N{GREEK SMALL LETTER ALPHA}\N{BRAIN}\N{PRIVATE USE ONE} 1"
OFFSETS_TRIAL = "I saw a big cabinet (in October 1973), 5 . Y"

# A sentence ends after one of these and closing quotes and brackets, where a word begins.
ENDS = re.compile(r"[.!?\u203d\u061f\u06d4\u0964\u0965\u1362\u0589\u104b\u17d4][\"'”’)\]]*$")
# These full stops end a sentence without a space after them.
FULL_ENDS = re.compile(r"[。！？｡][\"'”’)\]」』】》〉）]*$")
CLOSERS = re.compile(r"[\"'”’)\]」』】》〉）]+")
UNSPACED = "\u2e80"  # from here on, most scripts have no spaces between words
OTHER, CLOSER, END, FULL_END = range(4)  # kinds of pieces


class Encoding(typing.NamedTuple):
    """The ids of a text and where they stand in it."""

    ids: list[int]
    # Half-open ranges of characters, which do not begin with a space. That of a space is empty.
    offsets: list[tuple[int, int]]


class Vocabulary(abc.ABC):
    """Interface of the vocabularies.

    Attributes:
        size: Number of ids, special ids included.
        bos, pad, eos, unk, mask: The special ids. A vocabulary to which no text is unknown may have
            `unk` equal to `pad`.
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

    # Loaded models cannot be pickled.
    def __reduce__(self):
        return type(self), (self.content,)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The special ids, sorted."""
        return tuple(sorted({self.bos, self.pad, self.eos, self.unk, self.mask}))

    @functools.cached_property
    def special(self) -> config.SpecialIds:
        """The ids that the model and the masks depend on."""
        continues = tuple(not begins for begins in self._begins_word())
        return config.SpecialIds(self.bos, self.pad, self.eos, self.unk, self.mask, continues)

    @property
    @abc.abstractmethod
    def pieces(self) -> list[str]:
        """The spelling of every id, "" for an unused id. The list is made once."""

    @abc.abstractmethod
    def _begins_word(self) -> list[bool]:
        """Returns for every id whether its piece begins a word, which its file's format says."""

    @abc.abstractmethod
    def _piece_texts(self) -> list[str]:
        """Returns for every id the text of its piece, with a space where its file marks one."""

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

    @abc.abstractmethod
    def encode_masked(self, text: str) -> list[int]:
        """Returns the ids of a text in which `[MASK]` or `<mask>` stands for a masked token.

        In a tokenizer.json the other special tokens in the text give their ids too, as in
        transformers, and the file says whether the mask takes the space before it (lstrip). With
        SentencePiece it does.
        """

    def _with_own_mask(self, text: str) -> str:
        """Returns a text with every mask spelled as in this vocabulary."""
        for name in NAMES["mask"]:
            text = text.replace(name, self.pieces[self.mask])
        return text

    @abc.abstractmethod
    def decode(self, ids: typing.Iterable[int]) -> str:
        """Returns the text of `ids`. `<s>`, `<pad>`, `</s>` and `<mask>` give no text."""

    @functools.cached_property
    def _sentence_marks(self) -> tuple[np.ndarray, np.ndarray]:
        """For every id the kind of its piece (OTHER to FULL_END), and whether a word may begin."""
        texts = self._piece_texts()
        kinds = [_kind_of_piece(text) for text in texts]
        begins = [  # without the digits after the point of a decimal number
            text[:1] >= UNSPACED or (begins and not text[:1].isdigit())
            for begins, text in zip(self._begins_word(), texts, strict=True)
        ]
        return np.asarray(kinds, np.int8), np.asarray(begins)

    def sentence_ends(self, ids: np.ndarray) -> np.ndarray:
        """Returns after which ids a sentence ends, int [n] -> bool [n]. A row may break there.

        A sentence ends after `.`, `!`, `?`, the same of other scripts, and closing quotes and
        brackets, where a word begins. An abbreviation ends a sentence too.
        """
        kinds, begins = self._sentence_marks
        kind = kinds[ids]
        begins_next = np.append(begins[ids], True)[1:]
        closes_next = np.append(kind == CLOSER, False)[1:]
        # The last piece up to each place that is no closing quote.
        places = np.maximum.accumulate(np.where(kind == CLOSER, 0, np.arange(len(ids))))
        before = kind[places]
        return ((before == FULL_END) | ((before == END) & begins_next)) & ~closes_next

    def save(self, directory: str | os.PathLike) -> pathlib.Path:
        """Writes the vocabulary atomically into `directory`, which is made if it is missing.

        `load` takes the file or the directory, and verifies it with CHECKSUMS beside it.

        Returns the file.
        """
        path = pathlib.Path(directory) / self.FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.write(path, self.content)
        write_checksums(directory)
        return path


def _kind_of_piece(text: str) -> int:
    if FULL_ENDS.search(text):
        return FULL_END
    if ENDS.search(text):
        return END
    return CLOSER if CLOSERS.fullmatch(text) else OTHER


def _without_spaces(text: str, ids: list[int], offsets: list[tuple[int, int]]) -> Encoding:
    """Returns an Encoding, given ranges that may begin with spaces."""
    return Encoding(ids, [(end - len(text[start:end].lstrip()), end) for start, end in offsets])


class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model. Special tokens that it lacks are appended to it."""

    FILE = "sentencepiece.model"
    SPACE = "▁"  # stands for a space in the pieces

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
        proto.trainer_spec.ClearField("num_threads")  # of the machine that trained it
        super().__init__(proto.SerializeToString(deterministic=True))
        self.model = sentencepiece.SentencePieceProcessor(model_proto=self.content)
        self.size = self.model.get_piece_size()
        self.bos, self.pad, self.eos, self.unk, self.mask = (ids[key] for key in NAMES)

    @functools.cached_property
    def pieces(self):
        return [self.model.id_to_piece(index) for index in range(self.size)]

    def _begins_word(self):
        return [piece.startswith(self.SPACE) for piece in self.pieces]

    def _piece_texts(self):
        return [piece.replace(self.SPACE, " ") for piece in self.pieces]

    def encode_batch(self, texts):
        return self.model.encode(texts, out_type=int, num_threads=1)

    @functools.cached_property
    def _model_with_mask(self) -> sentencepiece.SentencePieceProcessor:
        """A processor that reads a literal mask in a text as the mask."""
        proto = sentencepiece_model_pb2.ModelProto.FromString(self.content)
        proto.pieces[self.mask].type = proto.SentencePiece.USER_DEFINED
        return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())

    def encode_masked(self, text):
        ids = self._model_with_mask.encode(self._with_own_mask(text), out_type=int)
        return [
            index
            for index, following in itertools.zip_longest(ids, ids[1:])
            if following != self.mask or self.model.id_to_piece(index) != self.SPACE
        ]

    def encode_with_offsets(self, text):
        result = self.model.encode(text, return_type="offset_mapping")
        return _without_spaces(text, result["ids"], result["offsets"])

    def decode(self, ids):
        silent = {self.bos, self.pad, self.eos, self.mask}
        return self.model.decode([int(i) for i in ids if int(i) not in silent])


class TokenizerJsonVocabulary(Vocabulary):
    """A Hugging Face tokenizer.json.

    Its tokens include `<s> <pad> </s> <unk> <mask>` or `[CLS] [PAD] [SEP] [UNK] [MASK]`. If its
    post-processor adds one token before a text and one after it, these are `<s>` and `</s>`.

    A byte-level file (EuroBERT's) may have no `<unk>`, and no `<pad>` because its model pads with
    `</s>`. `<pad>` is recognised by its id here, so it is then the first special token that has no
    other use. Padding is not attended to, so its id changes no output.
    """

    FILE = "tokenizer.json"

    def __init__(self, content: bytes):
        import tokenizers

        super().__init__(content)
        self.file = json.loads(content)
        self.file["truncation"] = self.file["padding"] = None
        if dropout := self.file["model"].get("dropout"):
            raise ValueError(f"it leaves out merges at random (dropout {dropout}): set that to 0")
        whole = tokenizers.Tokenizer.from_str(json.dumps(self.file))
        # The post-processor adds special tokens, and the one of RoBERTa cuts a character off the
        # offsets of each word if the tokenizer adds a space where the text has none.
        self.file["post_processor"] = None
        ids = whole.get_vocab(with_added_tokens=True).values()
        self.size = max(ids) + 1
        if self.size > MOST_IDS_PER_PIECE * len(ids):  # each id takes a row of the model
            raise ValueError(f"its largest id is {max(ids)}, and it has {len(ids)} pieces only")
        added = whole.get_added_tokens_decoder()
        special = {index for index in added if added[index].special}
        ends = whole.encode("").ids
        known = {}
        if len(ends) == 2 and None not in map(whole.id_to_token, ends):
            known = dict(zip(("bos", "eos"), ends, strict=True))
        for key in ("bos", "eos", "mask"):
            if key not in known:
                known[key] = _special_id(key, whole, special)
        is_byte_level = "ByteLevel" in {one["type"] for one in _steps(self.file["pre_tokenizer"])}
        unused = sorted(special - set(known.values()))
        known["pad"] = _special_id("pad", whole, special, unused if is_byte_level else [])
        known["unk"] = _special_id("unk", whole, special, [known["pad"]] if is_byte_level else [])
        self.bos, self.pad, self.eos, self.unk, self.mask = (known[key] for key in NAMES)
        # `encode_special_tokens` makes text of what is marked as special. That shall be the five.
        for token in self.file.setdefault("added_tokens", []):
            token["special"] = token["id"] in self.special_ids
        self.model = tokenizers.Tokenizer.from_str(json.dumps(self.file))
        self.model.encode_special_tokens = True

    @functools.cached_property
    def pieces(self):
        return [self.model.id_to_token(index) or "" for index in range(self.size)]

    @functools.cached_property
    def _space_mark(self) -> str | None:
        """What stands for a space at the start of a piece, None if pieces have no such mark."""
        for step in _steps(self.file.get("pre_tokenizer"), self.file.get("decoder")):
            if step["type"] == "ByteLevel":
                return "Ġ"
            if step["type"] == "Metaspace":
                return step["replacement"]
        for step in _steps(self.file.get("normalizer")):
            if step["type"] == "Replace" and step["pattern"] == {"String": " "}:
                return step["content"]
        return None

    def _begins_word(self):
        prefix = self.file["model"].get("continuing_subword_prefix")
        if prefix:
            return [not piece.startswith(prefix) for piece in self.pieces]
        if self._space_mark:
            return [piece.startswith(self._space_mark) for piece in self.pieces]
        return [True] * self.size  # each piece is a word

    def _piece_texts(self):
        import tokenizers

        if self._space_mark == "Ġ":
            decode = tokenizers.decoders.ByteLevel().decode
            return [decode([piece]) for piece in self.pieces]
        return [piece.replace(self._space_mark or " ", " ") for piece in self.pieces]

    def encode_batch(self, texts):
        return [
            encoding.ids
            for encoding in self.model.encode_batch_fast(texts, add_special_tokens=False)
        ]

    @functools.cached_property
    def _model_with_special_tokens(self):
        """A tokenizer that reads a literal special token in a text as that token."""
        return type(self.model).from_str(self.model.to_str())

    def encode_masked(self, text):
        text = self._with_own_mask(text)
        return self._model_with_special_tokens.encode(text, add_special_tokens=False).ids

    def encode_with_offsets(self, text):
        result = self.model.encode(text, add_special_tokens=False)
        return _without_spaces(text, result.ids, result.offsets)

    def decode(self, ids):
        silent = {self.bos, self.pad, self.eos, self.mask}
        return self.model.decode(
            [int(i) for i in ids if int(i) not in silent], skip_special_tokens=False
        )


def _special_id(
    key: str, tokenizer, special: set[int], instead: collections.abc.Sequence[int] = ()
) -> int:
    """Returns the id of a special token. A token marked as special goes before a piece.

    Without such a token, it is the first of `instead`.
    """
    ids = [tokenizer.token_to_id(name) for name in NAMES[key]]
    known = [index for index in ids if index is not None]
    if not known and instead:
        return instead[0]
    if not known:
        raise ValueError(f"it has no special token {' or '.join(NAMES[key])}")
    unknown = getattr(tokenizer.model, "unk_token", None)
    if key == "unk" and unknown in NAMES[key]:  # the one that text gets; MPNet has both
        return tokenizer.token_to_id(unknown)
    return next((index for index in known if index in special), known[0])


def _steps(*parts: dict | None) -> typing.Iterator[dict]:
    """Yields the steps of parts of a tokenizer.json, without the sequences that hold them."""
    for part in filter(None, parts):
        inner = [
            part[name] for name in ("pretokenizers", "decoders", "normalizers") if name in part
        ]
        if inner:
            yield from _steps(*inner[0])
        else:
            yield part


def files_in(directory: str | os.PathLike) -> list[pathlib.Path]:
    """Returns the vocabulary files in a directory. `load` reads the first."""
    files = [
        pathlib.Path(directory) / kind.FILE
        for kind in (SentencePieceVocabulary, TokenizerJsonVocabulary)
    ]
    return [file for file in files if file.is_file()]


def write_checksums(directory: str | os.PathLike):
    """Writes CHECKSUMS of the vocabulary files in a directory."""
    lines = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"
        for file in files_in(directory)
    ]
    storage.write(pathlib.Path(directory) / CHECKSUMS, "".join(lines))


def _verify(path: str | os.PathLike, content: bytes):
    """Raises ConfigError if CHECKSUMS beside a local file has another checksum of it."""
    if storage.in_bucket(path):
        return
    path = pathlib.Path(path)
    checksums = path.with_name(CHECKSUMS)
    if not checksums.is_file():
        return
    with storage.reading(checksums):
        lines = checksums.read_text().splitlines()
        recorded = {name: digest for digest, name in map(str.split, lines)}
    if recorded.get(path.name) not in (None, hashlib.sha256(content).hexdigest()):
        raise config.ConfigError(
            f"{path} is not what was written there ({CHECKSUMS} has another checksum). Put that "
            f"one back. If you changed it on purpose, remove {CHECKSUMS}"
        )


def with_size_of_file(settings: config.Vocabulary) -> config.Vocabulary:
    """Returns the settings with the size of the vocabulary in their file, if they name one."""
    if not settings.file:
        return settings
    return dataclasses.replace(settings, size=load(settings.file).size)


def load(path: str | os.PathLike) -> Vocabulary:
    """Reads a vocabulary: a SentencePiece model or a tokenizer.json, or a directory that holds one.

    A file can be in a bucket. Raises ConfigError if the vocabulary does not work.
    """
    path = os.path.expanduser(path)
    dictionary = None
    if os.path.isdir(path):
        published = storage.inside(path, PUBLISHED_MODEL).path
        files = files_in(path) or ([published] if published.is_file() else [])
        if not files:
            raise config.ConfigError(
                f"{path} holds neither {SentencePieceVocabulary.FILE} ({PUBLISHED_MODEL}) nor "
                f"{TokenizerJsonVocabulary.FILE}. Name a folder or a file with a vocabulary"
            )
        dictionary = storage.inside(path, DICTIONARY).path
        path = files[0]
    if not storage.exists(path):
        raise config.ConfigError(
            f"no vocabulary {path}. Name a SentencePiece .model or a tokenizer.json "
            "(Vocabulary.file=None trains one)"
        )
    is_json = str(path).endswith(".json")
    kind = TokenizerJsonVocabulary if is_json else SentencePieceVocabulary
    content = storage.read_bytes(path)
    _verify(path, content)
    try:
        if dictionary and dictionary.is_file() and kind is SentencePieceVocabulary:
            content = _in_order_of(dictionary, content)
        vocabulary = kind(content)
        _try_out(vocabulary)
        return vocabulary
    except (KeyboardInterrupt, SystemExit, config.ConfigError):
        raise
    except BaseException as error:
        # protobuf and sentencepiece raise their own types. tokenizers raises Exception, and its
        # panics are BaseExceptions.
        reason = " ".join(str(error).split())[:200]
        raise config.ConfigError(
            f"{path} cannot be read as {kind.FILE}: {reason}. Correct it, or name another one"
        ) from error


def _in_order_of(dictionary: pathlib.Path, content: bytes) -> bytes:
    """Returns a SentencePiece model whose ids are those of fairseq's dictionary of its pieces.

    fairseq puts `<s> <pad> </s> <unk>` first, then the words of dict.txt, one a line with a count
    or without, and `<mask>` last. A model cuts text by the scores of its pieces, whose order has no
    effect.

    Raises:
        ConfigError: A word is no piece of the model, or a piece of text is no word.
    """
    proto = sentencepiece_model_pb2.ModelProto.FromString(content)
    kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
    key_of = {name: key for key, names in NAMES.items() for name in names}
    pieces = {}
    for piece in proto.pieces:
        key = "unk" if piece.type == kinds.UNKNOWN else key_of.get(piece.piece, piece.piece)
        pieces[key] = piece
    first, last = ("bos", "pad", "eos", "unk"), "mask"
    with storage.reading(dictionary):
        lines = dictionary.read_text(encoding="utf-8").split("\n")
    words = [re.sub(r" \d+( #fairseq:overwrite)?$", "", line) for line in lines if line]
    keys = [key_of.get(word, word) for word in words]
    ordered = []
    for key in dict.fromkeys((*first, *keys, last)):
        piece = pieces.get(key)
        if piece is None and key in NAMES:
            piece = kinds(piece=NAMES[key][0], type=kinds.CONTROL)
        elif piece is None and PADDING_WORD.fullmatch(key):
            piece = kinds(piece=key, type=kinds.UNUSED)
        elif piece is None:
            raise config.ConfigError(
                f"{dictionary}: {key!r} is no piece of the SentencePiece model beside it. Take "
                "both files of one checkpoint"
            )
        ordered.append(piece)
    missing = pieces.keys() - {*first, *keys, last}
    unread = sorted(key for key in missing if pieces[key].type not in (kinds.CONTROL, kinds.UNUSED))
    if unread:
        raise config.ConfigError(
            f"{dictionary} lacks {len(unread)} pieces of the SentencePiece model beside it, as "
            f"{unread[0]!r}. Take both files of one checkpoint"
        )
    ordered = [kinds.FromString(piece.SerializeToString()) for piece in ordered]
    del proto.pieces[:]
    proto.pieces.extend(ordered)
    spec = proto.trainer_spec
    spec.bos_id, spec.pad_id, spec.eos_id, spec.unk_id = range(4)
    return proto.SerializeToString(deterministic=True)


def _try_out(vocabulary: Vocabulary):
    """Raises ValueError unless the vocabulary is consistent and encodes text."""
    others = {vocabulary.bos, vocabulary.pad, vocabulary.eos, vocabulary.mask}
    if len(others) < len(NAMES) - 1 or vocabulary.unk in others - {vocabulary.pad}:
        raise ValueError("two of its special tokens have the same id")
    ids = vocabulary.encode_with_offsets(TRIAL).ids
    if ids != vocabulary.encode(TRIAL):
        raise ValueError("it encodes the same text differently each time")
    if set(ids) & {vocabulary.bos, vocabulary.pad, vocabulary.eos, vocabulary.mask}:
        raise ValueError("text gets special ids")
    vocabulary.decode(ids)
    covered = {
        place
        for start, end in vocabulary.encode_with_offsets(OFFSETS_TRIAL).offsets
        for place in range(start, end)
    }
    for place, character in enumerate(OFFSETS_TRIAL):
        if place not in covered and not character.isspace():
            raise ValueError(
                f"its offsets leave out the character {character!r} at {place} of the text "
                f"{OFFSETS_TRIAL!r}"
            )
