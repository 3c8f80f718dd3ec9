"""Tokenizers: our vocabulary as a Hugging Face tokenizer, and the tokenizer files of other folders.

A SentencePiece model is rebuilt from the specification in its own file, with steps that every
implementation of the format has (`_map_characters`). One difference remains: if a text stacks
accents in an order that is not canonical in Unicode, SentencePiece composes fewer of them.

How special tokens in a text are read: tokens that a user added are tokens everywhere. The model's
own five (`<s>`, `<pad>`, `</s>`, `<unk>`, `<mask>`, or their names in BERT) are ordinary text,
except in `OpenedModel.fill_mask`. An exported tokenizer reads them as tokens, because
pipeline("fill-mask") needs it. `tokenizer(text, split_special_tokens=True)` reads them as text.
"""

import collections.abc
import json
import pathlib
import typing

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from maelm_jax import config, storage
from maelm_jax.data import vocabularies
from maelm_jax.encoders import families
from maelm_jax.encoders.family import Family, PairFormat

SETTINGS = "tokenizer_config.json"
# Older files of transformers, which it still reads.
ADDED_TOKENS, SPECIAL_TOKENS = "added_tokens.json", "special_tokens_map.json"
SPACE = "▁"  # SentencePiece writes a space as this character
# Difficult texts. An exported tokenizer must give them the ids of the vocabulary.
HARD_TEXTS = (
    "",
    " ",
    "a",
    "  many   spaces \t and\ttabs  ",
    "line\r\nbreak\u2028s",
    "two\nlines\n",
    "a\x00b\x01c\x07d\x7fe",
    "\x01 a \x02 b",
    "x" * 300,
    "-" * 101,
    "= == === ====",
    "Capital letters, ALL CAPITALS, mixedCase, SuperLongCamelCase",
    "▁under ▁ score▁",
    "don't 'quoted' “curly” — dash…",
    "\U0001f642",
    (
        "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd "
        "\U0001f642\U0001f642 \U0001f642"
    ),
    (
        "E\u0301 e\u0301 X\u0302 \u00f1 \u0130stanbul stra\u00dfe \u03a3\u0391\u03a3 "
        "\u039f\u03b4\u03cc\u03c2"
    ),
    "\uff41\uff42 \ufb01 \u00bd \u00b2 \u2122 \u2167 \uff5e a\u00a0b\u200bc\ufeffe",
    (
        "\u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \u1112\u1161\u11ab \u05e2\u05d1\u05e8 "
        "\u0e44\u0e17\u0e22 \u0939\u093f\u0928"
    ),
    "1,234.5e-6 C++ #tag @name a?d=e&f",
)
# Texts with the model's own special tokens, which are ordinary text.
SPECIAL_TEXTS = (
    "the <mask> and <s> and </s> and <pad> and <unk>, <mask>",
    "<mask>",
    "[CLS] a [SEP]",
)


class NoEqual(config.ConfigError):
    """No Hugging Face tokenizer gives the vocabulary's ids."""


def write(
    folder: pathlib.Path, vocabulary: vocabularies.Vocabulary, max_length: int, pair: PairFormat
):
    """Writes tokenizer.json, tokenizer_config.json and the vocabulary's own file into `folder`.

    `max_length` is the longest input in ids, with `<s>` and `</s>`.

    Raises:
        NoEqual: No Hugging Face tokenizer gives the ids of the vocabulary.
    """
    tokenizer = build(vocabulary, pair)

    def encode(text: str, split_special_tokens: bool) -> list[int]:
        tokenizer.encode_special_tokens = split_special_tokens
        return tokenizer.encode(text).ids

    differing = find_difference(encode, vocabulary)
    if differing is not None:
        raise NoEqual(
            f"no Hugging Face tokenizer gives this vocabulary's ids ({differing!r} gets others)"
        )
    vocabulary.save(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabularies.write_checksums(folder)
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
        "mask_token": token(vocabulary.mask),
        "model_max_length": max_length,
        "model_input_names": inputs,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
    }
    if vocabulary.unk != vocabulary.pad:
        settings["unk_token"] = token(vocabulary.unk)
    (folder / SETTINGS).write_text(
        json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def find_difference(
    encode: collections.abc.Callable[[str, bool], list[int]],
    vocabulary: vocabularies.Vocabulary,
    texts: collections.abc.Iterable[str] = (),
) -> str | None:
    """Returns the first text to which a tokenizer gives other ids than the vocabulary, or None.

    `encode` is the tokenizer: (text, whether the model's own special tokens are ordinary text) ->
    ids with `<s>` and `</s>`. The compared texts are `texts`, HARD_TEXTS, SPECIAL_TEXTS, and some
    with added tokens and masks.
    """
    added = [
        text
        for token in _added_tokens(vocabulary)
        for text in (f"before {token} after", f"Before{token}after {token}{token}.", token)
    ]
    mask = vocabulary.pieces[vocabulary.mask]
    masked = (mask, f"The {mask} of it, and{mask}{mask}.")
    cases = (
        ((*HARD_TEXTS, *added), False, vocabulary.encode),
        ((*SPECIAL_TEXTS, *texts), True, vocabulary.encode),
        (masked, False, vocabulary.encode_masked),
    )
    for compared, splits, encode_here in cases:
        for text in compared:
            if encode(text, splits) != [vocabulary.bos, *encode_here(text), vocabulary.eos]:
                return text
    return None


def _added_tokens(vocabulary: vocabularies.Vocabulary) -> list[str]:
    """Returns the tokens of a vocabulary that a user added to its pieces."""
    if isinstance(vocabulary, vocabularies.TokenizerJsonVocabulary):
        added = vocabulary.model.get_added_tokens_decoder()
        return [
            token.content
            for index, token in added.items()
            if index not in vocabulary.special_ids and token.content not in vocabularies.SPECIAL
        ]
    proto = sentencepiece_model_pb2.ModelProto.FromString(vocabulary.content)
    kind = sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED
    return [piece.piece for piece in proto.pieces if piece.type == kind]


def build(vocabulary: vocabularies.Vocabulary, pair: PairFormat):
    """Builds a tokenizers.Tokenizer with the ids of a vocabulary.

    It encodes a text as `<s>` text `</s>`, and a pair as `<s>` A `</s>` B `</s>` with
    `pair.separators` `</s>` between A and B.

    Raises:
        NoEqual: As `_convert_sentencepiece`.
    """
    import tokenizers
    from tokenizers import processors

    if isinstance(vocabulary, vocabularies.TokenizerJsonVocabulary):
        # Special are the five that the vocabulary takes: MPNet's file has <unk> and [UNK].
        file = json.loads(vocabulary.content)
        file |= {name: vocabulary.file[name] for name in ("added_tokens", "truncation", "padding")}
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(file))
    else:
        tokenizer = _convert_sentencepiece(vocabulary.content)
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
    # A byte-level tokenizer may leave the space before a word out of its offsets.
    stored = json.loads(tokenizer.to_str())["post_processor"] or {}
    if any(step.get("trim_offsets") for step in [stored, *stored.get("processors", [])]):
        template = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    tokenizer.post_processor = template
    return tokenizer


def _convert_sentencepiece(content: bytes):
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
        ids, _merges(ordinary), unk_token=unk, fuse_unk=True, byte_fallback=spec.byte_fallback
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = _convert_normalizer(proto)
    # Splitting at spaces lets the tokenizer cache words. That is wrong if a piece spans a space.
    split = not any(SPACE in piece.piece[1:] for piece in proto.pieces)
    # The part after <mask> is not the start of a text, so only the first part gets a space.
    has_prefix = proto.normalizer_spec.add_dummy_prefix
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        SPACE, prepend_scheme="first" if has_prefix else "never", split=split
    )
    tokenizer.decoder = decoders.Metaspace(
        SPACE, prepend_scheme="always" if has_prefix else "never"
    )
    return tokenizer


def _convert_normalizer(proto: sentencepiece_model_pb2.ModelProto):
    """Builds the normalizer of a SentencePiece model.

    It applies the character map, merges runs of spaces, removes spaces at the end, and writes
    spaces as SentencePiece does. The space before a text is added by the pre-tokenizer, or here if
    the text itself starts with a space.
    """
    from tokenizers import Regex, normalizers

    spec, steps = proto.normalizer_spec, []
    # The start and the end of a text, as every implementation of regular expressions writes them.
    start, end = r"(?<![\s\S])", r"(?![\s\S])"
    if spec.precompiled_charsmap:
        steps += _map_characters(proto)
    if spec.remove_extra_whitespaces:
        ends = rf"[ {SPACE}]+{end}" if spec.add_dummy_prefix else rf"{start} +|[ {SPACE}]+{end}"
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(ends), "")]
    if spec.add_dummy_prefix:  # the pre-tokenizer adds no space before a text that starts with one
        space = rf" ?(?={SPACE})" if spec.remove_extra_whitespaces else rf"(?=[ {SPACE}])"
        steps.append(normalizers.Replace(Regex(start + space), SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def _map_characters(proto: sentencepiece_model_pb2.ModelProto) -> list:
    """Returns normalizers that do what the character map of a SentencePiece model does.

    The implementation in JavaScript reads no such map. So the map of a standard rule becomes NFKC,
    Lowercase for a rule that folds case, and a replacement of the characters to which the rule
    does something else, if the vocabulary tells the results apart. Only the basic multilingual
    plane is searched for them.

    Raises:
        NoEqual: The map is the user's own, and may have rules for several characters at once.
    """
    from tokenizers import Regex, normalizers

    spec = proto.normalizer_spec
    if spec.name not in ("nfkc", "nfkc_cf", "nmt_nfkc", "nmt_nfkc_cf"):
        raise NoEqual(f"its character map {spec.name} has no equal in Hugging Face tokenizers")
    standard = [normalizers.NFKC()]
    if spec.name.endswith("_cf"):
        standard.append(normalizers.Lowercase())
    approximation = normalizers.Sequence(standard)
    alphabet = set("".join(piece.piece for piece in proto.pieces))
    characters = [chr(code) for code in (*range(1, 0xD800), *range(0xF900, 0x10000))]
    character_map = sentencepiece.SentencePieceNormalizer(
        model_proto=proto.SerializeToString(),
        add_dummy_prefix=False,
        escape_whitespaces=False,
        remove_extra_whitespaces=False,
    )
    wanted = character_map.normalize(characters)
    # {result: characters with this result}, of those that NFKC and Lowercase change, or keep.
    changed: dict[str, list[str]] = {}
    kept: dict[str, list[str]] = {}
    for character, result in zip(characters, wanted, strict=True):
        other = approximation.normalize_str(character)
        is_told_apart = not result.strip() or alphabet.intersection(result + other)
        if result != other and (is_told_apart or proto.trainer_spec.byte_fallback):
            groups = kept if other == character else changed
            groups.setdefault(result, []).append(character)
    before, after = [], []
    if deleted := kept.get("") or changed.get(""):
        # The pre-tokenizer adds no space to a text whose first character was deleted.
        start = rf"(?<![\s\S])[{''.join(deleted)}]+"
        before.append(normalizers.Replace(Regex(start), " "))
    for number, (result, group) in enumerate(changed.items()):
        stand_in = result
        if approximation.normalize_str(result) != result:  # a private character passes unchanged
            stand_in = chr(0xE000 + number)
            after.append(normalizers.Replace(stand_in, result))
        before.append(normalizers.Replace(Regex(f"[{''.join(group)}]"), stand_in))
    after += [
        normalizers.Replace(Regex(f"[{''.join(group)}]"), result) for result, group in kept.items()
    ]
    return [*before, *standard, *after]


def _merges(pieces: dict[str, float]) -> list[tuple[str, str]]:
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


# Tokenizer files of folders that other software wrote.


# Entries of SETTINGS.
ADDS_ENDS = ("add_bos_token", "add_eos_token")
NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "cls", "eos", "mask", "pad", "sep", "unk"))
TOKEN_LISTS = ("extra_special_tokens", "additional_special_tokens")
# Classes of transformers that read tokenizer.json alone.
_GENERIC = ("PreTrainedTokenizer", "TokenizersBackend")


def check_options(family: Family, folder: pathlib.Path):
    """Checks that tokenizer_config.json contradicts tokenizer.json nowhere.

    transformers changes the tokenizer of tokenizer.json to what the other file states. Here
    tokenizer.json is read as it is.

    Raises:
        ConfigError: The files differ in lower case, accents, Chinese characters, the space before a
            text or added tokens, or state what is not done here.
    """
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        return
    stated, stored = read_settings(folder), storage.read_json(tokenizer)
    with storage.reading(tokenizer):
        tokens = stored.get("added_tokens") or []
        added = {token["content"] for token in tokens}
        read_as_text = {token["content"] for token in tokens if token.get("special")}
        read_as_text -= vocabularies.SPECIAL
        pieces = stored["model"]["vocab"]
        pieces = set(pieces if isinstance(pieces, dict) else [piece for piece, _ in pieces])
        side = dict(stored.get("truncation") or {}).get("direction", "right").lower()
    with storage.reading(folder / SETTINGS):
        side = stated.get("truncation_side", side)
        more = _stated_tokens(folder) - added - (vocabularies.SPECIAL & pieces)
        named = {_content(stated.get(name) or "") for name in NAMED_TOKENS}
        more |= named - added - (vocabularies.SPECIAL & pieces) - {""}
        without_ends = [name for name in ADDS_ENDS if stated.get(name, True) is not True]
    if side != "right":
        raise config.ConfigError(
            f"{folder}: its tokenizer keeps the end of a long text (truncation_side {side!r}), and "
            f"maelm_jax the beginning. Remove that from {SETTINGS} and tokenizer.json, or cut "
            "texts before"
        )
    if without_ends:
        raise config.ConfigError(
            f"{folder}: {SETTINGS} has {without_ends[0]} {stated[without_ends[0]]!r}, and "
            "maelm_jax puts a token before a text and one after it. Remove that if the weights "
            "were trained so"
        )
    if stated.get("split_special_tokens") and read_as_text:
        raise config.ConfigError(
            f"{folder}: {SETTINGS} has split_special_tokens, so transformers reads "
            f"{min(read_as_text)!r} in a text as text. Remove that if the weights were not trained "
            "so"
        )
    if more:
        raise config.ConfigError(
            f"{folder}: transformers adds the token {min(more)!r} to tokenizer.json, which lacks "
            "it. Let it write the file: "
            f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
        )
    class_family = _find_class_family(family, folder)
    for of_class in class_family.tokenizer_options if class_family else ():
        name, default, part, option, is_always_stated = of_class
        with storage.reading(tokenizer):
            step, value = dict(stored.get(part) or {}), stated.get(name, default)
            value = _content(value) if isinstance(value, dict) else value
        absent = f"another {part}" if is_always_stated else default
        made_with = step.get(option, absent) if step else None
        if made_with != value:
            raise config.ConfigError(
                f"{folder}: tokenizer_config.json has {name} {value!r}"
                f"{'' if name in stated else ' (the default)'}, but tokenizer.json was made with "
                f"{made_with!r}. Correct tokenizer_config.json if it is wrong. Otherwise "
                "transformers makes tokenizer.json anew: "
                f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
            )


def _find_class_family(family: Family, folder: pathlib.Path) -> Family | None:
    """Returns the family of the tokenizer class that transformers takes for a folder of `family`.

    A folder may state the class of another family, as BERTs with XLM-RoBERTa's tokenizer do. None:
    the class reads tokenizer.json alone. Raises ConfigError for a class that is not known here.
    """
    if not family.has_tokenizer_class:
        return None
    files = read_settings(folder), _read_object(folder / "config.json")
    stated = str(next(filter(None, (file.get("tokenizer_class") for file in files)), ""))
    if stated.startswith(_GENERIC):
        return None
    by_class = {
        f"{each.class_name}Tokenizer": each
        for each in families.FAMILIES.values()
        if each.has_tokenizer_class
    }
    by_class[""] = family
    if stated.removesuffix("Fast") not in by_class:
        raise config.ConfigError(
            f"{folder}: its tokenizer_class {stated} is none of {', '.join(filter(None, by_class))}"
            f" or {_GENERIC[0]}Fast, so transformers may read other tokens than maelm_jax. "
            f"If tokenizer.json is right, write {_GENERIC[0]}Fast into {SETTINGS}"
        )
    return by_class[stated.removesuffix("Fast")]


def _stated_tokens(folder: pathlib.Path) -> set[str]:
    """Returns the tokens that files beside tokenizer.json add, without the special ones."""
    tokens = list(_read_object(folder / ADDED_TOKENS))
    for stated in (read_settings(folder), _read_object(folder / SPECIAL_TOKENS)):
        tokens += (stated.get("added_tokens_decoder") or {}).values()
        for name in TOKEN_LISTS:
            listed = stated.get(name) or []
            tokens += listed.values() if isinstance(listed, dict) else listed
    return set(map(_content, tokens))


def _content(token: str | dict[str, typing.Any]) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def check_ids(family: Family, folder: pathlib.Path, vocabulary: vocabularies.Vocabulary):
    """Checks that the tokenizer.json of a folder gives difficult texts the ids of the vocabulary.

    The vocabulary may be the file of SentencePiece beside it.

    Raises:
        ConfigError: Other ids, for example because tokenizer.json adds no `<s>` and `</s>`.
    """
    import tokenizers

    if not (folder / "tokenizer.json").is_file():
        return
    own, stated = storage.read_json(folder / "tokenizer.json"), read_settings(folder)
    class_family = _find_class_family(family, folder)
    is_generic = class_family is None
    class_adds_ends = not own.get("post_processor") and not is_generic
    own["truncation"] = own["padding"] = None
    with storage.reading(folder / "tokenizer.json", errors=Exception):  # of tokenizers, as such
        stock = tokenizers.Tokenizer.from_str(json.dumps(own))
        anew = stock
        if class_family and class_family.has_metaspace:
            anew = tokenizers.Tokenizer.from_str(
                json.dumps(own | _made_anew(own, stated, class_family))
            )
    bos, eos = vocabulary.bos, vocabulary.eos
    for name, index in {"cls_token": bos, "sep_token": eos}.items():
        with storage.reading(folder / SETTINGS):
            named = _content(stated.get(name) or vocabulary.pieces[index])
        if not is_generic and named != vocabulary.pieces[index]:
            raise config.ConfigError(
                f"{folder}: {SETTINGS} has {name} {named!r}, and tokenizer.json "
                f"{vocabulary.pieces[index]!r}. Correct the one that the weights were not trained "
                "with"
            )
    for text in (*HARD_TEXTS, *(f"before {token} after" for token in _added_tokens(vocabulary))):
        ids = vocabulary.encode(text)
        if stock.encode(text, add_special_tokens=False).ids != ids:
            raise config.ConfigError(
                f"{folder}: tokenizer.json gives other ids than {vocabulary.FILE} to {text!r:.40}. "
                "Remove the file that the weights were not trained with"
            )
        if anew.encode(text, add_special_tokens=False).ids != ids:
            raise config.ConfigError(
                f"{folder}: transformers makes the normalizer and the pre_tokenizer of "
                f"{class_family.class_name}Tokenizer anew, which gives other ids than "
                f"tokenizer.json to {text!r:.40}. If tokenizer.json is right, write the "
                f"tokenizer_class {_GENERIC[0]}Fast into {SETTINGS}"
            )
        theirs = stock.encode(text)
        if not class_adds_ends and theirs.ids != [bos, *ids, eos]:
            names = {"cls": [vocabulary.pieces[bos], bos], "sep": [vocabulary.pieces[eos], eos]}
            raise config.ConfigError(
                f"{folder}: its tokenizer reads {text!r:.40} as {theirs.tokens[:8]}, and maelm_jax "
                f"puts {names['cls'][0]} before a text and {names['sep'][0]} after it. If the "
                "weights were trained so, set the post_processor of tokenizer.json to "
                f"{json.dumps({'type': 'BertProcessing', **names})}"
            )


def _made_anew(
    own: dict[str, typing.Any], stated: dict[str, typing.Any], class_family: Family
) -> dict[str, typing.Any]:
    """Returns the parts of tokenizer.json that a class with `Family.has_metaspace` makes anew."""
    pieces, unknown = own["model"]["vocab"], _content(stated.get("unk_token") or "<unk>")
    if isinstance(pieces, dict):
        raise ValueError(f"{class_family.class_name}Tokenizer has a model of the type Unigram")
    unknown_id = 3
    if class_family is not families.FAMILIES["xlm-roberta"]:
        unknown_id = next((index for index, one in enumerate(pieces) if one[0] == unknown), 0)
    normalizer = own.get("normalizer") or {}
    steps = [normalizer, *normalizer.get("normalizers", ())]
    metaspace = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "always" if stated.get("add_prefix_space", True) else "never",
        "split": True,
    }
    splits = [{"type": "WhitespaceSplit"}, metaspace]
    return {
        "model": own["model"] | {"unk_id": unknown_id, "byte_fallback": False},
        "normalizer": next((step for step in steps if step.get("type") == "Precompiled"), None),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
    }


def choose_vocabulary(family: Family, folder: pathlib.Path, pad: int | None) -> str:
    """Returns the file of a folder's vocabulary. transformers adds tokens to tokenizer.json only.

    Raises ConfigError as `check_ids`, and if the vocabulary pads with another id than `pad`. `pad`
    is None if the positions do not depend on the id of padding.
    """
    loaded = [vocabularies.load(file) for file in vocabularies.files_in(folder)]
    largest = max(loaded, key=lambda vocabulary: vocabulary.size)
    if pad not in (None, largest.pad):
        raise config.ConfigError(
            f"{folder}: config.json has pad_token_id {pad}, but its tokenizer pads with "
            f"{largest.pad}. Correct the one that the weights were not trained with"
        )
    check_ids(family, folder, largest)
    return str(folder / largest.FILE)


def write_longest_input(folder: pathlib.Path, length: int):
    """Writes what `read_longest_input` reads, for a folder without tokenizer.json."""
    content = json.dumps({"model_max_length": length}) + "\n"
    (folder / SETTINGS).write_text(content, encoding="utf-8")


def read_longest_input(folder: pathlib.Path, positions: int) -> int:
    """Returns the longest input that the tokenizer_config.json of a folder states.

    It is `positions` if there is no such file, or if the file states more.

    Raises:
        ConfigError: The file is damaged, or states less than `<s>` and `</s>` take.
    """
    with storage.reading(folder / SETTINGS):
        stated = read_settings(folder)
        length = stated.get("model_max_length", stated.get("max_len"))  # the older spelling
        length = int(min(length or positions, positions))
        if length < 2:
            raise ValueError(f"model_max_length {length}")
        return length


def read_settings(folder: pathlib.Path) -> dict[str, typing.Any]:
    """Reads the tokenizer_config.json of a folder. Returns {} if there is none."""
    return _read_object(folder / SETTINGS)


def _read_object(file: pathlib.Path) -> dict[str, typing.Any]:
    """Reads a file that holds an object of JSON. Returns {} if there is none."""
    if not file.is_file():
        return {}
    content = storage.read_json(file)
    if not isinstance(content, dict):
        raise config.ConfigError(f"{file} holds no object of JSON. Put a whole copy of it there")
    return content
