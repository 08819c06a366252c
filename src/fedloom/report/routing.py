"""What clients tell of their routing over rounds: entropy of the gate, spread of the load, use of each expert.

They are the clients' metrics `gate_entropy`, `load_cv` and `expert_<k>...`, which a round's row holds as
`train/<metric>`; whatever of them there is gets a panel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from fedloom.report.plots import HEAT, MARKERS, SERIES, round_axis
from fedloom.report.record import RunRecord, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = (
    ("train/gate_entropy", "Gate entropy", "nats"),
    ("train/load_cv", "Expert load", "deviation over mean"),
)
EXPERT = re.compile(r"train/expert_(\d{1,6})(?:_\w+)?")
MARKED = 12  # rounds up to which a line has marks


def panels(record: RunRecord) -> list[Callable[[Axes], None]]:
    """One function per panel that there are values for; it draws on the axes that it is given."""
    curves = ((title, unit, _curve(record, key)) for key, title, unit in LINES)
    lines = [partial(_line, record, title, unit, curve) for title, unit, curve in curves if curve]
    experts = expert_curves(record)
    return [*lines, partial(_experts, record, experts)] if experts else lines


def expert_curves(record: RunRecord) -> dict[int, dict[int, float]]:
    """Expert -> running number of the round -> value, in the order of the experts."""
    found = {key: EXPERT.fullmatch(key) for row in record.rounds for key in row}
    order = sorted((int(match[1]), key) for key, match in found.items() if match)
    curves = {expert: _curve(record, key) for expert, key in order}
    return {expert: curve for expert, curve in curves.items() if curve}


def _curve(record: RunRecord, key: str) -> Mapping[int, float]:
    """Running number of the round -> value of a metric, where a round has one."""
    order = record.round_numbers
    pairs = ((order[row["stage"], row.get("round")], number(row, key)) for row in record.rounds)
    return {place: value for place, value in pairs if value is not None}


def _line(record: RunRecord, title: str, unit: str, curve: Mapping[int, float], ax: Axes) -> None:
    marker = MARKERS[0] if len(curve) <= MARKED else ""
    ax.plot(list(curve), list(curve.values()), color=SERIES[0], marker=marker, lw=1.6, clip_on=False)
    round_axis(ax, record)
    ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
    ax.set_ylabel(unit)
    ax.set_title(title)


def _experts(record: RunRecord, curves: Mapping[int, Mapping[int, float]], ax: Axes) -> None:
    """A row per expert, a column per round; blank where there is no value."""
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    rounds = len(record.round_numbers)
    values = np.array([[curve.get(k, np.nan) for k in range(1, rounds + 1)] for curve in curves.values()])
    colors = LinearSegmentedColormap.from_list("heat", HEAT)
    extent = (0.5, rounds + 0.5, len(curves) - 0.5, -0.5)
    shown = np.ma.masked_invalid(values)
    drawn = ax.imshow(shown, cmap=colors, aspect="auto", interpolation="nearest", extent=extent, vmin=0.0)
    round_axis(ax, record)
    step = -(-len(curves) // 16)
    ax.set_yticks(range(0, len(curves), step), [str(expert) for expert in list(curves)[::step]])
    ax.grid(False)
    ax.set_ylabel("expert")
    ax.set_title("Use of each expert")
    bar = ax.figure.colorbar(drawn, ax=ax, fraction=0.05, pad=0.02)
    bar.outline.set_visible(False)  # type: ignore[operator]  # the stubs take it for a property
    bar.ax.grid(False)
