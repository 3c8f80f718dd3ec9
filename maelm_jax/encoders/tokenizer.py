"""Our vocabulary as a Hugging Face tokenizer: the same ids for the same text, `<s>` and `</s>` where training puts them.

A SentencePiece model is rebuilt step by step from what its own file says. What would not be the same by itself:

- tokenizers applies a SentencePiece character map to whole grapheme clusters and drops what follows the first match ("E" and an accent become "e").
  So a separator is put around every non-ASCII character first, and accents are composed afterwards (NFC).
  What is left: accents stacked in an order that Unicode does not call canonical, where SentencePiece composes fewer of them.
- A literal `<mask>` or `<s>` in a text is ordinary text in training. In an exported folder it is the special token, as in every stock folder:
  pipeline("fill-mask") needs that. `tokenizer(text, split_special_tokens=True)` gives the ids of training.
"""

import json
import pathlib

from sentencepiece import sentencepiece_model_pb2

from maelm_jax import config
from maelm_jax.data import vocabulary as vocabularies

SPACE = "▁"  # how SentencePiece spells a space
SEPARATOR = "\x01"  # a control character, a grapheme cluster of its own; SentencePiece's maps delete it from text
# Lines that a tokenizer gets wrong first: asked of every tokenizer that is written.
ODD_LINES = (
    "", " ", "a", "  many   spaces \t and\ttabs  ", "line\r\nbreak\u2028s", "a\x00b\x01c\x07d\x7fe", "\x01 a \x02 b", "x" * 300, "-" * 101,
    "= == === ====", "the <mask> and <s> and </s> and <pad> and <unk>, <mask>", "<mask>", "▁under ▁ score▁", "don't 'quoted' “curly” — dash…",
    "\U0001f642", "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd \U0001f642\U0001f642 \U0001f642",
    "E\u0301 e\u0301 X\u0302 \u00f1 \u0130stanbul stra\u00dfe \u03a3\u0391\u03a3",
    "\uff41\uff42 \ufb01 \u00bd \u00b2 \u2122 \u2167 a\u00a0b\u200bc\ufeffe",
    "\u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \u1112\u1161\u11ab \u05e2\u05d1\u05e8 "
    "\u0e44\u0e17\u0e22 \u0939\u093f\u0928",
    "1,234.5e-6 C++ #tag @name a?d=e&f",
)  # fmt: skip


class NoEqual(config.ConfigError):
    """No Hugging Face tokenizer gives the vocabulary's ids."""


def write(folder: pathlib.Path, vocabulary: vocabularies.Vocabulary, max_length: int):
    """Writes tokenizer.json, tokenizer_config.json and the vocabulary's own file into `folder`.

    `max_length` counts ids, `<s>` and `</s>` included. Raises NoEqual when no Hugging Face tokenizer does the same.
    """
    tokenizer = build(vocabulary)
    differing = [
        line
        for line in ODD_LINES
        if encode(tokenizer, line) != [vocabulary.bos, *vocabulary.encode(line), vocabulary.eos]
    ]
    if differing:
        raise NoEqual(
            f"no Hugging Face tokenizer gives this vocabulary's ids ({differing[0]!r} gets "
            "others); --format=pytorch goes without"
        )
    vocabulary.save(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    token = tokenizer.id_to_token
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it stands
        "bos_token": token(vocabulary.bos),
        "cls_token": token(vocabulary.bos),
        "eos_token": token(vocabulary.eos),
        "sep_token": token(vocabulary.eos),
        "pad_token": token(vocabulary.pad),
        "unk_token": token(vocabulary.unk),
        "mask_token": token(vocabulary.mask),
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def encode(tokenizer, text: str) -> list[int]:
    """The ids of `text`, `<s>` and `</s>` around them."""
    return tokenizer.encode(text).ids


def build(vocabulary: vocabularies.Vocabulary):
    """A tokenizers.Tokenizer that gives `<s>` ids `</s>`, for pairs `<s>` A `</s>` `</s>` B `</s>`."""
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
    # <mask> takes the place of a word with the space before it.
    tokenizer.add_special_tokens(
        [
            tokenizers.AddedToken(
                name, special=True, normalized=False, lstrip=index == vocabulary.mask
            )
            for name, index in names.items()
            if name not in known
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}",
        pair=f"{bos} $A {eos} {eos} $B {eos}",
        special_tokens=[(bos, vocabulary.bos), (eos, vocabulary.eos)],
    )
    tokenizer.encode_special_tokens = True  # not kept in the file
    return tokenizer


def from_sentencepiece(content: bytes):
    """A tokenizers.Tokenizer that does what a SentencePiece BPE model does, special ids aside. Raises NoEqual for other kinds (of equal paths
    through a unigram model, Hugging Face's takes another one)."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    proto = sentencepiece_model_pb2.ModelProto.FromString(content)
    kinds, spec = sentencepiece_model_pb2.ModelProto.SentencePiece, proto.trainer_spec
    if spec.model_type != sentencepiece_model_pb2.TrainerSpec.BPE:
        raise NoEqual(
            "of SentencePiece models only BPE has an equal Hugging Face tokenizer; "
            "--format=pytorch goes without"
        )
    unk = next(piece.piece for piece in proto.pieces if piece.type == kinds.UNKNOWN)
    ids = {piece.piece: index for index, piece in enumerate(proto.pieces)}
    ordinary = {piece.piece: piece.score for piece in proto.pieces if piece.type == kinds.NORMAL}
    model = models.BPE(
        ids, merges(ordinary), unk_token=unk, fuse_unk=True, byte_fallback=spec.byte_fallback
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizer(proto.normalizer_spec)
    # Words are looked up one by one (and remembered), unless there are pieces that span a space.
    split = not any(SPACE in piece.piece[1:] for piece in proto.pieces)
    # What follows <mask> is no beginning of a text: the space in front is put before the first part only.
    scheme = "first" if proto.normalizer_spec.add_dummy_prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=split)
    tokenizer.decoder = decoders.Metaspace(
        SPACE, prepend_scheme="always" if proto.normalizer_spec.add_dummy_prefix else "never"
    )
    return tokenizer


def normalizer(spec: sentencepiece_model_pb2.NormalizerSpec):
    """The character map, then runs of spaces to one, none at the end, and spaces written as SentencePiece does.

    The space in front of a text is put there by the pre-tokenizer, unless the text begins with one already.
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
    if (
        spec.add_dummy_prefix
    ):  # a space that is part of the text does not stand for the one in front
        own = rf"\A ?(?={SPACE})" if spec.remove_extra_whitespaces else rf"\A(?=[ {SPACE}])"
        steps.append(normalizers.Replace(Regex(own), SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def merges(pieces: dict[str, float]) -> list[tuple[str, str]]:
    """SentencePiece joins any two neighbours whose union is a piece, best score first: every such pair, in that order."""
    ranked = sorted((-score, piece) for piece, score in pieces.items())
    return [
        (piece[:cut], piece[cut:])
        for _, piece in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
