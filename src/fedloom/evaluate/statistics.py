"""Means over seeds with intervals, tests of one method against another on the same seeds, and ranks of several."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROUNDING = 1e-9  # of the largest value: differences below it are noise of the arithmetic


@dataclass(frozen=True)
class Interval:
    """Mean of `n` values with a confidence interval; std (ddof 1), low and high are None for one value."""

    mean: float
    n: int
    std: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def half_width(self) -> float | None:
        """Half the width of the interval."""
        return None if self.high is None else self.high - self.mean


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Mean and two-sided Student-t interval, mean +- t_{n-1} s / sqrt(n).

    One value has no interval. Raises `ValueError` without values, for values that are not finite, or for a
    level outside (0, 1).
    """
    x = _finite(values)
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must be in (0, 1), got {level}")
    mean, n = float(x.mean()), len(x)
    if n == 1:
        return Interval(mean, 1)
    from scipy.stats import t

    std = float(x.std(ddof=1))
    half = float(t.ppf(0.5 + level / 2, n - 1)) * std / math.sqrt(n)
    return Interval(mean, n, std, mean - half, mean + half)


@dataclass(frozen=True)
class Comparison:
    """A paired comparison: a against b on the same seeds; difference = mean(a - b).

    t, p_t: paired t-test. w, p_wilcoxon: Wilcoxon signed-rank test. Two-sided; None where there is no test.
    With n pairs the signed-rank p is never below 2 / 2^n, so it decides nothing for n < 6 at 5 %.
    """

    difference: float
    n: int
    t: float | None = None
    p_t: float | None = None
    w: float | None = None
    p_wilcoxon: float | None = None


def compare_paired(a: Sequence[float], b: Sequence[float]) -> Comparison:
    """Compare two methods seed by seed; a[i] and b[i] belong to the same seed.

    A single pair has no test. Equal values give p = 1; a difference that is the same for every seed has no spread, so
    it has no t-test. What differs by less than `ROUNDING` of the largest value is equal. Raises `ValueError` for
    unequal lengths, no pairs, or values that are not finite.
    """
    x, y = _finite(a), _finite(b)
    if len(x) != len(y):
        raise ValueError(f"a paired comparison needs equal numbers of values, got {len(x)} and {len(y)}")
    delta, n = x - y, len(x)
    mean = float(delta.mean())
    if n == 1:
        return Comparison(mean, 1)
    # Subtraction leaves rounding noise in differences that are equal on paper; it must not pass for spread or rank.
    steps = delta / (max(np.abs(x).max(), np.abs(y).max()) or 1.0) / ROUNDING
    if np.abs(steps).max() <= 1:
        return Comparison(mean, n, 0.0, 1.0, 0.0, 1.0)
    size = np.abs(steps)
    w, p_w = _signed_rank(np.sign(steps) * np.where(size > 1, 1 + _levels(size, 1.0), 0.0))
    if np.ptp(steps) <= 1:
        return Comparison(mean, n, w=w, p_wilcoxon=p_w)
    t, p_t = _t_test(delta)
    return Comparison(mean, n, t, p_t, w, p_w)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number, in the order given; see Holm, Scandinavian Journal of Statistics, 1979.

    The k-th smallest of m is multiplied by m - k + 1, is at least what the one before it became and at most 1. To
    reject what then lies below alpha is to reject anything wrongly with a probability of at most alpha. Raises
    `ValueError` for values outside [0, 1].
    """
    if bad := [p for p in p_values if not 0.0 <= p <= 1.0]:
        raise ValueError(f"p-values must be in [0, 1], got {bad[0]}")
    corrected, least = [0.0] * len(p_values), 0.0
    for k, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        least = corrected[i] = min(1.0, max(least, (len(p_values) - k) * p_values[i]))
    return corrected


def mean_ranks(values: Sequence[Sequence[float]], *, lower: bool = False) -> list[float]:
    """Mean over blocks of the rank of each method, 1 for the best; equal values share the mean of their ranks.

    values: [methods][blocks], a block being a seed or a setting. lower: whether lower values are better. What differs
    by `ROUNDING` of the block's largest value or less is equal, and so are values that a chain of such differences
    joins. Raises `ValueError` without methods or blocks, or for values that are not finite.
    """
    from scipy.stats import rankdata

    rows = np.stack([_finite(row) for row in values]) if len(values) else _finite(())
    levels = _levels(rows, ROUNDING * np.abs(rows).max(0))
    return [float(rank) for rank in rankdata(levels if lower else -levels, axis=0).mean(1)]


def _levels(values: np.ndarray, noise: np.ndarray | float) -> np.ndarray:
    """Place of each value among those of its column, from 0; a new place begins where the gap exceeds the noise."""
    order = np.argsort(values, axis=0)
    gaps = np.diff(np.take_along_axis(values, order, 0), axis=0, prepend=-np.inf) > noise
    levels = np.empty(values.shape)
    np.put_along_axis(levels, order, gaps.cumsum(0) - 1.0, 0)
    return levels


def _t_test(delta: np.ndarray) -> tuple[float, float]:
    """t = mean sqrt(n) / s and its two-sided p with n - 1 degrees of freedom."""
    from scipy.stats import t as student

    n = len(delta)
    t = float(delta.mean() / delta.std(ddof=1) * math.sqrt(n))
    return t, float(2 * student.sf(abs(t), n - 1))


def _signed_rank(delta: np.ndarray) -> tuple[float, float]:
    from scipy.stats import wilcoxon

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few pairs, ties and zeros, depending on scipy's version
        result = wilcoxon(delta)
    return float(result.statistic), float(result.pvalue)


def _finite(values: Sequence[float]) -> np.ndarray:
    x = np.asarray(values, np.float64)
    if x.ndim != 1 or len(x) == 0:
        raise ValueError("at least one value is needed")
    if not np.isfinite(x).all():
        raise ValueError(f"values must be finite, got {x[~np.isfinite(x)][0]}")
    return x
