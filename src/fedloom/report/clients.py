"""How accuracy is spread over clients, after every stage."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedloom.report.plots import SERIES, STROKES, legend_below, percent_axis, stage_axis
from fedloom.report.record import RunRecord, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def has_spread(record: RunRecord) -> bool:
    """Whether the deviation over clients was measured after several stages."""
    return sum(number(row, "accuracy/client_std") is not None for row in record.stages) > 1


def spread_curve(ax: Axes, record: RunRecord) -> None:
    """Mean accuracy over clients, one deviation (ddof 0) around it, and the worst tenth, in per cent over stages."""
    import numpy as np

    x = [row["stage"] for row in record.stages]
    mean, std, worst = (
        100 * np.array([_or_nan(number(row, f"accuracy/client_{key}")) for row in record.stages])
        for key in ("mean", "std", "worst10")
    )
    band = "one deviation over clients"
    ax.fill_between(x, mean - std, mean + std, color=SERIES[5], alpha=0.22, linewidth=0, label=band)
    ax.plot(x, mean, color=SERIES[0], marker="D", lw=2.2, clip_on=False, label="mean")
    ax.plot(x, worst, color=SERIES[1], linestyle=STROKES[1], marker="v", lw=1.6, clip_on=False, label="worst tenth")
    stage_axis(ax, x)
    percent_axis(ax)
    ax.set_title("Accuracy over clients")
    legend_below(ax, *ax.get_legend_handles_labels())


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
