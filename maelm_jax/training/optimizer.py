"""AdamW as the published code sets it (github.com/yumeng5/MAE-LM, its fairseq configurations).

The reference adds epsilon to the uncorrected sqrt(v), optax after the bias correction: the first steps differ slightly.
"""

import typing

import jax
import jax.numpy as jnp
import optax

from maelm_jax import config


def schedule(settings: config.Optimizer, train_steps: int) -> optax.Schedule:
    """Step -> learning rate: linear from 0 to the peak over `warmup_steps`, then linear to 0 at `train_steps`."""
    warmup = min(settings.warmup_steps, train_steps)
    up = optax.linear_schedule(0.0, settings.learning_rate, max(warmup, 1))
    down = optax.linear_schedule(settings.learning_rate, 0.0, max(train_steps - warmup, 1))
    return optax.join_schedules([up, down], [warmup])


def create(settings: config.Optimizer, train_steps: int) -> optax.GradientTransformation:
    """Clip by the global norm, then AdamW; decoupled decay on every parameter."""
    clip = optax.clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity()
    adamw = optax.adamw(schedule(settings, train_steps), settings.b1, settings.b2, settings.eps, weight_decay=settings.weight_decay)
    chain = optax.chain(clip, adamw)

    def update(gradient, state, params):
        with jax.numpy_dtype_promotion("standard"):  # optax multiplies floats by integer counts, which strict promotion refuses
            return chain.update(gradient, state, params)

    return optax.GradientTransformation(chain.init, update)


class Schedule(typing.NamedTuple):
    """A learning rate as data, float32 scalars: a step compiled once serves every peak, warm-up and length of run."""

    count: jax.Array  # steps done
    peak: jax.Array
    warmup: jax.Array  # steps
    total: jax.Array  # steps; 0 there

    def rate(self) -> jax.Array:
        """As `schedule` gives it."""
        rising = self.count / jnp.maximum(self.warmup, 1.0)
        falling = (self.total - self.count) / jnp.maximum(self.total - self.warmup, 1.0)
        return self.peak * jnp.where(self.count < self.warmup, rising, jnp.maximum(falling, 0.0))


def create_adjustable(settings: config.Optimizer) -> optax.GradientTransformation:
    """The optimiser of `create`, its schedule part of the state: `with_schedule` sets it, `settings.learning_rate` and `warmup_steps` do not."""
    clip = optax.clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity()
    adam = optax.scale_by_adam(settings.b1, settings.b2, settings.eps)
    chain = optax.chain(clip, adam, optax.add_decayed_weights(settings.weight_decay))

    def init(params):
        return chain.init(params), Schedule(*(jnp.zeros((), jnp.float32) for _ in Schedule._fields))

    def update(gradient, state, params):
        with jax.numpy_dtype_promotion("standard"):  # as in `create`
            updates, inner = chain.update(gradient, state[0], params)
        rate = state[1].rate()
        return jax.tree.map(lambda u: -rate * u, updates), (inner, state[1]._replace(count=state[1].count + 1.0))

    return optax.GradientTransformation(init, update)


def with_schedule(opt_state: tuple, peak: float, warmup: int, total: int) -> tuple:
    """The state of `create_adjustable` with this schedule, from its start."""
    values = (0.0, peak, warmup, total)
    return opt_state[0], Schedule(*(jax.device_put(jnp.float32(v), old.sharding) for v, old in zip(values, opt_state[1], strict=True)))
