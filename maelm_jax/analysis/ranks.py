"""What the second moment of a set of hidden states says: effective rank, spectrum, the dimensions kept for [MASK], per-dimension use.

All of it is float64 numpy on d x d matrices. With H the (tokens x d) matrix of states, the eigenvalues of its second moment H^T H / n are the
squares of H's singular values, divided by n.
"""

import collections.abc
import dataclasses
import math
import typing

import numpy as np

from maelm_jax import config

LEAST_PER_DIMENSION = 20  # tokens for each dimension, below which no rank is reported
ALONE_DEGREES = 45.0  # from the real tokens' span: more than half of such a direction lies outside it
CONFIDENCE = 0.95


def check_tau(tau: float):
    if not 0 < tau <= 1:
        raise config.ConfigError(f"--tau={tau}: tau must lie in (0, 1]")


def spectrum(moment: np.ndarray) -> np.ndarray:
    """Eigenvalues of a second moment [D, D], largest first, float64 [D].

    The states came in float32, so what is below d x 2^-24 of the largest is rounding and set to 0 (cf. numpy.linalg.matrix_rank).
    """
    values = np.linalg.eigvalsh(moment)[::-1]
    return np.where(values > len(values) * 2.0**-24 * values[0], values, 0.0)


def effective_rank(values: np.ndarray, tau: float) -> int:
    """The smallest k such that the k largest of `values` (squared singular values, largest first) sum to at least tau of all (arXiv 2302.02060)."""
    cumulated = np.cumsum(values)
    return int(np.searchsorted(cumulated, tau * cumulated[-1]) + 1)


def span(moment: np.ndarray, tau: float) -> np.ndarray:
    """An orthonormal basis [D, k] of the k leading eigenvectors, k the effective rank: the space in which tau of the squared length lies."""
    values, vectors = np.linalg.eigh(moment)
    return vectors[:, ::-1][:, : effective_rank(spectrum(moment), tau)]


def share_outside(moment: np.ndarray, basis: np.ndarray) -> float:
    """The share of a moment's trace (mean squared length, or variance of a centred one) that lies outside the span of `basis` [D, k]."""
    return float(1.0 - np.trace(basis.T @ moment @ basis) / np.trace(moment))


def principal_angles(basis: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Degrees between the span of `other` [D, m] and that of `basis` [D, k], one for each dimension of `other`, ascending, float64 [m].

    The usual principal angles, and 90 for the m - k dimensions for which `basis` has no partner left.
    """
    cosines = np.linalg.svd(basis.T @ other, compute_uv=False)
    return np.concatenate([np.degrees(np.arccos(np.clip(cosines, 0.0, 1.0))), np.full(other.shape[1] - len(cosines), 90.0)])


def use_of_dimensions(moment: np.ndarray) -> np.ndarray:
    """The share of each coordinate of the hidden state in the mean squared length, float64 [D], in the order of the coordinates."""
    return np.diag(moment) / np.trace(moment)


@dataclasses.dataclass(frozen=True)
class Interval:
    """The mean over disjoint sets of tokens, and half the width of its confidence interval (Student's t); None for a single set."""

    mean: float
    half: float | None
    sets: int


def interval(values: collections.abc.Sequence[float | int]) -> Interval:
    n, mean = len(values), float(np.mean(values))
    if n < 2:
        return Interval(mean, None, n)
    import scipy.stats  # takes a second, which training, that needs no interval, is spared

    quantile = scipy.stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1)
    return Interval(mean, float(quantile * np.std(values, ddof=1) / math.sqrt(n)), n)


def enough(tokens: typing.SupportsFloat, width: int) -> bool:
    """Whether a rank may be reported from so many tokens: fewer than 20 x d would show the sample, not the model."""
    return float(tokens) >= LEAST_PER_DIMENSION * width


def describe(sets: list[dict], layer: int, tau: float) -> dict:
    """All that is reported of one layer, ready for JSON. `sets` holds {name: Moments} of each disjoint set of tokens (see moments.py).

    For each name that has tokens enough: their number, the effective rank over all sets' tokens, its mean and interval over the sets, the rank
    of the centred states, both spectra, the use of dimensions. Where the encoder sees [MASK], `mask_alone`: what it keeps for [MASK].
    """
    width = sets[0]["plain"].total.shape[1]
    groups = [one | {"all": one["real"] + one["mask"]} for one in sets]
    pooled = {name: sum((one[name] for one in groups[1:]), groups[0][name]) for name in groups[0]}
    result: dict = {"layer": layer}
    for name, moments in pooled.items():
        result[name] = {"tokens": int(moments.count)}
        if not enough(moments.count, width):
            continue
        values, centred = (spectrum(moments.second(layer, centred=c)) for c in (False, True))
        parts = [one[name] for one in groups if enough(one[name].count, width)]
        by_set = interval([effective_rank(spectrum(part.second(layer)), tau) for part in parts] if len(parts) > 1 else [effective_rank(values, tau)])
        result[name] |= {
            "rank": effective_rank(values, tau),
            "rank_by_set": dataclasses.asdict(by_set),
            "centred_rank": effective_rank(centred, tau),
            "spectrum": values.tolist(),
            "centred_spectrum": centred.tolist(),
            "use_of_dimensions": use_of_dimensions(moments.second(layer)).tolist(),
        }
    if "rank" in result["mask"] and "rank" in result["real"]:
        result["mask_alone"] = mask_alone(pooled["real"].second(layer), pooled["mask"], layer, tau)
    return result


def mask_alone(real: np.ndarray, mask, layer: int, tau: float) -> dict:
    """What the encoder keeps for [MASK]: how much of it lies outside the span of the real tokens of the same input (theorem 2.2).

    `share_outside` is of [MASK]'s mean squared length, `variance_outside` of its variance; `dimensions` counts the dimensions of [MASK]'s own
    span that make more than 45 degrees with the real tokens' span. Both spans hold tau of the squared length.
    """
    basis = span(real, tau)
    angles = principal_angles(basis, span(mask.second(layer), tau))
    return {
        "share_outside": share_outside(mask.second(layer), basis),
        "variance_outside": share_outside(mask.second(layer, centred=True), basis),
        "dimensions": int((angles > ALONE_DEGREES).sum()),
        "principal_angles": angles.tolist(),
    }
