"""Writes encoders as stock transformers models, and checks the files beside those that are read.

The stock class of the encoder's family (families.py) computes the same function without extra code.
A pooler is not part of the encoder. One that came in with a BERT goes out with it again.
"""

import json
import pathlib
import typing

from maelm_jax import config, json_files
from maelm_jax.data import vocabularies
from maelm_jax.encoders import families, layouts, weight_files
from maelm_jax.encoders.fine_tuned_head import FineTunedHead


class TokenizerOption(typing.NamedTuple):
    """An entry of tokenizer_config.json, and where tokenizer.json states the same."""

    name: str
    default: bool | None  # of the tokenizer's class, for a file without the entry
    part: str
    option: str


_OF_BERT = (
    TokenizerOption("do_lower_case", True, "normalizer", "lowercase"),
    TokenizerOption("strip_accents", None, "normalizer", "strip_accents"),
    TokenizerOption("tokenize_chinese_chars", True, "normalizer", "handle_chinese_chars"),
)
FAMILY_OPTIONS = {  # by model_type
    **dict.fromkeys(("bert", "distilbert", "electra", "mpnet"), _OF_BERT),
    "roberta": (TokenizerOption("add_prefix_space", False, "pre_tokenizer", "add_prefix_space"),),
}
# Classes of transformers that read tokenizer.json alone.
GENERIC_TOKENIZERS = ("PreTrainedTokenizer", "TokenizersBackend")


def architecture(weights: layouts.Weights, head: FineTunedHead | None = None) -> str:
    """Returns the name of the stock class that loads the export of a model.

    The class has the head of a fine-tuned run, the language-model head of an MLM run, or no head.
    The prediction head of an MAE-LM run reads the decoder, so its class has no head.

    Raises:
        ConfigError: No stock model computes the encoder.
    """
    class_name = families.of_model(weights.model, weights.special).class_name
    if head:
        return class_name + head.task_class
    reads_encoder = weights.model.decoder_layers == 0 and "head/bias" in weights.params
    return class_name + ("ForMaskedLM" if reads_encoder else "Model")


def write(folder: pathlib.Path, weights: layouts.Weights, head: FineTunedHead | None = None) -> int:
    """Writes config.json and model.safetensors into `folder`.

    The files hold the encoder, and the head of a fine-tuned run or of an MLM run.

    Returns:
        The number of parameters written.

    Raises:
        ConfigError: No stock model computes the encoder.
    """
    params, model, vocabulary_size, special = weights
    family, stock_class = families.of_model(model, special), architecture(weights, head)
    prefix = "" if stock_class.endswith("Model") else family.prefix
    tensors = layouts.export_tensors(
        params, family.encoder_mappings(model, special.pad, prefix), vocabulary_size
    )
    tensors |= family.added_tensors(model, prefix)
    mappings = []
    if head:
        mappings = family.task_head_mappings(head.task_class)
    elif stock_class.endswith("MaskedLM"):
        mappings = family.language_model_mappings()
    if "pooler/kernel" in params and not head:
        mappings += family.pooler_mappings(prefix)
    tensors |= layouts.export_tensors(params, mappings, vocabulary_size)
    content = {
        "architectures": [stock_class],
        **family.config_entries(model, special, vocabulary_size),
        **(head.config_entries() if head else {}),
    }
    (folder / "config.json").write_text(
        json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    weight_files.write_safetensors(folder / weight_files.WEIGHTS, tensors)
    return sum(value.size for value in tensors.values())


def ignored_head(content: dict) -> str | None:
    """Returns the stock class that a config.json names, if it has a head that is not read."""
    names = content.get("architectures")
    if not json_files.is_texts(names) or not names:
        return None
    has_known_head = names[0].endswith(("Model", "ForMaskedLM", "BertForPreTraining"))
    return None if has_known_head else names[0]


def vocabulary_of(folder: pathlib.Path) -> str:
    """Returns a folder's vocabulary. transformers adds tokens to tokenizer.json only."""
    files = vocabularies.files_in(folder)
    sizes = [vocabularies.load(file).size for file in files] if len(files) > 1 else [0]
    return str(folder if max(sizes) == sizes[0] else files[-1])


def check_tokenizer(content: dict, folder: pathlib.Path):
    """Checks that tokenizer_config.json contradicts tokenizer.json nowhere.

    transformers changes the tokenizer of tokenizer.json to what the other file states. Here
    tokenizer.json is read as it is.

    Args:
        content: The content of config.json.
        folder: The folder that holds both.

    Raises:
        ConfigError: The files differ in lower case, accents, Chinese characters or the space before
            a text.
    """
    file, tokenizer = folder / "tokenizer_config.json", folder / "tokenizer.json"
    options = FAMILY_OPTIONS.get(content["model_type"])
    if not (options and file.is_file() and tokenizer.is_file()):
        return
    stated, stored = json_files.read_object(file), json_files.read_object(tokenizer)
    if str(stated.get("tokenizer_class", "")).startswith(GENERIC_TOKENIZERS):
        return
    for name, default, part, option in options:
        step, value = stored.get(part), stated.get(name, default)
        if isinstance(step, dict) and option in step and step[option] != value:
            raise config.ConfigError(
                f"{folder}: tokenizer_config.json has {name} {json_files.shown(value)}"
                f"{'' if name in stated else ' (the default)'}, but tokenizer.json was made with "
                f"{json_files.shown(step[option])}. Correct tokenizer_config.json if it is wrong. "
                "Otherwise transformers makes tokenizer.json anew: "
                f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
            )
