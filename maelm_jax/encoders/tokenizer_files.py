"""Writes the vocabulary of a run as a Hugging Face tokenizer that gives the same ids.

A SentencePiece model is rebuilt from the specification in its own file. Two differences need care:

- The tokenizers library applies a SentencePiece character map to whole grapheme clusters, and drops
  what follows the first match: "E" with an accent becomes "e". The normalizer therefore puts a
  separator around every non-ASCII character first and composes accents afterwards (NFC). One
  difference remains: if a text stacks accents in an order that is not canonical in Unicode,
  SentencePiece composes fewer of them.
- In training, a literal `<mask>` or `<s>` in a text is ordinary text. In an exported folder it is
  the special token, because pipeline("fill-mask") needs it. Call
  `tokenizer(text, split_special_tokens=True)` to get the ids of training.
"""

import json
import pathlib

from sentencepiece import sentencepiece_model_pb2

from maelm_jax import config
from maelm_jax.data import vocabularies
from maelm_jax.encoders.task_formats import PairFormat

SPACE = "▁"  # SentencePiece writes a space as this character
# A control character is a grapheme cluster of its own. SentencePiece maps delete it from texts.
SEPARATOR = "\x01"
# Difficult lines. `write` compares their ids with those of the vocabulary.
ODD_LINES = (
    "",
    " ",
    "a",
    "  many   spaces \t and\ttabs  ",
    "line\r\nbreak\u2028s",
    "a\x00b\x01c\x07d\x7fe",
    "\x01 a \x02 b",
    "x" * 300,
    "-" * 101,
    "= == === ====",
    "the <mask> and <s> and </s> and <pad> and <unk>, <mask>",
    "<mask>",
    "▁under ▁ score▁",
    "don't 'quoted' “curly” — dash…",
    "\U0001f642",
    (
        "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd "
        "\U0001f642\U0001f642 \U0001f642"
    ),
    "E\u0301 e\u0301 X\u0302 \u00f1 \u0130stanbul stra\u00dfe \u03a3\u0391\u03a3",
    "\uff41\uff42 \ufb01 \u00bd \u00b2 \u2122 \u2167 a\u00a0b\u200bc\ufeffe",
    (
        "\u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \u1112\u1161\u11ab \u05e2\u05d1\u05e8 "
        "\u0e44\u0e17\u0e22 \u0939\u093f\u0928"
    ),
    "1,234.5e-6 C++ #tag @name a?d=e&f",
)


class NoEqual(config.ConfigError):
    """No Hugging Face tokenizer gives the vocabulary's ids."""


def write(
    folder: pathlib.Path, vocabulary: vocabularies.Vocabulary, max_length: int, pair: PairFormat
):
    """Writes tokenizer.json, tokenizer_config.json and the vocabulary's own file into `folder`.

    Args:
        folder: The folder to write into.
        vocabulary: The vocabulary of the run.
        max_length: The longest input in ids, with `<s>` and `</s>`.
        pair: How the encoder reads two sentences.

    Raises:
        NoEqual: No Hugging Face tokenizer gives the ids of the vocabulary.
    """
    tokenizer = build(vocabulary, pair)
    differing = [
        line
        for line in ODD_LINES
        if encode(tokenizer, line) != [vocabulary.bos, *vocabulary.encode(line), vocabulary.eos]
    ]
    if differing:
        raise NoEqual(
            f"no Hugging Face tokenizer gives this vocabulary's ids ({differing[0]!r} gets others)"
        )
    vocabulary.save(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    token = tokenizer.id_to_token
    inputs = ["input_ids", "attention_mask"]
    if pair.has_types:
        inputs.insert(1, "token_type_ids")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # loads tokenizer.json without changes
        "bos_token": token(vocabulary.bos),
        "cls_token": token(vocabulary.bos),
        "eos_token": token(vocabulary.eos),
        "sep_token": token(vocabulary.eos),
        "pad_token": token(vocabulary.pad),
        "unk_token": token(vocabulary.unk),
        "mask_token": token(vocabulary.mask),
        "model_max_length": max_length,
        "model_input_names": inputs,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def encode(tokenizer, text: str) -> list[int]:
    """Returns the ids of `text`, with `<s>` and `</s>`."""
    return tokenizer.encode(text).ids


def build(vocabulary: vocabularies.Vocabulary, pair: PairFormat):
    """Builds a tokenizers.Tokenizer with the ids of a vocabulary.

    It encodes a text as `<s>` text `</s>`, and a pair as `<s>` A `</s>` B `</s>` with
    `pair.separators` `</s>` between A and B.

    Raises:
        NoEqual: As `from_sentencepiece`.
    """
    import tokenizers
    from tokenizers import processors

    if isinstance(vocabulary, vocabularies.TokenizerJsonVocabulary):
        tokenizer = tokenizers.Tokenizer.from_str(vocabulary.content.decode("utf-8"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
    else:
        tokenizer = from_sentencepiece(vocabulary.content)
    bos, eos = (tokenizer.id_to_token(index) for index in (vocabulary.bos, vocabulary.eos))
    known = {
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
    }
    names = {tokenizer.id_to_token(index): index for index in vocabulary.special_ids}
    # <mask> replaces a word together with the space before it, hence lstrip.
    tokenizer.add_special_tokens(
        [
            tokenizers.AddedToken(
                name, special=True, normalized=False, lstrip=index == vocabulary.mask
            )
            for name, index in names.items()
            if name not in known
        ]
    )
    between, second = " ".join([eos] * pair.separators), int(pair.has_types)
    template = processors.TemplateProcessing(
        single=f"{bos} $A {eos}",
        pair=f"{bos} $A {between} $B:{second} {eos}:{second}",
        special_tokens=[(bos, vocabulary.bos), (eos, vocabulary.eos)],
    )
    trims = _trims_offsets(tokenizer)
    tokenizer.post_processor = (
        processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
        if trims
        else template
    )
    tokenizer.encode_special_tokens = True  # tokenizer.json does not store this
    return tokenizer


def _trims_offsets(tokenizer) -> bool:
    """Returns whether a byte-level tokenizer leaves the space before a word out of its offsets."""
    stored = json.loads(tokenizer.to_str())["post_processor"] or {}
    return any(step.get("trim_offsets") for step in [stored, *stored.get("processors", [])])


def from_sentencepiece(content: bytes):
    """Builds a tokenizers.Tokenizer from the bytes of a SentencePiece BPE model.

    The special ids are left to the caller.

    Raises:
        NoEqual: The model is not BPE. A unigram model has no equal, because the Hugging Face
            tokenizer chooses another one among segmentations of the same score.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    proto = sentencepiece_model_pb2.ModelProto.FromString(content)
    kinds, spec = sentencepiece_model_pb2.ModelProto.SentencePiece, proto.trainer_spec
    if spec.model_type != sentencepiece_model_pb2.TrainerSpec.BPE:
        raise NoEqual("of SentencePiece models only BPE has an equal Hugging Face tokenizer")
    unk = next(piece.piece for piece in proto.pieces if piece.type == kinds.UNKNOWN)
    ids = {piece.piece: index for index, piece in enumerate(proto.pieces)}
    ordinary = {piece.piece: piece.score for piece in proto.pieces if piece.type == kinds.NORMAL}
    model = models.BPE(
        ids, merges(ordinary), unk_token=unk, fuse_unk=True, byte_fallback=spec.byte_fallback
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizer(proto.normalizer_spec)
    # Splitting at spaces lets the tokenizer cache words. It is wrong if a piece spans a space.
    split = not any(SPACE in piece.piece[1:] for piece in proto.pieces)
    # The part after <mask> is not the start of a text, so only the first part gets a space.
    scheme = "first" if proto.normalizer_spec.add_dummy_prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=split)
    tokenizer.decoder = decoders.Metaspace(
        SPACE, prepend_scheme="always" if proto.normalizer_spec.add_dummy_prefix else "never"
    )
    return tokenizer


def normalizer(spec: sentencepiece_model_pb2.NormalizerSpec):
    """Builds the normalizer of a SentencePiece model.

    It applies the character map, merges runs of spaces, removes spaces at the end, and writes
    spaces as SentencePiece does. The space before a text is added by the pre-tokenizer, or here if
    the text itself starts with a space.
    """
    from tokenizers import Regex, normalizers

    steps = []
    if spec.precompiled_charsmap:
        steps += [
            normalizers.Replace(Regex(r"(?=[^\x00-\x7F])|(?<=[^\x00-\x7F])"), SEPARATOR),
            normalizers.Precompiled(spec.precompiled_charsmap),
            normalizers.Replace(SEPARATOR, ""),
            normalizers.NFC(),
        ]
    if spec.remove_extra_whitespaces:
        ends = rf"[ {SPACE}]+\z" if spec.add_dummy_prefix else rf"\A +|[ {SPACE}]+\z"
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(ends), "")]
    if spec.add_dummy_prefix:  # the pre-tokenizer adds no space before a text that starts with one
        leading = rf"\A ?(?={SPACE})" if spec.remove_extra_whitespaces else rf"\A(?=[ {SPACE}])"
        steps.append(normalizers.Replace(Regex(leading), SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def merges(pieces: dict[str, float]) -> list[tuple[str, str]]:
    """Returns the merges of a BPE model: every pair of pieces whose union is a piece, best first.

    SentencePiece merges any two neighbours whose union is a piece, in the order of the scores.
    `pieces` is {piece: score}.
    """
    ranked = sorted((-score, piece) for piece, score in pieces.items())
    return [
        (piece[:cut], piece[cut:])
        for _, piece in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
