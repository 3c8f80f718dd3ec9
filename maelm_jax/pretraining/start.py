"""Decides what a run starts from. The order is important.

1. the newest whole checkpoint of its workdir,
2. the checkpoint of another run, with the state of the optimiser (`Run.continue_from`),
3. the weights of an encoder (`Run.init_from`),
4. fresh weights.
"""

import collections.abc
import dataclasses
import math
import typing

import jax
import numpy as np

from maelm_jax import config
from maelm_jax.data import prepare, vocabularies, vocabulary_training
from maelm_jax.encoders import adoption, opened
from maelm_jax.training import checkpoint, metrics, optimizers, run_rows, step
from maelm_jax.training.workdir import Kind, Parent, Workdir


class StartingPoint(typing.NamedTuple):
    """The settings of a run, and what it starts from if its workdir has no checkpoint.

    At most one of `encoder` and `parent` is set. Both are None for fresh weights, and for a run
    that has a checkpoint.
    """

    experiment: config.Experiment
    encoder: opened.OpenedModel | None = None
    parent: Parent | None = None


class StartingState(typing.NamedTuple):
    """State that the training loop starts with."""

    state: step.State
    step: int = 0  # optimiser steps of this run that produced the state
    has_head: bool = False  # whether the prediction head is trained


def check_settings(workdir: Workdir, experiment: config.Experiment):
    """Raises ConfigError if a run in the workdir has other settings than `experiment`.

    The message has the differences, apart from those of free settings (see `config.differences`).
    """
    recorded = workdir.read_settings()
    if changes := recorded and config.differences(recorded, experiment):
        remedy = "" if checkpoint.complete_steps(workdir) else "remove it if it is not needed, "
        raise config.ConfigError(
            f"{workdir} holds a run with other settings ({'; '.join(changes)}): {remedy}"
            "give another --workdir, or the same settings"
        )


def check_checkpoints(workdir: Workdir):
    """Raises ConfigError if the run had checkpoints or steps, and none of them is there.

    A run makes metrics.jsonl before config.gin. A copy of it in part may lack both checkpoints and
    metrics.jsonl, and would begin anew. Also raises ConfigError if metrics.jsonl is damaged.
    """
    lines = metrics.read(workdir)
    if checkpoint.complete_steps(workdir):
        return
    if workdir.settings_file.exists() and not workdir.metrics_file.exists():
        raise config.ConfigError(
            f"{workdir} has the settings of a run, but neither metrics.jsonl nor a checkpoint: was "
            "it copied in part? Copy all of it, or give another --workdir to begin again"
        )
    if saved := [line["checkpoint"] for line in lines if line.get("checkpoint")]:
        raise config.ConfigError(
            f"{workdir.checkpoints} has no checkpoint any more, and the run had one of "
            f"step {saved[-1]}. Put it back (is its disk mounted?), or give another --workdir to "
            "begin again"
        )


def find_starting_point(experiment: config.Experiment, workdir: Workdir) -> StartingPoint:
    """Finds what a run starts from, and takes over the settings of the encoder of `Run.init_from`.

    A run that has a checkpoint does not need its source any more: what it took over stands in the
    config.gin of the workdir. The source may be gone, or be another encoder by now. Raises
    ConfigError if there is no such source, or if it does not fit the settings.
    """
    run = experiment.run
    if checkpoint.complete_steps(workdir):
        if run.init_from:
            experiment = _with_recorded_encoder(experiment, workdir)
        return StartingPoint(experiment)
    if run.continue_from:
        return StartingPoint(experiment, parent=find_parent(experiment))
    if run.init_from:
        return _adopt_encoder(experiment)
    return StartingPoint(experiment)


def _adopt_encoder(experiment: config.Experiment) -> StartingPoint:
    """Finds the encoder of `Run.init_from` and takes over its settings."""
    path = experiment.run.init_from
    encoder = opened.find_model(path)
    if encoder.vocabulary_path is None and experiment.vocabulary.file is None:
        raise config.ConfigError(
            f"Run.init_from={path} has no vocabulary, and a new one would have other ids than its "
            "weights: name its file with --gin.Vocabulary.file"
        )
    adopted = adoption.adopt_settings(experiment, encoder)
    if adopted.changes:
        print(f"taken over from {path}: {'; '.join(adopted.changes)}")
    return StartingPoint(adopted.experiment, encoder=encoder)


def choose_vocabulary(workdir: Workdir, starting_point: StartingPoint) -> vocabularies.Vocabulary:
    """Loads the vocabulary of the run or of the run that it goes on from, else makes it.

    Raises:
        ConfigError: It is damaged, or is not the vocabulary of the encoder of `Run.init_from`.
    """
    experiment, encoder, parent = starting_point
    if workdir.has_vocabulary:
        vocabulary = workdir.load_vocabulary()
    elif parent:
        vocabulary = parent.workdir.load_vocabulary()
    else:
        vocabulary = vocabulary_training.vocabulary_for(experiment.vocabulary, experiment.corpus)
    if encoder:
        encoder.check_vocabulary(vocabulary)
    return vocabulary


def _with_recorded_encoder(experiment: config.Experiment, workdir: Workdir) -> config.Experiment:
    """Returns the settings with what the workdir records of the encoder that the run began from.

    That is the encoder, the decoder if it came with it, and the vocabulary unless one is named.
    """
    recorded = workdir.read_settings()
    if recorded.run.init_from != experiment.run.init_from:
        raise config.ConfigError(
            f"{workdir} holds a run with Run.init_from={recorded.run.init_from}, not "
            f"{experiment.run.init_from}: give another --workdir"
        )
    encoder, decoder = dataclasses.asdict(recorded.encoder), experiment.decoder
    if workdir.read_origin().get("has_decoder"):
        decoder = recorded.decoder
    elif decoder and recorded.encoder.positions == "rotary":  # which has no relative biases
        decoder = dataclasses.replace(decoder, relative_bias=False)
    file = experiment.vocabulary.file or recorded.vocabulary.file
    return dataclasses.replace(
        experiment,
        encoder=config.Encoder(**adoption.keep_raised(encoder, experiment.encoder)),
        decoder=decoder,
        vocabulary=dataclasses.replace(experiment.vocabulary, file=file),
    )


def find_parent(experiment: config.Experiment) -> Parent:
    """Finds the checkpoint of `Run.continue_from`, and checks that this run can go on from it.

    Raises ConfigError if there is no such checkpoint, it is damaged, or another model was trained.
    """
    name = experiment.run.continue_from
    workdir, wanted = checkpoint.split_name(name)
    workdir.fetch()
    _require_pretraining(workdir, wanted, name)
    step_number = checkpoint.pick_step(workdir, wanted)
    theirs, before = workdir.read_settings(), workdir.read_parent()
    changes = _changes_from(theirs, experiment, workdir)
    logged = [line for line in metrics.read(workdir) if line["step"] <= step_number]
    last = next((line for line in logged[::-1] if "learning_rate" in line), None)
    if config.names_own_code(theirs.optimizer.schedule):
        # What the settings of a run name is not imported where they are read.
        rate = last["learning_rate"] if last else 0.0
    else:
        rates = optimizers.LearningRates(
            theirs.optimizer, theirs.run.train_steps, before and before.learning_rate
        )
        rate = float(rates[step_number])
        if last and not math.isclose(
            last["learning_rate"], float(rates[last["step"] - 1]), rel_tol=1e-5, abs_tol=1e-12
        ):
            rate = last["learning_rate"]  # Run.train_steps was another one then
    _check_learning_rate(theirs.optimizer, experiment.optimizer, rate, name, step_number)
    _require_whole_state(workdir, step_number, name)
    rows_read = step_number * theirs.run.batch_size + (before.rows_read if before else 0)
    tokens = workdir.trained_tokens(step_number)
    return Parent(workdir, step_number, tokens, rate, rows_read, changes)


def _require_pretraining(workdir: Workdir, wanted: int | None, name: str):
    """Raises ConfigError unless `name` is a run of pretraining, with a step if it still runs."""
    workdir.require_run("Run.continue_from: ")
    if workdir.kind is Kind.FINETUNED:
        raise config.ConfigError(f"{workdir} is a fine-tuned run: continue a run of pretraining")
    if wanted is None and workdir.is_running:
        steps = ", ".join(map(str, checkpoint.all_steps(workdir)))
        raise config.ConfigError(
            f"Run.continue_from={name} is still running. Wait, or name a checkpoint that it has "
            f"written, as {workdir}@STEP: {steps}"
        )


def _require_whole_state(workdir: Workdir, step_number: int, name: str):
    """Raises ConfigError if a checkpoint is damaged, or has no state of the optimiser."""
    checkpoint.verify(workdir.checkpoints / str(step_number))
    if not checkpoint.has_optimizer_state(workdir, step_number):
        raise config.ConfigError(
            f"Run.continue_from={name}: its checkpoint has no state of the optimiser (did merge "
            f"write it?). Begin a new one with Run.init_from={workdir}"
        )


def _check_learning_rate(
    theirs: config.Optimizer, ours: config.Optimizer, rate: float, name: str, step_number: int
):
    """Raises ConfigError if a run cannot begin at `rate`, that of its parent at `step_number`."""
    if ours.schedule == "decay" and rate == 0:
        raise config.ConfigError(
            f"Run.continue_from={name}: its learning rate is 0 after step {step_number}, so "
            "nothing is left to decay. Name a checkpoint before its decay, as WORKDIR@STEP"
        )
    if rate:
        _check_muon(theirs, ours, name)


def _check_muon(theirs: config.Optimizer, ours: config.Optimizer, name: str):
    """Raises ConfigError if Muon's learning rate would not begin where it stood.

    A run goes on at the AdamW rate of its parent. Muon's is always in the same ratio to it.
    """
    ratios = [one.muon_learning_rate / one.learning_rate for one in (theirs, ours)]
    goes_on = ours.schedule == "decay" or ours.warmup_steps > 0
    if ours.kind == "muon" and goes_on and not math.isclose(*ratios):
        raise config.ConfigError(
            f"Run.continue_from={name}: Optimizer.muon_learning_rate / Optimizer.learning_rate is "
            f"{ratios[0]:g} there, {ratios[1]:g} here. Set both as they were, or in this ratio"
        )


def _changes_from(theirs: config.Experiment, ours: config.Experiment, parent: Workdir) -> list[str]:
    """Returns the settings in which this run differs from the one that it goes on from.

    Raises ConfigError if the weights, the state of the optimiser or the vocabulary would not fit.
    """
    free = set(config.field_names(config.Encoder, fits_weights="any"))
    if ours.encoder.positions == "rotary":
        free.update(config.field_names(config.Encoder, fits_weights="larger"))
    fixed = {f"Encoder.{name}" for name in config.field_names(config.Encoder) if name not in free}
    fixed |= {f"Decoder.{name}" for name in config.field_names(config.Decoder)}
    # Whether some parameters do not decay is a part of the structure of the optimiser's state.
    fixed |= {"Optimizer.kind", "Optimizer.decay_norms_and_biases"}
    if not (file := ours.vocabulary.file):
        fixed |= {"Vocabulary.size", "Vocabulary.cased"}
    elif vocabularies.load(file).fingerprint != parent.load_vocabulary().fingerprint:
        raise config.ConfigError(
            f"Vocabulary.file is another file than the vocabulary of {parent}: leave it out"
        )
    changes = config.changes(theirs, ours)
    if wrong := [line for name, line in changes.items() if name in fixed]:
        raise config.ConfigError(
            f"Run.continue_from: {parent} has another model or optimiser ({'; '.join(wrong)})"
        )
    return list(changes.values())


def count_rows_read(parent: Parent, experiment: config.Experiment, chosen: prepare.Prepared) -> int:
    """Returns where this run begins in its rows: behind those that its parent has read.

    It is 0 if the parent was trained on other rows, or on the same in another order.
    """
    theirs, recorded = parent.workdir.read_settings(), parent.workdir.read_rows()
    order = (experiment.run.seed, experiment.corpus.shuffle_shards)
    if (
        order != (theirs.run.seed, theirs.corpus.shuffle_shards)
        or recorded is None
        or run_rows.fingerprints(recorded) != run_rows.fingerprints(chosen.record)
    ):
        return 0
    return parent.rows_read


def load_state(
    starting_point: StartingPoint,
    workdir: Workdir,
    shapes: step.State,
    create_fresh: collections.abc.Callable[[], step.State],
    vocabulary_size: int,
) -> StartingState:
    """Loads or makes the state that the loop starts with.

    `shapes` has the shapes and shardings of the state. `create_fresh` returns one with fresh
    weights. It is not called if they are not needed, so that at most one state is on the devices.
    Raises ConfigError if a checkpoint has more steps than the run, or if weights do not fit.
    """
    experiment, encoder, parent = starting_point
    if restored := checkpoint.restore_newest(workdir, shapes):
        if restored.step > experiment.run.train_steps:
            raise config.ConfigError(
                f"Run.train_steps={experiment.run.train_steps} is below the {restored.step} "
                f"steps that {workdir} has done. Use {restored.step} or more"
            )
        print(f"resuming {workdir} at step {restored.step}")
        return StartingState(restored.state, restored.step, has_head=True)
    if parent:
        print(f"going on from step {parent.step} of {parent.workdir}; {'; '.join(parent.changes)}")
        state = checkpoint.restore(parent.workdir, parent.step, shapes)
        first = jax.device_put(np.int32(0), shapes.step.sharding)
        return StartingState(state._replace(step=first), has_head=True)
    state = create_fresh()
    if not encoder:
        return StartingState(state)
    values = encoder.read_params(experiment.model)
    values = adoption.repeat_positions(values, experiment.encoder.max_positions)
    loaded = adoption.load_params(values, state.params, vocabulary_size, encoder.path)
    print(
        f"starting from {encoder.path} ({encoder.kind}); "
        f"with fresh weights: {' and '.join(loaded.fresh) or 'nothing'}; "
        f"left out of it: {' and '.join(loaded.unused) or 'nothing'}"
    )
    state = state._replace(params=loaded.params)
    return StartingState(state, has_head="head" not in loaded.fresh)
