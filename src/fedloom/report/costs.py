"""What accuracy costs: final accuracy of groups of runs against their traffic and their operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fedloom.evaluate.comparison import pooled, train_flops
from fedloom.report import fronts
from fedloom.report.fronts import CostAxis, Point, in_megabytes
from fedloom.report.groups import Group
from fedloom.report.record import Row, number
from fedloom.report.units import short_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def traffic(summary: Row) -> float | None:
    """Bytes sent both ways. A run that pools the data of all has none."""
    known = [v for v in (number(summary, key) for key in ("bytes_up", "bytes_down")) if v is not None]
    return sum(known) if known and not pooled(summary) else None


def training(summary: Row) -> float | None:
    """FLOPs of the whole training, an estimate (see `fedloom.evaluate.comparison.train_flops`)."""
    return number({"flops": train_flops(summary)}, "flops")


def operations(summary: Row) -> float | None:
    """FLOPs of one example."""
    return number(summary, "flops_per_example")


class Cost(NamedTuple):
    """A cost: what a run's summary says of it, and its axis."""

    measure: Callable[[Row], float | None]
    axis: CostAxis


COSTS = (
    Cost(traffic, CostAxis("Accuracy against traffic", "MB sent both ways", in_megabytes)),
    Cost(training, CostAxis("Accuracy against training", "FLOPs of training, estimated", short_count)),
    Cost(operations, CostAxis("Accuracy against operations", "FLOPs per example", short_count)),
)


def points(groups: Sequence[Group], cost: Cost) -> dict[str, Point]:
    """Name -> point of the groups that have an accuracy: means over seeds, and the interval of the accuracy."""
    found = {group.name: _point(group, cost) for group in groups}
    return {name: point for name, point in found.items() if point is not None}


def _point(group: Group, cost: Cost) -> Point | None:
    accuracy = group.interval(lambda record: number(record.summary, "final_accuracy"))
    price = group.interval(lambda record: cost.measure(record.summary))
    if accuracy is None:
        return None
    together = any(pooled(record.summary) for record in group.counted)
    return Point(None if price is None else price.mean, accuracy.mean, accuracy.low, accuracy.high, together)


def drawable(groups: Sequence[Group]) -> list[Cost]:
    """The costs that at least two federations differ in."""
    return [cost for cost in COSTS if len(set(fronts.placed(points(groups, cost)).values())) > 1]


def scatter(ax: Axes, groups: Sequence[Group], cost: Cost) -> None:
    """Final accuracy in per cent over a cost, each group in the look of its position; see `fedloom.report.fronts`."""
    from matplotlib.ticker import FuncFormatter

    fronts.draw(ax, points(groups, cost), cost.axis, order=[group.name for group in groups])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
