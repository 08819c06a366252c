"""Values against a cost: the points that no other beats in both, and their picture.

One that pools the data of all clients is no federation and on no front; it stands as a level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fedloom.report.plots import MUTED, PAPER, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

WIDE = 20.0  # the ratio of costs from which the axis is logarithmic


class Point(NamedTuple):
    """A run or a method. cost: None where it has none; low, high: the interval of the value, where there is one."""

    cost: float | None
    value: float
    low: float | None = None
    high: float | None = None
    pooled: bool = False


class CostAxis(NamedTuple):
    """The axis of a cost: the picture's title, what is along the axis and how its numbers are written."""

    title: str
    label: str
    write: Callable[[float], str]


def in_megabytes(value: float) -> str:
    """Bytes on an axis of millions of bytes."""
    return f"{value / 1e6:g}"


def placed(points: Mapping[str, Point]) -> dict[str, float]:
    """Label -> cost of what has one and is a federation."""
    return {label: p.cost for label, p in points.items() if p.cost is not None and not p.pooled}


def front(points: Mapping[str, Point], *, lower: bool = False) -> list[str]:
    """Labels that no other dominates: is no dearer and no worse, and one of both strictly. lower: values are better
    when they are lower. What pools all data, and what has no cost, is left out.
    """
    signed = {k: (cost, points[k].value if lower else -points[k].value) for k, cost in placed(points).items()}
    return [
        label
        for label, mine in signed.items()
        if not any(other != mine and other[0] <= mine[0] and other[1] <= mine[1] for other in signed.values())
    ]


def draw(
    ax: Axes,
    points: Mapping[str, Point],
    axis: CostAxis,
    *,
    order: Sequence[str],
    scale: float = 100.0,
    lower: bool = False,
) -> None:
    """Each point in the look of its position in `order`, filled on the front, which a line of steps joins; with its
    interval. scale: what values are multiplied with. Some point has to be `placed`.

    Costs are on a logarithmic axis where they differ by more than a factor `WIDE`; what costs nothing then stands at
    its left end, at 0.
    """
    costs, best = placed(points), front(points, lower=lower)
    line = sorted((costs[label], scale * points[label].value) for label in best)
    ax.step(*zip(*line, strict=True), where="post", color=MUTED, lw=1.0, zorder=1)
    for i, label in enumerate(order):
        color, point = look(i)[0], points.get(label)
        if label in costs and point is not None:
            if point.low is not None and point.high is not None:
                ends = [scale * point.low, scale * point.high]
                ax.plot([costs[label]] * 2, ends, color=color, lw=1.2, zorder=2)
            made = mark(i, filled=label in best)
            made.set_data([costs[label]], [scale * point.value])
            ax.add_line(made)
        elif point is not None and point.pooled:
            ax.axhline(scale * point.value, color=color, lw=1.4, ls=":", zorder=0)
    _along(ax, list(costs.values()), axis)
    ax.set_title(axis.title)


def _along(ax: Axes, costs: Sequence[float], axis: CostAxis) -> None:
    """Scale and ticks of the costs."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    positive = [cost for cost in costs if cost > 0]
    ax.margins(y=0.15)
    ax.autoscale_view(scalex=False)
    if positive and max(positive) > WIDE * min(positive):
        zero = len(positive) < len(costs)
        ax.set_xscale("symlog", linthresh=min(positive) / 2, linscale=0.4) if zero else ax.set_xscale("log")
        ax.set_xlim(-min(positive) / 8 if zero else min(positive) / 1.5, 1.5 * max(positive))
        ax.xaxis.set_minor_formatter(NullFormatter())
    else:
        ax.set_xlim(-0.03 * (max(costs) or 1.0), 1.08 * (max(costs) or 1.0))
        ax.locator_params(axis="x", nbins=5)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: axis.write(value)))
    ax.set_xlabel(axis.label)


def mark(i: int, *, filled: bool = True, pooled: bool = False) -> Line2D:
    """The mark of the i-th of several; hollow where it is on no front, a dotted level for pooled data."""
    from matplotlib.lines import Line2D

    color, marker, _ = look(i)
    if pooled:
        return Line2D([], [], linestyle=":", lw=1.4, color=color)
    face = color if filled else PAPER
    return Line2D([], [], linestyle="", marker=marker, markersize=7.5, color=color, markerfacecolor=face, zorder=3)
