"""Numbers of results as the papers print them: accuracies in per cent, everything else as it is."""

from __future__ import annotations

from fedloom.evaluate.comparison import DOMAIN, RESULTS
from fedloom.report.columns import PLAIN, words
from fedloom.report.units import decimal, short_count

POINTS = ("forgetting", "backward_transfer", "domain_std", "personal_domain_std")
THOUSANDTHS = ("measures.alignment", "measures.matched_cosine", "ratio")


def is_fraction(metric: str) -> bool:
    """Whether a result is a fraction that is shown in per cent."""
    return metric == "share" or (metric in RESULTS and metric not in PLAIN) or metric.startswith(DOMAIN)


def head(metric: str) -> str:
    """A result with its unit: "final accuracy, %"."""
    unit = ", pp" if metric in POINTS else ", %" if is_fraction(metric) else ""
    return f"{words(metric)}{unit}"


def short(metric: str, mean: float, half: float | None = None) -> str:
    """Mean and half width of its interval: "50.3 ± 1.2" in per cent, "0.219 ± 0.016", "11.2 M"."""
    if is_fraction(metric):
        return _joined(f"{100 * mean:.1f}", None if half is None else f"{100 * half:.1f}")
    if metric in THOUSANDTHS:
        return _joined(f"{mean:.3f}", None if half is None else f"{half:.3f}")
    if metric in PLAIN:
        return _joined(decimal(mean), None if half is None else f"{half:.2g}")
    return _joined(short_count(mean), short_count(half) if half else None)


def printed(metric: str, value: float) -> str:
    """A number of a paper, which is in per cent already."""
    return f"{value:.2f}" if is_fraction(metric) or metric in PLAIN else short_count(value)


def _joined(mean: str, half: str | None) -> str:
    return mean if half is None else f"{mean} ± {half}"
