"""What a pretraining run prints: its sizes and cost at the start, its result at the end."""

import time

import jax
import numpy as np

from maelm_jax import config, tables
from maelm_jax.data import prepare
from maelm_jax.encoders import families
from maelm_jax.pretraining import unigram
from maelm_jax.training import flops, kept_steps, metrics, sharding
from maelm_jax.training.workdir import Workdir


def print_start(
    experiment: config.Experiment,
    params: dict,
    mesh: jax.sharding.Mesh,
    special: config.SpecialIds,
    attention: list[str],
):
    """Prints the sizes of a run.

    `params` are the parameters or their shapes, `attention` the lines on the attention backends.
    """
    trained, heldout = (one.objective.masking.rate for one in (experiment, experiment.evaluated))
    if heldout != trained:
        print(f"held-out losses and ranks: mask rate {heldout:g}")
    if strategy := experiment.objective.masking.strategy:
        print(f"masks: as {strategy} says; the unigram cross-entropy is that of all tokens")
    try:
        families.require_stock_family(experiment.encoder, special)
    except config.ConfigError as error:
        print(f"this run cannot be exported with --format=huggingface: {error}")
    for line in attention:
        print(line)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(
        f"{count:,} parameters; {experiment.run.train_steps:,} steps of "
        f"{experiment.tokens_per_step:,} slots; mesh {dict(mesh.shape)}"
    )
    optimizer, steps = experiment.optimizer, experiment.run.train_steps
    has_warmup = optimizer.schedule != "decay" and not config.names_own_code(optimizer.schedule)
    if has_warmup and optimizer.warmup_steps >= steps:
        print(
            f"Optimizer.warmup_steps={optimizer.warmup_steps:,} is cut to the {steps:,} steps of "
            "the run: the learning rate rises to the end and never falls; set a shorter warm-up"
        )


def print_passes(run: config.Run, rows: prepare.Prepared, kept: dict[str, int]):
    """Prints the text of a step, how often the run reads all text, and its kept checkpoints."""
    slots = rows.record["length"]
    print(
        f"{rows.tokens_per_row * run.batch_size:,.0f} tokens of text a step, in "
        f"{rows.tokens_per_row / slots:.1%} of its slots"
    )
    for line in rows.describe_passes(run):
        print(line)
    if kept:
        listed = ", ".join(f"{name} (step {step:,})" for name, step in kept.items())
        print(f"kept checkpoints: {listed}")
    if run.keep_at_words and not any(name.startswith(kept_steps.AFTER_WORDS) for name in kept):
        print(
            f"Run.keep_at_words begins at {min(run.keep_at_words):,} words, which the run does not "
            "read: no checkpoint is kept for them. Set smaller numbers"
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


def print_baseline(baseline: unigram.Unigram | None, heldout: np.ndarray):
    """Prints the loss that a useful encoder is below, if it is known."""
    if baseline is None:
        return
    print(
        f"{baseline.name} cross-entropy of the held-out tokens: {baseline.loss(heldout):.4f} nats; "
        "an encoder that has learned something is below it",
        flush=True,
    )


def report_result(
    workdir: Workdir,
    experiment: config.Experiment,
    began: float,
    baseline: unigram.Unigram | None,
):
    """Prints the result of a finished run and draws its loss curve.

    `began` is time.perf_counter() at the start of the command. A useful encoder is below the loss
    of `baseline`, if there is one.
    """
    seconds = time.perf_counter() - began
    steps, lines = experiment.run.train_steps, metrics.read(workdir)
    evaluated = [line for line in lines if "eval_loss" in line and line["step"] == steps]
    if not evaluated:
        print(f"done: step {steps}, which was not evaluated")
        return
    last = evaluated[-1]
    trained, heldout = (one.objective.masking.rate for one in (experiment, experiment.evaluated))
    labels = {}
    if trained != heldout:
        labels["trained_label"] = f"training (one batch), at mask rate {trained:g}"
        labels["heldout_label"] = f"held-out, at mask rate {heldout:g}"
    picture = workdir.loss_curve_file
    compared = ""
    if baseline:
        labels |= {"baseline_name": baseline.name, "baseline": last[baseline.name]}
        below = last[baseline.name] - last["eval_loss"]
        compared = (
            f", {abs(below):.2f} {'below' if below >= 0 else 'above'} the {baseline.name} "
            f"cross-entropy {last[baseline.name]:.4f}"
        )
    unit = experiment.objective.unit
    metrics.plot(picture, metrics.read_curves(workdir), unit, **labels)
    workdir.send()
    print(
        f"done: step {last['step']}, held-out loss {last['eval_loss']:.4f} nats{compared}; "
        f"accuracy {last['eval_accuracy']:.3f}; {seconds:.0f} s in all\n"
        f"loss curve: {workdir.path.rstrip('/')}/{picture.name}"
    )


def print_sizes(experiment: config.Experiment, params: dict):
    """Prints the number of parameters by part of the model, and how much a run trains on."""
    counts = {
        name: sum(leaf.size for leaf in jax.tree.leaves(part)) for name, part in params.items()
    }
    listed = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    run, length = experiment.run, experiment.corpus.sequence_length
    print(
        f"{sum(counts.values()):,} parameters ({listed}); {run.train_steps:,} steps of "
        f"{run.batch_size:,} rows of {length} tokens"
    )


def print_parameters(params: dict):
    """Prints a line for each array of parameters."""
    lines = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path, shape = sharding.parameter_path(keys), "x".join(map(str, leaf.shape))
        lines.append((path, shape, f"{leaf.size:,}", tuple(sharding.partition_spec(path))))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    lines.append(("all", "", f"{count:,}", ""))
    print(f"\n{tables.plain(('parameter', 'shape', 'values', 'sharding'), lines)}")


def print_flops(experiment: config.Experiment):
    """Prints the FLOPs of a step by term, and those of all steps."""
    terms = flops.flops_terms(experiment, experiment.vocabulary.size)
    total, steps = sum(terms.values()), experiment.run.train_steps
    lines = [(name, f"{value:.4g}", f"{value / total:.1%}") for name, value in terms.items()]
    lines.append(("all", f"{total:.4g}", "100.0%"))
    print(f"\n{tables.plain(('term', 'FLOPs a step', 'share'), lines)}")
    print(f"{total * steps:.4g} FLOPs in {steps:,} steps")
