"""Effective rank, spectrum and other figures from the second moment of hidden states.

The effective rank is that of arXiv 2302.02060. Everything is float64 numpy on D x D matrices, where
D is the width. H is the (tokens x D) matrix of n states. The eigenvalues of its second moment
H^T H / n are the squared singular values of H, divided by n.
"""

import typing

import numpy as np

TAU = 0.9  # share of the squared length that the effective rank holds, as in the paper
LEAST_PER_DIMENSION = 20  # no rank is reported from fewer tokens for each dimension
# A direction at more than this angle from a span has more than half its squared length outside.
ALONE_DEGREES = 45.0
# Rounding errors of sums over many tokens, of the largest eigenvalue: in float64, and in float32,
# in which states minus their mean are multiplied (5e-9 to 1.6e-7 were measured).
ROUNDING, FLOAT32_ROUNDING = 2.0**-44, 8 * 2.0**-24


class Spectra(typing.NamedTuple):
    """Eigenvalues, largest first, float64 [D]. Those within the rounding error are 0."""

    second: np.ndarray  # of the second moment
    centred: np.ndarray  # of the covariance


def spectra(second: np.ndarray, centred: np.ndarray) -> Spectra:
    """Returns the eigenvalues of a second moment and of its covariance, both [D, D]."""
    values = [np.linalg.eigvalsh(moment)[::-1] for moment in (second, centred)]
    least = max(ROUNDING * values[0][0], FLOAT32_ROUNDING * values[1][0])
    return Spectra(*(np.where(each > least, each, 0.0) for each in values))


def spectrum(second: np.ndarray) -> np.ndarray:
    """Returns the eigenvalues of a second moment [D, D] for a rank, largest first, float64 [D]."""
    return np.maximum(np.linalg.eigvalsh(second)[::-1], 0.0)


def effective_rank(values: np.ndarray, tau: float) -> int:
    """Smallest k such that the k largest values sum to at least tau of the sum of all.

    This is the effective rank of arXiv 2302.02060. The values are squared singular values, largest
    first, float64 [D].
    """
    cumulated = np.cumsum(values)
    if not cumulated[-1]:  # the centred states of [MASK] are all 0 where no position is added
        return 0
    return int(np.searchsorted(cumulated, tau * cumulated[-1]) + 1)


def span(moment: np.ndarray, tau: float) -> np.ndarray:
    """Orthonormal basis [D, k] of the k leading eigenvectors, where k is the effective rank.

    Its span holds at least tau of the squared length.
    """
    _, vectors = np.linalg.eigh(moment)
    return vectors[:, ::-1][:, : effective_rank(spectrum(moment), tau)]


def share_outside(moment: np.ndarray, basis: np.ndarray) -> float:
    """Share of the trace of `moment` [D, D] that lies outside the span of `basis` [D, k].

    The trace is the mean squared length, or the variance if the moment is centred.
    """
    return float(1.0 - np.trace(basis.T @ moment @ basis) / np.trace(moment))


def principal_angles(basis: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Principal angles between two spans, in degrees, ascending: one for each column of `other`.

    If `other` [D, m] has more columns than `basis` [D, k], the last m - k angles are 90.
    """
    import scipy.linalg  # slow to import

    angles = np.degrees(scipy.linalg.subspace_angles(basis, other))[::-1]
    return np.pad(angles, (0, other.shape[1] - len(angles)), constant_values=90.0)


def has_rank(tokens: typing.SupportsFloat, width: int) -> bool:
    """Returns whether `tokens` tokens suffice to report a rank.

    With fewer, the rank depends on the sample and not on the model.
    """
    return float(tokens) >= LEAST_PER_DIMENSION * width


def describe(sets: list[dict], layer: int, tau: float) -> dict:
    """Describes one layer, ready for JSON.

    Each of the disjoint sets of tokens is {kind: Moments}, with the kinds `moments.TOKEN_KINDS`.

    Returns:
        A dict with one entry for each kind of tokens, and for "all". The entry has the number of
        tokens. If these suffice, it also has the effective rank of the pooled tokens, that of each
        set, the rank of the centred states, and both spectra. If real tokens and [MASK] both have a
        rank, the key `mask_alone` holds the result of `mask_alone`.
    """
    width = sets[0]["plain"].total.shape[1]
    of_layer = [{name: one[name].of_layer(layer) for name in one} for one in sets]
    groups = [one | {"all": one["real"] + one["mask"]} for one in of_layer]
    pooled = {name: sum((one[name] for one in groups[1:]), groups[0][name]) for name in groups[0]}
    result: dict = {"layer": layer}
    for name, moments in pooled.items():
        result[name] = {"tokens": int(moments.count)}
        if has_rank(moments.count, width):
            parts = [one[name] for one in groups if has_rank(one[name].count, width)]
            result[name] |= _describe_tokens(moments, parts, tau)
    if "rank" in result["mask"] and "rank" in result["real"]:
        result["mask_alone"] = mask_alone(pooled["real"].second(), pooled["mask"], tau)
    return result


def _describe_tokens(moments, parts: list, tau: float) -> dict:
    """Ranks and spectra of one layer. `parts` are the sets with enough tokens for a rank."""
    values, centred = spectra(moments.second(), moments.second(centred=True))
    rank = effective_rank(values, tau)
    by_set = [effective_rank(spectrum(part.second()), tau) for part in parts]
    return {
        "rank": rank,
        "rank_by_set": by_set,
        "centred_rank": effective_rank(centred, tau),
        "spectrum": values.tolist(),
        "centred_spectrum": centred.tolist(),
    }


def mask_alone(real: np.ndarray, mask, tau: float) -> dict:
    """Measures how much of the [MASK] states lies outside the span of the real tokens.

    The real tokens are those of the same input (arXiv 2302.02060, theorem 2.2). Both spans hold at
    least tau of the squared length. `real` is the second moment of the real tokens, [D, D]. `mask`
    has the moments of the [MASK] tokens in the same layer.

    Returns:
        share_outside: Share of the mean squared length of [MASK] outside the real tokens' span.
        variance_outside: Share of the variance of [MASK] outside that span.
        dimensions: Number of dimensions of the [MASK] span at more than `ALONE_DEGREES` from it.
        principal_angles: Angles between the spans in degrees, ascending.
    """
    basis, second, centred = span(real, tau), mask.second(), mask.second(centred=True)
    varies = spectra(second, centred).centred.any()
    angles = principal_angles(basis, span(second, tau))
    return {
        "share_outside": share_outside(second, basis),
        "variance_outside": share_outside(centred, basis) if varies else 0.0,
        "dimensions": int((angles > ALONE_DEGREES).sum()),
        "principal_angles": angles.tolist(),
    }
