"""Runs one pretraining: data, model, state, loop, in the order in which it happens."""

import functools
import typing

import jax

from maelm_jax import config, own_parts
from maelm_jax.analysis import monitor
from maelm_jax.data import batches, prepare, vocabularies
from maelm_jax.encoders import opened
from maelm_jax.model import masking
from maelm_jax.model.kernels import backends
from maelm_jax.pretraining import evaluation, start, summary
from maelm_jax.pretraining import objective as objectives
from maelm_jax.training import (
    attention_report,
    checkpoint,
    distributed,
    flops,
    kept_steps,
    loop,
    metrics,
    optimizers,
    profiling,
    run_rows,
    sharding,
    step,
)
from maelm_jax.training.workdir import Parent, Workdir


class OwnParts(typing.NamedTuple):
    """What the settings of a run name that is imported."""

    strategy: typing.Callable | None  # the function of Masking.strategy
    schedule: optimizers.OwnSchedule | None
    open_logger: metrics.OpenLogger


def load_own_parts(experiment: config.Experiment) -> OwnParts:
    """Imports what the settings name. These are the user's, and not those of a run that is read.

    Raises ConfigError if a function does not exist, or has other arguments.
    """
    masks, optimizer = experiment.objective.masking, experiment.optimizer
    strategy = schedule = None
    if masks.strategy:
        strategy = own_parts.load_function(
            "Masking.strategy",
            masks.strategy,
            masking.STRATEGY_ARGUMENTS,
            masks.strategy_parameters,
        )
    if config.names_own_code(optimizer.schedule):
        schedule = own_parts.load_function(
            "Optimizer.schedule",
            optimizer.schedule,
            optimizers.SCHEDULE_ARGUMENTS,
            optimizer.schedule_parameters,
        )
        optimizers.LearningRates(optimizer, experiment.run.train_steps, own=schedule)
    return OwnParts(strategy, schedule, metrics.find_logger(experiment.run.log_to))


def pretrain(
    workdir: Workdir,
    experiment: config.Experiment,
    parts: OwnParts,
    accept_new_data: bool,
    began: float,
    profiled_steps: int = 0,
):
    """Trains until `Run.train_steps`, on one process or as one of several.

    The caller holds the lock of the workdir, which may be in a bucket. Until everything that can be
    wrong input is checked, nothing in the workdir changes but the names of damaged checkpoints.
    `parts` are those of `load_own_parts`. `began` is time.perf_counter() at the start of the
    command. `profiled_steps` are traced by JAX's profiler.

    Raises:
        ConfigError: Settings, data or a checkpoint do not fit.
        RunError: The run cannot continue.
        SystemExit: A signal stopped the run (`loop.run`).
    """
    workdir.fetch(holds_lock=True)
    start.check_checkpoints(workdir)
    starting_point = start.find_starting_point(experiment, workdir)
    experiment = starting_point.experiment
    start.check_settings(workdir, experiment)

    # Mesh.
    mesh = sharding.make_mesh(experiment.mesh)
    sharding.check_mesh(experiment, mesh)
    attention = attention_report.describe_run(experiment, mesh)

    # Vocabulary.
    if not workdir.in_bucket:
        distributed.check_shared_folder(workdir.folder)
    with distributed.process_zero_first("vocabulary"):
        vocabulary = start.choose_vocabulary(workdir, starting_point)
    special = vocabulary.special

    # Model.
    target = backends.mesh_target(mesh)
    strategy = parts.strategy and masking.bind_strategy(
        parts.strategy,
        experiment.objective.masking,
        vocabulary.pieces,
        experiment.corpus.sequence_length,
    )
    objective = objectives.create(experiment, vocabulary.size, special, target, strategy)
    optimizer = optimizers.create(experiment.optimizer, experiment.compute.dtype)
    shapes = step.state_shapes(objective.init, optimizer, mesh)

    # Data. Rows are made from text once: a run with prepared rows needs no TensorFlow.
    rows = run_rows.choose_rows(workdir, experiment.corpus, vocabulary, accept_new_data)
    heldout = batches.read_heldout(rows.split("heldout"), rows.rates, experiment.run.eval_rows)
    baseline = objective.make_baseline(rows)
    kept = kept_steps.by_name(experiment.run, rows.words_per_row)

    # State.
    fresh = functools.partial(
        step.create_state, objective.init, optimizer, experiment.run.seed, mesh
    )
    initial = start.load_state(starting_point, workdir, shapes, fresh, vocabulary.size)
    if not initial.has_head:
        objective.set_initial_values(initial.state.params, baseline)
    parent = workdir.read_parent()  # of a run that has begun
    if starting_point.parent:
        rows_read = start.count_rows_read(starting_point.parent, experiment, rows)
        parent = starting_point.parent._replace(rows_read=rows_read)

    # Loop.
    train_step = step.make_train_step(
        objective.loss,
        optimizer,
        shapes,
        experiment.run.seed,
        experiment.run.accumulate,
        mesh,
    )
    evaluate = evaluation.make_evaluation(
        objective.evaluated(),
        heldout,
        baseline,
        shapes.params,
        experiment,
        mesh,
        special.pad,
        objective.left_to_right() if experiment.objective.causal_share else None,
    )
    ranks = monitor.RankMonitor(experiment, vocabulary.size, special, heldout, mesh)
    peak = flops.peak_flops()
    terms = flops.flops_terms(experiment, vocabulary.size)
    job = loop.Job(
        run=experiment.run,
        train_step=train_step,
        batch=make_batches(experiment, rows, mesh, parent.rows_read if parent else 0),
        learning_rates=optimizers.LearningRates(
            experiment.optimizer,
            experiment.run.train_steps,
            parent.learning_rate if parent else None,
            parts.schedule,
        ),
        tokens=rows.tokens_per_row * experiment.run.batch_size,
        flops=sum(terms.values()),
        peak_flops=peak,
        evaluate=evaluate,
        ranks=ranks,
        kept_steps=frozenset(kept.values()),
    )
    summary.print_start(experiment, shapes.params, mesh, special, attention)
    summary.print_passes(experiment.run, rows, kept)
    summary.print_cost(terms, peak)
    summary.print_baseline(baseline, heldout)
    if not jax.process_index():
        record_start(workdir, experiment, vocabulary, rows, initial.step, starting_point, parent)
    writer = metrics.Writer(workdir, initial.step, parts.open_logger)
    checkpoints = checkpoint.Checkpoints(
        workdir, keep_every=experiment.run.keep_every, keep_at=job.kept_steps
    )
    trace = profiling.StepTrace(workdir.profile_folder, initial.step, profiled_steps)
    with loop.closing(writer, checkpoints):
        loop.run(job, initial.state, initial.step, writer, checkpoints, trace)
    # JAX ends the others if they wait for more than SHUTDOWN_SECONDS at their exit.
    with distributed.process_zero_first("result is reported"):
        if not jax.process_index():
            summary.report_result(workdir, experiment, began, baseline)


def make_batches(
    experiment: config.Experiment,
    rows: prepare.Prepared,
    mesh: jax.sharding.Mesh,
    first_example: int = 0,
) -> typing.Callable[[int], jax.Array]:
    """Returns the function that reads the batch of a step, counted from 0, onto the devices.

    Step 0 begins with the example of number `first_example`.
    """
    run = experiment.run
    reader = batches.Batches(
        rows.split("train"),
        rows.rates,
        run.batch_size,
        run.seed,
        sharding.local_row_indices(run.batch_size, mesh),
        experiment.corpus.shuffle_shards,
        first_example,
    )

    def batch(number: int) -> jax.Array:
        return sharding.shard_batch(reader.batch(number), mesh, run.batch_size)

    return batch


def record_start(
    workdir: Workdir,
    experiment: config.Experiment,
    vocabulary: vocabularies.Vocabulary,
    rows: prepare.Prepared,
    done: int,
    starting_point: start.StartingPoint,
    parent: Parent | None,
):
    """Writes the records of this start into the workdir, on process 0.

    Before this start the run has `done` steps. If there are none, it begins from `starting_point`.
    """
    changes = workdir.changes_since_last_start(experiment)
    for change in changes:
        print(f"changed since the last start: {change}")
    workdir.metrics_file.touch()  # before config.gin: see start.check_checkpoints
    workdir.write_start(experiment, vocabulary, done, changes)
    run_rows.write(workdir, rows, done)
    if not done:
        workdir.origin_file.unlink(missing_ok=True)  # of a start that saved nothing
        encoder = starting_point.encoder
        if parent:
            workdir.write_parent(parent)
            encoder = opened.find_workdir(parent.workdir, parent.step)
        if encoder:
            encoder.write_origin(workdir)
    workdir.send()
