"""What a pretraining run prints: its cost and baselines at the start, its result at the end."""

import time
import typing

import jax

from maelm_jax import config, storage
from maelm_jax.analysis import monitor
from maelm_jax.encoders import families
from maelm_jax.training import flops, metrics, phases


class StepCost(typing.NamedTuple):
    """Cost of a step of a phase, and peak performance of the devices."""

    phase: phases.Phase
    terms: dict[str, float]  # model FLOPs by term
    peak: flops.Peak


def step_costs(experiment: config.Experiment, vocabulary_size: int) -> list[StepCost]:
    """FLOPs of a step of each phase, and the devices' peak: of the data sheet, or measured."""
    peak = flops.peak_flops(experiment.model.dtype)
    return [
        StepCost(phase, flops.flops_terms(phase.experiment, vocabulary_size), peak)
        for phase in phases.of_run(experiment)
    ]


def print_expectations(costs: list[StepCost], unigram_loss: float):
    """Prints the model FLOPs, the peak and the unigram cross-entropy, the baselines of a run."""
    for cost in costs:
        scope = f"{phases.describe(cost.phase)}; " if len(costs) > 1 else ""
        listed = " + ".join(f"{value:.3g} {name}" for name, value in cost.terms.items() if value)
        print(f"{scope}model FLOPs a step: {sum(cost.terms.values()):.3g} = {listed}")
    print(flops.describe_peak(costs[0].peak))
    print(
        f"unigram cross-entropy of the held-out targets: {unigram_loss:.4f} nats; "
        "an encoder that has learned something is below it"
    )


def without_effect(experiment: config.Experiment, has_head: bool) -> list[str]:
    """Returns one line for each setting that has no effect in this run."""
    run, optimizer, lines = experiment.run, experiment.optimizer, []
    if optimizer.warmup_steps > run.train_steps:
        lines.append(
            f"Optimizer.warmup_steps={optimizer.warmup_steps} is shortened to the "
            f"{run.train_steps} steps of the run: the learning rate rises faster, and to the end"
        )
    elif optimizer.warmup_steps == run.train_steps:
        lines.append(
            f"Optimizer.warmup_steps={optimizer.warmup_steps} is all of the {run.train_steps} "
            "steps: the learning rate rises to the end and does not fall"
        )
    if optimizer.freeze_encoder_steps >= run.train_steps:
        lines.append(
            f"Optimizer.freeze_encoder_steps={optimizer.freeze_encoder_steps} is all of the "
            f"{run.train_steps} steps: the encoder does not change"
        )
    size = phases.of_run(experiment)[-1].experiment.run.batch_size
    if size != run.batch_size:
        lines.append(
            f"Run.batch_size={run.batch_size} is not reached: the run ends at {size} rows a step"
        )
    trained = {phase.experiment.masking.rate for phase in phases.of_run(experiment)}
    for share, rate in experiment.masking.rate_plateaus:
        if rate not in trained:
            lines.append(
                f"Masking.rate_plateaus: the one at {share:g} has no step, so mask rate {rate:g} "
                "is not trained"
            )
    if experiment.model.unigram_bias and has_head:
        lines.append("Model.unigram_bias has no effect: the prediction head is trained already")
    return lines


def print_missing_stock_class(experiment: config.Experiment, special: config.SpecialIds):
    """Says at the start that the encoder cannot be exported to stock transformers, if so."""
    try:
        families.require_stock_family(experiment.model, special)
    except config.ConfigError as error:
        print(f"this run cannot be exported with --format=huggingface: {error}")


def print_size(
    experiment: config.Experiment, params: dict, mesh: jax.sharding.Mesh, has_head: bool = False
):
    """Prints the number of parameters, steps and tokens, the mesh, and settings without effect.

    Args:
        experiment: The settings.
        params: The parameters, or their shapes.
        mesh: The devices.
        has_head: Whether the prediction head is trained already.
    """
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    run_phases, length = phases.of_run(experiment), experiment.corpus.sequence_length
    for line in without_effect(experiment, has_head):
        print(line)
    tokens = dict.fromkeys(f"{phase.experiment.run.batch_size * length:,}" for phase in run_phases)
    print(
        f"{count:,} parameters; {run_phases[-1].end:,} steps of {', then '.join(tokens)} tokens; "
        f"mesh {dict(mesh.shape)}",
        flush=True,
    )


def print_result(
    workdir: str,
    experiment: config.Experiment,
    began: float,
    ranks: monitor.RankMonitor,
    unigram_loss: float,
):
    """Prints the result of a finished run and draws its loss curve.

    Args:
        workdir: The folder of the run.
        experiment: The settings of the run.
        began: time.perf_counter() at the start of the command.
        ranks: Tells what the measurement of ranks cost.
        unigram_loss: Unigram cross-entropy of the held-out targets, in nats.
    """
    seconds = time.perf_counter() - began
    print(ranks.cost(seconds))
    last = [line for line in metrics.read(workdir) if "eval_loss" in line][-1]
    picture = metrics.plot(workdir, unigram_loss, _curve_labels(experiment))
    storage.send(workdir)
    below = unigram_loss - last["eval_loss"]
    print(
        f"done: step {last['step']}, held-out loss {last['eval_loss']:.4f} nats, "
        f"{abs(below):.2f} {'below' if below >= 0 else 'above'} the unigram cross-entropy "
        f"{unigram_loss:.4f}; "
        f"accuracy {last['eval_accuracy']:.3f}; {seconds:.0f} s in all\nloss curve: {picture}"
    )


def _curve_labels(experiment: config.Experiment) -> metrics.CurveLabels:
    """Names of the losses, with their mask rates if the run never trains at the held-out one."""
    labels, heldout = metrics.CurveLabels(), experiment.evaluated.masking.rate
    rates = sorted({phase.experiment.masking.rate for phase in phases.of_run(experiment)})
    if heldout in rates:
        return labels
    listed = ", ".join(f"{rate:g}" for rate in rates)
    return metrics.CurveLabels(
        f"{labels.training}, at mask rate {listed}", f"{labels.heldout}, at mask rate {heldout:g}"
    )
