"""Decides what a run starts from: its checkpoint, else `Run.init_from`, else fresh weights."""

import dataclasses
import os
import pathlib
import typing

from maelm_jax import config, gin_files, storage
from maelm_jax.encoders import adoption, source
from maelm_jax.training import checkpoint, checkpoint_reading, resume, step

COMMITTED = "commit_success.txt"  # of Orbax, in a complete checkpoint in a bucket


class StartingState(typing.NamedTuple):
    """State that the training loop starts with."""

    state: step.State
    step: int = 0  # optimiser steps that produced the state
    has_head: bool = False  # whether the prediction head is trained


class ResolvedSource(typing.NamedTuple):
    """The settings of a run, and what `Run.init_from` names.

    The source is None if `Run.init_from` is not set, or if the run has a checkpoint.
    """

    experiment: config.Experiment
    encoder_source: source.EncoderSource | None


def resolve_source(experiment: config.Experiment, workdir: str) -> ResolvedSource:
    """Finds the source that `Run.init_from` names and adopts its settings.

    A run that has a checkpoint does not need its source any more: what it adopted stands in the
    config.gin of the workdir. The source may be gone, or be another encoder by now.

    Args:
        experiment: Settings of the run.
        workdir: Workdir of the run.

    Raises:
        ConfigError: There is no such source, it does not fit the settings, or its ids are unknown.
    """
    path = experiment.run.init_from
    if not path:
        return ResolvedSource(experiment, None)
    if _has_checkpoint(workdir):
        _check_origin(path, workdir)
        return ResolvedSource(_with_recorded_encoder(experiment, workdir), None)
    encoder_source = source.find_encoder(path)
    if encoder_source.vocabulary is None and experiment.vocabulary.file is None:
        raise config.ConfigError(
            f"Run.init_from={path} has no vocabulary, and a new one would have other ids than its "
            "weights: name its file with --gin.Vocabulary.file"
        )
    adopted = adoption.adopt_settings(experiment, encoder_source)
    if adopted.changes:
        print(f"taken over from {path}: {'; '.join(adopted.changes)}")
    return ResolvedSource(adopted.experiment, encoder_source)


def _has_checkpoint(workdir: str) -> bool:
    """Returns whether a workdir has a complete checkpoint.

    On a disk, Orbax writes to a temporary name and renames the folder at the end. In a bucket it
    writes under the final name and adds COMMITTED last.
    """
    files, root = storage.file_system(workdir)
    folder = f"{root}/{checkpoint_reading.FOLDER}"
    try:
        paths = files.ls(folder, detail=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    steps = [path for path in paths if pathlib.PurePath(path).name.isdecimal()]
    if storage.in_bucket(workdir):
        steps = [path for path in steps if files.exists(f"{path.rstrip('/')}/{COMMITTED}")]
    return bool(steps)


def _check_origin(path: str, workdir: str):
    """Raises ConfigError if the run in the workdir began from another source that still exists.

    A source that is gone may have been moved to `path`.
    """
    recorded = _recorded(workdir)
    began = gin_files.load([str(recorded)]).run.init_from if recorded.is_file() else None
    if began and os.path.exists(began) and os.path.realpath(began) != os.path.realpath(path):
        raise config.ConfigError(
            f"{workdir} holds a run that began from {began}, not from {path}: give another "
            f"--workdir, or --gin.Run.init_from={began}"
        )


def _recorded(workdir: str) -> pathlib.Path:
    """Returns the settings of the run on this machine. `train` fetches those in a bucket."""
    return storage.local_path(workdir) / "config.gin"


def _with_recorded_encoder(experiment: config.Experiment, workdir: str) -> config.Experiment:
    """Returns the settings with what the workdir records of the encoder that the run began from.

    That is the encoder, the decoder if it came with it, and the vocabulary unless one is named.
    """
    recorded = gin_files.load([str(_recorded(workdir))])
    fields = config.field_names(config.Model, part="encoder")
    origin = source.read_origin(storage.local_path(workdir))
    if origin and origin.has_decoder:
        fields += config.field_names(config.Model, part="decoder")
    elif recorded.model.positions == "rotary":
        fields.append("decoder_relative_bias")  # as `adoption.adopt_settings` sets it
    encoder = {name: getattr(recorded.model, name) for name in fields}
    file = experiment.vocabulary.file or recorded.vocabulary.file
    return dataclasses.replace(
        experiment,
        model=dataclasses.replace(experiment.model, **encoder),
        vocabulary=dataclasses.replace(experiment.vocabulary, file=file),
    )


def resumed(
    shapes: step.State,
    experiment: config.Experiment,
    before: resume.Before | None,
    checkpoints: checkpoint.Checkpoints,
) -> StartingState | None:
    """Loads the newest complete checkpoint. Returns None if there is none.

    Args:
        shapes: Shapes and shardings of the state.
        experiment: Settings of the run.
        before: How the workdir was last run, or None for a new workdir.
        checkpoints: Checkpoints of the workdir.

    Raises:
        ConfigError: The checkpoint has more steps than the run.
    """
    restored, workdir = checkpoints.restore(shapes), checkpoints.workdir
    if restored is None:
        return None
    resume.check_length(workdir, restored.step, experiment.run.train_steps)
    print(f"resuming {workdir} at step {restored.step}")
    for line in resume.effects(before, experiment, restored.step) if before else ():
        print(line)
    return StartingState(restored.state, restored.step, has_head=True)


def begun(
    fresh: step.State,
    experiment: config.Experiment,
    vocabulary_size: int,
    encoder_source: source.EncoderSource | None,
    workdir: str,
) -> StartingState:
    """Loads the parameters of `encoder_source` into the state of a new run.

    Args:
        fresh: State with freshly drawn parameters.
        experiment: Settings of the run.
        vocabulary_size: Number of tokens in the vocabulary.
        encoder_source: Pretrained parameters, or None.
        workdir: Workdir of the run.

    Raises:
        ConfigError: `Run.init_from` is set, and its source was not looked for, because there was a
            checkpoint.
    """
    if encoder_source is None:
        if experiment.run.init_from:
            raise config.ConfigError(
                f"{workdir} holds no complete checkpoint any more: give another "
                f"--workdir to begin again from {experiment.run.init_from}"
            )
        return StartingState(fresh)
    values = encoder_source.read_params(experiment.model)
    loaded = adoption.load_params(values, fresh.params, vocabulary_size, encoder_source.path)
    with_fresh = " and ".join(loaded.fresh) or "nothing"
    left_out = " and ".join(loaded.unused) or "nothing"
    print(
        f"starting from {encoder_source.path} ({encoder_source.kind}); "
        f"with fresh weights: {with_fresh}; left out of it: {left_out}"
    )
    return StartingState(fresh._replace(params=loaded.params), has_head="head" not in loaded.fresh)
