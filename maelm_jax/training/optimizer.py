"""AdamW as the reference sets it (reference.md section 2).

The reference adds epsilon to the uncorrected sqrt(v), optax after the bias correction: the first steps differ slightly.
"""

import jax
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
