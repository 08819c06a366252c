"""What accuracy costs: final accuracy of several runs or methods against their traffic and their operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fedloom.report.plots import look
from fedloom.report.record import Row, number
from fedloom.report.units import short_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE = 20.0  # the ratio of costs from which the axis is logarithmic


class Point(NamedTuple):
    """One run or method. Costs and accuracy; low, high: the interval of the accuracy, where there is one."""

    traffic: float | None
    operations: float | None
    accuracy: float | None
    low: float | None = None
    high: float | None = None


class Cost(NamedTuple):
    """A cost: the field of a `Point`, the picture's title, the axis and how its numbers are written."""

    field: str
    title: str
    label: str
    write: Callable[[float], str]


COSTS = (
    Cost("traffic", "Accuracy against traffic", "MB sent both ways", lambda value: f"{value / 1e6:g}"),
    Cost("operations", "Accuracy against operations", "FLOPs per example", short_count),
)


def of_summary(summary: Row) -> Point:
    """The point of one run. A run that pools the data of all has no traffic."""
    pooled = summary.get("data_view") not in (None, "stream")
    traffic = None if pooled else _sum([number(summary, key) for key in ("bytes_up", "bytes_down")])
    return Point(traffic, number(summary, "flops_per_example"), number(summary, "final_accuracy"))


def of_methods(content: Mapping[str, Any]) -> dict[str, Point]:
    """Label -> the point of a method's means over seeds, from the content of compare.json."""
    return {label: _of_metrics(entry["metrics"]) for label, entry in content["methods"].items()}


def _of_metrics(metrics: Mapping[str, Row]) -> Point:
    means = {key: number(found, "mean") for key, found in metrics.items()}
    accuracy = metrics.get("final_accuracy", {})
    return Point(
        _sum([means.get("bytes_up"), means.get("bytes_down")]),
        means.get("flops_per_example"),
        means.get("final_accuracy"),
        number(accuracy, "low"),
        number(accuracy, "high"),
    )


def _sum(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def drawable(points: Sequence[Point]) -> list[Cost]:
    """The costs that at least two points differ in."""
    return [cost for cost in COSTS if len({x for x, _, _ in _places(points, cost)}) > 1]


def _places(points: Sequence[Point], cost: Cost) -> list[tuple[float, float, int]]:
    """(cost, accuracy, position) of the points that have both."""
    found = [(getattr(point, cost.field), point.accuracy, i) for i, point in enumerate(points)]
    return [(x, y, i) for x, y, i in found if x is not None and y is not None]


def scatter(ax: Axes, points: Sequence[Point], cost: Cost) -> None:
    """Final accuracy in per cent over a cost, each point in the look of its position, with its interval."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    places = _places(points, cost)
    for x, y, i in places:
        color, marker, _ = look(i)
        low, high = points[i].low, points[i].high
        if low is not None and high is not None:
            ax.plot([x, x], [100 * low, 100 * high], color=color, lw=1.2, zorder=2)
        ax.plot([x], [100 * y], marker=marker, color=color, linestyle="", markersize=7.5, zorder=3)
    costs = [x for x, _, _ in places]
    if min(costs) > 0 and max(costs) > WIDE * min(costs):
        ax.set_xscale("log")
        ax.xaxis.set_minor_formatter(NullFormatter())
    else:
        ax.set_xlim(left=0, right=1.08 * max(costs))
        ax.locator_params(axis="x", nbins=5)
    ax.margins(y=0.15)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: cost.write(value)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    ax.set_xlabel(cost.label)
    ax.set_title(cost.title)
