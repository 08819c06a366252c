"""Means over seeds with intervals, and tests of one method against another on the same seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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

    t, p_t: paired t-test. w, p_wilcoxon: Wilcoxon signed-rank test. Two-sided; None for a single pair.
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

    Equal values give p = 1; a difference that is the same for every seed has no spread, so t is infinite and
    p = 0. Raises `ValueError` for unequal lengths, no pairs, or values that are not finite.
    """
    x, y = _finite(a), _finite(b)
    if len(x) != len(y):
        raise ValueError(f"a paired comparison needs equal numbers of values, got {len(x)} and {len(y)}")
    delta, n = x - y, len(x)
    mean = float(delta.mean())
    if n == 1:
        return Comparison(mean, 1)
    t, p_t = _t_test(delta)
    w, p_w = _signed_rank(delta)
    return Comparison(mean, n, t, p_t, w, p_w)


def _t_test(delta: np.ndarray) -> tuple[float, float]:
    mean, spread = float(delta.mean()), float(np.ptp(delta))
    # Subtraction leaves rounding noise in differences that are equal on paper; it must not pass for spread.
    if spread <= 1e-12 * max(1.0, float(np.abs(delta).max())):
        equal = abs(mean) <= 1e-12
        return (0.0, 1.0) if equal else (math.copysign(math.inf, mean), 0.0)
    from scipy.stats import ttest_1samp

    result = ttest_1samp(delta, 0.0)
    return float(result.statistic), float(result.pvalue)


def _signed_rank(delta: np.ndarray) -> tuple[float, float]:
    if not delta.any():
        return 0.0, 1.0
    from scipy.stats import wilcoxon

    result = wilcoxon(delta)
    return float(result.statistic), float(result.pvalue)


def _finite(values: Sequence[float]) -> np.ndarray:
    x = np.asarray(values, np.float64)
    if x.ndim != 1 or len(x) == 0:
        raise ValueError("at least one value is needed")
    if not np.isfinite(x).all():
        raise ValueError(f"values must be finite, got {x[~np.isfinite(x)][0]}")
    return x
