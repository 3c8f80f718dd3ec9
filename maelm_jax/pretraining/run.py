"""Runs one pretraining: prepares rows, model and state, runs the loop, prints the summary."""

import collections.abc
import functools
import typing

import jax
import numpy as np
import optax

from maelm_jax import config, storage
from maelm_jax.analysis import monitor
from maelm_jax.data import batches, vocabularies, vocabulary_training
from maelm_jax.encoders import source
from maelm_jax.model import maelm
from maelm_jax.pretraining import dry_run, evaluation, mask_rate, start, summary, unigram
from maelm_jax.training import (
    attention_report,
    checkpoint,
    coordination,
    loop,
    metrics,
    optimizers,
    phases,
    resume,
    row_record,
    run_record,
    run_rows,
    sharding,
    step,
    step_log,
)


class Options(typing.NamedTuple):
    """Options of the command line that are not settings."""

    workdir: str
    dry_run: bool
    accept_new_data: bool
    began: float  # time.perf_counter() at the start of the command


class Setup(typing.NamedTuple):
    """Parts of a run that exist before its weights."""

    experiment: config.Experiment
    mesh: jax.sharding.Mesh
    vocabulary: vocabularies.Vocabulary
    rows: row_record.RunRows
    shapes: step.State  # shapes and shardings of the state
    init: collections.abc.Callable  # key -> parameters
    optimizer: optax.GradientTransformation
    # settings -> sums of the loss over a batch
    loss_of: collections.abc.Callable[[config.Experiment], step.LossFn]

    def split(self, name: str) -> dict:
        """Rows of a split ("train" or "heldout") by source."""
        return {source_name: splits[name] for source_name, splits in self.rows.stores.items()}

    @property
    def never_targets(self) -> tuple[int, ...]:
        """Ids that are never predicted."""
        return unigram.never_targets(self.experiment.masking, self.vocabulary.special)


def pretrain(
    options: Options, experiment: config.Experiment, encoder_source: source.EncoderSource | None
) -> int:
    """Trains until `Run.train_steps`, on one process or as one of several.

    Args:
        options: Flags of the command.
        experiment: The settings, including those adopted from `Run.init_from`.
        encoder_source: Source of the weights if the workdir has no checkpoint. None: fresh weights.

    Returns:
        The exit status: 0, or 143 after SIGTERM.

    Raises:
        ConfigError: Settings, data or a checkpoint do not fit. The records are unchanged.
        RunError: The run cannot continue.
    """
    before = resume.read(options.workdir)
    mesh = sharding.make_mesh(experiment.mesh)
    sharding.check_mesh(experiment, mesh)
    if options.dry_run:
        dry_run.show(dry_run.with_size_of_vocabulary(experiment, options.workdir, before), mesh)
        return 0

    attention = attention_report.of_run(experiment, mesh)
    setup = set_up(options, experiment, encoder_source, mesh)
    special = setup.vocabulary.special
    heldout_rows = batches.heldout(
        setup.split("heldout"), setup.rows.rates, experiment.run.eval_rows
    )
    for line in mask_rate.of_run(experiment, heldout_rows, special):
        print(line)
    ranks = monitor.RankMonitor(experiment, setup.vocabulary.size, special, heldout_rows, mesh)
    token_nll = unigram.unigram_nll(setup.rows, setup.vocabulary.size, setup.never_targets)
    heldout = evaluation.make_heldout_set(
        experiment.evaluated, heldout_rows, token_nll, special, sharding.row_shards(mesh)
    )
    costs = summary.step_costs(experiment, setup.vocabulary.size)
    summary.print_expectations(costs, heldout.unigram)
    checkpoints = checkpoint.Checkpoints(
        options.workdir, experiment.run.keep_checkpoints, experiment.run.keep_every
    )
    starting = load_state(setup, encoder_source, before, checkpoints, token_nll)
    summary.print_missing_stock_class(experiment, special)
    for line in attention:
        print(line)
    began_with_head = starting.has_head and not starting.step
    summary.print_size(experiment, setup.shapes.params, mesh, began_with_head)
    if not jax.process_index():
        record_start(options, setup, before, starting.step, encoder_source)

    job = make_job(setup, costs, heldout, ranks, starting.state)
    status = train(options.workdir, job, starting, checkpoints)
    if status == 0 and not jax.process_index():
        summary.print_result(options.workdir, experiment, options.began, ranks, heldout.unigram)
    return status


def set_up(
    options: Options,
    experiment: config.Experiment,
    encoder_source: source.EncoderSource | None,
    mesh: jax.sharding.Mesh,
) -> Setup:
    """Loads or makes the vocabulary and the rows, and creates the model.

    Rows are made from text once. A run with prepared rows needs neither TensorFlow nor seqio.
    """
    if not storage.in_bucket(options.workdir):
        coordination.check_shared_folder(options.workdir, "workdir")
    recorded = storage.local_path(options.workdir) / "vocabulary"  # exists if the run resumes
    with coordination.process_zero_first("vocabulary"):
        if vocabularies.files_in(recorded):
            vocabulary = vocabularies.load(recorded)
        else:
            vocabulary = vocabulary_training.vocabulary_for(
                experiment.vocabulary, experiment.corpus
            )
    if encoder_source:
        encoder_source.check_vocabulary(vocabulary)
    special = vocabulary.special
    graph, init = maelm.create(experiment.model, vocabulary.size, special)
    loss_of = functools.partial(step.pretraining_loss, graph=graph, special=special)
    updates = optimizers.create(experiment.optimizer, experiment.run.train_steps)
    # Before the rows, which can take hours: the mesh may not divide a parameter.
    shapes = step.state_shapes(init, updates, mesh, experiment.optimizer.ema_decay)
    chosen_rows = run_rows.choose_rows(
        options.workdir, experiment.corpus, vocabulary, options.accept_new_data
    )
    return Setup(experiment, mesh, vocabulary, chosen_rows, shapes, init, updates, loss_of)


def load_state(
    setup: Setup,
    encoder_source: source.EncoderSource | None,
    before: resume.Before | None,
    checkpoints: checkpoint.Checkpoints,
    token_nll: np.ndarray,
) -> start.StartingState:
    """Loads the state that the loop starts with: of a checkpoint, a source, or fresh weights.

    Args:
        setup: The parts of the run.
        encoder_source: Source of the weights if there is no checkpoint. None: fresh weights.
        before: How the workdir was last run, or None for a new workdir.
        checkpoints: Checkpoints of the workdir.
        token_nll: Unigram negative log-likelihood of each id, for the bias of a fresh head.
    """
    experiment = setup.experiment
    if resumed := start.resumed(setup.shapes, experiment, before, checkpoints):
        return resumed
    # Asynchronous: the devices draw the weights while the host compiles the step.
    fresh = step.create_state(
        setup.init, setup.optimizer, experiment.run.seed, setup.mesh, experiment.optimizer.ema_decay
    )
    starting = start.begun(
        fresh, experiment, setup.vocabulary.size, encoder_source, checkpoints.workdir
    )
    if experiment.model.unigram_bias and not starting.has_head:
        unigram.set_head_bias(starting.state.params["head"], token_nll, setup.never_targets)
    return starting


def record_start(
    options: Options,
    setup: Setup,
    before: resume.Before | None,
    done: int,
    encoder_source: source.EncoderSource | None,
):
    """Records this start.

    Args:
        options: Flags of the command.
        setup: The parts of the run.
        before: How the workdir was last run, or None for a new workdir.
        done: The steps of the run before this start.
        encoder_source: What the run starts from if `done` is 0. None: random weights.
    """
    if before:
        changes = config.differences(before.experiment, setup.experiment)
        resume.record(options.workdir, done, changes)
    run_record.write(storage.local_path(options.workdir), setup.experiment, setup.vocabulary)
    row_record.write(options.workdir, setup.rows, done)
    if encoder_source:
        source.write_origin(storage.local_path(options.workdir), encoder_source.origin)
    elif not done:
        storage.remove(options.workdir, source.ORIGIN)
    storage.send(options.workdir)


def make_job(
    setup: Setup,
    costs: list[summary.StepCost],
    heldout: evaluation.HeldoutSet,
    ranks: monitor.RankMonitor,
    state: step.State,
) -> loop.Job:
    """Assembles the loop's job: compiled steps, batches, evaluation, measurement of ranks."""
    experiment, mesh, run = setup.experiment, setup.mesh, setup.experiment.run
    schedule = optimizers.schedule(experiment.optimizer, run.train_steps)
    loss = setup.loss_of(experiment.evaluated)
    return loop.Job(
        run=run,
        phases=tuple(_loop_phase(setup, cost, state) for cost in costs),
        evaluate=evaluation.make_evaluation(loss, heldout, state, run.seed, mesh),
        ranks=ranks,
        learning_rates=np.asarray(schedule(np.arange(run.train_steps))),
    )


def _batches(setup: Setup, phase: phases.Phase) -> collections.abc.Callable[[int], jax.Array]:
    """Returns the function that reads the batch of a step, counted from 0, onto the devices."""
    run, window = phase.experiment.run, phase.experiment.corpus.shuffle_shards
    row_indices = sharding.local_row_indices(run.batch_size, setup.mesh)
    reader = batches.Batches(
        setup.split("train"),
        setup.rows.rates,
        run.batch_size,
        run.seed,
        row_indices,
        window,
        phase.first_row,
    )

    def batch(number: int) -> jax.Array:
        rows = reader.batch(number - phase.start)
        return sharding.shard_batch(rows, setup.mesh, run.batch_size)

    return batch


def _loop_phase(setup: Setup, cost: summary.StepCost, state: step.State) -> loop.CompiledPhase:
    """Returns the batches of a phase and its training step, which its first call compiles."""
    experiment = cost.phase.experiment
    run = experiment.run
    train_step = step.make_train_step(
        setup.loss_of(experiment),
        setup.optimizer,
        state,
        run.seed,
        run.accumulate,
        setup.mesh,
        experiment.optimizer.ema_decay,
    )
    tokens = float(run.batch_size * experiment.corpus.sequence_length)
    work = step_log.StepWork(tokens, sum(cost.terms.values()), cost.peak.flops_per_second)
    return loop.CompiledPhase(cost.phase.start, train_step, work, _batches(setup, cost.phase))


def train(
    workdir: str, job: loop.Job, starting: start.StartingState, checkpoints: checkpoint.Checkpoints
) -> int:
    """Runs the loop and returns the exit status.

    A finished run whose last step has no evaluation is evaluated first.
    """
    writer = metrics.Writer(workdir, starting.step)
    finished = starting.step == job.run.train_steps
    # Of a workdir in a bucket, process 0 alone has metrics.jsonl.
    if finished and not coordination.broadcast_flag(
        "last step is evaluated", _is_evaluated(workdir, starting.step)
    ):
        writer.write(starting.step, job.evaluate(starting.state).values)
    with loop.closing(writer, checkpoints):
        state, status = loop.run(job, starting.state, starting.step, writer, checkpoints)
    if status == loop.STOPPED:
        print(f"stopped by SIGTERM at step {int(state.step)}; the same command goes on from there")
    return status


def _is_evaluated(workdir: str, last_step: int) -> bool:
    """Returns whether metrics.jsonl has an evaluation of the last step."""
    lines = metrics.read(workdir)
    return any(line["step"] == last_step and "eval_loss" in line for line in lines)
