"""Scores the checkpoints of one arm of against_peers.py: held-out loss, minimal pairs, probes.

    python benchmarks/peer_scoring.py --run=runs/peers/runs/4x128-bert-s0 \
        --inputs=runs/peers/inputs --blimp='blimp/*.jsonl' --glue=glue --output=scores.json

--run is a workdir of maelm_jax.train, or a folder of peer_training.py. All arms are scored by the
same functions, in JAX: models of transformers are loaded as stock folders.

losses   Of each checkpoint: the mean of -log p, in nats, of the masked tokens of the same held-out
         rows. MLM models read [MASK] there. The encoder of MAE-LM skips them. A model reads a row
         as it did in training: ours starts anew at each document, a stock model does not.
blimp    Of the last checkpoint: accuracy on minimal pairs (maelm_jax.evaluate --pairs).
probes   Of the last checkpoint: a logistic regression on the mean of the last hidden states, five
         folds of GLUE's training examples (the first 10,000). CoLA: Matthews correlation; the
         others: accuracy. `most frequent class` is what a constant answer gets.
"""

import argparse
import csv
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from maelm_jax.data import readers
from maelm_jax.encoders.opened import OpenedModel, load_model
from maelm_jax.measuring import pairs
from maelm_jax.model import model_inputs

ROWS = 32  # of a batch
FOLDS = 5
PROBE_EXAMPLES = 10_000
# Columns of the sentences and of the label in GLUE's training files. CoLA's has no header.
TASKS = {
    "SST-2": (("sentence",), "label"),
    "CoLA": ((3,), 1),
    "MRPC": (("#1 String", "#2 String"), "Quality"),
    "RTE": (("sentence1", "sentence2"), "label"),
    "QQP": (("question1", "question2"), "is_duplicate"),
    "MNLI": (("sentence1", "sentence2"), "gold_label"),
}


def main():
    """Scores a run, and writes the numbers as JSON."""
    args = parse_flags()
    steps = checkpoint_steps(args.run)
    with np.load(args.inputs / "heldout.npz") as heldout:
        ids, masked = heldout["ids"], heldout["masked"]
    losses = {}
    for step in steps:
        encoder = load(args.run, step)
        losses[step] = heldout_loss(encoder, ids, masked, is_stock(args.run))
        print(f"step {step}: held-out loss {losses[step]:.4f}", flush=True)
    scores = {
        "losses": losses,
        "checked_loss": checked_loss(args.run, encoder, ids, masked),
        "blimp": blimp(encoder, args.blimp, args.blimp_pairs),
        "probes": probes(encoder, args.glue, args.inputs / "tokenizer.json"),
    }
    args.output.write_text(json.dumps(scores, indent=1) + "\n")


def is_stock(run: pathlib.Path) -> bool:
    """Returns whether a run is of peer_training.py: its checkpoints are stock folders."""
    return not (run / "config.gin").exists()


def checkpoint_steps(run: pathlib.Path) -> list[int]:
    """Returns the steps of a run's checkpoints, ascending."""
    return sorted(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit())


def load(run: pathlib.Path, step: int) -> OpenedModel:
    """Loads a checkpoint of a run."""
    if is_stock(run):
        return load_model(run / "checkpoints" / str(step))
    return load_model(run, step)


def heldout_loss(
    encoder: OpenedModel, ids: np.ndarray, masked: np.ndarray, one_segment: bool
) -> float:
    """Returns the mean of -log p of the masked tokens, in nats.

    Args:
        encoder: A model with a prediction head.
        ids: Rows, int32 [rows, length].
        masked: The tokens to predict, bool [rows, length].
        one_segment: Whether a row is one text, as stock models read it. If not, each <s> starts
            a text, as in maelm_jax.train.
    """
    bos, pad, length = encoder.vocabulary.bos, encoder.vocabulary.pad, ids.shape[1]
    budget = model_inputs.Budget(length, int(masked.sum(1).max()))
    total = 0.0
    for start in range(0, len(ids), ROWS):  # the number of rows is a multiple of ROWS
        part, at = ids[start : start + ROWS], masked[start : start + ROWS]
        segments, positions = model_inputs.segments_and_positions(jnp.asarray(part), bos, pad)
        if one_segment:
            segments = (part != pad).astype(np.int32)
            positions = np.broadcast_to(np.arange(length, dtype=np.int32), part.shape)
        logits = encoder.compute_logits(part, positions, segments, at, budget)
        used = np.arange(budget.masked) < at.sum(1, keepdims=True)
        likelihoods = np.asarray(jax.nn.log_softmax(logits))[used]
        total -= float(np.take_along_axis(likelihoods, part[at][:, None], axis=1).sum())
    return total / int(masked.sum())


def checked_loss(
    run: pathlib.Path, encoder: OpenedModel, ids: np.ndarray, masked: np.ndarray
) -> dict[str, float] | None:
    """Returns the loss of the first held-out rows as PyTorch and JAX compute it; None for ours."""
    if not is_stock(run):
        return None
    record = json.loads((run / "peer.json").read_text())
    rows = record["checked_rows"]
    ours = heldout_loss(encoder, ids[:rows], masked[:rows], one_segment=True)
    return {"pytorch": record["checked_loss"], "jax": ours}


def blimp(encoder: OpenedModel, pattern: str | None, most: int) -> dict | None:
    """Returns the score on minimal pairs, of `most` pairs of each paradigm."""
    if not pattern:
        return None
    read = pairs.read(pattern, most)
    (score,) = pairs.as_json(read, {"blimp": pairs.score(encoder, read, "blimp")})
    return {"pairs": len(read), **score}


def probes(encoder: OpenedModel, glue: pathlib.Path | None, tokenizer_file: pathlib.Path) -> dict:
    """Returns {task: scores of the folds, and that of a constant answer}."""
    if not glue:
        return {}
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    tokenizer.enable_truncation(encoder.length)  # of a pair, the longer text is cut
    result = {}
    for task in TASKS:
        texts, labels = read_task(glue / task, task)
        encodings = tokenizer.encode_batch(texts)
        ids = [encoding.ids[1:-1] for encoding in encodings]
        states = encoder.encode_ids(ids, encoder.choose_recipe("mean"))
        result[task] = probe(states, labels, task)
        print(f"{task}: {np.mean(result[task]['folds']):.4f}", flush=True)
    return result


def read_task(folder: pathlib.Path, task: str) -> tuple[list, np.ndarray]:
    """Returns the texts (or pairs of texts) and the labels of the first training examples."""
    (path,) = folder.glob("train.tsv*")
    lines = (readers.decode(line, str(path), start) for start, line in readers.lines(str(path)))
    rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    columns, label = TASKS[task]
    if isinstance(label, str):
        header = next(rows)
        columns, label = [header.index(name) for name in columns], header.index(label)
    chosen = [row for row, _ in zip(rows, range(PROBE_EXAMPLES), strict=False)]
    texts = [tuple(row[column] for column in columns) for row in chosen]
    labels = np.array([row[label] for row in chosen])
    return [text if len(columns) == 2 else text[0] for text in texts], labels


def probe(states: np.ndarray, labels: np.ndarray, task: str) -> dict:
    """Returns the scores of a logistic regression in each fold.

    Args:
        states: Float32 [examples, width].
        labels: Text [examples].
        task: Decides the metric.
    """
    from sklearn import linear_model, metrics, model_selection, pipeline, preprocessing

    classifier = pipeline.make_pipeline(
        preprocessing.StandardScaler(), linear_model.LogisticRegression(max_iter=2000)
    )
    folds = model_selection.StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    scoring = metrics.make_scorer(metrics.matthews_corrcoef) if task == "CoLA" else "accuracy"
    scores = model_selection.cross_val_score(classifier, states, labels, cv=folds, scoring=scoring)
    most_frequent = max(np.unique(labels, return_counts=True)[1]) / len(labels)
    return {
        "metric": "matthews" if task == "CoLA" else "accuracy",
        "examples": len(labels),
        "folds": [float(score) for score in scores],
        "most frequent class": 0.0 if task == "CoLA" else float(most_frequent),
    }


def parse_flags() -> argparse.Namespace:
    """Returns the flags of the command line."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--run", type=pathlib.Path, required=True, help="what was trained")
    flags.add_argument("--inputs", type=pathlib.Path, required=True, help="prepared inputs")
    flags.add_argument("--output", type=pathlib.Path, required=True, help="JSON file to write")
    flags.add_argument("--blimp", help="glob of files of minimal pairs; default: not scored")
    flags.add_argument("--blimp_pairs", type=int, default=1000, help="of each paradigm, at most")
    flags.add_argument("--glue", type=pathlib.Path, help="folder of GLUE; default: no probes")
    return flags.parse_args()


if __name__ == "__main__":
    main()
