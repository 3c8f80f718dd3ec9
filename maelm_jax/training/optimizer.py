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

    It rises linearly from 0 to the peak over `warmup_steps`, then falls linearly to 0 at
    `train_steps`.
    """
    warmup = min(settings.warmup_steps, train_steps)
    up = optax.linear_schedule(0.0, settings.learning_rate, max(warmup, 1))
    down = optax.linear_schedule(settings.learning_rate, 0.0, max(train_steps - warmup, 1))
    return optax.join_schedules([up, down], [warmup])


def create(settings: config.Optimizer, train_steps: int) -> optax.GradientTransformation:
    """Returns the optimiser: clipping by the global norm, then AdamW.

    Weight decay is decoupled and applies to every parameter.
    """
    clip = optax.clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity()
    adamw = optax.adamw(
        schedule(settings, train_steps),
        settings.b1,
        settings.b2,
        settings.eps,
        weight_decay=settings.weight_decay,
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

    `with_schedule` sets the schedule. `settings.learning_rate` and `settings.warmup_steps` have no
    effect.
    """
    clip = optax.clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity()
    adam = optax.scale_by_adam(settings.b1, settings.b2, settings.eps)
    chain = optax.chain(clip, adam, optax.add_decayed_weights(settings.weight_decay))

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
