"""Compares an exported folder with JAX on real text.

It reads the folder with the library that the export format is for: torch, and transformers for
--format=huggingface. The text is the reference manual that comes with Python and some difficult
lines.
"""

import importlib.util
import json
import pathlib
import typing

import numpy as np

from maelm_jax import config
from maelm_jax.data import vocabularies
from maelm_jax.encoders import inference, published, tokenizer_files, torch_checkpoint

TOLERANCE = 1e-5  # largest difference in float32, relative to the largest value
SENTENCE = "Representations that were never trained on [MASK] have nothing to forget."
HEAD_LINES = 8  # lines whose logits are compared
# Tokens of a compared line. The attention scores of 8 lines of 8192 tokens would need 26 GB.
LONGEST_LINE = 1024
Report = dict[str, typing.Any]


def missing_library(format: str) -> str:
    """Returns a library that verifies an export format and is not installed, or ""."""
    if not torch_checkpoint.is_installed():
        return "PyTorch"
    has_transformers = importlib.util.find_spec("transformers") is not None
    return "" if has_transformers or format != "huggingface" else "transformers"


def sample_lines(count: int = 60) -> list[str]:
    """Returns the texts of the comparison, with `count` or a few more lines of growing length.

    The last two have more tokens than LONGEST_LINE.
    """
    from pydoc_data import topics

    lines = [
        line.strip()
        for topic in sorted(topics.topics)
        for line in topics.topics[topic].splitlines()
        if line.strip()
    ]
    text = " ".join(lines)
    starts = range(0, len(text), len(text) // count)
    growing = [text[start : start + 12 * number] for number, start in enumerate(starts)]
    return [SENTENCE, *tokenizer_files.ODD_LINES, *growing, text[:40_000], text[50_000:90_000]]


def _sample_ids(model: config.Model, vocabulary: vocabularies.Vocabulary) -> np.ndarray:
    """Returns the ids of the sample lines, cut at the last position or at LONGEST_LINE."""
    return inference.batch(sample_lines(), vocabulary, min(model.max_positions, LONGEST_LINE))


def difference(name: str, theirs: np.ndarray, ours: np.ndarray) -> Report:
    """Compares two arrays.

    Returns:
        A report with the largest absolute difference and the largest absolute value of `ours`.

    Raises:
        RunError: The difference is larger than TOLERANCE times the value, or not a number.
    """
    report = {
        "of": name,
        "largest_difference": float(np.abs(theirs - ours).max()),
        "largest_value": float(np.abs(ours).max()),
    }
    if not report["largest_difference"] <= TOLERANCE * report["largest_value"]:
        raise config.RunError(
            f"verification failed: {name} differ by {report['largest_difference']:.2g} (largest "
            f"value {report['largest_value']:.3g}, tolerance {TOLERANCE:g} of it); "
            "nothing was written"
        )
    return report


def every_seventh(ids: np.ndarray, vocabulary: vocabularies.Vocabulary) -> np.ndarray:
    """Returns bool, the shape of `ids`: True at the text tokens of every seventh position."""
    return (
        ~np.isin(ids, (vocabulary.bos, vocabulary.eos, vocabulary.pad))
        & (np.arange(ids.shape[1]) % 7 == 3)[None]
    )


def huggingface(
    folder: pathlib.Path, params: dict, model: config.Model, vocabulary: vocabularies.Vocabulary
) -> list[Report]:
    """Compares the stock tokenizer and model of an exported folder with JAX.

    The ids must be equal. The hidden states must agree within the tolerance, as must the logits of
    an MLM run or a fine-tuned run.

    Raises:
        RunError: Ids, hidden states or logits differ.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    ids = _sample_ids(model, vocabulary)
    _compare_tokenizer(folder, ids, vocabulary)
    states = inference.hidden_states(params, model, vocabulary, ids)
    reports = [_compare_states(folder, ids, states, vocabulary)]
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    [name] = content["architectures"]
    head = getattr(transformers, name)
    ids, states = ids[:HEAD_LINES], states[:HEAD_LINES]
    if name.endswith("MaskedLM"):
        reports.append(_compare_language_model(folder, head, ids, params, model, vocabulary))
    elif not name.endswith("Model"):
        reports.append(_compare_task_head(folder, head, ids, states, params, vocabulary, model))
    return reports


def _compare_tokenizer(folder: pathlib.Path, ids: np.ndarray, vocabulary: vocabularies.Vocabulary):
    """Raises RunError unless the stock tokenizer gives `ids` for the sample lines."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(
        sample_lines(),
        padding=True,
        truncation=True,
        max_length=ids.shape[1],
        return_tensors="np",
        split_special_tokens=True,  # a literal <mask> in a text is text, as in training
    )
    if not (
        np.array_equal(encoded["input_ids"], ids)
        and np.array_equal(encoded["attention_mask"], ids != vocabulary.pad)
    ):
        raise config.RunError(
            "verification failed: the stock tokenizer gives other ids than the vocabulary; nothing "
            "was written"
        )
    of_mask = [vocabulary.bos, vocabulary.mask, vocabulary.eos]
    if tokenizer(tokenizer.mask_token)["input_ids"] != of_mask:
        raise config.RunError(
            f"verification failed: the stock tokenizer does not know {tokenizer.mask_token}; "
            "nothing was written"
        )


def _stock_inputs(ids: np.ndarray, vocabulary: vocabularies.Vocabulary) -> dict[str, typing.Any]:
    """Returns ids as the arguments of a stock model."""
    import torch

    input_ids = torch.tensor(ids).long()
    return {"input_ids": input_ids, "attention_mask": (input_ids != vocabulary.pad).long()}


def _compare_states(
    folder: pathlib.Path,
    ids: np.ndarray,
    states: np.ndarray,
    vocabulary: vocabularies.Vocabulary,
) -> Report:
    """Compares the hidden states of the stock encoder with `states`."""
    import torch
    import transformers

    stock = transformers.AutoModel.from_pretrained(folder).eval()

    @torch.no_grad()
    def stock_states(part):
        return stock(**_stock_inputs(part, vocabulary)).last_hidden_state.numpy()

    theirs = inference.in_parts(stock_states, ids, vocabulary.pad, states.shape[2])
    real = ids != vocabulary.pad
    return {
        **difference(f"hidden states of {type(stock).__name__}", theirs[real], states[real]),
        "sentence": SENTENCE,
        "input_ids": ids[0, real[0]].tolist(),
        "hidden_state_of_<s>": [round(float(value), 6) for value in theirs[0, 0, :4]],
    }


def _compare_task_head(
    folder: pathlib.Path,
    stock_class: type,
    ids: np.ndarray,
    states: np.ndarray,
    params: dict,
    vocabulary: vocabularies.Vocabulary,
    model: config.Model,
) -> Report:
    """Compares the logits of a fine-tuned head."""
    import torch

    stock, real = stock_class.from_pretrained(folder).eval(), ids != vocabulary.pad
    with torch.no_grad():
        outputs = stock(**_stock_inputs(ids, vocabulary))
    if "span" in params:
        theirs = np.stack([outputs.start_logits.numpy(), outputs.end_logits.numpy()], 2)[real]
    else:
        theirs = outputs.logits.numpy()[real] if "token" in params else outputs.logits.numpy()
    ours = inference.task_logits(params, states, real, model)
    return difference(f"logits of {stock_class.__name__}", theirs, ours)


def _compare_language_model(
    folder: pathlib.Path,
    stock_class: type,
    ids: np.ndarray,
    params: dict,
    model: config.Model,
    vocabulary: vocabularies.Vocabulary,
) -> Report:
    """Compares the logits of an MLM run at positions that hold `<mask>`."""
    import torch

    stock, masked = stock_class.from_pretrained(folder).eval(), every_seventh(ids, vocabulary)
    inputs = _stock_inputs(ids, vocabulary)
    inputs["input_ids"][torch.tensor(masked)] = vocabulary.mask
    with torch.no_grad():
        theirs = stock(**inputs).logits.numpy()[masked]
    ours = inference.logits(params, model, vocabulary, ids, masked, encoder_reads_masks=True)
    return difference(f"logits of {stock_class.__name__}", theirs, ours)


def pytorch(
    folder: pathlib.Path, params: dict, model: config.Model, vocabulary: vocabularies.Vocabulary
) -> list[Report]:
    """Compares maelm.py of an exported folder with JAX: hidden states, logits at masked positions.

    Raises:
        RunError: They differ by more than the tolerance.
    """
    import torch

    spec = importlib.util.spec_from_file_location("maelm_exported", folder / "maelm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    exported = module.MaeLm.from_folder(folder).eval()
    ids = _sample_ids(model, vocabulary)
    real = ids != vocabulary.pad
    with torch.no_grad():
        theirs = inference.in_parts(
            lambda part: exported(torch.tensor(part)).numpy(), ids, vocabulary.pad, model.width
        )
    ours = inference.hidden_states(params, model, vocabulary, ids)
    reports = [difference("hidden states of maelm.MaeLm", theirs[real], ours[real])]
    ids = ids[:HEAD_LINES]
    masked = every_seventh(ids, vocabulary)
    with torch.no_grad():
        theirs = exported.predict(torch.tensor(ids), torch.tensor(masked)).numpy()[masked]
    ours = inference.logits(
        params, model, vocabulary, ids, masked, exported.encoder_reads_masks, exported.renumber
    )
    return [*reports, difference("logits of maelm.MaeLm", theirs, ours)]


def reference(folder: pathlib.Path, params: dict, vocabulary_size: int) -> list[Report]:
    """Compares the tensors of model.pt with the parameters {path: array} that were written.

    The code of the reference implementation is not run.

    Raises:
        RunError: The tensors differ.
    """
    stored = torch_checkpoint.read(folder / "model.pt")["model"]
    written = published.to_reference(params, vocabulary_size)
    if not all(np.array_equal(stored.get(name), value) for name, value in written.items()):
        raise config.RunError(
            "verification failed: torch.load reads other tensors than were written; nothing was "
            "written"
        )
    what = f"the {len(stored)} tensors that torch.load reads"
    return [{"of": what, "largest_difference": 0.0, "largest_value": 0.0}]
