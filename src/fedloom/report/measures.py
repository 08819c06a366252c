"""What a network measures of itself after every stage, as curves: alignment over tasks, perplexity and others.

They are the entries of `measures` in the rows of stages; those that have a name here get a panel where several stages
have a value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from fedloom.report.plots import MARKERS, SERIES, stage_axis
from fedloom.report.record import RunRecord, number
from fedloom.report.routing import MARKED
from fedloom.report.tables import flat

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = (
    ("alignment", "Alignment over tasks", "matched minus other cosines"),
    ("matched_cosine", "Matched cosine over tasks", "cosine"),
    ("accuracy_norm", "Accuracy, length-normalised", "fraction"),
    ("perplexity", "Perplexity over tasks", ""),
)


def panels(record: RunRecord) -> list[Callable[[Axes], None]]:
    """One function per measure with values after several stages; it draws on the axes that it is given."""
    found = ((title, unit, _curve(record, name)) for name, title, unit in CURVES)
    return [partial(_draw, title, unit, curve) for title, unit, curve in found if len(curve) > 1]


def _curve(record: RunRecord, name: str) -> dict[int, float]:
    """Stage -> value, where there is one."""
    pairs = ((row["stage"], number(flat(row), f"measures.{name}")) for row in record.stages)
    return {stage: value for stage, value in pairs if value is not None}


def _draw(title: str, unit: str, curve: dict[int, float], ax: Axes) -> None:
    marker = MARKERS[0] if len(curve) <= MARKED else ""
    ax.plot(list(curve), list(curve.values()), color=SERIES[0], marker=marker, lw=1.6, clip_on=False)
    stage_axis(ax, list(curve))
    low, high = ax.get_ylim()
    ax.set_ylim(min(0.0, low), max(0.0, high))
    ax.set_ylabel(unit)
    ax.set_title(title)
