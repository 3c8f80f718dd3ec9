"""Runs one pretraining: prepares rows, model and state, runs the loop, prints the summary."""

import collections.abc
import time
import typing

import jax
import numpy as np
import optax

from maelm_jax import config, storage
from maelm_jax.analysis import monitor
from maelm_jax.data import batches, vocabulary_training
from maelm_jax.data import vocabulary as vocabularies
from maelm_jax.encoders import source
from maelm_jax.model import maelm
from maelm_jax.pretraining import dry_run, mask_rate, start, unigram
from maelm_jax.training import (
    checkpoint,
    coordination,
    distributed,
    loop,
    metrics,
    optimizer,
    resume,
    row_record,
    run_record,
    run_rows,
    sharding,
    step,
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
    init: collections.abc.Callable  # key -> parameters
    updates: optax.GradientTransformation
    loss: step.LossFn

    def split(self, name: str) -> dict:
        """Rows of a split ("train" or "heldout") by source."""
        return {source_name: splits[name] for source_name, splits in self.rows.stores.items()}


class StepCost(typing.NamedTuple):
    """Cost of a step and peak performance of the devices."""

    flops: dict[str, float]  # model FLOPs by term
    peak: metrics.Peak


class HeldoutSet(typing.NamedTuple):
    """Held-out rows in batches for evaluation."""

    batches: np.ndarray  # int32 [batches, rows, L]; rows of padding fill the last batch
    unigram: float  # cross-entropy of the unigram distribution on their targets, in nats


def pretrain(
    options: Options, experiment: config.Experiment, encoder_source: source.Pretrained | None
) -> int:
    """Trains until `Run.train_steps`, on one process or as one of several.

    Args:
        options: Flags of the command.
        experiment: The settings, including those adopted from `Run.init_from`.
        encoder_source: Source of the weights if the workdir has no checkpoint. None: fresh weights.

    Returns:
        The exit status: 0, or 143 after SIGTERM.

    Raises:
        ConfigError: Settings, data or a checkpoint do not fit. The workdir is unchanged.
        RunError: The run cannot continue.
    """
    distributed.check_same_start(experiment, options.workdir)
    before = resume.read(options.workdir)
    mesh = sharding.make_mesh(experiment.mesh)
    sharding.check_mesh(experiment, mesh)
    if options.dry_run:
        dry_run.show(experiment, mesh)
        return 0

    setup = set_up(options, experiment, encoder_source, mesh)
    special = setup.vocabulary.special
    heldout_rows = batches.heldout(
        setup.split("heldout"), setup.rows.rates, experiment.run.eval_rows
    )
    print(mask_rate.of_rows(experiment.masking, heldout_rows, special))
    ranks = monitor.RankMonitor(experiment, setup.vocabulary.size, special, heldout_rows, mesh)
    token_nll = unigram.unigram_nll(setup.rows, setup.vocabulary.size, special)
    heldout = make_heldout_set(experiment, heldout_rows, token_nll, special)
    cost = step_cost(experiment, setup.vocabulary.size)
    print_expectations(cost, heldout)

    checkpoints = checkpoint.Checkpoints(
        options.workdir, experiment.run.keep_checkpoints, experiment.run.keep_every
    )
    # Nothing waits for the fresh weights: the devices draw them while the step is compiled.
    fresh = step.create_state(setup.init, setup.updates, experiment.run.seed, mesh)
    first = start.starting_state(
        fresh, experiment, setup.vocabulary.size, encoder_source, before, checkpoints
    )
    if experiment.model.unigram_bias and not first.has_head:
        unigram.set_head_bias(first.state.params["head"], token_nll, special)
    print_size(experiment, first.state.params, mesh)
    if not jax.process_index():
        record_start(options, setup, before, first.step)

    job = make_job(setup, cost, heldout, ranks, first.state)
    status = train(options.workdir, job, first, checkpoints)
    if status == 0 and not jax.process_index():
        summarise(options, ranks, heldout.unigram)
    return status


def set_up(
    options: Options,
    experiment: config.Experiment,
    encoder_source: source.Pretrained | None,
    mesh: jax.sharding.Mesh,
) -> Setup:
    """Loads or makes the vocabulary and the rows, and creates the model.

    Rows are made from text once. A run with prepared rows needs neither TensorFlow nor seqio.
    """
    if not storage.in_bucket(options.workdir):
        coordination.check_shared_folder(options.workdir, "workdir")
    own_folder = storage.local_path(options.workdir) / "vocabulary"  # exists if the run resumes
    with coordination.process_zero_first("vocabulary"):
        if vocabularies.files_in(own_folder):
            vocabulary = vocabularies.load(own_folder)
        else:
            vocabulary = vocabulary_training.vocabulary_for(
                experiment.vocabulary, experiment.corpus
            )
    if encoder_source:
        encoder_source.check_vocabulary(vocabulary)
    chosen_rows = run_rows.choose_rows(
        options.workdir, experiment.corpus, vocabulary, options.accept_new_data
    )
    special = vocabulary.special
    graph, init = maelm.create(experiment.model, vocabulary.size, special)
    updates = optimizer.create(experiment.optimizer, experiment.run.train_steps)
    loss = step.pretraining_loss(experiment, graph, special)
    return Setup(experiment, mesh, vocabulary, chosen_rows, init, updates, loss)


def make_heldout_set(
    experiment: config.Experiment,
    heldout: np.ndarray,
    token_nll: np.ndarray,
    special: config.SpecialIds,
) -> HeldoutSet:
    """Cuts held-out rows [R, L] into batches of the size of a training microbatch."""
    size = experiment.run.batch_size // experiment.run.accumulate
    length = heldout.shape[1]
    # Rows of padding have no targets, so they do not change the loss.
    padding = np.full((-len(heldout) % size, length), special.pad, heldout.dtype)
    parts = np.concatenate([heldout, padding]).reshape(-1, size, length)
    return HeldoutSet(parts, unigram.cross_entropy(experiment, token_nll, parts, special))


def record_start(options: Options, setup: Setup, before: resume.Before | None, done: int):
    """Records settings, vocabulary and rows of this start: the first change to the workdir."""
    if before:
        changes = resume.changes(before.experiment, setup.experiment)
        resume.record(options.workdir, done, changes)
    run_record.write(storage.local_path(options.workdir), setup.experiment, setup.vocabulary)
    row_record.write(options.workdir, setup.rows, done)
    storage.send(options.workdir)


def make_job(
    setup: Setup,
    cost: StepCost,
    heldout: HeldoutSet,
    ranks: monitor.RankMonitor,
    state: step.State,
) -> loop.Job:
    """Assembles the loop's job: compiled step, batches, evaluation, measurement of ranks."""
    experiment, mesh, run = setup.experiment, setup.mesh, setup.experiment.run
    row_indices = sharding.local_row_indices(run.batch_size, mesh)
    training_rows = batches.Batches(
        setup.split("train"), setup.rows.rates, run.batch_size, run.seed, row_indices
    )
    schedule = optimizer.schedule(experiment.optimizer, run.train_steps)
    return loop.Job(
        run=run,
        train_step=step.make_train_step(
            setup.loss, setup.updates, state, run.seed, run.accumulate, mesh
        ),
        batch=lambda number: sharding.shard_batch(
            training_rows.batch(number), mesh, run.batch_size
        ),
        evaluate=make_evaluation(setup, heldout, state),
        learning_rates=np.asarray(schedule(np.arange(run.train_steps))),
        tokens_per_step=float(run.batch_size * experiment.corpus.sequence_length),
        flops_per_step=sum(cost.flops.values()),
        peak_flops=cost.peak.flops_per_second,
        measures=(loop.Measure(run.rank_every, ranks),),
    )


def make_evaluation(
    setup: Setup, heldout: HeldoutSet, state: step.State
) -> collections.abc.Callable:
    """Makes a function state -> Evaluation with eval_loss, eval_accuracy and unigram."""
    mesh, size = setup.mesh, heldout.batches.shape[1]
    eval_step = step.make_eval_step(setup.loss, state, setup.experiment.run.seed, mesh)
    row_indices = sharding.local_row_indices(size, mesh)

    def evaluate(state: step.State) -> loop.Evaluation:
        parts = [sharding.shard_batch(part[row_indices], mesh, size) for part in heldout.batches]
        sums = [eval_step(state.params, part, np.uint32(i * size)) for i, part in enumerate(parts)]
        loss, correct, count = np.sum(
            [jax.device_get(part) for part in sums], axis=0, dtype=np.float64
        )
        values = {"eval_loss": loss / count, "eval_accuracy": correct / count}
        return loop.Evaluation(state, values | {"unigram": heldout.unigram})

    return evaluate


def train(
    workdir: str, job: loop.Job, first: start.StartingState, checkpoints: checkpoint.Checkpoints
) -> int:
    """Runs the loop; returns the exit status. Evaluates a finished run that lacks it."""
    writer = metrics.Writer(workdir, first.step)
    if first.step == job.run.train_steps and not _is_evaluated(workdir, first.step):
        writer.write(first.step, job.evaluate(first.state).values)
    try:
        state, status = loop.run(job, first.state, first.step, writer, checkpoints)
    finally:
        writer.close()
        checkpoints.close()
    if status == loop.STOPPED:
        print(f"stopped by SIGTERM at step {int(state.step)}; the same command goes on from there")
    return status


def _is_evaluated(workdir: str, last_step: int) -> bool:
    """Whether metrics.jsonl has an evaluation of the last step."""
    lines = metrics.read(workdir)
    return any(line["step"] == last_step and "eval_loss" in line for line in lines)


def step_cost(experiment: config.Experiment, vocabulary_size: int) -> StepCost:
    """FLOPs of a step, and the devices' peak: from the data sheet or, if unknown, measured."""
    flops = metrics.flops_terms(experiment, vocabulary_size)
    return StepCost(flops, metrics.peak_flops(experiment.model.dtype))


def print_expectations(cost: StepCost, heldout: HeldoutSet):
    """Prints the model FLOPs, the peak and the unigram cross-entropy, the baselines of a run."""
    listed = " + ".join(f"{value:.3g} {name}" for name, value in cost.flops.items() if value)
    print(f"model FLOPs a step: {sum(cost.flops.values()):.3g} = {listed}")
    print(metrics.describe_peak(cost.peak))
    print(
        f"unigram cross-entropy of the held-out targets: {heldout.unigram:.4f} nats; "
        "an encoder that has learned something is below it"
    )


def print_size(experiment: config.Experiment, params: dict, mesh: jax.sharding.Mesh):
    """Prints the number of parameters, the steps, the tokens of a step and the mesh."""
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    run = experiment.run
    tokens = run.batch_size * experiment.corpus.sequence_length
    print(
        f"{count:,} parameters; {run.train_steps:,} steps of {tokens:,} tokens; mesh "
        f"{dict(mesh.shape)}",
        flush=True,
    )


def summarise(options: Options, ranks: monitor.RankMonitor, unigram_loss: float):
    """Prints the result of a finished run and draws its loss curve."""
    seconds = time.perf_counter() - options.began
    print(ranks.cost(seconds))
    last = [line for line in metrics.read(options.workdir) if "eval_loss" in line][-1]
    picture = metrics.plot(options.workdir, unigram_loss)
    storage.send(options.workdir)
    print(
        f"done: step {last['step']}, held-out loss {last['eval_loss']:.4f} nats, "
        f"{unigram_loss - last['eval_loss']:.2f} below the unigram cross-entropy "
        f"{unigram_loss:.4f}; "
        f"accuracy {last['eval_accuracy']:.3f}; {seconds:.0f} s in all\nloss curve: {picture}"
    )
