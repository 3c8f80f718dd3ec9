"""Compares an exported folder with JAX, by other code than wrote it.

Stock classes of transformers compute hidden states and logits of real text: the reference manual
that comes with Python, and difficult lines. In the layout of the published code, every parameter is
found by its name.
"""

import collections.abc
import dataclasses
import json
import pathlib
import re
import typing

import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from maelm_jax import config
from maelm_jax.encoders import (
    decoder_file,
    export,
    families,
    family,
    layouts,
    tokenizer,
    weight_files,
)
from maelm_jax.encoders.opened import OpenedModel
from maelm_jax.model import ops
from maelm_jax.model.kernels.layer_norm import layer_norm

TOLERANCE = 1e-5  # largest difference in float32, relative to the largest value
SENTENCE = "Representations that were never trained on [MASK] have nothing to forget."
HEAD_LINES = 8  # lines whose logits are compared
# Tokens of a compared line. The attention scores of 8 lines of 8192 tokens would need 26 GB.
LONGEST_LINE = 1024
LINES_AT_A_TIME = 8
# {pattern in the name of a tensor of the published code: what stands there in a parameter's path},
# one after the other.
PUBLISHED_NAMES = {
    r"^(encoder|gen_decoder)\.lm_head\.weight$": "encoder/token_embedding",
    r"^(encoder|gen_decoder)\.sentence_encoder\.embed_tokens\.weight$": "encoder/token_embedding",
    r"^(encoder|gen_decoder)\.lm_head\.": "head/",
    r"^encoder\.sentence_encoder\.": "encoder/",
    r"^gen_decoder\.sentence_encoder\.": "decoder/",
    r"layers\.\d+\.": "blocks/",
    r"self_attn\.(q|k|v|out)_proj\.": r"attention/\1_proj.",
    r"q_proj\.": "query.",
    r"k_proj\.": "key.",
    r"v_proj\.": "value.",
    r"out_proj\.": "out.",
    r"self_attn_layer_norm\.": "attention_norm.",
    r"final_layer_norm\.": "feed_forward_norm.",
    r"(emb_)?layer_norm\.": "norm.",
    r"fc1\.": "feed_forward/up.",
    r"fc2\.": "feed_forward/down.",
    r"embed_positions\.weight$": "position_embedding",
    r"relative_attention_bias\.weight$": "relative_bias/table",
    r"norm\.weight$": "norm/scale",
    r"\.weight$": "/kernel",
    r"\.bias$": "/bias",
}


class Report(typing.NamedTuple):
    """One comparison. The numbers are absolute."""

    subject: str
    largest_difference: float
    largest_value: float


def verify(format: str, folder: pathlib.Path, encoder: OpenedModel) -> list[Report]:
    """Reads an exported folder back and compares it with JAX.

    The ids of the tokenizer, and every parameter in `model.pt`, must be equal. Hidden states and
    logits must agree within TOLERANCE. If the folder that the encoder was read from has a
    tokenizer.json, its tokenizer must give the same ids too. A head of the objective's own is in no
    export.

    Raises:
        RunError: The folder does not compute what JAX computes.
    """
    model = dataclasses.replace(encoder.model, compute=config.Compute())
    encoder = encoder.without_left_out().replace(model=model)
    if format == "huggingface":
        import transformers

        transformers.utils.logging.set_verbosity_error()  # of texts that are too long, on purpose
        transformers.utils.logging.disable_progress_bar()
        if pathlib.Path(encoder.path, "tokenizer.json").is_file():
            _compare_with_original(encoder)
        return _verify_stock(folder, encoder)
    return _verify_tensors(folder, encoder)


def sample_texts() -> list[str]:
    """Returns the texts of the comparison. The last two have more tokens than LONGEST_LINE."""
    from pydoc_data import topics

    lines = [
        line.strip()
        for topic in sorted(topics.topics)
        for line in topics.topics[topic].splitlines()
        if line.strip()
    ]
    text = " ".join(lines)
    starts = range(0, len(text), len(text) // 60)
    growing = [text[start : start + 12 * number] for number, start in enumerate(starts)]
    return [SENTENCE, *tokenizer.HARD_TEXTS, *growing, text[:40_000], text[50_000:90_000]]


def _compare(subject: str, theirs: list[np.ndarray], ours: list[np.ndarray]) -> Report:
    """Compares arrays. Raises RunError if they differ by more than TOLERANCE times the largest."""
    left, right = (np.concatenate([value.ravel() for value in part]) for part in (theirs, ours))
    difference, largest = float(np.abs(left - right).max()), float(np.abs(right).max())
    if not difference <= TOLERANCE * largest:
        raise config.RunError(
            f"verification failed: {subject} differ by {difference:.2g} (largest value "
            f"{largest:.3g}, tolerance {TOLERANCE:g} of it); nothing was written"
        )
    return Report(subject, difference, largest)


def _verify_stock(folder: pathlib.Path, encoder: OpenedModel) -> list[Report]:
    """Compares the stock tokenizer and model of a folder, and their head."""
    import torch
    import transformers

    if (folder / "tokenizer.json").is_file():
        _compare_tokenizer(folder, encoder)
    length, pad = min(encoder.model.encoder.max_positions, LONGEST_LINE), encoder.vocabulary.pad
    encoded = encoder.vocabulary.encode_batch(sample_texts())
    rows = encoder.replace(length=length).add_ends(encoded)
    stock = transformers.AutoModel.from_pretrained(folder).eval()

    def compute_states(ids):
        return stock(input_ids=ids, attention_mask=(ids != pad).long()).last_hidden_state

    states = encoder.hidden_states(rows)
    theirs = _run_torch(compute_states, rows, pad)
    reports = [_compare(f"hidden states of {type(stock).__name__}", theirs, states)]
    [name] = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    if decoder_file.is_in(encoder):  # the class of the package, which the folder has a copy of
        from maelm_jax.encoders import modeling_mae_lm

        name = decoder_file.class_name(encoder)
        with_head = getattr(modeling_mae_lm, name).from_pretrained(folder).eval()
    elif family.is_headless(name):
        return reports
    else:
        with_head = getattr(transformers, name).from_pretrained(folder).eval()

    def compute_logits(ids):
        outputs = with_head(input_ids=ids, attention_mask=(ids != pad).long())
        if name.endswith(family.QUESTION_ANSWERING):
            return torch.stack((outputs.start_logits, outputs.end_logits), -1)
        return outputs.logits

    rows = rows[:HEAD_LINES]
    if encoder.model.causal:
        return [*reports, _compare_next_tokens(name, with_head, rows, encoder)]
    if name.endswith("MaskedLM"):  # every seventh token is masked
        ends, mask_id = (encoder.vocabulary.bos, encoder.vocabulary.eos), encoder.vocabulary.mask
        masks = [(np.arange(len(row)) % 7 == 3) & ~np.isin(row, ends) for row in rows]
        masked = [np.where(mask, mask_id, row) for row, mask in zip(rows, masks, strict=True)]
        theirs = _run_torch(compute_logits, [row.tolist() for row in masked], pad)
        theirs = [logits[mask] for logits, mask in zip(theirs, masks, strict=True)]
        ours = encoder.masked_logits(rows, [mask.tolist() for mask in masks])
    else:
        by_token = not name.endswith(family.SEQUENCE_CLASSIFICATION)
        theirs = _run_torch(compute_logits, rows, pad, by_token)
        ours = [_compute_task_logits(encoder, of_line) for of_line in states[:HEAD_LINES]]
    reports.append(_compare(f"logits of {name}", theirs, ours))
    if name := export.find_causal_class(encoder):
        causal = getattr(transformers, name).from_pretrained(folder, is_decoder=True).eval()
        reports.append(_compare_next_tokens(name, causal, rows, encoder.left_to_right()))
    return reports


def _compare_next_tokens(
    name: str, model: typing.Any, rows: list[list[int]], encoder: OpenedModel
) -> Report:
    """Compares the logits of a stock class of next tokens, which stand at the slot before."""
    pad = encoder.vocabulary.pad

    def compute_logits(ids):
        return model(input_ids=ids, attention_mask=(ids != pad).long()).logits

    theirs = [logits[:-1] for logits in _run_torch(compute_logits, rows, pad)]
    masks = [[slot > 0 for slot in range(len(row))] for row in rows]
    return _compare(f"logits of {name}", theirs, encoder.masked_logits(rows, masks))


def _compare_tokenizer(folder: pathlib.Path, encoder: OpenedModel):
    """Raises RunError unless the stock tokenizer gives the ids of the vocabulary."""
    import transformers

    stock = transformers.AutoTokenizer.from_pretrained(folder)

    def encode(text: str, split_special_tokens: bool) -> list[int]:
        return stock(text, split_special_tokens=split_special_tokens)["input_ids"]

    text = tokenizer.find_difference(encode, encoder.vocabulary, sample_texts())
    if text is not None:
        raise config.RunError(
            "verification failed: the stock tokenizer gives other ids than the vocabulary to "
            f"{text!r:.80}; nothing was written"
        )


def _compare_with_original(encoder: OpenedModel):
    """Raises RunError unless the tokenizer of its stock folder gives the ids of the vocabulary."""
    import transformers

    stock, vocabulary = transformers.AutoTokenizer.from_pretrained(encoder.path), encoder.vocabulary
    texts = sample_texts()
    for text, ids in zip(texts, vocabulary.encode_batch(texts), strict=True):
        theirs = stock(text, split_special_tokens=True)["input_ids"]
        if theirs != [vocabulary.bos, *ids, vocabulary.eos]:
            raise config.RunError(
                f"verification failed: the tokenizer of {encoder.path} gives other ids to "
                f"{text!r:.80} than maelm_jax: its tokenizer_config.json may contradict its "
                "tokenizer.json; nothing was written"
            )


def _run_torch(
    run: collections.abc.Callable, rows: list[list[int]], pad: int, by_token: bool = True
) -> list[np.ndarray]:
    """Returns what a function of PyTorch computes for each line, a few lines at a time.

    `run` maps ids [lines, tokens] to [lines, ...], or to [lines, tokens, ...] if `by_token`. Then
    the results are cut to the tokens of a line.
    """
    import torch

    results = []
    for start in range(0, len(rows), LINES_AT_A_TIME):
        part = rows[start : start + LINES_AT_A_TIME]
        longest = max(map(len, part))
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in part])
        with torch.no_grad():
            computed = run(ids).numpy()
        for value, row in zip(computed, part, strict=True):
            results.append(value[: len(row)] if by_token else value)
    return results


def _compute_task_logits(encoder: OpenedModel, states: np.ndarray) -> np.ndarray:
    """Computes the logits of a fine-tuned head (finetuning/heads.py) for one line.

    `states` [tokens, width] are its last hidden states. The result is [classes] of a classifier,
    and [tokens, 2 or classes] of the heads `span` and `token`.
    """

    def linear(params: dict, x: np.ndarray) -> np.ndarray:
        return x @ params["kernel"] + params.get("bias", np.float32(0))

    params = traverse_util.unflatten_dict(encoder.params, sep="/")
    [module] = [module for module in family.HEADS.values() if module in params]
    head, x, style = (
        params[module],
        states,
        families.choose_family(encoder.model.encoder).classifier,
    )
    if module == "classifier":
        x = states.mean(axis=0, keepdims=True) if style.pools_mean else states[:1]
    if "dense" in head:
        x = ops.ACTIVATIONS[style.activation](jnp.asarray(linear(head["dense"], x)))
    if "norm" in head:
        scale = jnp.asarray(head["norm"]["scale"])
        x = layer_norm(x[None], scale, None, encoder.model.encoder.layer_norm_eps)[0]
    logits = linear(head.get("out", head), np.asarray(x))
    return logits[0] if module == "classifier" else logits


def _verify_tensors(folder: pathlib.Path, encoder: OpenedModel) -> list[Report]:
    """Finds every parameter in model.pt by the name that it has in the published code.

    The reference's code is not run. Names are translated by PUBLISHED_NAMES, not by the mappings
    that wrote the file.
    """
    stored = weight_files.read_pytorch(folder / "model.pt")["model"]
    params = encoder.params
    layers = {path: range(len(x)) if "/blocks/" in path else (None,) for path, x in params.items()}
    missing = {(path, layer) for path, numbers in layers.items() for layer in numbers}
    faults = []
    for name, value in stored.items():
        path, layer = _translate(name)
        if value.ndim == 2 and path.endswith("/kernel"):
            value = value.T
        ours = params.get(path)
        if ours is not None and layer is not None:
            ours = ours[layer] if layer < len(ours) else None
        if ours is None:
            faults.append(f"{name} has no parameter here")
        elif not np.array_equal(value, ours):
            faults.append(f"{name} has other values")
        missing.discard((path, layer))
    faults += [f"{path} is missing" for path in sorted({path for path, _ in missing})]
    if faults:
        raise config.RunError(
            f"verification failed: model.pt differs from JAX: {layouts.list_faults(faults)}; "
            "nothing was written"
        )
    return [Report(f"{len(params)} parameters in {len(stored)} tensors of model.pt", 0.0, 0.0)]


def _translate(name: str) -> tuple[str, int | None]:
    """Returns the path of a parameter, and its layer or None, by its name in the published code."""
    number = re.search(r"\.layers\.(\d+)\.", name)
    for pattern, text in PUBLISHED_NAMES.items():
        name = re.sub(pattern, text, name)
    return name, int(number[1]) if number else None
