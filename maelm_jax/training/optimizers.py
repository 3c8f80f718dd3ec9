"""AdamW with the settings of the published code (github.com/yumeng5/MAE-LM), Muon, learning rates.

AdamW differs in one point: the published code (fairseq) adds epsilon to sqrt(v) before the bias
correction, optax after it. The first steps differ slightly.

The learning rate is no part of an optimiser. `learning_rates` gives the rate of every step, and the
training step multiplies the update by it. So pretraining and fine-tuning share `create`, and one
compiled step serves every schedule.
"""

import jax
import numpy as np
import optax
import optax.contrib

from maelm_jax import config
from maelm_jax.training import sharding

MUON_RMS = 0.2  # root mean square of Muon's update of a matrix, as AdamW's typically is


def create(settings: config.Optimizer) -> optax.GradientTransformation:
    """Returns an optimiser: clipping by the global norm, then the rule of `Optimizer.kind`.

    Its updates are to be multiplied by the learning rate. Weight decay is decoupled from the
    gradient. Without `decay_norms_and_biases` it leaves out biases and scales.

    Muon (Jordan 2024; scaled as by Liu et al. 2025, arXiv 2502.16982) updates the matrices of the
    layers, AdamW all other parameters.
    """
    clip = optax.clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity()
    adamw = optax.chain(
        optax.scale_by_adam(settings.b1, settings.b2, settings.eps),
        optax.add_decayed_weights(
            settings.weight_decay, None if settings.decay_norms_and_biases else _is_decayed
        ),
        optax.scale(-1.0),
    )
    match settings.kind:
        case "adamw":
            rule = adamw
        case "muon":
            muon = optax.contrib.muon(
                settings.muon_learning_rate / settings.learning_rate,
                weight_decay=settings.weight_decay,
                muon_weight_dimension_numbers=_matrix_axes,
                consistent_rms=MUON_RMS,
            )
            rule = optax.partition({"muon": muon, "adamw": adamw}, _rule_of_each)
    chain = optax.chain(clip, rule)

    def update(gradient, state, params):
        # optax multiplies floats by integer counts, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            return chain.update(gradient, state, params)

    return optax.GradientTransformation(chain.init, update)


def learning_rates(
    settings: config.Optimizer, steps: int, start: float | None = None
) -> np.ndarray:
    """Returns the learning rate of every step.

    With the schedules "linear" and "wsd" (warm-up, stable, decay), it goes linearly to the peak in
    `warmup_steps`. Then it falls to 0 over all other steps (linear), or it stays and falls over the
    last `decay_share` of all steps (wsd). With "decay" it falls to 0 over all steps.

    Args:
        settings: Peak, warm-up and schedule.
        steps: Length of the run.
        start: Where the rate begins: that of the run that this one goes on from. None: 0.

    Returns:
        float32 [steps].
    """
    return _rates(np.arange(steps), settings, steps, start or 0.0)


def learning_rate_after(
    step: int, settings: config.Optimizer, steps: int, start: float | None = None
) -> float:
    """Returns the learning rate that `learning_rates` comes to after a step, 0 after a decay."""
    return float(_rates(np.array([step]), settings, steps, start or 0.0)[0])


def _rates(done: np.ndarray, settings: config.Optimizer, steps: int, start: float) -> np.ndarray:
    """Returns the learning rate of the step that follows on `done` steps."""
    if settings.schedule == "decay":
        return (start * _remaining(done / steps, settings.decay_shape)).astype(np.float32)
    warmup, peak = min(settings.warmup_steps, steps), settings.learning_rate
    rising = start + (peak - start) * done / max(warmup, 1)
    falling, shape = steps - warmup, "linear"
    if settings.schedule == "wsd":
        falling = min(round(settings.decay_share * steps), falling)
        shape = settings.decay_shape
    fallen = np.clip((done - (steps - falling)) / max(falling, 1), 0, 1)
    rates = np.where(done < warmup, rising, peak * _remaining(fallen, shape))
    return rates.astype(np.float32)


def _remaining(fallen: np.ndarray, shape: str) -> np.ndarray:
    """Returns the share of the rate that is left after the share `fallen` of a decay."""
    if shape == "1-sqrt":
        return 1 - np.sqrt(fallen)
    return (1 + np.cos(np.pi * fallen)) / 2 if shape == "cosine" else 1 - fallen


def _is_decayed(params: dict) -> dict:
    """Returns for each parameter whether weight decay applies to it: not to biases and scales."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, _: keys[-1].key not in ("bias", "scale"), params
    )


def _rule_of_each(params: dict) -> dict:
    """Returns for each parameter the rule that updates it: "muon" for the layers' matrices."""

    def leaf(keys, _):
        path = sharding.parameter_path(keys)
        return "muon" if "/blocks/" in path and path.endswith("/kernel") else "adamw"

    return jax.tree_util.tree_map_with_path(leaf, params)


def _matrix_axes(kernels: dict) -> dict:
    """Returns the axes of stacked kernels [N, in, out]: each of the N is a matrix of its own."""
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers((1,), (2,)), kernels)
