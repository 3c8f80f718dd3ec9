"""Held-out evaluation of a pretraining run."""

import collections.abc
import typing

import jax
import numpy as np

from maelm_jax import config
from maelm_jax.pretraining import unigram
from maelm_jax.training import loop, sharding, step


class HeldoutSet(typing.NamedTuple):
    """Held-out rows in batches for evaluation."""

    batches: np.ndarray  # int32 [batches, rows, L]; rows of padding fill the last batch
    unigram: float  # cross-entropy of the unigram distribution on their targets, in nats


def make_heldout_set(
    experiment: config.Experiment,
    heldout: np.ndarray,
    token_nll: np.ndarray,
    special: config.SpecialIds,
    row_shards: int = 1,
) -> HeldoutSet:
    """Divides held-out rows into batches of the size of a training microbatch, or into one batch.

    Args:
        experiment: Settings of evaluations.
        heldout: The rows, int32 [R, L].
        token_nll: Unigram negative log-likelihood of each id, float64 [vocabulary size].
        special: Ids of the special tokens.
        row_shards: A batch is divided into so many parts.

    Raises:
        ConfigError: No token of the rows is masked.
    """
    microbatch = experiment.run.batch_size // experiment.run.accumulate
    size = min(microbatch, -(-len(heldout) // row_shards) * row_shards)
    length = heldout.shape[1]
    # Rows of padding have no targets, so they do not change the loss.
    padding = np.full((-len(heldout) % size, length), special.pad, heldout.dtype)
    batches = np.concatenate([heldout, padding]).reshape(-1, size, length)
    return HeldoutSet(batches, unigram.cross_entropy(experiment, token_nll, batches, special))


def make_evaluation(
    loss: step.LossFn, heldout: HeldoutSet, state: step.State, seed: int, mesh: jax.sharding.Mesh
) -> collections.abc.Callable[[step.State], loop.Evaluation]:
    """Returns a function that gives eval_loss, eval_accuracy and unigram of a state.

    Args:
        loss: Sums of the loss over a batch.
        heldout: The rows.
        state: Gives structure and shapes of the state.
        seed: Seed of the masks.
        mesh: Devices.
    """
    size = heldout.batches.shape[1]
    eval_step = step.make_eval_step(loss, state, seed, mesh)
    row_indices = sharding.local_row_indices(size, mesh)

    def evaluate(state: step.State) -> loop.Evaluation:
        params = step.evaluated_params(state)
        batches = [sharding.shard_batch(rows[row_indices], mesh, size) for rows in heldout.batches]
        sums = [eval_step(params, batch, np.uint32(i * size)) for i, batch in enumerate(batches)]
        total, correct, count = np.sum(
            [jax.device_get(part) for part in sums], axis=0, dtype=np.float64
        )
        values = {"eval_loss": total / count, "eval_accuracy": correct / count}
        return loop.Evaluation(state, values | {"unigram": heldout.unigram})

    return evaluate
