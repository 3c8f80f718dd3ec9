"""Converts text to ids and back.

A vocabulary is a SentencePiece BPE trained here, a SentencePiece model file or a Hugging Face
tokenizer.json. One trained here has `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, then the pieces, and
`<mask>` last. This is the layout of MPNet and of the reference. Text never gives special ids: a
literal `<mask>` or `<s>` in a text is encoded as ordinary characters.
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

NAMES = {
    "bos": ("<s>", "[CLS]"), "pad": ("<pad>", "[PAD]"), "eos": ("</s>", "[SEP]"),
    "unk": ("<unk>", "[UNK]"), "mask": ("<mask>", "[MASK]"),
}  # fmt: skip
ASCII = "".join(chr(code) for code in range(33, 127))  # pieces of every vocabulary trained here
SENTENCE_CHARACTERS = 1 << 14  # at most 64 KiB of UTF-8, the trainer's limit
MOST_IDS = 1 << 22  # of a vocabulary; common ones have at most about a million
# Every vocabulary must be able to encode this text of known and unknown characters.
TRIAL = "Text, \N{GREEK SMALL LETTER ALPHA}\N{BRAIN}\N{PRIVATE USE ONE} 1"
SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*(?=\s)")


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
            self.bos, self.pad, self.eos, self.unk, self.mask, _continue_words(self.pieces()))

    @abc.abstractmethod
    def pieces(self) -> list[str]:
        """The spelling of every id, "" for an unused id."""

    @abc.abstractmethod
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, without special ids around them. Uses one thread."""

    def encode(self, text: str) -> list[int]:
        """The ids of one text, without special ids around them."""
        return self.encode_batch([text])[0]

    @abc.abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text and their positions in it.

        Returns:
            (ids, half-open range of the text's characters for each id). A range can include the
            white space in front.
        """

    @abc.abstractmethod
    def decode(self, ids: typing.Iterable[int]) -> str:
        """The text of `ids`. `<s>`, `<pad>`, `</s>` and `<mask>` give no text."""

    def save(self, directory: str | os.PathLike) -> pathlib.Path:
        """Writes the vocabulary atomically into `directory`, which is made if it is missing.

        Returns:
            The file. `load` takes the file or the directory.
        """
        path = pathlib.Path(directory) / self.FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.write(path, self.content)
        return path

    def seqio_vocabulary(self):
        """This vocabulary as a seqio.Vocabulary. Imports seqio."""
        from maelm_jax.data import seqio_tasks

        return seqio_tasks.seqio_vocabulary(self)


class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model. Special tokens that it lacks are appended to it."""

    FILE = "sentencepiece.model"

    def __init__(self, content: bytes):
        proto = sentencepiece_model_pb2.ModelProto.FromString(content)
        kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
        ids = {}
        for index, piece in enumerate(proto.pieces):
            if piece.type in (kinds.CONTROL, kinds.UNKNOWN, kinds.USER_DEFINED):
                if piece.piece in NAMES["mask"]:
                    # Text with a literal "<mask>" gives the id of a user-defined piece.
                    piece.type = kinds.CONTROL
                ids.update(
                    {
                        key: index
                        for key, names in NAMES.items()
                        if piece.piece in names or (key == "unk" and piece.type == kinds.UNKNOWN)})
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
    """A Hugging Face tokenizer.json.

    Its tokens include `<s> <pad> </s> <unk> <mask>` or `[CLS] [PAD] [SEP] [UNK] [MASK]`.
    """

    FILE = "tokenizer.json"

    def __init__(self, content: bytes):
        import tokenizers

        super().__init__(content)
        # Work is divided among processes, so tokenizers needs no threads.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.model = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        self.model.encode_special_tokens = True  # a literal <mask> in a text is text
        self.model.no_truncation()
        self.model.no_padding()
        self.size = max(self.model.get_vocab(with_added_tokens=True).values()) + 1
        if self.size > MOST_IDS:
            raise ValueError(f"it has a token of id {self.size - 1}; ids must be below {MOST_IDS}")
        for key, names in NAMES.items():
            found = [
                self.model.token_to_id(name)
                for name in names
                if self.model.token_to_id(name) is not None]
            if not found:
                raise config.ConfigError(
                    "Vocabulary.file: the tokenizer.json has no token "
                    f"{' or '.join(names)}; add it to its special tokens")
            setattr(self, key, found[0])

    def pieces(self):
        return [self.model.id_to_token(index) or "" for index in range(self.size)]

    def encode_batch(self, texts):
        return [
            encoding.ids for encoding in self.model.encode_batch(texts, add_special_tokens=False)]

    def encode_with_offsets(self, text):
        found = self.model.encode(text, add_special_tokens=False)
        return found.ids, found.offsets

    def decode(self, ids):
        silent = {self.bos, self.pad, self.eos, self.mask}
        return self.model.decode(
            [int(i) for i in ids if int(i) not in silent], skip_special_tokens=False)


def files_in(directory: str | os.PathLike) -> list[pathlib.Path]:
    """The vocabulary files in a directory. `load` reads the first."""
    files = [
        pathlib.Path(directory) / kind.FILE
        for kind in (SentencePieceVocabulary, TokenizerJsonVocabulary)]
    return [file for file in files if file.is_file()]


def load(path: str | os.PathLike) -> Vocabulary:
    """Reads a vocabulary.

    Args:
        path: A SentencePiece model, a tokenizer.json, or a directory that holds one of them.

    Raises:
        ConfigError: The path is none of these, or the vocabulary does not work.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        files = files_in(path)
        if not files:
            raise config.ConfigError(
                f"Vocabulary.file: {path} holds neither "
                f"{SentencePieceVocabulary.FILE} nor {TokenizerJsonVocabulary.FILE}")
        path = files[0]
    if not path.is_file():
        raise config.ConfigError(
            f"Vocabulary.file: no file {path}; name a SentencePiece .model or a "
            "tokenizer.json, or set it to None to train one")
    kind = TokenizerJsonVocabulary if path.suffix == ".json" else SentencePieceVocabulary
    try:
        vocabulary = kind(path.read_bytes())
        _try_out(vocabulary)
        return vocabulary
    except (config.ConfigError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # protobuf and sentencepiece raise their own types. tokenizers raises Exception, and its
        # panics are BaseExceptions.
        reason = " ".join(str(error).split())[:200]
        raise config.ConfigError(
            f"Vocabulary.file: {path} cannot be read as {kind.FILE}: {reason}; name another file"
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


def _continue_words(pieces: list[str]) -> tuple[bool, ...]:
    """Whether each piece continues the word before it.

    WordPiece marks such a piece with `##`. In other vocabularies a piece without a leading space
    mark continues a word.
    """
    if any(piece.startswith("##") and len(piece) > 2 for piece in pieces):
        return tuple(piece.startswith("##") for piece in pieces)
    return tuple(not piece.startswith(("▁", "Ġ")) for piece in pieces)


def text_hash(text: str) -> int:
    """A number in [0, 2**64) that depends on the text alone.

    Documents are sampled and split into train and held-out by this number.
    """
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def sample(documents: typing.Iterable[str], megabytes: float) -> list[str]:
    """The documents with the smallest hashes that fit into a size together.

    The result does not depend on the order of the documents.

    Args:
        documents: Any number of documents.
        megabytes: The size, in 10**6 characters.

    Returns:
        The documents in the order of their hashes.
    """
    limit, total = int(megabytes * 1e6), 0
    kept: list[tuple[int, str]] = []  # (-hash, text): a heap with the largest hash on top
    bound = None  # documents from this hash on do not fit
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
    """Trains a SentencePiece BPE on a sample of documents.

    The same documents in any order give the same model, byte for byte.

    Args:
        texts: The documents.
        settings: Size and kind of the vocabulary, and size of the sample.

    Raises:
        ConfigError: There is no text, or `settings.size` does not fit the text.
    """
    chosen = sample(texts, settings.sample_megabytes)
    lines = [
        sentence
        for text in chosen
        for line in text.split("\n")
        for sentence in sentences(line)
        if not sentence.isspace() and sentence]
    if not lines:
        raise config.ConfigError(
            "Vocabulary: the corpus holds no text to train a vocabulary on; "
            "check Corpus.sources or TEXT_FILES")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            # <mask> is appended later. The trainer would give it one of the first ids.
            vocab_size=settings.size - 1,
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
            raise config.ConfigError(
                "vocabulary larger than the corpus supports: "
                f"set Vocabulary.size {most} (it is {settings.size})") from error
        too_small = re.search(r"required_chars\S* (\d+) vs (\d+)", text)
        if too_small:
            least = int(too_small[2]) + 1
            raise config.ConfigError(
                f"Vocabulary.size {settings.size} does not hold the corpus's characters: "
                f"set it above {least}") from error
        raise config.ConfigError(
            f"Vocabulary: SentencePiece cannot train on this corpus: {text[:300]}") from error
    return SentencePieceVocabulary(model.getvalue())


def describe(settings: config.Vocabulary) -> str:
    """The settings that a trained vocabulary depends on, as text for its key."""
    return json.dumps(
        [settings.size, settings.cased, settings.sample_megabytes, sentencepiece.__version__])
