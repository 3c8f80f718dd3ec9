"""Held-out evaluation of a pretraining run."""

import collections.abc

import jax
import numpy as np

from maelm_jax import config
from maelm_jax.pretraining import objective as objectives
from maelm_jax.pretraining import unigram
from maelm_jax.training import loop, sharding, step


def make_evaluation(
    objective: objectives.Objective,
    rows: np.ndarray,
    baseline: unigram.Unigram | None,
    params: dict,
    experiment: config.Experiment,
    mesh: jax.sharding.Mesh,
    pad: int,
    next_tokens: objectives.MaskedTokens | None = None,
) -> collections.abc.Callable[[step.State], loop.Evaluation]:
    """Returns a function that measures a state: eval_loss, eval_accuracy and a baseline's loss.

    The held-out `rows` are int32 [R, L]. `params` gives structure and shapes of the parameters.
    `pad` is the id of padding. With the objective `next_tokens`, eval_causal_loss is its loss of
    the same rows.
    """
    run = experiment.run
    batches = in_batches(rows, run.batch_size // run.accumulate, sharding.row_shards(mesh), pad)
    size = batches.shape[1]
    baseline_loss = {baseline.name: baseline.loss(rows)} if baseline else {}
    row_indices = sharding.local_row_indices(size, mesh)

    def make_measure(measured: objectives.Objective):
        eval_step = step.make_eval_step(measured.loss, params, run.seed, mesh)

        def measure(params: dict) -> np.ndarray:
            sums = [
                eval_step(
                    params,
                    sharding.shard_batch(batch[row_indices], mesh, size),
                    np.uint32(number * size),
                )[:3]
                for number, batch in enumerate(batches)
            ]
            return np.sum(jax.device_get(sums), axis=0, dtype=np.float64)

        return measure

    measure = make_measure(objective)
    measure_causal = make_measure(next_tokens) if next_tokens else None

    def evaluate(state: step.State) -> loop.Evaluation:
        total, correct, count = measure(state.params)
        values = {"eval_loss": total / count, "eval_accuracy": correct / count}
        if measure_causal:
            total, _, count = measure_causal(state.params)
            values["eval_causal_loss"] = total / count
        return loop.Evaluation(state, values | baseline_loss)

    return evaluate


def in_batches(rows: np.ndarray, microbatch: int, row_shards: int, pad: int) -> np.ndarray:
    """Divides rows [R, L] into batches [batches, rows, L].

    A batch has the size of a training microbatch, and is divided into `row_shards` parts. Few rows
    are one batch. Rows of padding fill the last one. They have no targets, so the loss is the same.
    """
    size = min(microbatch, -(-len(rows) // row_shards) * row_shards)
    padding = np.full((-len(rows) % size, rows.shape[1]), pad, rows.dtype)
    return np.concatenate([rows, padding]).reshape(-1, size, rows.shape[1])
