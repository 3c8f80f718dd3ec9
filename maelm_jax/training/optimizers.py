"""AdamW with the settings of the published code (github.com/yumeng5/MAE-LM), and Muon.

AdamW differs in one point: the published code (fairseq) adds epsilon to sqrt(v) before the bias
correction, optax after it. The first steps differ slightly.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import Array, Int

from maelm_jax import config
from maelm_jax.training import sharding

MUON_RMS = 0.2  # root mean square of Muon's update of a matrix, as AdamW's typically is


def schedule(settings: config.Optimizer, train_steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the step.

    It rises linearly from 0 to the peak over `warmup_steps`, and falls linearly to 0 at
    `train_steps`. With `schedule` "linear" it falls from the peak on. With "wsd" (warm-up, stable,
    decay) it stays at the peak and falls in the last `decay_share` of the steps only.
    """
    peak, warmup = settings.learning_rate, min(settings.warmup_steps, train_steps)
    up = optax.linear_schedule(0.0, peak, max(warmup, 1))
    if settings.schedule == "linear":
        down = optax.linear_schedule(peak, 0.0, max(train_steps - warmup, 1))
        return optax.join_schedules([up, down], [warmup])
    falling = min(round(settings.decay_share * train_steps), train_steps - warmup)
    down = optax.linear_schedule(peak, 0.0, max(falling, 1))
    parts = [up, optax.constant_schedule(peak), down]
    return optax.join_schedules(parts, [warmup, train_steps - falling])


def _decayed(params: dict) -> dict:
    """Returns for each parameter whether weight decay applies to it: not to biases and scales."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, _: keys[-1].key not in ("bias", "scale"), params
    )


def _rules(params: dict) -> dict:
    """Returns for each parameter the rule that updates it: "muon" for the layers' matrices."""

    def leaf(keys, _):
        path = sharding.parameter_path(keys)
        return "muon" if "/blocks/" in path and path.endswith("/kernel") else "adamw"

    return jax.tree_util.tree_map_with_path(leaf, params)


def _matrix_axes(kernels: dict) -> dict:
    """Returns the axes of stacked kernels [N, in, out]: each of the N is a matrix of its own."""
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers((1,), (2,)), kernels)


def _freezing_encoder(steps: int) -> optax.GradientTransformation:
    """Returns a rule that makes the encoder's updates 0 in the first `steps` steps."""

    def share(count):
        return jnp.where(count < steps, 0.0, 1.0)

    def of_encoder(params):
        return {module: module == "encoder" for module in params}

    return optax.masked(optax.scale_by_schedule(share), of_encoder)


def _clipped(
    settings: config.Optimizer, *rules: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Returns clipping by the global norm, then the rules."""
    clip = optax.clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity()
    chain = optax.chain(clip, *rules)

    def update(gradient, state, params):
        # optax multiplies floats by integer counts, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            return chain.update(gradient, state, params)

    return optax.GradientTransformation(chain.init, update)


def create(settings: config.Optimizer, train_steps: int) -> optax.GradientTransformation:
    """Returns the optimiser of pretraining: clipping by the global norm, then AdamW or Muon.

    Muon (Jordan 2024; scaled as by Liu et al. 2025, arXiv 2502.16982) updates the matrices of the
    layers, AdamW all other parameters. Weight decay is decoupled. Without `decay_norms_and_biases`
    it leaves out biases and scales. In the first `freeze_encoder_steps` steps the parameters of the
    encoder do not change; its moments do.
    """
    adamw = optax.adamw(
        schedule(settings, train_steps),
        settings.b1,
        settings.b2,
        settings.eps,
        weight_decay=settings.weight_decay,
        mask=None if settings.decay_norms_and_biases else _decayed,
    )
    frozen_steps = settings.freeze_encoder_steps
    # Without frozen steps there is no rule: it would add to the state, and so to checkpoints.
    last = [_freezing_encoder(frozen_steps)] if frozen_steps else []
    if settings.kind == "adamw":
        return _clipped(settings, adamw, *last)
    of_matrices = dataclasses.replace(settings, learning_rate=settings.muon_learning_rate)
    muon = optax.contrib.muon(
        schedule(of_matrices, train_steps),
        weight_decay=settings.weight_decay,
        muon_weight_dimension_numbers=_matrix_axes,
        consistent_rms=MUON_RMS,
    )
    return _clipped(settings, optax.partition({"muon": muon, "adamw": adamw}, _rules), *last)


def moving_average(average: dict, params: dict, decay: float, step: Int[Array, ""]) -> dict:
    """Returns the moving average of the parameters after a step.

    After step t, the parameters of step s have the weight (1 - decay) decay^(t - s) / (1 - decay^t)
    in it. The weights sum to 1, as Adam's bias correction makes them (Kingma and Ba 2015). The
    initial parameters have weight 0. In step 1 the result is `params`, whatever `average` holds.

    Args:
        average: The average after the step before.
        params: The parameters after this step.
        decay: Above 0, below 1.
        step: Number of this step, from 1.
    """
    # expm1 keeps the digits that 1 - decay^t loses in float32 in the first steps.
    weights_so_far = -jnp.expm1(step.astype(jnp.float32) * math.log(decay))
    newest = (1.0 - decay) / weights_so_far
    return jax.tree.map(lambda a, p: a + newest * (p - a), average, params)


class Schedule(typing.NamedTuple):
    """A schedule of the learning rate as data. All fields are float32 scalars.

    One compiled step serves every peak, warm-up and length of run.
    """

    count: jax.Array  # steps done
    peak: jax.Array
    warmup: jax.Array  # steps
    total: jax.Array  # steps; the rate is 0 there

    def rate(self) -> jax.Array:
        """Returns the learning rate after `count` steps, as `schedule` does."""
        rising = self.count / jnp.maximum(self.warmup, 1.0)
        falling = (self.total - self.count) / jnp.maximum(self.total - self.warmup, 1.0)
        return self.peak * jnp.where(self.count < self.warmup, rising, jnp.maximum(falling, 0.0))


def create_adjustable(settings: config.Optimizer) -> optax.GradientTransformation:
    """Returns the optimiser of `create` with the schedule as a part of its state.

    `with_schedule` sets the schedule, which is linear. The settings of the learning rate and its
    schedule have no effect.
    """
    adam = optax.scale_by_adam(settings.b1, settings.b2, settings.eps)
    decayed = None if settings.decay_norms_and_biases else _decayed
    chain = _clipped(settings, adam, optax.add_decayed_weights(settings.weight_decay, decayed))

    def init(params):
        return chain.init(params), Schedule(*(jnp.zeros((), jnp.float32) for _ in Schedule._fields))

    def update(gradient, state, params):
        inner, schedule_state = state
        updates, inner = chain.update(gradient, inner, params)
        rate = schedule_state.rate()
        schedule_state = schedule_state._replace(count=schedule_state.count + 1.0)
        return jax.tree.map(lambda u: -rate * u, updates), (inner, schedule_state)

    return optax.GradientTransformation(init, update)


def with_schedule(opt_state: tuple, peak: float, warmup: int, total: int) -> tuple:
    """Returns the state of `create_adjustable` with a new schedule, at its start.

    Args:
        opt_state: State of the optimiser.
        peak: Learning rate at its peak.
        warmup: Steps until the peak.
        total: Steps until the rate is 0.
    """
    values = (0.0, peak, warmup, total)
    return opt_state[0], Schedule(
        *(
            jax.device_put(jnp.float32(v), old.sharding)
            for v, old in zip(values, opt_state[1], strict=True)
        )
    )
