"""Fine-tuning runs of one task: training, evaluation, predictions and results."""

import collections.abc
import dataclasses
import json
import pathlib
import shutil
import time
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from jax.sharding import NamedSharding

from maelm_jax import config, storage
from maelm_jax.data.vocabulary import Vocabulary
from maelm_jax.finetuning import batches as batching
from maelm_jax.finetuning import files, heads
from maelm_jax.finetuning.encoder_source import EncoderSource
from maelm_jax.finetuning.task_data import DevSet, TaskData
from maelm_jax.model import keys
from maelm_jax.training import (
    checkpoint,
    checkpoint_params,
    flops,
    loop,
    metrics,
    optimizer,
    sharding,
    step,
)

STOPPED = loop.STOPPED
RESULTS = "results.json"  # written last: a folder that holds it is finished
UNFINISHED = "unfinished"  # folder of the checkpoints to resume from, removed at the end


class State(typing.NamedTuple):
    """Training state. It includes the best parameters, so that a resumed run still has them."""

    step: jax.Array
    params: dict
    opt_state: optax.OptState
    best_params: dict
    best_score: jax.Array  # float32: main metric of `best_params`, -inf before the first evaluation


class FinetuneSession:
    """Data and compiled steps that all runs of one task with one architecture share."""

    def __init__(self, experiment: config.Experiment, problem: TaskData, vocabulary: Vocabulary):
        self.settings, self.problem, self.vocabulary = experiment.finetune, problem, vocabulary
        self.mesh = sharding.make_mesh(experiment.mesh)
        self.graph, self.init = heads.create(
            experiment.model, self.vocabulary.size, self.vocabulary.pad, problem.classes)
        self.updates = optimizer.create_adjustable(experiment.optimizer)
        shapes = jax.eval_shape(self.init, keys.of_seed(0))
        place_as = lambda tree: sharding.shardings_of(tree, self.mesh)  # noqa: E731
        moments = jax.eval_shape(self.updates.init, shapes)
        self.fresh_params = jax.jit(self.init, out_shardings=place_as(shapes))
        self.fresh_moments = jax.jit(self.updates.init, out_shardings=place_as(moments))
        self.zero = jax.device_put(
            jnp.zeros((), jnp.int32), NamedSharding(self.mesh, jax.sharding.PartitionSpec()))
        longest = max(int(dev.features.lengths.max())
                      for dev in (*problem.dev.values(), *problem.unscored.values()))
        sizes = batching.padded_lengths(problem.train.lengths, length_of(experiment))
        self.sizes = sizes if sizes[-1] >= longest else [*sizes, longest]
        self.predictor = Predictor(
            self.graph, self.init, self.mesh, self.vocabulary.pad, self.settings.eval_batch_size)
        state = State(self.zero, shapes, moments, shapes, self.zero)
        # The step is compiled with seed 0. The seed of a run travels in its batches.
        self.train_step = step.make_train_step(
            heads.loss_of(self.graph), self.updates, state, 0, experiment.run.accumulate, self.mesh)
        self.peak = flops.peak_flops(experiment.model.dtype).flops_per_second

    def fresh_state(self, start: EncoderSource, seed: int) -> State:
        """The state before the first step: the encoder of `start`, and a head drawn with `seed`."""
        params = self.fresh_params(keys.of_stream(seed, keys.INIT_STREAM))
        params |= {"encoder": start.encoder(params["encoder"])}
        # The training step donates the buffers of its state: no two fields may share a buffer.
        copy = lambda tree: jax.tree.map(jnp.copy, tree)  # noqa: E731
        return State(copy(self.zero), params, self.fresh_moments(params), copy(params),
                     jax.device_put(jnp.float32(-jnp.inf), self.zero.sharding))

    def run(
        self, experiment: config.Experiment, start: EncoderSource, workdir: str,
        record: collections.abc.Callable[[], None] = lambda: None,
    ) -> dict | None:
        """Trains one cell with one seed in `workdir`. Resumes from a checkpoint of UNFINISHED.

        Args:
            experiment: Settings with one value of each hyperparameter.
            start: The encoder to start from.
            workdir: Folder of the run.
            record: Writes the settings of the run. It is called after the checkpoint is read and
                before anything in `workdir` changes.

        Returns:
            The content of results.json; None when SIGTERM stopped the run.

        Raises:
            Diverged: The loss or the gradient is not finite.
        """
        began = time.perf_counter()
        settings, problem, seed = experiment.finetune, self.problem, experiment.run.seed
        batches = batching.Batches(
            problem.train, self.sizes, settings.batch_size, self.vocabulary.pad, seed)
        total = batches.per_epoch * settings.epochs
        run = dataclasses.replace(
            experiment.run, train_steps=total,
            eval_every=-(-batches.per_epoch // settings.evaluations))
        warmup = round(settings.warmup * total)
        folder = pathlib.Path(workdir)
        state = self.fresh_state(start, seed)
        state = state._replace(opt_state=optimizer.with_schedule(
            state.opt_state, settings.learning_rate, warmup, total))
        planned = optimizer.Schedule(
            np.arange(total, dtype=np.float32),
            *map(np.float32, (settings.learning_rate, warmup, total)))
        checkpoints = checkpoint.Checkpoints(workdir, keep=1, inside=UNFINISHED)
        resumed = checkpoints.restore(state)
        state = resumed[1] if resumed else state
        first = int(state.step)
        record()
        best_outputs = None  # stays None in a run that was resumed after its best evaluation

        def evaluate(state: State) -> loop.Evaluation:
            nonlocal best_outputs
            outputs = self.outputs(state.params, problem.dev)
            values = self.score(outputs)
            score = np.float32(values[problem.main])
            if score > jax.device_get(state.best_score):
                best_outputs = outputs
                better = jax.tree.map(jnp.copy, state.params)
                state = state._replace(
                    best_params=better,
                    best_score=jax.device_put(jnp.asarray(score), state.best_score.sharding))
            return loop.Evaluation(
                state, {f"eval_{name}": value for name, value in values.items()})

        tokens = int(problem.train.lengths.sum()) / batches.per_epoch
        job = loop.Job(
            run=run, train_step=self.train_step,
            batch=lambda number: place(batches.batch(number), self.mesh), evaluate=evaluate,
            learning_rates=np.asarray(planned.rate()), tokens_per_step=tokens,
            flops_per_step=self.flops_per_step(experiment.model, batches), peak_flops=self.peak)
        writer = metrics.Writer(workdir, first)
        try:
            state, status = loop.run(job, state, first, writer, checkpoints)
        finally:
            writer.close()
            checkpoints.close()
        if status == loop.STOPPED:
            return None
        evaluations = self.evaluations(workdir, batches.per_epoch)
        # `max` returns the first of equal scores, and `evaluate` keeps the first too.
        best = max(evaluations, key=lambda line: np.float32(line[problem.main]))
        written = self.write_best(folder, state.best_params, best["step"], best_outputs)
        results = {
            "task": problem.name, "init_from": start.name, "seed": seed, "cell": cell_of(settings),
            "main_metric": problem.main, "score": best[problem.main], "best": best,
            "last": evaluations[-1], "evaluations": evaluations, "labels": list(problem.labels),
            "max_length": length_of(experiment), "train_examples": len(problem.train.ids),
            "steps": total, "padding": {"train": batches.padding(), "lengths": self.sizes},
            "examples_per_second": self.speed(workdir, tokens, settings.batch_size),
            "seconds": time.perf_counter() - began, "resumed_at": first, "predictions": written,
            "notes": problem.notes}  # fmt: skip
        write_json(folder / RESULTS, results)
        shutil.rmtree(folder / UNFINISHED)
        return results

    def outputs(self, params: dict, sets: dict[str, DevSet]) -> dict:
        """{name of the set: Predictor.outputs of its examples}."""
        return {name: self.predictor.outputs(params, found, self.sizes)
                for name, found in sets.items()}

    def score(self, outputs: dict) -> dict[str, float]:
        """{metric: value} on the dev sets. A name such as "matched" is a prefix of its metrics."""
        values = {}
        for name, dev in self.problem.dev.items():
            scored = dev.score(outputs[name])
            values |= {f"{name}_{metric}" if name else metric: value
                       for metric, value in scored.items()}
        return values

    def write_best(
        self, folder: pathlib.Path, params: dict, number: int, outputs: dict | None
    ) -> list[str]:
        """Writes a checkpoint of `params`, of step `number`, and their predictions.

        `outputs` are the outputs of `params` on the dev sets; None computes them. Returns the names
        of the files of predictions.
        """
        with_head = checkpoint.Checkpoints(str(folder), keep=1)
        with_head.save(number, {"params": params})
        with_head.close()
        outputs = (outputs or self.outputs(params, self.problem.dev)) | self.outputs(
            params, self.problem.unscored)
        written = []
        for name, dev in (self.problem.dev | self.problem.unscored).items():
            # The predictions of the first dev set have no name in their file name.
            extra = name if name != next(iter(self.problem.dev)) else ""
            written.append(dev.write(
                outputs[name], folder, "_".join(filter(None, ("predictions", extra)))).name)
        return written

    def evaluations(self, workdir: str, per_epoch: int) -> list[dict]:
        """Step, epoch and metrics of every evaluation in metrics.jsonl."""
        lines = [line for line in metrics.read(workdir) if f"eval_{self.problem.main}" in line]
        named = lambda line: {  # noqa: E731
            name.removeprefix("eval_"): value
            for name, value in line.items() if name.startswith("eval_")}
        return [{"step": line["step"], "epoch": round(line["step"] / per_epoch, 4), **named(line)}
                for line in lines]

    def speed(self, workdir: str, tokens_per_step: float, batch_size: int) -> float | None:
        """Median training examples per second, without evaluation; None in a very short run."""
        rates = [line["tokens_per_second"]
                 for line in metrics.read(workdir) if line.get("tokens_per_second")]
        return float(np.median(rates)) / tokens_per_step * batch_size if rates else None

    def flops_per_step(self, model: config.Model, batches: batching.Batches) -> float:
        """Mean model FLOPs of a step, without padding. See training.flops.flops_terms."""
        per_layer = 4 * model.width**2 + 2 * model.width * model.feed_forward
        lengths = self.problem.train.lengths.astype(np.float64)
        return model.layers * float(
            (6.0 * per_layer * lengths + 12.0 * model.width * lengths**2).sum()
        ) / batches.per_epoch


class Predictor:
    """Computes the outputs of a fine-tuned model for whole sets of examples."""

    def __init__(self, graph, init, mesh: jax.sharding.Mesh, pad: int, rows: int):
        self.mesh, self.pad = mesh, pad
        self.rows = -(-rows // (mesh.shape["data"] * mesh.shape["fsdp"])) * (
            mesh.shape["data"] * mesh.shape["fsdp"])
        params = sharding.shardings_of(jax.eval_shape(init, keys.of_seed(0)), mesh)
        self.predict = jax.jit(
            heads.predict_of(graph), in_shardings=(params, NamedSharding(mesh, sharding.BATCH)))

    def outputs(self, params: dict, dev: DevSet, sizes: list[int]):
        """Outputs of heads.predict_of as NumPy arrays over all examples, in the order of `dev`."""
        numbers, parts = [], []
        count = -(-len(dev.features.ids) // self.rows)
        batches = batching.in_order(dev.features, sizes, self.rows, self.pad)
        for rows, batch in tqdm.tqdm(batches, total=count, desc="evaluating", unit="batch",
                                     leave=False, mininterval=1.0, delay=5.0):
            numbers.append(rows)
            parts.append(self.predict(params, place(batch, self.mesh)))
        parts = jax.device_get(parts)
        order = np.argsort(np.concatenate(numbers))
        joined = lambda *arrays: np.concatenate(  # noqa: E731
            [a[: len(n)] for a, n in zip(arrays, numbers, strict=True)])[order]
        return jax.tree.map(joined, *parts)


def place(batch: batching.Batch, mesh: jax.sharding.Mesh) -> batching.Batch:
    """`batch` on the devices, its rows sharded over the mesh."""
    return batching.Batch(*(sharding.shard_batch(part, mesh) for part in batch))


def length_of(experiment: config.Experiment) -> int:
    """Largest number of tokens of an example."""
    return min(experiment.finetune.max_length, experiment.model.max_positions)


def cell_of(settings: config.Finetune) -> dict:
    """The hyperparameters that tell one cell of the grid from another."""
    return {name: getattr(settings, name)
            for name in ("batch_size", "learning_rate", "epochs", "warmup")}


def write_json(path: pathlib.Path, content):
    """Writes a JSON file. Under its name it is always complete."""
    storage.write(path, json.dumps(content, indent=1) + "\n")


def read_results(folder: pathlib.Path) -> dict:
    """Reads results.json of a finished run. Raises ConfigError when it is damaged."""
    path, remedy = folder / RESULTS, f"Remove {folder} and run again."
    results = files.read_record(path, remedy, task=str, cell=dict, seed=int)
    if "diverged" in results:
        return files.read_record(path, remedy, diverged=str)
    number = (int, float)
    results = files.read_record(
        path, remedy, score=number, best=dict, last=dict, evaluations=list, predictions=list)
    for name, value in results["best"].items():
        if not isinstance(value, number) or not isinstance(results["last"].get(name), number):
            raise config.ConfigError(f"{path}: damaged, {name} is no number. {remedy}")
    return results


def restore(workdir: str, experiment: config.Experiment, classes: int, vocabulary: Vocabulary):
    """Returns (Predictor, parameters) of a finished run. `classes` is that of heads.create."""
    graph, init = heads.create(experiment.model, vocabulary.size, vocabulary.pad, classes)
    mesh = sharding.make_mesh(experiment.mesh)
    shapes = jax.eval_shape(init, keys.of_seed(0))
    like = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes, sharding.shardings_of(shapes, mesh))
    params = checkpoint_params.restore_params(workdir, like)[1]
    return Predictor(
        graph, init, mesh, vocabulary.pad, experiment.finetune.eval_batch_size), params
