"""Outputs of a fine-tuned model for all examples of a set."""

import typing

import jax
import numpy as np
import tqdm
from jax.sharding import NamedSharding

from maelm_jax import config
from maelm_jax.data.vocabularies import Vocabulary
from maelm_jax.finetuning import batches, heads
from maelm_jax.finetuning.task_data import DevSet, Head
from maelm_jax.model import keys
from maelm_jax.training import checkpoint, sharding


class Predictor:
    """Computes the outputs of a fine-tuned model for all examples of a set."""

    def __init__(self, graph, init, head: Head, mesh: jax.sharding.Mesh, pad: int, batch_size: int):
        devices = sharding.row_shards(mesh)
        self.mesh, self.pad = mesh, pad
        self.batch_size = -(-batch_size // devices) * devices
        params = sharding.shardings_of(jax.eval_shape(init, keys.make_key(0)), mesh)
        self.predict = jax.jit(
            heads.predict_of(graph, head),
            in_shardings=(params, NamedSharding(mesh, sharding.BATCH)),
        )

    def outputs(self, params: dict, dev: DevSet, sizes: list[int]):
        """Outputs of heads.predict_of as NumPy arrays over all examples, in the order of `dev`.

        Args:
            params: Parameters of the model.
            dev: The examples.
            sizes: Lengths to pad to, in ascending order.
        """
        indices, outputs = [], []
        planned = tqdm.tqdm(
            batches.in_order(dev.features, sizes, self.batch_size, self.pad),
            total=-(-len(dev.features.ids) // self.batch_size),
            desc="evaluating",
            unit="batch",
            leave=False,
            mininterval=1.0,
            delay=5.0,
        )
        for part in planned:
            indices.append(part.indices)
            outputs.append(self.predict(params, shard(part.batch, self.mesh)))
        order = np.argsort(np.concatenate(indices))

        def joined(*arrays):
            rows = [array[: len(part)] for array, part in zip(arrays, indices, strict=True)]
            return np.concatenate(_equally_wide(rows))[order]

        return jax.tree.map(joined, *jax.device_get(outputs))


def _equally_wide(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Arrays [rows, slots, ...] with zeros added up to the most slots."""
    if arrays[0].ndim == 1:
        return arrays
    slots = max(array.shape[1] for array in arrays)
    others = [(0, 0)] * (arrays[0].ndim - 2)
    return [np.pad(array, [(0, 0), (0, slots - array.shape[1]), *others]) for array in arrays]


def shard(batch: batches.Batch, mesh: jax.sharding.Mesh) -> batches.Batch:
    """`batch` on the devices, its rows sharded over the mesh."""
    return batches.Batch(*(sharding.shard_batch(part, mesh) for part in batch))


class Restored(typing.NamedTuple):
    """The model of a finished run."""

    predictor: Predictor
    params: dict


def restore(
    workdir: str, experiment: config.Experiment, head: Head, vocabulary: Vocabulary
) -> Restored:
    """Loads the model of a finished run."""
    graph, init = heads.create(experiment.model, vocabulary.size, vocabulary.pad, head)
    mesh = sharding.make_mesh(experiment.mesh)
    like = sharding.sharded_shapes(jax.eval_shape(init, keys.make_key(0)), mesh)
    params = checkpoint.restore_params(workdir, like)
    batch_size = experiment.finetune.eval_batch_size
    return Restored(Predictor(graph, init, head, mesh, vocabulary.pad, batch_size), params)
