"""Several groups of runs in one picture: a line per group, with the 95 % interval over its seeds as a band."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from fedloom.report.groups import Group
from fedloom.report.plots import look, percent_axis, points_axis, stage_axis
from fedloom.report.record import RunRecord, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKED = 30  # places up to which a line has marks


class Overlay(NamedTuple):
    """A picture of groups: its title, what a run has per place, whether places are stages, and the axis along y."""

    title: str
    measure: Callable[[RunRecord], Mapping[int, float]]
    staged: bool
    axis: Callable[[Axes], None]


def _per_stage(key: str, record: RunRecord) -> dict[int, float]:
    """Stage -> the value of a key of its row."""
    found = {row["stage"]: number(row, key) for row in record.stages}
    return {stage: value for stage, value in found.items() if value is not None}


FORGETTING = Overlay("Forgetting over stages", lambda record: record.forgetting_by_stage, True, points_axis)
OVER_STAGES = (
    Overlay("Accuracy over all seen classes", partial(_per_stage, "accuracy"), True, percent_axis),
    FORGETTING,
    Overlay("Accuracy of the current task", partial(_per_stage, "accuracy/current"), True, percent_axis),
    Overlay("Clients, worst tenth", partial(_per_stage, "accuracy/client_worst10"), True, percent_axis),
)
OVER_ROUNDS = (Overlay("Accuracy over rounds", lambda record: dict(record.accuracy_by_round), False, percent_axis),)


def pictures(groups: Sequence[Group]) -> list[Callable[[Axes], None]]:
    """One function per picture in which some group has a line; it draws on the axes that it is given."""
    staged = any(len(record.stages) > 1 for group in groups for record in group.counted)
    shown = OVER_STAGES if staged else OVER_ROUNDS
    known = [overlay for overlay in shown if any(group.curve(overlay.measure) for group in groups)]
    return [partial(draw, overlay=overlay, groups=groups) for overlay in known]


def draw(ax: Axes, overlay: Overlay, groups: Sequence[Group]) -> None:
    """Means as lines and their intervals as bands, in the order given; colours repeat after six."""
    curves = [group.curve(overlay.measure) for group in groups]
    for i, curve in enumerate(curves):
        color, marker, stroke = look(i)
        x, marker = list(curve), marker if len(curve) <= MARKED else ""
        banded = {place: found for place, found in curve.items() if found.low is not None}
        low, high = ([100 * getattr(found, side) for found in banded.values()] for side in ("low", "high"))
        ax.fill_between(list(banded), low, high, color=color, alpha=0.16, linewidth=0, zorder=1)
        ax.plot(
            x,
            [100 * found.mean for found in curve.values()],
            linestyle=stroke,
            color=color,
            marker=marker,
            zorder=3,
            clip_on=False,
        )
    places = sorted({place for curve in curves for place in curve})
    overlay.axis(ax)
    if overlay.staged:
        stage_axis(ax, places)
    else:
        ax.set_xlabel("rounds done")
    ax.set_title(overlay.title)
