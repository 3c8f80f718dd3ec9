"""Fine-tuning runs of one task: training on the loop of training/, evaluation, results."""

import dataclasses
import shutil
import time
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from maelm_jax import config, progress, storage
from maelm_jax.analysis import monitor
from maelm_jax.data.vocabularies import Vocabulary
from maelm_jax.encoders.results import CONFUSION, Results
from maelm_jax.finetuning import heads
from maelm_jax.finetuning.batches import Batch, Batches, choose_lengths, in_order, pack
from maelm_jax.finetuning.initial_encoder import InitialEncoder
from maelm_jax.finetuning.task import EvaluationSet, InputFormat, Task, TaskData, require_metric
from maelm_jax.model import keys
from maelm_jax.model.kernels import backends
from maelm_jax.training import checkpoint, flops, loop, metrics, optimizers, sharding, step
from maelm_jax.training.workdir import Workdir

HYPERPARAMETERS = ("batch_size", "learning_rate", "epochs", "warmup")  # of a cell of the grid
EVALUATION_ROWS = 64  # rows of an evaluation step
RANK_SEED = 0  # of the masks of rank_real_* and rank_all_*: the same for all seeds of a task
# FLOPs that a device computes in the time that compiling one more shape takes: 6 s of a core with
# 80 GFLOP/s (measured), 20 s of an accelerator with 50 TFLOP/s (assumed).
FLOPS_OF_COMPILATION_ON_CPU, FLOPS_OF_COMPILATION = 5e11, 1e15


class State(typing.NamedTuple):
    """Training state, with the best parameters, so that a resumed run still has them."""

    step: jax.Array
    params: dict
    opt_state: optax.OptState
    best_params: dict
    # float32: the mean metric by which `best_params` was selected, -inf before the first evaluation
    best_score: jax.Array


class Model:
    """A model with the head of a task on the devices: its definition, and its predictions."""

    def __init__(self, model: config.Model, mesh: config.Mesh, task: Task, vocabulary: Vocabulary):
        self.task, self.pad = task, vocabulary.pad
        self.mesh = sharding.make_mesh(mesh)
        definition = model, vocabulary.size, vocabulary.pad, task
        self.graph, self.init = heads.define(*definition)
        # The training step computes each device's rows by themselves.
        self.training_graph = heads.define(*definition, backends.mesh_target(self.mesh)).graph
        shapes = jax.eval_shape(self.init, keys.make_key(0))
        self.shapes = sharding.sharded_shapes(shapes, self.mesh)
        self._predict = jax.jit(
            heads.predict_function(self.graph, task),
            in_shardings=(
                sharding.shardings_of(shapes, self.mesh),
                NamedSharding(self.mesh, sharding.BATCH),
            ),
        )

    def shard(self, batch: Batch) -> Batch:
        """Puts a batch on the devices."""
        return Batch(*(sharding.shard_batch(part, self.mesh) for part in batch))

    def outputs(
        self,
        params: dict,
        dev: EvaluationSet,
        lengths: list[int],
        rows: int = EVALUATION_ROWS,
    ):
        """Computes the outputs of `Task.predict` for all examples, in their order.

        `lengths` are those of `batches.in_order`, `rows` those of a batch. Returns NumPy arrays.
        Outputs of slots are as wide as the longest batch.
        """
        devices = sharding.row_shards(self.mesh)
        rows = -(-rows // devices) * devices
        indices, outputs = [], []
        planned = progress.Bar(
            in_order(dev.features, lengths, rows, self.pad),
            total=-(-len(dev.features.ids) // rows),
            desc="evaluating",
            leave=False,
            delay=5.0,
        )
        for part, batch in planned:
            indices.append(part)
            outputs.append(self._predict(params, self.shard(batch)))
        order = np.argsort(np.concatenate(indices))

        def join(*arrays):
            rows = [array[: len(part)] for array, part in zip(arrays, indices, strict=True)]
            if rows[0].ndim == 2:  # a column for each class, or for each slot of the batch
                most = max(array.shape[1] for array in rows)
                rows = [np.pad(array, [(0, 0), (0, most - array.shape[1])]) for array in rows]
            return np.concatenate(rows)[order]

        return jax.tree.map(join, *jax.device_get(outputs))


def slots_of_compilation(mesh: jax.sharding.Mesh, model: config.Model) -> float:
    """Returns the slots that are trained on in the time that compiling one more shape takes."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    work = FLOPS_OF_COMPILATION_ON_CPU if is_cpu else FLOPS_OF_COMPILATION
    return work / flops.flops_per_token(model.encoder)


class Session:
    """Data and compiled steps that all runs of one task with one architecture share."""

    def __init__(
        self, experiment: config.Experiment, task: Task, data: TaskData, vocabulary: Vocabulary
    ):
        self.task, self.data, self.vocabulary = task, data, vocabulary
        first = next(iter(data.dev))  # the score is that of the first dev set
        metric = task.settings.metric or task.main_metric
        self.fingerprint = data.fingerprint()
        self.baseline = self.score(
            {name: task.constant_outputs(data.train, dev) for name, dev in data.dev.items()}
        )
        has_part = metric in self.baseline or not first  # as matched_accuracy
        self.main_metric = metric if has_part else f"{first}_{metric}"
        require_metric(task.name, self.main_metric, self.baseline)
        self.model = model = Model(experiment.model, experiment.mesh, task, vocabulary)
        optimizer = optimizers.create(experiment.optimizer)

        def create_state(params: dict) -> State:
            # The training step donates its state: no two fields may share a buffer.
            best_params, best_score = jax.tree.map(jnp.copy, params), jnp.float32(-jnp.inf)
            return State(jnp.int32(0), params, optimizer.init(params), best_params, best_score)

        shapes = jax.eval_shape(create_state, model.shapes)
        self.state_shapes = sharding.sharded_shapes(shapes, model.mesh)
        shardings = sharding.shardings_of(shapes, model.mesh)
        self.create_state = jax.jit(create_state, out_shardings=shardings)
        self.draw_model = jax.jit(model.init, out_shardings=shardings.params)
        # The step is compiled with seed 0. The seed of a run travels in its batches.
        self.train_step = step.make_train_step(
            heads.loss_function(model.training_graph, task),
            optimizer,
            self.state_shapes,
            0,
            experiment.run.accumulate,
            model.mesh,
        )
        self.compiled: dict[tuple[int, int], jax.stages.Compiled] = {}  # by rows and length
        self._monitors: dict[config.Objective, monitor.RankMonitor] = {}

    def outputs(self, params: dict, lengths: list[int]) -> dict:
        """Returns {name of the dev set: `Model.outputs` of its examples}."""
        return {
            name: self.model.outputs(params, dev, lengths) for name, dev in self.data.dev.items()
        }

    def score(self, outputs: dict) -> dict[str, float]:
        """Returns {metric: value} of the dev sets. A name such as "matched" begins its metrics."""
        return {
            f"{name}_{metric}" if name else metric: value
            for name, dev in self.data.dev.items()
            for metric, value in self.task.score(dev, outputs[name]).items()
        }

    def selection_score(self, values: dict[str, float]) -> np.float32:
        """Returns the value by which the best evaluation is selected, from its metrics."""
        names = self.task.selected_by
        if self.task.settings.metric or not names:
            names = (self.main_metric,)
        return np.float32(np.mean([values[name] for name in names]))

    def rank_monitor(self, experiment: config.Experiment) -> monitor.RankMonitor:
        """Returns what measures the ranks on the text of the first dev set.

        It is compiled once for each way of masking: encoders that share a session may have been
        pretrained with different masks.
        """
        if experiment.objective not in self._monitors:
            features = next(iter(self.data.dev.values())).features
            longest, count = int(features.lengths.max()), len(features.ids)
            self._monitors[experiment.objective] = monitor.RankMonitor(
                dataclasses.replace(
                    experiment, run=dataclasses.replace(experiment.run, seed=RANK_SEED)
                ),
                self.vocabulary.size,
                self.vocabulary.special,
                pack(features, longest, count, self.vocabulary.pad, 0).ids,
                self.model.mesh,
            )
        return self._monitors[experiment.objective]


class Run:
    """One cell with one seed: batches, training, results.

    Batches and steps depend on the settings and the data only, so that a resumed run has the same.
    """

    def __init__(
        self,
        session: Session,
        experiment: config.Experiment,
        encoder: InitialEncoder,
        workdir: Workdir,
    ):
        """Plans the run. `experiment` has one value of each hyper-parameter."""
        self.session, self.experiment = session, experiment
        self.encoder, self.workdir = encoder, workdir
        self._best_outputs: dict | None = None
        grid, data = experiment.finetune.grid, session.data
        self.max_length = InputFormat.of_run(experiment, session.vocabulary).length
        lengths = [data.train.lengths, *(dev.features.lengths for dev in data.dev.values())]
        self.lengths = choose_lengths(
            np.concatenate(lengths),
            self.max_length,
            slots_of_compilation(session.model.mesh, experiment.model) / grid.epochs,
        )
        pad, seed = session.vocabulary.pad, experiment.run.seed
        self.batches = Batches(data.train, self.lengths, grid.batch_size, pad, seed)
        self.total_steps = self.batches.per_epoch * grid.epochs
        warmup_steps = round(grid.warmup * self.total_steps)
        schedule = dataclasses.replace(
            experiment.optimizer, learning_rate=grid.learning_rate, warmup_steps=warmup_steps
        )
        self.learning_rates = optimizers.learning_rates(schedule, self.total_steps)

    @property
    def inputs(self) -> dict:
        """The content of inputs.json: what the run depends on beside its settings."""
        return {
            "start_step": self.encoder.step,
            "encoder": self.encoder.fingerprint,
            "data": self.session.fingerprint,
        }

    def train(self) -> Results:
        """Trains, from a checkpoint of `workdir.unfinished` if there is one. Writes the results.

        Returns:
            The results.

        Raises:
            Diverged: The loss or the gradient is not finite.
            SystemExit: A signal stopped the run (`loop.run`).
        """
        began = time.perf_counter()
        workdir, unfinished = self.workdir, self.workdir.unfinished
        resumed = checkpoint.restore_newest(unfinished, self.session.state_shapes)
        state = resumed.state if resumed else self.initial_state()
        first_step = int(state.step)
        # Nothing in the folder changes before the checkpoint is read.
        workdir.write_start(self.experiment, self.encoder.vocabulary)
        storage.write_json(workdir.inputs_file, self.inputs)
        open_logger = metrics.find_logger(self.experiment.run.log_to)
        writer = metrics.Writer(workdir, first_step, open_logger)
        checkpoints = checkpoint.Checkpoints(unfinished, keep=1)
        with loop.closing(writer, checkpoints):
            self._compile()
            if self.experiment.run.rank_every and not metrics.read(workdir):
                writer.write(0, self._measure_ranks(state.params))
            if not self._has_stalled():
                state = loop.run(self._job(), state, first_step, writer, checkpoints)
        results = self._finish(state)
        results.seconds = time.perf_counter() - began
        results.write(workdir.results_file)
        shutil.rmtree(unfinished.folder, ignore_errors=True)  # another part may remove it too
        return results

    def initial_state(self) -> State:
        """Returns the state before the first step: the encoder, and a head drawn with the seed."""
        key = keys.make_stream_key(self.experiment.run.seed, keys.INIT_STREAM)
        params = self.session.draw_model(key)
        if not self.encoder.is_random:
            params = self.encoder.load_into(params)
        return self.session.create_state(params)

    def _compile(self):
        """Compiles the training step for each length that is new, and says so."""
        compiled, rows = self.session.compiled, self.batches.batch_size
        new = [length for length in self.lengths if (rows, length) not in compiled]
        with progress.Bar(new, unit="length", leave=False) as bar:
            for number, length in enumerate(bar, start=1):
                bar.set_description(f"compiling length {length} ({number} of {len(new)})")
                batch = self.session.model.shard(self.batches.empty_batch(length))
                compiled[rows, length] = self.session.train_step.lower(
                    self.session.state_shapes, batch, self.learning_rates[0]
                ).compile()

    def _job(self) -> loop.Job:
        """Returns what the training loop runs."""
        session, run = self.session, self.experiment.run
        tokens = int(session.data.train.lengths.sum()) / self.batches.per_epoch

        def train_step(state: State, batch: Batch, rate: np.float32) -> tuple[State, dict]:
            return session.compiled[batch.ids.shape](state, batch, rate)

        def batch(number: int) -> Batch:
            return session.model.shard(self.batches.batch(number))

        return loop.Job(
            run=dataclasses.replace(
                run,
                train_steps=self.total_steps,
                eval_every=-(-self.batches.per_epoch // self.experiment.finetune.evaluations),
            ),
            train_step=train_step,
            batch=batch,
            tokens=tokens,
            flops=tokens * flops.flops_per_token(self.experiment.model.encoder),
            peak_flops=None,
            evaluate=self._evaluate,
            ranks=self._measure_ranks,
            learning_rates=self.learning_rates,
        )

    def _measure_ranks(self, params: dict) -> dict[str, int]:
        return self.session.rank_monitor(self.experiment)(params)

    def _evaluate(self, state: State) -> loop.Evaluation:
        """Evaluates the parameters of a state, and keeps the best ones and their outputs."""
        outputs = self.session.outputs(state.params, self.lengths)
        values = self.session.score(outputs)
        score = self.session.selection_score(values)
        if score > jax.device_get(state.best_score):
            self._best_outputs = outputs
            state = state._replace(
                best_params=jax.tree.map(jnp.copy, state.params),
                best_score=jax.device_put(score, state.best_score.sharding),
            )
        logged = {f"eval_{name}": value for name, value in values.items()}
        return loop.Evaluation(state, logged, ends=self._has_stalled(values))

    def _evaluations(self) -> list[dict]:
        """Returns the evaluations in metrics.jsonl: their step, epoch and metrics."""
        return [
            {"step": line["step"], "epoch": round(line["step"] / self.batches.per_epoch, 4)}
            | {name: line[f"eval_{name}"] for name in self.session.baseline}
            for line in metrics.read(self.workdir)
            if f"eval_{self.session.main_metric}" in line
        ]

    def _has_stalled(self, *new: dict) -> bool:
        """Whether `Finetune.patience` evaluations brought no gain. `new` are not logged yet."""
        patience = self.experiment.finetune.patience
        if patience is None:
            return False
        scores = [self.session.selection_score(values) for values in (*self._evaluations(), *new)]
        return bool(scores) and len(scores) - 1 - int(np.argmax(scores)) >= patience

    def _finish(self, state: State) -> Results:
        """Writes the best model and its predictions. Returns the results of the run."""
        session, task, grid = self.session, self.session.task, self.experiment.finetune.grid
        evaluations = self._evaluations()
        best = max(evaluations, key=session.selection_score)  # of equal ones the first
        checkpoints = checkpoint.Checkpoints(self.workdir, keep=1)
        checkpoints.save(best["step"], {"params": state.best_params})
        checkpoints.close()
        # A run that was resumed after its best evaluation has no outputs of it.
        outputs = self._best_outputs or session.outputs(state.best_params, self.lengths)
        first, written = next(iter(session.data.dev)), []
        report = task.class_report(session.data.dev[first], outputs[first])
        if report and report.shows_confusion:
            title = f"{task.name}: what is taken for what, {session.data.dev[first].size}"
            report.draw(self.workdir.folder / CONFUSION, title)
        for number, (name, dev) in enumerate(session.data.dev.items()):
            stem = f"predictions_{name}" if number else "predictions"
            written.append(task.write(dev, outputs[name], self.workdir.folder, stem).name)
        return Results(
            task=task.name,
            labels=list(task.labels),
            label_separator=self.experiment.finetune.custom.label_separator,
            has_stock_class=task.has_stock_class,
            init_from=self.encoder.name,
            seed=self.experiment.run.seed,
            cell=cell_of(grid),
            main_metric=session.main_metric,
            score=best[session.main_metric],
            baseline=session.baseline,
            best=best,
            last=evaluations[-1],
            evaluations=evaluations,
            classes=report,
            evaluated_on={name or "dev": dev.size for name, dev in session.data.dev.items()},
            train_examples=len(session.data.train.ids),
            max_length=self.max_length,
            padded_lengths=self.lengths,
            steps=int(state.step),
            planned_steps=self.total_steps,
            predictions=written,
            notes=task.notes,
        )


def cell_of(grid: config.Grid) -> dict:
    """Returns the hyper-parameters that tell one cell of the grid from another."""
    return {name: getattr(grid, name) for name in HYPERPARAMETERS}


def metric_line(name: str, *values: float) -> str:
    """Returns a line of a table of metrics, as text."""
    return f"  {name:<24}" + "".join(f"{value:>10.4f}" for value in values)


def describe_results(workdir: Workdir) -> str:
    """Returns metrics of the best and the last evaluation of a finished run, as text."""
    results = Results.of_run(workdir)
    best, last, baseline = results.best, results.last, results.baseline
    evaluated_on = ", ".join(results.evaluated_on.values())
    title = (
        f"{results.task}, {evaluated_on}: best of {len(results.evaluations)} evaluations "
        f"(epoch {best['epoch']:g}), last, and the majority baseline:"
    )
    lines = [metric_line(name, best[name], last[name], baseline[name]) for name in baseline]
    if results.steps < results.planned_steps:
        lines.append(
            f"ended after {results.steps:,} of {results.planned_steps:,} steps: "
            "the last evaluations brought no gain (Finetune.patience)"
        )
    if results.classes:
        lines += ["", results.classes.tables(), ""]
    predictions = ", ".join(str(workdir.folder / name) for name in results.predictions)
    return "\n".join([title, *lines, f"predictions: {predictions}"])
