"""What a pretraining run prints: its sizes and cost at the start, its result at the end.

`describe` prints sizes, cost and memory without training (`train --dry_run`).
"""

import dataclasses
import time

import jax
import numpy as np

from maelm_jax import config, storage, tables
from maelm_jax.analysis import monitor
from maelm_jax.data import vocabularies
from maelm_jax.encoders import families
from maelm_jax.model import masking
from maelm_jax.pretraining import objective as objectives
from maelm_jax.pretraining import unigram
from maelm_jax.training import attention_report, flops, metrics, run_record, sharding

GIB = 2**30


def print_start(
    experiment: config.Experiment,
    params: dict,
    mesh: jax.sharding.Mesh,
    special: config.SpecialIds,
    attention: list[str],
):
    """Prints the sizes of a run.

    Args:
        experiment: The settings.
        params: The parameters, or their shapes.
        mesh: The devices.
        special: Ids of special tokens.
        attention: Lines on the attention backends.
    """
    if experiment.evaluated.masking.rate != experiment.masking.rate:
        print(f"held-out losses and ranks: mask rate {experiment.evaluated.masking.rate:g}")
    try:
        families.require_stock_family(experiment.model, special)
    except config.ConfigError as error:
        print(f"this run cannot be exported with --format=huggingface: {error}")
    for line in attention:
        print(line)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    tokens = experiment.run.batch_size * experiment.corpus.sequence_length
    print(
        f"{count:,} parameters; {experiment.run.train_steps:,} steps of {tokens:,} tokens; "
        f"mesh {dict(mesh.shape)}"
    )


def print_cost(terms: dict[str, float], peak: float | None):
    """Prints the model FLOPs of a step, and the peak FLOP/s that MFU is a share of."""
    listed = " + ".join(f"{value:.3g} {name}" for name, value in terms.items() if value)
    print(f"model FLOPs a step: {sum(terms.values()):.3g} = {listed}")
    if peak is not None:
        print(f"MFU is against {peak / 1e12:.3g} TFLOP/s (data sheet, bf16)")
    elif jax.default_backend() != "cpu":
        kind = jax.devices()[0].device_kind
        print(f"MFU is left out: PEAK_FLOPS of maelm_jax/training/flops.py does not list {kind}")


def print_baseline(baseline: unigram.Unigram, heldout: np.ndarray):
    """Prints the loss that a useful encoder is below."""
    print(
        f"{baseline.name} cross-entropy of the held-out tokens: {baseline.loss(heldout):.4f} nats; "
        "an encoder that has learned something is below it",
        flush=True,
    )


def report_result(
    workdir: str,
    experiment: config.Experiment,
    began: float,
    ranks: monitor.RankMonitor,
    baseline: unigram.Unigram,
):
    """Prints the result of a finished run and draws its loss curve.

    Args:
        workdir: The folder of the run.
        experiment: The settings of the run.
        began: time.perf_counter() at the start of the command.
        ranks: Tells what the measurement of ranks cost.
        baseline: The loss that a useful encoder is below.
    """
    seconds = time.perf_counter() - began
    print(ranks.cost(seconds))
    last = [line for line in metrics.read(workdir) if "eval_loss" in line][-1]
    trained, heldout = experiment.masking.rate, experiment.evaluated.masking.rate
    labels = {}
    if trained != heldout:
        labels["trained_label"] = f"training (one batch), at mask rate {trained:g}"
        labels["heldout_label"] = f"held-out, at mask rate {heldout:g}"
    picture = storage.local_path(workdir) / "loss_curve.png"
    metrics.plot(
        picture, run_record.loss_curves(workdir), baseline.name, last[baseline.name], **labels
    )
    storage.send(workdir)
    below = last[baseline.name] - last["eval_loss"]
    print(
        f"done: step {last['step']}, held-out loss {last['eval_loss']:.4f} nats, "
        f"{abs(below):.2f} {'below' if below >= 0 else 'above'} the {baseline.name} cross-entropy "
        f"{last[baseline.name]:.4f}; accuracy {last['eval_accuracy']:.3f}; {seconds:.0f} s in all\n"
        f"loss curve: {picture}"
    )


def describe(experiment: config.Experiment, workdir: str):
    """Prints parameters, rows, FLOPs and memory of a run, for which the training step is compiled.

    No array is allocated, and no data is read. The size of the vocabulary is that of the file in
    the workdir or in the settings, if there is one.
    """
    mesh = sharding.make_mesh(experiment.mesh)
    sharding.check_mesh(experiment, mesh)
    file = experiment.vocabulary.file
    if vocabularies.files_in(storage.local_path(workdir) / run_record.VOCABULARY):
        file = str(storage.local_path(workdir) / run_record.VOCABULARY)
    sized = dataclasses.replace(experiment.vocabulary, file=file)
    sized = vocabularies.with_size_of_file(sized)
    experiment = dataclasses.replace(experiment, vocabulary=sized)
    abstract = objectives.abstract_step(experiment, mesh)
    _print_parameters(abstract.state.params)
    _print_rows(experiment, mesh)
    _print_flops(experiment)
    for line in attention_report.describe_run(experiment, mesh):
        print(line)
    memory = abstract.train_step.lower(*abstract.arguments).compile().memory_analysis()
    moments = sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract.state.opt_state)
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(abstract.state.params))
    lines = [
        ("parameters", 4 * count, "in all"),
        ("optimiser's state", moments, "in all"),
        ("state and batch", memory.argument_size_in_bytes, "per device"),
        (
            "activations, gradients, temporaries",
            memory.temp_size_in_bytes,
            "per device (this backend's compiler)",
        ),
    ]
    cells = [(name, f"{size / GIB:.3f} GiB", scope) for name, size, scope in lines]
    print(tables.plain(("memory", "", ""), cells))


def _print_parameters(params: dict):
    """Prints a line for each array of parameters."""
    lines = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path, shape = sharding.parameter_path(keys), "x".join(map(str, leaf.shape))
        lines.append((path, shape, f"{leaf.size:,}", tuple(sharding.partition_spec(path))))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    lines.append(("all", "", f"{count:,}", ""))
    print(f"{tables.plain(('parameter', 'shape', 'values', 'sharding'), lines)}\n")


def _print_rows(experiment: config.Experiment, mesh: jax.sharding.Mesh):
    """Prints the mesh, the rows and the slots of a step."""
    run, length = experiment.run, experiment.corpus.sequence_length
    sizes = masking.budget(experiment.masking, length)
    print(
        f"mesh {dict(mesh.shape)} of {mesh.devices.flat[0].device_kind}; "
        f"{run.batch_size} rows of {length} tokens a step in {run.accumulate} part(s)"
    )
    print(f"encoder slots {sizes.visible}, masked slots {sizes.masked} a row")


def _print_flops(experiment: config.Experiment):
    """Prints the FLOPs of a step by term, and those of all steps."""
    terms = flops.flops_terms(experiment, experiment.vocabulary.size)
    total, steps = sum(terms.values()), experiment.run.train_steps
    lines = [(name, f"{value:.4g}", f"{value / total:.1%}") for name, value in terms.items()]
    lines.append(("all", f"{total:.4g}", "100.0%"))
    print(f"{tables.plain(('term', 'FLOPs a step', 'share'), lines)}")
    print(f"{total * steps:.4g} FLOPs in {steps:,} steps\n")
