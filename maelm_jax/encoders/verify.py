"""Compares an exported folder with JAX on real text.

It reads the folder with the library that the export format is for: torch, and transformers for
--format=huggingface. The text is the reference manual that comes with Python and some difficult
lines.
"""

import importlib.util
import json
import pathlib
import typing

import jax
import jax.numpy as jnp
import numpy as np

from maelm_jax import config
from maelm_jax.data import vocabulary as vocabularies
from maelm_jax.encoders import tokenizer as tokenizers
from maelm_jax.encoders import torch_file
from maelm_jax.model import maelm, masking

TOLERANCE = 1e-5  # largest difference in float32, relative to the largest value
INSTALL = "pip install torch==2.13.0 transformers==5.23.0 (or pip install -e '.[torch]')"
SENTENCE = "Representations that were never trained on [MASK] have nothing to forget."
Report = dict[str, typing.Any]


def installed(format: str) -> bool:
    """Returns whether the libraries that verify an export format are installed."""
    return all(
        importlib.util.find_spec(name)
        for name in (["torch", "transformers"] if format == "huggingface" else ["torch"])
    )


def lines(count: int = 60) -> list[str]:
    """Returns the texts of the comparison, with `count` or a few more lines of growing length.

    The last two are long enough to be cut at the last position.
    """
    from pydoc_data import topics

    text = [
        line.strip()
        for topic in sorted(topics.topics)
        for line in topics.topics[topic].splitlines()
        if line.strip()
    ]
    paragraphs = " ".join(text)
    sample = [
        paragraphs[start : start + 12 * number]
        for number, start in enumerate(range(0, len(paragraphs), len(paragraphs) // count))
    ]
    return [
        SENTENCE,
        *tokenizers.ODD_LINES,
        *sample,
        paragraphs[:40_000],
        paragraphs[50_000:90_000],
    ]


def batch(texts: list[str], vocabulary: vocabularies.Vocabulary, length: int) -> np.ndarray:
    """Encodes texts as `<s>` ids `</s>`, cut to `length` ids and padded on the right.

    Returns:
        int32 [lines, ids of the longest line].
    """
    rows = [
        [vocabulary.bos, *ids[: length - 2], vocabulary.eos]
        for ids in vocabulary.encode_batch(texts)
    ]
    result = np.full((len(rows), max(map(len, rows))), vocabulary.pad, np.int32)
    for row, ids in zip(result, rows, strict=True):
        row[: len(ids)] = ids
    return result


def in_parts(
    states: typing.Callable[[np.ndarray], np.ndarray], ids: np.ndarray, pad: int, width: int
) -> np.ndarray:
    """Computes hidden states of 8 lines at a time, so that little memory is needed.

    Each part is cut to its longest line, rounded up to a multiple of 64 so that JAX compiles few
    shapes.

    Args:
        states: Maps ids [lines, length] to hidden states [lines, length, width].
        ids: int32 [lines, length], padded with `pad`.
        pad: The id of `<pad>`.
        width: The width of the states.

    Returns:
        float32 [lines, length, width], 0 after the cut.
    """
    result = np.zeros((*ids.shape, width), np.float32)
    for start in range(0, len(ids), 8):
        part = ids[start : start + 8]
        length = -(-int((part != pad).sum(1).max()) // 64) * 64
        result[start : start + 8, :length] = states(part[:, :length])
    return result


def hidden_states(
    params: dict, model: config.Model, vocabulary: vocabularies.Vocabulary, ids: np.ndarray
) -> np.ndarray:
    """Computes the last hidden states of the encoder with JAX.

    Returns:
        float32 [lines, length, width], meaningless at padding.
    """
    graph = maelm.encoder_graph(model, vocabulary.size, vocabulary.pad)

    @jax.jit
    def states(parameters, ids):
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
        return maelm.apply(graph, parameters)(
            ids, positions, (ids != vocabulary.pad).astype(jnp.int32)
        )

    return in_parts(
        lambda part: np.asarray(states(params["encoder"], part)), ids, vocabulary.pad, model.width
    )


def logits(
    params: dict,
    model: config.Model,
    vocabulary: vocabularies.Vocabulary,
    ids: np.ndarray,
    masked: np.ndarray,
) -> np.ndarray:
    """Computes the logits at the masked positions with JAX.

    The encoder reads `<mask>` at these positions only if the model has no decoder.

    Args:
        params: The parameter tree.
        model: The settings of the model.
        vocabulary: The vocabulary of the run.
        ids: int32 [lines, length].
        masked: bool [lines, length].

    Returns:
        float32 [masked positions, vocabulary].
    """
    graph, _ = maelm.create(model, vocabulary.size, vocabulary.special)
    segments = (ids != vocabulary.pad).astype(np.int32)
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    visible_to_encoder = masked if model.decoder_layers == 0 else np.zeros_like(masked)
    sizes = masking.Budget(ids.shape[1], int(masked.sum(1).max()))
    inputs = masking.split(
        *map(jnp.asarray, (ids, segments, positions, masked, visible_to_encoder)),
        sizes,
        vocabulary.mask,
    )
    found = np.asarray(jax.jit(lambda p, i: maelm.apply(graph, p)(i))(params, inputs))
    return np.concatenate([row[: mask.sum()] for row, mask in zip(found, masked, strict=True)])[
        :, : vocabulary.size
    ]


def tuned_logits(params: dict, states: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Computes the logits of a fine-tuned head (finetuning/heads.py) in NumPy.

    Args:
        params: The parameter tree, with `classifier` or `span`.
        states: float32 [lines, length, width], the last hidden states.
        real: bool [lines, length], False at padding.

    Returns:
        [lines, classes] of a classifier; [positions that are not padding, 2] of a span head.
    """
    if "span" in params:
        return states[real] @ params["span"]["kernel"] + params["span"]["bias"]
    dense, out = params["classifier"]["dense"], params["classifier"]["out"]
    return np.tanh(states[:, 0] @ dense["kernel"] + dense["bias"]) @ out["kernel"] + out["bias"]


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


def pick(ids: np.ndarray, vocabulary: vocabularies.Vocabulary) -> np.ndarray:
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
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    texts = lines()
    ids = batch(texts, vocabulary, model.max_positions)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    as_text = {"split_special_tokens": True}  # a literal <mask> in a text is text, as in training
    encoded = tokenizer(
        texts,
        padding=True,
        truncation=True,
        max_length=model.max_positions,
        return_tensors="pt",
        **as_text,
    )
    real = ids != vocabulary.pad
    if not (
        np.array_equal(encoded["input_ids"].numpy(), ids)
        and np.array_equal(encoded["attention_mask"].numpy(), real)
    ):
        raise config.RunError(
            "verification failed: the stock tokenizer gives other ids than the vocabulary; nothing "
            "was written"
        )
    if tokenizer(tokenizer.mask_token)["input_ids"] != [
        vocabulary.bos,
        vocabulary.mask,
        vocabulary.eos,
    ]:
        raise config.RunError(
            f"verification failed: the stock tokenizer does not know {tokenizer.mask_token}; "
            "nothing was written"
        )
    stock = transformers.AutoModel.from_pretrained(folder).eval()

    @torch.no_grad()
    def states(part):
        ids = torch.tensor(part).long()
        return stock(
            input_ids=ids, attention_mask=(ids != vocabulary.pad).long()
        ).last_hidden_state.numpy()

    theirs = in_parts(states, ids, vocabulary.pad, model.width)
    ours = hidden_states(params, model, vocabulary, ids)
    first = [round(float(value), 6) for value in theirs[0, 0, :4]]
    size = int(real[0].sum())
    reports = [difference(f"hidden states of {type(stock).__name__}", theirs[real], ours[real])]
    reports[0] |= {
        "sentence": SENTENCE,
        "input_ids": ids[0, :size].tolist(),
        "hidden_state_of_<s>": first,
    }
    [name] = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    if "classifier" in params or "span" in params:
        head = getattr(transformers, name).from_pretrained(folder).eval()
        with torch.no_grad():
            found = head(
                input_ids=encoded["input_ids"][:8], attention_mask=encoded["attention_mask"][:8]
            )
        found = (
            torch.stack([found.start_logits, found.end_logits], 2)[torch.tensor(real[:8])]
            if "span" in params
            else found.logits
        )
        reports.append(
            difference(f"logits of {name}", found.numpy(), tuned_logits(params, ours[:8], real[:8]))
        )
    elif name.endswith("MaskedLM"):
        masked = pick(ids[:8], vocabulary)
        seen = torch.where(torch.tensor(masked), vocabulary.mask, encoded["input_ids"][:8])
        head = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
        with torch.no_grad():
            found = head(
                input_ids=seen, attention_mask=encoded["attention_mask"][:8]
            ).logits.numpy()[masked]
        reports.append(
            difference(
                f"logits of {type(head).__name__}",
                found,
                logits(params, model, vocabulary, ids[:8], masked),
            )
        )
    return reports


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
    theirs = module.MaeLm.from_folder(folder).eval()
    ids = batch(lines(), vocabulary, model.max_positions)
    real = ids != vocabulary.pad
    states = in_parts(
        torch.no_grad()(lambda part: theirs(torch.tensor(part)).numpy()),
        ids,
        vocabulary.pad,
        model.width,
    )
    reports = [
        difference(
            "hidden states of maelm.MaeLm",
            states[real],
            hidden_states(params, model, vocabulary, ids)[real],
        )
    ]
    masked = pick(ids[:8], vocabulary)
    with torch.no_grad():
        found = theirs.predict(torch.tensor(ids[:8]), torch.tensor(masked)).numpy()[masked]
    return [
        *reports,
        difference(
            "logits of maelm.MaeLm", found, logits(params, model, vocabulary, ids[:8], masked)
        ),
    ]


def reference(folder: pathlib.Path) -> list[Report]:
    """Compares the tensors that torch.load reads from model.pt with those of `torch_file.read`.

    The code of the reference implementation is not run.

    Raises:
        RunError: The tensors differ.
    """
    import argparse

    import torch

    with torch.serialization.safe_globals([argparse.Namespace]):
        theirs = torch.load(folder / "model.pt", weights_only=True)["model"]
    ours = torch_file.read(folder / "model.pt")["model"]
    if set(theirs) != set(ours) or not all(
        np.array_equal(theirs[name].numpy(), ours[name]) for name in ours
    ):
        raise config.RunError(
            "verification failed: torch.load reads other tensors than were written; nothing was "
            "written"
        )
    return [
        {
            "of": f"the {len(ours)} tensors that torch.load reads",
            "largest_difference": 0.0,
            "largest_value": 0.0,
        }
    ]
