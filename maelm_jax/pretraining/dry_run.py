"""Prints parameters, FLOPs, memory and mesh of a run without training it.

The real training step is compiled, but no array is allocated.
"""

import dataclasses

import jax

from maelm_jax import config, storage, tables
from maelm_jax.data import vocabularies
from maelm_jax.model import masking
from maelm_jax.pretraining import mask_rate
from maelm_jax.training import attention_report, flops, phases, resume, sharding, step


def show(experiment: config.Experiment, mesh: jax.sharding.Mesh):
    """Prints the parameters, the rows and slots of a step, its FLOPs by term and memory by kind."""
    run_phases = phases.of_run(experiment)
    steps = [step.abstract(phase.experiment, mesh) for phase in run_phases]
    count = _show_parameters(steps[0].state.params)
    for phase in run_phases:
        if len(run_phases) > 1:
            print(phases.describe(phase))
        _show_rows(phase.experiment, mesh)
        _show_flops(phase)
    for line in attention_report.of_run(experiment, mesh):
        print(line)
    if len(run_phases) > 1:
        total = sum(map(_flops_of, run_phases))
        print(f"{total:.4g} FLOPs in all {experiment.run.train_steps:,} steps")
    memory = max(map(_memory, steps), key=lambda memory: memory.temp_size_in_bytes)
    print(f"parameters          {_gib(4 * count)} in all")
    print(f"optimiser's state   {_gib(_bytes(steps[0].state.opt_state))} in all")
    if experiment.optimizer.ema_decay:
        print(f"moving average      {_gib(4 * count)} in all")
    print(f"state               {_gib(memory.argument_size_in_bytes)} per device, batch included")
    temporaries = _gib(memory.temp_size_in_bytes)
    print(f"activations, gradients, temporaries {temporaries} per device (this backend's compiler)")


def with_size_of_vocabulary(
    experiment: config.Experiment, workdir: str, before: resume.Before | None
) -> config.Experiment:
    """Returns settings with the size of the run's vocabulary, else of the file that they name."""
    file, recorded = experiment.vocabulary.file, storage.local_path(workdir) / "vocabulary"
    is_same = before is not None and before.experiment.vocabulary == experiment.vocabulary
    if is_same and vocabularies.files_in(recorded):
        file = str(recorded)
    named = dataclasses.replace(experiment.vocabulary, file=file)
    sized = vocabularies.with_size_of_file(named)
    return dataclasses.replace(experiment, vocabulary=sized)


def _memory(abstract: step.AbstractStep):
    """Compiles a step and returns XLA's analysis of its memory."""
    return abstract.train_step.lower(abstract.state, abstract.batch).compile().memory_analysis()


def _show_parameters(params: dict) -> int:
    """Prints a line for each array of parameters; returns the number of parameters."""
    lines = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path, shape = sharding.parameter_path(keys), "x".join(map(str, leaf.shape))
        lines.append((path, shape, f"{leaf.size:,}", tuple(sharding.partition_spec(path))))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    lines.append(("all", "", f"{count:,}", ""))
    print(f"{tables.plain(('parameter', 'shape', 'values', 'sharding'), lines)}\n")
    return count


def _show_rows(experiment: config.Experiment, mesh: jax.sharding.Mesh):
    """Prints the mesh, the rows and slots of a step, and the mask rate."""
    run, length = experiment.run, experiment.corpus.sequence_length
    sizes = masking.budget(experiment.masking, length)
    print(
        f"mesh {dict(mesh.shape)} of {mesh.devices.flat[0].device_kind}; "
        f"{run.batch_size} rows of {length} tokens a step in {run.accumulate} part(s)"
    )
    print(f"encoder slots {sizes.visible}, masked slots {sizes.masked} a row")
    print(mask_rate.of_length(experiment.masking, length))


def _terms(phase: phases.Phase) -> dict[str, float]:
    return flops.flops_terms(phase.experiment, phase.experiment.vocabulary.size)


def _flops_of(phase: phases.Phase) -> float:
    """Returns the FLOPs of all steps of a phase."""
    return sum(_terms(phase).values()) * phase.steps


def _show_flops(phase: phases.Phase):
    """Prints the FLOPs of a step by term, and those of all steps of the phase."""
    terms = _terms(phase)
    total = sum(terms.values())
    lines = [(name, f"{value:.4g}", f"{value / total:.1%}") for name, value in terms.items()]
    lines.append(("all", f"{total:.4g}", "100.0%"))
    print(tables.plain(("term", "FLOPs a step", "share"), lines))
    print(f"{_flops_of(phase):.4g} FLOPs in {phase.steps:,} steps\n")


def _bytes(tree) -> int:
    """Returns the bytes of all arrays of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _gib(count: float) -> str:
    return f"{count / 2**30:>9.3f} GiB"
