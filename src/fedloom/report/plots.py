"""Pictures of a run: accuracy over stages, the accuracy matrix as a heat map, the loss over rounds.

Stages and tasks are counted from 0, as in every file of a run folder. Figures hold no text of the user's but, where
they are `named`, the names of domains; a page takes none that is.
Colours are those of Okabe and Ito, told apart by markers and strokes as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.report.drawn import plain
from fedloom.report.record import Matrix, Row, RunRecord, number
from fedloom.report.tables import differ

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Series = Sequence[float | None]

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("o", "s", "^", "D", "v", "P")
STROKES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
MOST_NAMED = 12  # domains that a picture names
LONGEST = 24  # characters of a name
INK, MUTED, LINE, PAPER = "#1c2430", "#5b6675", "#dfe4ea", "#fffffe"
HEAT = ("#eef4fb", "#b9d4ee", "#6ea8dc", "#2c72b3", "#10396b")

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "xtick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.color": LINE,
    "ytick.labelcolor": MUTED,
    "ytick.left": False,
    "lines.linewidth": 2.0,
    "lines.markersize": 5.0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.labelcolor": MUTED,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedloom",
    "savefig.facecolor": PAPER,
    "text.usetex": False,
}


def figure(width: float, height: float) -> Figure:
    """An empty figure in inches with a layout that keeps labels inside; no pyplot, no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08, wspace=0.06)
    made = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(made)
    return made


def styled() -> AbstractContextManager[None]:
    """The look of every picture; drawing and saving happen inside."""
    import matplotlib

    return matplotlib.rc_context(STYLE)


def accuracy_curve(ax: Axes, record: RunRecord, *, legend: bool = True, named: bool = False) -> None:
    """Accuracy over stages: all seen classes, the current and the first task, the spread over clients."""
    rows = record.stages
    x = [row["stage"] for row in rows]
    worst, mean = ([number(row, f"accuracy/client_{k}") for row in rows] for k in ("worst10", "mean"))
    if any(v is not None for v in worst):
        low, high = _percent(worst), _percent(mean)
        ax.fill_between(x, low, high, color=SERIES[5], alpha=0.22, linewidth=0, label="clients, mean to worst tenth")
    chance = [1 / n if n else None for n in (number(row, "seen_classes") for row in rows)]
    first = [row[0] if row else None for row in record.matrix]
    whose = f": {plain(str(record.task_names[0]), LONGEST)}" if named and record.task_names else ""
    lines: tuple[tuple[str, Series, str, str, Any], ...] = (
        ("all seen classes", [number(row, "accuracy") for row in rows], SERIES[0], "o", "-"),
        ("current task", [number(row, "accuracy/current") for row in rows], SERIES[2], "^", "--"),
        ("clients, mean", mean, SERIES[5], "D", (0, (4, 1))),
        (f"first task{whose}", first[: len(x)] + [None] * (len(x) - len(first)), SERIES[1], "s", "-."),
        ("chance", chance, MUTED, "", ":"),
    )
    for zorder, (label, values, color, marker, stroke) in enumerate(reversed(lines), start=2):
        if any(v is not None for v in values):
            width = 2.6 if label == "all seen classes" else 1.2 if label == "chance" else 1.6
            ax.plot(
                x,
                _percent(values),
                linestyle=stroke,
                color=color,
                marker=marker,
                label=label,
                lw=width,
                zorder=zorder,
                clip_on=False,
            )
    stage_axis(ax, x)
    percent_axis(ax)
    ax.set_title("Accuracy over stages")
    if legend and ax.get_legend_handles_labels()[0]:
        handles, labels = ax.get_legend_handles_labels()
        legend_below(ax, handles[::-1], labels[::-1])


def domain_curves(ax: Axes, record: RunRecord, *, named: bool = False) -> None:
    """Accuracy of the global view on every domain: their mean, thick, and one deviation (ddof 0) around it.

    Over stages; of a single stage over the rounds that evaluated it. A domain has a value from the stage on in which it
    has arrived. Lines look as `look` says, in the order of `record.domain_curves`. named: with a legend.
    """
    import numpy as np

    staged = len(record.stages) > 1
    x, found = ([r["stage"] for r in record.stages], record.domain_curves) if staged else record.domain_curves_by_round
    curves = np.array([_percent(curve) for curve in found.values()])
    handles = []
    for i, curve in enumerate(curves):
        color, marker, stroke = look(i)
        marker = marker if len(x) <= 30 else ""
        handles += ax.plot(x, curve, linestyle=stroke, color=color, marker=marker, lw=1.4, zorder=3, clip_on=False)
    known = [column[~np.isnan(column)] for column in curves.T]
    mean, std = np.array([(c.mean(), c.std()) if len(c) else (math.nan, math.nan) for c in known]).T
    ax.fill_between(x, mean - std, mean + std, color=MUTED, alpha=0.16, linewidth=0, zorder=1)
    thick = ax.plot(x, mean, color=INK, lw=2.8, zorder=4, clip_on=False)
    stage_axis(ax, x) if staged else round_axis(ax, record)
    percent_axis(ax)
    ax.set_title(f"Accuracy per domain over {'stages' if staged else 'rounds'}")
    if named:
        names = [plain(str(name), LONGEST) for name in found] if len(found) <= MOST_NAMED else []
        legend_below(ax, [*thick, *handles[: len(names)]], [f"mean of {len(found)} domains", *names])


def accuracy_bars(ax: Axes, record: RunRecord, *, named: bool = False) -> None:
    """The accuracies of a run with a single stage, as horizontal bars. named: with those per domain."""
    row = record.stages[-1] if record.stages else {}
    classes = number(row, "seen_classes")
    bars = [
        ("all classes", number(row, "accuracy"), SERIES[0]),
        ("clients, mean", number(row, "accuracy/client_mean"), SERIES[5]),
        ("clients, worst tenth", number(row, "accuracy/client_worst10"), SERIES[1]),
        *(_domain_bars(row) if named else ()),
        ("chance", 1 / classes if classes else None, MUTED),
    ]
    known = [(label, 100 * value, color) for label, value, color in reversed(bars) if value is not None]
    for y, (_, value, color) in enumerate(known):
        ax.barh(y, value, height=0.42, color=color)
        ax.text(min(value, 99.0) + 1.5, y, f"{value:.1f} %", va="center", weight="bold")
    ax.set_yticks(range(len(known)), [label for label, _, _ in known])
    ax.set_xlim(0, 112)
    ax.set_xticks(range(0, 101, 20), [f"{v} %" for v in range(0, 101, 20)])
    ax.grid(True, axis="x")
    ax.grid(False, axis="y")
    ax.set_title("Accuracy")


def _domain_bars(row: Row) -> list[tuple[str, float | None, str]]:
    """Mean over domains and each of them, of the global view and of own views where those differ from it."""
    found = [row.get(key) for key in ("accuracy/domains", "accuracy/domains_personal")]
    common, own = ({k: number(v, k) for k in v} if isinstance(v, Mapping) else {} for v in found)
    views = [("", common, SERIES[2])]
    views += [(", own views", own, SERIES[3])] if differ(own, common) else []
    bars: list[tuple[str, float | None, str]] = []
    for whose, values, color in views:
        known = {name: value for name, value in values.items() if value is not None}
        bars += [(f"domains{whose}, mean", math.fsum(known.values()) / len(known), color)] if known else []
        if len(known) <= MOST_NAMED:
            bars += [(f"{plain(str(name), LONGEST)}{whose}", value, color) for name, value in known.items()]
    return bars


def accuracy_heatmap(ax: Axes, matrix: Matrix, names: Sequence[str] = ()) -> None:
    """R[t][j] in per cent: one row per stage from the top, one column per task; blank where there is no value.

    names: of the tasks, where they have any.
    """
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    values = 100 * np.array([[math.nan if v is None else v for v in row] for row in matrix], np.float64)
    stages, tasks = values.shape
    colors = LinearSegmentedColormap.from_list("heat", HEAT)
    edges = np.arange(tasks + 1) - 0.5, np.arange(stages + 1) - 0.5
    masked = np.ma.masked_invalid(values)
    ax.pcolormesh(*edges, masked, cmap=colors, vmin=0, vmax=100, edgecolors=PAPER, linewidth=1.0)
    size = min(11.0, 92.0 / max(stages, tasks, 8))
    for (t, j), value in np.ndenumerate(values):
        if not math.isnan(value):
            ink = "#ffffff" if value > 66 else "#0b1b2b"
            ax.text(j, t, f"{value:.0f}", ha="center", va="center", color=ink, size=size)
    ax.set_aspect("equal")
    ax.set_ylim(stages - 0.5, -0.5)
    ax.grid(False)
    ax.set_xticks(*_ticks(tasks))
    ax.set_yticks(*_ticks(stages))
    ax.tick_params(length=0, labelsize=min(9.0, 120.0 / max(stages, tasks)))
    if len(names) == tasks:
        labels = [f"{k} {plain(str(name), LONGEST)}" for k, name in enumerate(names)]
        ax.set_xticks(range(tasks), labels, rotation=40, ha="right", rotation_mode="anchor")
    ax.spines[:].set_visible(False)
    ax.set_xlabel("task" if len(names) != tasks else "task (domain)")
    ax.set_ylabel("after stage")
    ax.set_title("Accuracy per task, %")


def accuracy_over_rounds(ax: Axes, record: RunRecord) -> None:
    """Accuracy over all seen classes in every round that evaluated it; thin marks where a stage begins."""
    x, y = zip(*record.accuracy_by_round, strict=True)
    ax.plot(x, _percent(y), color=SERIES[0], marker="o" if len(x) <= 30 else "", lw=2.6, clip_on=False)
    round_axis(ax, record)
    percent_axis(ax)
    ax.set_title("Accuracy over rounds")


def loss_curve(ax: Axes, record: RunRecord) -> None:
    """Training loss over rounds, one line per exchange that reports one; thin marks where a stage begins."""
    rows = [row for row in record.rounds if number(row, "train/loss") is not None]
    order = record.round_numbers
    names = list(dict.fromkeys(row.get("exchange") for row in rows))[: len(SERIES)]
    handles = []
    for i, name in enumerate(names):
        own = [row for row in rows if row.get("exchange") == name]
        x = [order[row["stage"], row.get("round")] for row in own]
        marker = MARKERS[i] if len(x) <= 12 else ""
        handles += ax.plot(
            x, [row["train/loss"] for row in own], STROKES[i], color=SERIES[i], marker=marker, lw=1.6, clip_on=False
        )
    if len(names) > 1:
        ax.legend(handles, [plain(str(name), LONGEST) for name in names])
    round_axis(ax, record)
    ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
    ax.set_ylabel("training objective")
    ax.set_title("Training loss" + (" (below 0: see the glossary)" if _any_below_zero(rows) else ""))


def _any_below_zero(rows: Sequence[Mapping[str, Any]]) -> bool:
    return any(row["train/loss"] < 0 for row in rows)


def look(i: int) -> tuple[str, str, Any]:
    """Colour, marker and stroke of the i-th of several runs; colours repeat after six, with other marks and strokes."""
    k, turn = i % len(SERIES), i // len(SERIES)
    return SERIES[k], MARKERS[(k + turn) % len(MARKERS)], STROKES[(k + turn) % len(STROKES)]


def overview(ax: Axes, record: RunRecord, *, named: bool = False) -> None:
    """The picture that says most: over stages, or for a single stage over its rounds, or its end as bars.

    named: per domain where there are domains.
    """
    if len(record.stages) > 1:
        accuracy_curve(ax, record, named=named)
    elif named and record.domain_curves_by_round[1]:
        domain_curves(ax, record, named=True)
    elif record.accuracy_by_round:
        accuracy_over_rounds(ax, record)
    else:
        accuracy_bars(ax, record, named=named)


def _domain_panel(record: RunRecord) -> Callable[..., None] | None:
    """What a third panel shows of the domains, where the other two do not show how well each does at the end."""
    if len(record.stages) > 1:
        return domain_curves if record.domain_curves and not record.task_names else None
    return accuracy_bars if record.accuracy_by_round and _domain_bars(record.stages[-1]) else None


def save_accuracy(record: RunRecord, path: Path) -> Path:
    """Write accuracy.png: the curve and the heat map; for a run with a single stage the loss stands for the latter.

    Domains are named: as tasks where each task is one, else in a third panel or as the bars of a single stage. Returns
    the path. A run without any evaluation gives a picture that says so.
    """
    with styled():
        if not record.stages:
            made = figure(10.4, 4.3)
            made.text(0.5, 0.5, "No accuracy has been recorded yet.", ha="center", color=MUTED)
        else:
            single = len(record.stages) == 1
            more = _domain_panel(record)
            height = 1 + 0.3 * len(_domain_bars(record.stages[-1])) if single else 0.0
            made = figure(15.4 if more else 10.4, max(4.3, height))
            axes = made.subplots(1, 3 if more else 2, width_ratios=(1.25, 1, 1.2) if more else (1.25, 1))
            overview(axes[0], record, named=True)
            if single or not record.matrix:
                loss_curve(axes[1], record)
            else:
                accuracy_heatmap(axes[1], record.matrix, record.task_names)
            if more:
                more(axes[2], record, named=True)
        made.savefig(path, dpi=160, facecolor="white", metadata={"Software": None})
    return path


def _percent(values: Series) -> list[float]:
    return [math.nan if v is None else 100 * v for v in values]


def percent_axis(ax: Axes) -> None:
    """Per cent along y, from 0 to 100, or where everything drawn is low to a round number above it."""
    most = ax.dataLim.y1
    top = next((top for top in (5, 10, 25, 50) if 0 < most <= 0.95 * top), 100)
    ax.set_ylim(0, 1.03 * top)
    ax.set_yticks(range(0, top + 1, top // 5), [f"{v} %" for v in range(0, top + 1, top // 5)])


def points_axis(ax: Axes) -> None:
    """Percentage points along y, with zero in sight."""
    low, high = ax.get_ylim()
    ax.set_ylim(min(0.0, low), max(1.0, high))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g} pp".replace("-", "−"))


def stage_axis(ax: Axes, stages: Sequence[int]) -> None:
    """Stages along x."""
    ax.set_xlabel("stage")
    ax.set_xticks(stages)
    if stages:
        ax.set_xlim(stages[0] - 0.3, stages[-1] + 0.3)


def round_axis(ax: Axes, record: RunRecord) -> None:
    """Running numbers of rounds along x, with thin marks where a stage begins."""
    from matplotlib.ticker import MaxNLocator

    order = record.round_numbers
    starts = {stage: i for (stage, _), i in reversed(order.items())}
    for start in sorted(starts.values())[1:]:
        ax.axvline(start - 0.5, color=LINE, lw=1.0, zorder=0)
    ax.set_xlim(0.5, max(len(order), 1) + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.set_xlabel("rounds done")


def _ticks(number_of: int) -> tuple[range, list[str]]:
    return range(number_of), [str(i) for i in range(number_of)]


def legend_below(ax: Axes, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend under the axes, in as many columns as their width has room for."""
    figure_width = ax.figure.get_figure(root=True).get_figwidth()
    ax.legend(
        handles,
        labels,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=3 if figure_width > 5 else 2,
        columnspacing=1.4,
        handlelength=2.4,
    )
