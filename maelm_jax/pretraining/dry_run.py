"""Prints parameters, FLOPs, memory and mesh of a run without training it.

The real training step is compiled, but no array is allocated.
"""

import jax

from maelm_jax import config, tables
from maelm_jax.model import masking
from maelm_jax.pretraining import mask_rate
from maelm_jax.training import attention_report, flops, sharding, step


def show(experiment: config.Experiment, mesh: jax.sharding.Mesh):
    """Prints the parameters, the rows and slots of a step, its FLOPs by term and memory by kind."""
    train_step, state, batch = step.abstract(experiment, mesh)
    count = _show_parameters(state.params)
    _show_rows(experiment, mesh)
    _show_flops(experiment)
    memory = train_step.lower(state, batch).compile().memory_analysis()
    print(f"parameters          {_gib(4 * count)} in all")
    print(f"Adam's moments      {_gib(8 * count)} in all")
    if experiment.optimizer.ema_decay:
        print(f"moving average      {_gib(4 * count)} in all")
    print(f"state               {_gib(memory.argument_size_in_bytes)} per device, batch included")
    temporaries = _gib(memory.temp_size_in_bytes)
    print(f"activations, gradients, temporaries {temporaries} per device (this backend's compiler)")


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
    """Prints the mesh, the rows and slots of a step, the mask rate and the attention backend."""
    run, length = experiment.run, experiment.corpus.sequence_length
    sizes = masking.budget(experiment.masking, length)
    print(
        f"mesh {dict(mesh.shape)} of {mesh.devices.flat[0].device_kind}; "
        f"{run.batch_size} rows of {length} tokens a step in {run.accumulate} part(s)"
    )
    print(f"encoder slots {sizes.visible}, masked slots {sizes.masked} a row")
    print(mask_rate.of_length(experiment.masking, length))
    print(attention_report.describe(experiment, mesh))


def _show_flops(experiment: config.Experiment):
    """Prints the FLOPs of a step by term, and those of the run."""
    terms = flops.flops_terms(experiment, experiment.vocabulary.size)
    total, steps = sum(terms.values()), experiment.run.train_steps
    lines = [(name, f"{value:.4g}", f"{value / total:.1%}") for name, value in terms.items()]
    lines.append(("all", f"{total:.4g}", "100.0%"))
    print(tables.plain(("term", "FLOPs a step", "share"), lines))
    print(f"{total * steps:.4g} FLOPs in {steps:,} steps\n")


def _gib(count: float) -> str:
    return f"{count / 2**30:>9.3f} GiB"
