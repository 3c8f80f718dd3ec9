"""Text to ids and back: a SentencePiece BPE trained here, a SentencePiece model file, or a Hugging Face tokenizer.json.

The vocabulary trained here has `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, then the pieces, `<mask>` last: the layout of MPNet and of the reference.
Special ids never come out of text: a literal `<mask>` or `<s>` in a text is encoded as ordinary characters.
"""

import abc
import functools
import hashlib
import heapq
import io
import json
import os
import pathlib
import re
import typing

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from maelm_jax import config, storage

NAMES = {"bos": ("<s>", "[CLS]"), "pad": ("<pad>", "[PAD]"), "eos": ("</s>", "[SEP]"), "unk": ("<unk>", "[UNK]"), "mask": ("<mask>", "[MASK]")}
ASCII = "".join(chr(code) for code in range(33, 127))  # always among the pieces, however rare in the corpus
SENTENCE_CHARACTERS = 1 << 14  # at most 64 KiB of UTF-8, which is what the SentencePiece trainer takes
MOST_IDS = 1 << 22  # of a vocabulary; the largest in use have about a million
TRIAL = "Text, \N{GREEK SMALL LETTER ALPHA}\N{BRAIN}\N{PRIVATE USE ONE} 1"  # what a vocabulary must be able to encode: known and unknown characters
SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*(?=\s)")


def sentences(line: str) -> list[str]:
    """Cuts a line after each `.`, `!` or `?` (and the quotes and brackets that close it) before white space, which begins the next sentence.

    Joined, the sentences are the line. An abbreviation ends a "sentence" too: the cuts only decide where a row may break.
    A sentence of more than SENTENCE_CHARACTERS is cut before its last space within that length, or at
    that length: the time that tokenisers take for a word grows faster than the word.
    """
    ends = [match.end() for match in SENTENCE_END.finditer(line)]
    bounds = zip([0, *ends], [*ends, len(line)], strict=True)
    parts = [line[start:end] for start, end in bounds if start < end] or [line]
    if len(line) <= SENTENCE_CHARACTERS:
        return parts
    return [piece for part in parts for piece in _bounded(part)]


def _bounded(sentence: str) -> typing.Iterator[str]:
    start = 0
    while len(sentence) - start > SENTENCE_CHARACTERS:
        space = sentence.rfind(" ", start + 1, start + SENTENCE_CHARACTERS)
        end = space if space > 0 else start + SENTENCE_CHARACTERS
        yield sentence[start:end]
        start = end
    yield sentence[start:]


class Vocabulary(abc.ABC):
    """The interface. `size` counts all ids, special ones included; `bos`, `pad`, `eos`, `unk`, `mask` are ids; `fingerprint` is a sha256 in hex."""

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

    def __reduce__(self):  # loaded models do not pickle: worker processes load the bytes again
        return type(self), (self.content,)

    @property
    def special_ids(self) -> tuple[int, ...]:
        return tuple(sorted({self.bos, self.pad, self.eos, self.unk, self.mask}))

    @functools.cached_property
    def special(self) -> config.SpecialIds:
        """What model and masks must know of this vocabulary."""
        return config.SpecialIds(self.bos, self.pad, self.eos, self.unk, self.mask, _continue_words(self.pieces()))

    @abc.abstractmethod
    def pieces(self) -> list[str]:
        """The spelling of every id; "" of an id that is not used."""

    @abc.abstractmethod
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, without special ids around them; on one thread."""

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    @abc.abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text, and for each the half-open range of the text's characters that it stands for (white space before it may be in it)."""

    @abc.abstractmethod
    def decode(self, ids: typing.Iterable[int]) -> str:
        """The text of `ids`; `<s>`, `<pad>`, `</s>` and `<mask>` give nothing."""

    def save(self, directory: str | os.PathLike) -> pathlib.Path:
        """Writes the vocabulary into `directory` (made if absent), atomically; `load` reads that path or the directory."""
        path = pathlib.Path(directory) / self.FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.write(path, self.content)
        return path

    def seqio_vocabulary(self):
        """This vocabulary as a seqio Vocabulary (imports seqio)."""
        from maelm_jax.data import seqio_tasks

        return seqio_tasks.seqio_vocabulary(self)


class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model. `<s>`, `<pad>`, `</s>` or `<mask>` that it lacks are appended as control pieces."""

    FILE = "sentencepiece.model"

    def __init__(self, content: bytes):
        proto = sentencepiece_model_pb2.ModelProto.FromString(content)
        kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
        ids = {}
        for index, piece in enumerate(proto.pieces):
            if piece.type in (kinds.CONTROL, kinds.UNKNOWN, kinds.USER_DEFINED):
                if piece.piece in NAMES["mask"]:
                    piece.type = kinds.CONTROL  # a user-defined <mask> would come out of a literal "<mask>" in a text
                ids.update({key: index for key, names in NAMES.items() if piece.piece in names or (key == "unk" and piece.type == kinds.UNKNOWN)})
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

    def encode_with_offsets(self, text):
        found = self.model.encode(text, return_type="offset_mapping")
        return found["ids"], found["offsets"]

    def decode(self, ids):
        silent = {self.bos, self.pad, self.eos, self.mask}
        return self.model.decode([int(i) for i in ids if int(i) not in silent])


class TokenizerJsonVocabulary(Vocabulary):
    """A Hugging Face tokenizer.json, with `<s> <pad> </s> <unk> <mask>` or `[CLS] [PAD] [SEP] [UNK] [MASK]` among its tokens."""

    FILE = "tokenizer.json"

    def __init__(self, content: bytes):
        import tokenizers

        super().__init__(content)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes are what work is divided over
        self.model = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        self.model.encode_special_tokens = True  # a literal <mask> in a text is ordinary text
        self.model.no_truncation()
        self.model.no_padding()
        self.size = max(self.model.get_vocab(with_added_tokens=True).values()) + 1
        if self.size > MOST_IDS:
            raise ValueError(f"it has a token of id {self.size - 1}; ids must be below {MOST_IDS}")
        for key, names in NAMES.items():
            found = [self.model.token_to_id(name) for name in names if self.model.token_to_id(name) is not None]
            if not found:
                raise config.ConfigError(f"Vocabulary.file: the tokenizer.json has no token {' or '.join(names)}; add it to its special tokens")
            setattr(self, key, found[0])

    def pieces(self):
        return [self.model.id_to_token(index) or "" for index in range(self.size)]

    def encode_batch(self, texts):
        return [encoding.ids for encoding in self.model.encode_batch(texts, add_special_tokens=False)]

    def encode_with_offsets(self, text):
        found = self.model.encode(text, add_special_tokens=False)
        return found.ids, found.offsets

    def decode(self, ids):
        silent = {self.bos, self.pad, self.eos, self.mask}
        return self.model.decode([int(i) for i in ids if int(i) not in silent], skip_special_tokens=False)


def files_in(directory: str | os.PathLike) -> list[pathlib.Path]:
    """The vocabulary files of a directory; `load` reads the first."""
    files = [pathlib.Path(directory) / kind.FILE for kind in (SentencePieceVocabulary, TokenizerJsonVocabulary)]
    return [file for file in files if file.is_file()]


def load(path: str | os.PathLike) -> Vocabulary:
    """Reads a SentencePiece model, a tokenizer.json, or a directory that `save` wrote. Raises ConfigError when it is neither."""
    path = pathlib.Path(path)
    if path.is_dir():
        files = files_in(path)
        if not files:
            raise config.ConfigError(f"Vocabulary.file: {path} holds neither {SentencePieceVocabulary.FILE} nor {TokenizerJsonVocabulary.FILE}")
        path = files[0]
    if not path.is_file():
        raise config.ConfigError(f"Vocabulary.file: no file {path}; name a SentencePiece .model or a tokenizer.json, or set it to None to train one")
    kind = TokenizerJsonVocabulary if path.suffix == ".json" else SentencePieceVocabulary
    try:
        vocabulary = kind(path.read_bytes())
        _try_out(vocabulary)
        return vocabulary
    except (config.ConfigError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # protobuf and sentencepiece raise their own, tokenizers a bare Exception, its panics are a BaseException
        reason = " ".join(str(error).split())[:200]
        raise config.ConfigError(f"Vocabulary.file: {path} cannot be read as {kind.FILE}: {reason}; name another file") from error


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


def _continue_words(pieces: list[str]) -> tuple[bool, ...]:
    """Whether each piece goes on with the word before it: by WordPiece's mark where a vocabulary has it, else for lack of a space in front."""
    if any(piece.startswith("##") and len(piece) > 2 for piece in pieces):
        return tuple(piece.startswith("##") for piece in pieces)
    return tuple(not piece.startswith(("▁", "Ġ")) for piece in pieces)


def text_hash(text: str) -> int:
    """A number in [0, 2**64) that depends on the text alone: what documents are sampled and split by."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def sample(documents: typing.Iterable[str], megabytes: float) -> list[str]:
    """The documents of smallest hash that fit into `megabytes` (10**6 characters) together, in hash order: the order they come in has no effect."""
    limit, total = int(megabytes * 1e6), 0
    kept: list[tuple[int, str]] = []  # a heap with the largest hash on top
    bound = None  # hashes from here on are out: something below them did not fit
    for text in documents:
        key = text_hash(text)
        if bound is not None and key >= bound:
            continue
        heapq.heappush(kept, (-key, text))
        total += len(text)
        while total > limit and len(kept) > 1:
            key, dropped = heapq.heappop(kept)
            bound = -key
            total -= len(dropped)
    return [text for _, text in sorted(kept, reverse=True)]


def train(texts: typing.Iterable[str], settings: config.Vocabulary) -> SentencePieceVocabulary:
    """Trains a SentencePiece BPE on a sample of the documents `texts`. The same texts in any order give the same model, byte for byte.

    Raises ConfigError when there is no text, or less than `settings.size` pieces can be made of it.
    """
    chosen = sample(texts, settings.sample_megabytes)
    lines = [sentence for text in chosen for line in text.split("\n") for sentence in sentences(line) if not sentence.isspace() and sentence]
    if not lines:
        raise config.ConfigError("Vocabulary: the corpus holds no text to train a vocabulary on; check Corpus.sources or TEXT_FILES")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=settings.size - 1,  # <mask> is appended: a symbol named to the trainer would land among the first ids
            character_coverage=0.9999,
            normalization_rule_name="nmt_nfkc" if settings.cased else "nmt_nfkc_cf",
            max_sentence_length=1 << 16,
            bos_id=0,
            pad_id=1,
            eos_id=2,
            unk_id=3,
            unk_surface="<unk>",
            required_chars=ASCII if settings.cased else ASCII.lower(),
            shuffle_input_sentence=False,
            num_threads=os.cpu_count() or 1,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())
        too_large = re.search(r"less than or equal to (\d+)|value <= (\d+)", text)
        if "too high" in text or too_large:
            most = f"to at most {int(too_large[1] or too_large[2]) + 1}" if too_large else "lower"
            raise config.ConfigError(f"vocabulary larger than the corpus supports: set Vocabulary.size {most} (it is {settings.size})") from error
        too_small = re.search(r"required_chars\S* (\d+) vs (\d+)", text)
        if too_small:
            least = int(too_small[2]) + 1
            raise config.ConfigError(f"Vocabulary.size {settings.size} does not hold the corpus's characters: set it above {least}") from error
        raise config.ConfigError(f"Vocabulary: SentencePiece cannot train on this corpus: {text[:300]}") from error
    return SentencePieceVocabulary(model.getvalue())


def describe(settings: config.Vocabulary) -> str:
    """What of the settings a trained vocabulary depends on, as text for its key."""
    return json.dumps([settings.size, settings.cased, settings.sample_megabytes, sentencepiece.__version__])
