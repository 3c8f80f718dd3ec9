"""AdamW with the settings of the published code (github.com/yumeng5/MAE-LM), Muon, learning rates.

AdamW differs in one point: the published code (fairseq) adds epsilon to sqrt(v) before the bias
correction, optax after it. The first steps differ slightly.

The learning rate is no part of an optimiser. `learning_rates` gives the rate of every step, and the
training step multiplies the update by it. So pretraining and fine-tuning share `create`, and one
compiled step serves every schedule.
"""

import collections.abc
import functools
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from maelm_jax import config
from maelm_jax.model.kernels.linear import product
from maelm_jax.training import sharding

MUON_RMS = 0.2  # root mean square of Muon's update of a matrix, as AdamW's typically is
MUON_DECAY = 0.95  # of its momentum
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of Jordan (2024)
NEWTON_SCHULZ_STEPS = 5
# (step from 0, steps, peak, warm-up steps, **Optimizer.schedule_parameters) -> its learning rate
OwnSchedule = collections.abc.Callable[..., float]
SCHEDULE_ARGUMENTS = ("step", "steps", "peak", "warmup_steps")
WIDE = 2  # from so many times as many columns as rows on, iterations on the Gram matrix are faster


def create(
    settings: config.Optimizer, dtype: jax.typing.DTypeLike = jnp.float32
) -> optax.GradientTransformation:
    """Returns an optimiser: clipping by the global norm, then the rule of `Optimizer.kind`.

    Its updates are to be multiplied by the learning rate. Weight decay is decoupled from the
    gradient. Without `decay_norms_and_biases` it leaves out biases and scales.

    Muon updates the matrices of the layers, AdamW all other parameters. The products of Muon are of
    `dtype`, the type of the model's computation.
    """
    is_decayed = None if settings.decay_norms_and_biases else _is_decayed
    adamw = optax.chain(
        optax.scale_by_adam(settings.b1, settings.b2, settings.eps),
        optax.add_decayed_weights(settings.weight_decay, is_decayed),
        optax.scale(-1.0),
    )
    match settings.kind:
        case "adamw":
            rule = adamw
        case "muon":
            muon = optax.chain(
                optax.GradientTransformation(_init_muon, functools.partial(_update_muon, dtype)),
                optax.add_decayed_weights(settings.weight_decay),
                optax.scale(-settings.muon_learning_rate / settings.learning_rate),
            )
            rule = optax.partition({"muon": muon, "adamw": adamw}, _rule_of_each)

    def update(gradient, state, params):
        if settings.clip_norm:
            # optax's own clipping branches for each parameter, which takes a second to compile.
            share = jnp.minimum(1.0, settings.clip_norm / optax.tree.norm(gradient))
            gradient = jax.tree.map(lambda g: share * g, gradient)
        # optax multiplies floats by integer counts, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            return rule.update(gradient, state, params)

    return optax.GradientTransformation(rule.init, update)


class MuonState(typing.NamedTuple):
    """State of Muon."""

    count: Int[Array, ""]
    momentum: dict


def _init_muon(kernels: dict) -> MuonState:
    return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, kernels))


def _update_muon(
    dtype: jax.typing.DTypeLike, kernels: dict, state: MuonState, _=None
) -> tuple[dict, MuonState]:
    """Replaces the gradient of each matrix by the orthogonal matrix nearest to its momentum.

    Source: Jordan 2024, with Nesterov momentum; scaled as by Liu et al. 2025 (arXiv 2502.16982).
    Matrices of one shape are orthogonalised together: fewer programs to compile, larger products.
    """
    count = state.count + 1
    momentum = optax.tree.update_moment(kernels, state.momentum, MUON_DECAY, 1)
    # Both are divided by the sum of their weights, as in optax.contrib.muon.
    ahead = optax.tree.update_moment(
        optax.tree.bias_correction(kernels, MUON_DECAY, count),
        optax.tree.bias_correction(momentum, MUON_DECAY, count + 1),
        MUON_DECAY,
        1,
    )
    leaves, tree = jax.tree.flatten(ahead)
    groups = collections.defaultdict(list)
    for number, leaf in enumerate(leaves):
        groups[tuple(sorted(leaf.shape[1:]))].append(number)
    for shape, numbers in groups.items():
        matrices = [_as_wide(leaves[number]) for number in numbers]
        orthogonal = _orthogonalise(jnp.concatenate(matrices), dtype)
        orthogonal = orthogonal * (MUON_RMS * max(shape) ** 0.5)
        ends = np.cumsum([len(matrix) for matrix in matrices])[:-1]
        for number, part in zip(numbers, jnp.split(orthogonal, ends), strict=True):
            is_wide = leaves[number].shape == part.shape
            leaves[number] = part if is_wide else part.swapaxes(1, 2)
    return jax.tree.unflatten(tree, leaves), MuonState(count, momentum)


def _as_wide(matrices: Float[Array, "N _ _"]) -> Float[Array, "N _ _"]:
    """Returns the matrices, transposed if they have more rows than columns."""
    _, rows, columns = matrices.shape
    return matrices if rows <= columns else matrices.swapaxes(1, 2)


def _orthogonalise(x: Float[Array, "N _ _"], dtype: jax.typing.DTypeLike) -> Float[Array, "N _ _"]:
    """Brings the singular values of each matrix near 1, by Newton-Schulz iterations.

    CPUs take one matrix after the other: XLA's CPU compiler multiplies batches more slowly.
    """
    rows, columns = x.shape[1:]
    # n iterations at once take 4 n - 3 products of square matrices and two with x, one by one n and
    # 2 n. In bfloat16, more than three at once are not accurate enough.
    at_once = [2, 3] if jnp.dtype(dtype) == jnp.bfloat16 else [NEWTON_SCHULZ_STEPS]

    def orthogonalise(x):
        x = x / (jnp.linalg.norm(x) + 1e-8)
        if columns < WIDE * rows:
            return jax.lax.fori_loop(0, NEWTON_SCHULZ_STEPS, lambda _, x: _iterate(x, 1, dtype), x)
        for steps in at_once:
            x = _iterate(x, steps, dtype)
        return x

    one_by_one = functools.partial(jax.lax.map, orthogonalise)
    return jax.lax.platform_dependent(x, cpu=one_by_one, default=jax.vmap(orthogonalise))


def _iterate(
    x: Float[Array, "R C"], steps: int, dtype: jax.typing.DTypeLike
) -> Float[Array, "R C"]:
    """Does iterations x -> p x, where p = a I + b g + c g^2 and g = x x^T is the Gram matrix.

    The Gram matrix of the result is p g p. So all iterations are done on square matrices, and x is
    read at the start and at the end only.
    """
    a, b, c = NEWTON_SCHULZ

    def multiply(subscripts, left, right):
        return product(subscripts, left.astype(dtype), right.astype(dtype), jnp.float32)

    square = functools.partial(multiply, "rs,st->rt")
    gram = multiply("rc,sc->rs", x, x)
    for step in range(steps):
        p = _split(a, b * gram + c * square(gram, gram))
        if step == 0:
            q = p
        else:
            rest = q.scale * p.rest + p.scale * q.rest + square(p.rest, q.rest)
            q = _split(p.scale * q.scale, rest)
        if step < steps - 1:
            half = p.scale * gram + square(p.rest, gram)
            gram = p.scale * half + square(half, p.rest)
    return q.scale * x + multiply("rs,sc->rc", q.rest, x)


class _Split(typing.NamedTuple):
    """The matrix scale I + rest. Apart, a large `scale` takes no digits of `rest` in bfloat16."""

    scale: Float[Array, ""]
    rest: Float[Array, "R R"]


def _split(scale: jax.typing.ArrayLike, rest: Float[Array, "R R"]) -> _Split:
    """Returns scale I + rest, with a `rest` whose trace is 0."""
    mean = jnp.trace(rest) / len(rest)
    return _Split(scale + mean, rest - mean * jnp.eye(len(rest)))


def learning_rates(
    settings: config.Optimizer, steps: int, start: float | None = None
) -> np.ndarray:
    """Returns the learning rate of every step, float32 [steps].

    With the schedules "linear", "cosine" and "wsd" (warm-up, stable, decay), it goes linearly to
    the peak in `warmup_steps`. Then it falls to 0 over all other steps, linearly or as half a wave
    (linear, cosine), or it stays and falls linearly over the last `decay_share` of all steps (wsd).
    With "decay" it falls to 0 over all steps, as 1 - sqrt(share of the steps). It begins at
    `start`, the rate of the run that this one goes on from. None is 0.
    """
    return _rates(np.arange(steps), settings, steps, start or 0.0)


class LearningRates:
    """The values of `learning_rates`, each computed when it is needed: a run may be very long.

    The value after the last step is the rate at the end of the run: 0 after a decay. `own` is the
    user's function, if `Optimizer.schedule` names one. Its rates must be numbers of at least 0.
    """

    def __init__(
        self,
        settings: config.Optimizer,
        steps: int,
        start: float | None = None,
        own: OwnSchedule | None = None,
    ):
        self._settings, self._steps, self._start = settings, steps, start or 0.0
        self._own = own
        if own:
            for step in (0, steps // 2, steps - 1):
                _ = self[step]

    def __getitem__(self, step: int) -> np.float32:
        if self._own:
            return self._own_rate(step)
        return _rates(np.array([step]), self._settings, self._steps, self._start)[0]

    def _own_rate(self, step: int) -> np.float32:
        settings = self._settings
        arguments = (step, self._steps, settings.learning_rate, settings.warmup_steps)
        try:
            rate = float(self._own(*arguments, **settings.schedule_parameters))
            if not 0 <= rate < math.inf:
                raise ValueError(f"it returns {rate}, which is no learning rate")
        except Exception as error:
            raise config.ConfigError(
                f"Optimizer.schedule={settings.schedule} fails for step {step} of {self._steps} "
                f"({type(error).__name__}: {error}). Return a number from 0 on"
            ) from error
        return np.float32(rate)


def _rates(done: np.ndarray, settings: config.Optimizer, steps: int, start: float) -> np.ndarray:
    """Returns the learning rate of the step that follows on `done` steps."""
    if settings.schedule == "decay":
        return (start * (1 - np.sqrt(done / steps))).astype(np.float32)
    warmup, peak = min(settings.warmup_steps, steps), settings.learning_rate
    rising = start + (peak - start) * done / max(warmup, 1)
    falling = steps - warmup
    if settings.schedule == "wsd":
        falling = min(round(settings.decay_share * steps), falling)
    fallen = np.clip((done - (steps - falling)) / max(falling, 1), 0, 1)
    if settings.schedule == "cosine":
        fallen = (1 - np.cos(np.pi * fallen)) / 2
    elif settings.schedule not in ("linear", "wsd"):
        raise ValueError(
            f"Optimizer.schedule={settings.schedule!r} has no case in "
            "maelm_jax/training/optimizers.py"
        )
    rates = np.where(done < warmup, rising, peak * (1 - fallen))
    return rates.astype(np.float32)


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
