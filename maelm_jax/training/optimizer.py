"""AdamW with the settings of the published code (github.com/yumeng5/MAE-LM).

One difference: the published code (fairseq) adds epsilon to sqrt(v) before the bias correction,
optax after it. The first steps differ slightly.
"""

import typing

import jax
import jax.numpy as jnp
import optax

from maelm_jax import config


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


def create(settings: config.Optimizer, train_steps: int) -> optax.GradientTransformation:
    """Returns the optimiser: clipping by the global norm, then AdamW.

    Weight decay is decoupled. Without `decay_norms_and_biases` it leaves out biases and scales.
    """
    clip = optax.clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity()
    adamw = optax.adamw(
        schedule(settings, train_steps),
        settings.b1,
        settings.b2,
        settings.eps,
        weight_decay=settings.weight_decay,
        mask=None if settings.decay_norms_and_biases else _decayed,
    )
    chain = optax.chain(clip, adamw)

    def update(gradient, state, params):
        # optax multiplies floats by integer counts, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            return chain.update(gradient, state, params)

    return optax.GradientTransformation(chain.init, update)


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
    clip = optax.clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity()
    adam = optax.scale_by_adam(settings.b1, settings.b2, settings.eps)
    mask = None if settings.decay_norms_and_biases else _decayed
    decay = optax.add_decayed_weights(settings.weight_decay, mask)
    chain = optax.chain(clip, adam, decay)

    def init(params):
        return chain.init(params), Schedule(*(jnp.zeros((), jnp.float32) for _ in Schedule._fields))

    def update(gradient, state, params):
        with jax.numpy_dtype_promotion("standard"):  # as in `create`
            updates, inner = chain.update(gradient, state[0], params)
        rate = state[1].rate()
        return jax.tree.map(lambda u: -rate * u, updates), (
            inner,
            state[1]._replace(count=state[1].count + 1.0),
        )

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
