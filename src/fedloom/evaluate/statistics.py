"""Means over seeds with intervals, and tests of one method against another on the same seeds."""

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

    def better(self, alpha: float = 0.05) -> bool:
        """True when a exceeds b and the paired t-test rejects equality at `alpha`; never for a single pair."""
        return self.p_t is not None and self.difference > 0 and self.p_t < alpha


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
    w, p_w = _signed_rank(np.round(steps))
    if np.ptp(steps) <= 1:
        return Comparison(mean, n, w=w, p_wilcoxon=p_w)
    t, p_t = _t_test(delta)
    return Comparison(mean, n, t, p_t, w, p_w)


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
