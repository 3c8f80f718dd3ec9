"""Fine-tuning runs of one task: training, evaluation, predictions and results."""

import collections.abc
import dataclasses
import pathlib
import shutil
import time
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maelm_jax import config
from maelm_jax.data.vocabularies import Vocabulary
from maelm_jax.finetuning import heads, input_format, predictor, rank_curve, results
from maelm_jax.finetuning.batches import Batch, Batches, padded_lengths
from maelm_jax.finetuning.initial_encoder import InitialEncoder
from maelm_jax.finetuning.schedule import Schedule
from maelm_jax.finetuning.task_data import DevSet, TaskData
from maelm_jax.model import keys
from maelm_jax.training import (
    checkpoint,
    flops,
    loop,
    metrics,
    optimizers,
    sharding,
    step,
)

UNFINISHED = "unfinished"  # folder of the checkpoints to resume from, removed at the end


class State(typing.NamedTuple):
    """Training state. It includes the best parameters, so that a resumed run still has them."""

    step: jax.Array
    params: dict
    opt_state: optax.OptState
    best_params: dict
    # float32: TaskData.selection_score of `best_params`, -inf before the first evaluation
    best_score: jax.Array


class FinetuneSession:
    """Data and compiled steps that all runs of one task with one architecture share."""

    def __init__(self, experiment: config.Experiment, task: TaskData, vocabulary: Vocabulary):
        self.task, self.vocabulary = task, vocabulary
        self.mesh = sharding.make_mesh(experiment.mesh)
        self.graph, self.init = heads.create(
            experiment.model, vocabulary.size, vocabulary.pad, task.head
        )
        self.optimizer = optimizers.create(experiment.optimizer)
        shapes = jax.eval_shape(self.init, keys.make_key(0))
        moments = jax.eval_shape(self.optimizer.init, shapes)
        self.fresh_params = jax.jit(
            self.init, out_shardings=sharding.shardings_of(shapes, self.mesh)
        )
        self.fresh_moments = jax.jit(
            self.optimizer.init, out_shardings=sharding.shardings_of(moments, self.mesh)
        )
        replicated = jax.NamedSharding(self.mesh, jax.P())
        self.zero = jax.device_put(jnp.zeros((), jnp.int32), replicated)
        self.sizes = self._padded_lengths(input_format.length_of(experiment))
        self.predictor = predictor.Predictor(
            self.graph,
            self.init,
            task.head,
            self.mesh,
            vocabulary.pad,
            experiment.finetune.eval_batch_size,
        )
        state = State(self.zero, shapes, moments, shapes, self.zero)
        # The step is compiled with seed 0. The seed of a run travels in its batches.
        self.train_step = step.make_train_step(
            heads.loss_of(self.graph, task.head),
            self.optimizer,
            state,
            0,
            experiment.run.accumulate,
            self.mesh,
        )
        self.peak = flops.peak_flops(experiment.model.dtype).flops_per_second
        self.rank_monitors = rank_curve.RankMonitors(task, vocabulary, self.mesh)

    def _padded_lengths(self, longest: int) -> list[int]:
        """Lengths that batches are padded to. The last one fits every example to predict."""
        dev_sets = (*self.task.dev.values(), *self.task.unscored.values())
        longest_dev = max(int(dev.features.lengths.max()) for dev in dev_sets)
        sizes = padded_lengths(self.task.train.lengths, longest)
        return sizes if sizes[-1] >= longest_dev else [*sizes, longest_dev]

    def fresh_state(self, encoder: InitialEncoder, seed: int) -> State:
        """The state before the first step: the given encoder, and a head drawn with `seed`."""
        params = self.fresh_params(keys.make_stream_key(seed, keys.INIT_STREAM))
        params |= {"encoder": encoder.load_encoder(params["encoder"])}
        if "classifier" in params:
            dense = params["classifier"]["dense"]
            params["classifier"]["dense"] = encoder.load_pooler(dense)
        # The training step donates the buffers of its state: no two fields may share a buffer.
        return State(
            _copy(self.zero),
            params,
            self.fresh_moments(params),
            _copy(params),
            jax.device_put(jnp.float32(-jnp.inf), self.zero.sharding),
        )

    def run(
        self,
        experiment: config.Experiment,
        encoder: InitialEncoder,
        workdir: str,
        record: collections.abc.Callable[[], None],
    ) -> dict:
        """Trains one cell with one seed in `workdir`. Resumes from a checkpoint of UNFINISHED.

        Args:
            experiment: Settings with one value of each hyper-parameter.
            encoder: The encoder to start from.
            workdir: Folder of the run.
            record: Writes the settings of the run. It is called after the checkpoint is read and
                before anything in `workdir` changes.

        Returns:
            The content of results.json.

        Raises:
            Diverged: The loss or the gradient is not finite.
            SystemExit: A signal stopped the run.
        """
        began = time.perf_counter()
        schedule = self._schedule(experiment)
        state = self.fresh_state(encoder, experiment.run.seed)
        unfinished = f"{workdir}/{UNFINISHED}"
        resumed = checkpoint.restore_newest(unfinished, state)
        state = resumed.state if resumed else state
        first_step = int(state.step)
        if self.task.selected_by:
            self._check_selection(workdir, state)
        record()
        evaluator = _Evaluator(self)
        writer = metrics.Writer(workdir, first_step)
        checkpoints = checkpoint.Checkpoints(unfinished, keep=1)
        with loop.closing(writer, checkpoints):
            job = self._job(schedule, experiment, evaluator)
            if experiment.run.rank_every and not metrics.read(workdir):
                writer.write(0, self.rank_monitors.of(experiment)(state.params))
            state = loop.run(job, state, first_step, writer, checkpoints)
        content = self._finish(pathlib.Path(workdir), schedule, experiment, state, evaluator)
        content |= {
            "init_from": encoder.name,
            "resumed_at": first_step,
            "seconds": time.perf_counter() - began,
        }
        results.write_json(pathlib.Path(workdir) / results.NAME, content)
        shutil.rmtree(pathlib.Path(workdir) / UNFINISHED)
        return content

    def _check_selection(self, workdir: str, state: State):
        """Checks that this version selects the best evaluation as the run before `state` did."""
        lines = [line for line in metrics.read(workdir) if line["step"] <= int(state.step)]
        past = results.evaluations_in(lines, self.task.main)
        best = max(map(self.task.selection_score, past), default=-np.inf)
        if best != jax.device_get(state.best_score):
            raise config.ConfigError(
                f"{workdir}/{UNFINISHED} holds a run whose best evaluation was selected by other "
                f"metrics than {' and '.join(self.task.selected_by)}. Remove that folder to start "
                "the run again"
            )

    def _schedule(self, experiment: config.Experiment) -> Schedule:
        """Batches, steps and learning rates of a run."""
        settings = experiment.finetune
        batches = Batches(
            self.task.train,
            self.sizes,
            settings.grid.batch_size,
            self.vocabulary.pad,
            experiment.run.seed,
        )
        return Schedule(batches, settings)

    def _job(
        self, schedule: Schedule, experiment: config.Experiment, evaluator: "_Evaluator"
    ) -> loop.Job:
        """What the training loop runs."""
        flops_per_step = schedule.flops_per_step(experiment.model)
        work = loop.StepWork(schedule.tokens_per_step, flops_per_step, self.peak)

        def batch(number: int) -> Batch:
            return predictor.shard(schedule.batches.batch(number), self.mesh)

        return loop.Job(
            run=dataclasses.replace(
                experiment.run, train_steps=schedule.total_steps, eval_every=schedule.eval_every
            ),
            train_step=self.train_step,
            batch=batch,
            work=work,
            evaluate=evaluator.evaluate,
            ranks=self.rank_monitors.of(experiment),
            learning_rates=schedule.learning_rates(experiment.optimizer),
        )

    def _finish(
        self,
        folder: pathlib.Path,
        schedule: Schedule,
        experiment: config.Experiment,
        state: State,
        evaluator: "_Evaluator",
    ) -> dict:
        """Writes the best model and its predictions. Returns the results of the run."""
        task, grid = self.task, experiment.finetune.grid
        per_epoch = schedule.batches.per_epoch
        evaluations, best = results.evaluations(str(folder), task, per_epoch)
        written = self.write_best(folder, state.best_params, best["step"], evaluator.best_outputs)
        return {
            "task": task.name,
            "seed": experiment.run.seed,
            "cell": results.cell_of(grid),
            "main_metric": task.main,
            "score": best[task.main],
            "best": best,
            "last": evaluations[-1],
            "evaluations": evaluations,
            "labels": list(task.labels),
            "label_separator": task.label_separator,
            "max_length": input_format.length_of(experiment),
            "train_examples": len(task.train.ids),
            "steps": schedule.total_steps,
            "padding": {"train": schedule.batches.padding(), "lengths": self.sizes},
            "examples_per_second": results.speed(
                str(folder), schedule.tokens_per_step, grid.batch_size
            ),
            "predictions": written,
            "notes": task.notes,
        }

    def outputs(self, params: dict, sets: dict[str, DevSet]) -> dict:
        """{name of the set: Predictor.outputs of its examples}."""
        return {name: self.predictor.outputs(params, dev, self.sizes) for name, dev in sets.items()}

    def score(self, outputs: dict) -> dict[str, float]:
        """{metric: value} on the dev sets. A name such as "matched" is a prefix of its metrics."""
        values = {}
        for name, dev in self.task.dev.items():
            for metric, value in dev.score(outputs[name]).items():
                values[f"{name}_{metric}" if name else metric] = value
        return values

    def write_best(
        self, folder: pathlib.Path, params: dict, step_number: int, outputs: dict | None
    ) -> list[str]:
        """Writes a checkpoint of `params`, of step `step_number`, and their predictions.

        `outputs` are the outputs of `params` on the dev sets; None computes them. Returns the names
        of the files of predictions.
        """
        best_checkpoint = checkpoint.Checkpoints(str(folder), keep=1)
        best_checkpoint.save(step_number, {"params": params})
        best_checkpoint.close()
        outputs = outputs or self.outputs(params, self.task.dev)
        outputs = outputs | self.outputs(params, self.task.unscored)
        written = []
        for name, dev in (self.task.dev | self.task.unscored).items():
            # The predictions of the first dev set have no name in their file name.
            is_first = name == next(iter(self.task.dev))
            stem = "predictions" if is_first else f"predictions_{name}"
            written.append(dev.write(outputs[name], folder, stem).name)
        return written


def _copy(tree):
    return jax.tree.map(jnp.copy, tree)


class _Evaluator:
    """Evaluates during training, and keeps the best parameters and their outputs."""

    def __init__(self, session: FinetuneSession):
        self.session = session
        # Stays None in a run that was resumed after its best evaluation.
        self.best_outputs: dict | None = None

    def evaluate(self, state: State) -> loop.Evaluation:
        """Evaluates the parameters of `state`."""
        outputs = self.session.outputs(state.params, self.session.task.dev)
        values = self.session.score(outputs)
        score = self.session.task.selection_score(values)
        if score > jax.device_get(state.best_score):
            self.best_outputs = outputs
            state = state._replace(
                best_params=_copy(state.params),
                best_score=jax.device_put(jnp.asarray(score), state.best_score.sharding),
            )
        return loop.Evaluation(state, {f"eval_{name}": value for name, value in values.items()})
