"""The picture of a data plan: who holds which classes and domains, and when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.data.describe import spread

if TYPE_CHECKING:
    from fedloom.data.plan import Plan

MOST_CLIENTS = 100
ARRIVALS = {
    "synchronous": "all clients in step",
    "shifted": "clients start one after another",
    "per_client": "every client in an order of its own",
}
INK, FAINT, EMPTY = "#22303c", "#7b8794", "#f4f5f7"
# Early tasks are cool, late ones warm, so that time can be read from colour.
RAMP = ("#3b4cc0", "#2a7fb8", "#2a9d8f", "#7fb069", "#e0a526", "#e76f51", "#b5305f")


def draw_plan(plan: Plan, path: Path) -> Path:
    """Write a PNG: from the left, examples of every class on every client, of every domain, the timetable, sizes.

    Domains are left out where the data have none, the timetable where all clients are in step. A colour is a task,
    ink is all tasks; its strength is the share of the largest cell, with a scale where the cells are too many to hold
    numbers. Of more than 100 clients, 100 at even distances are shown.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    clients = spread(plan.num_clients, MOST_CLIENTS)
    groups = (tuple(range(plan.num_classes)),) if _by_domain(plan) else plan.tasks
    order = [c for group in groups for c in group]
    counts, colours = _counts(plan, clients), _colours(len(plan.tasks))
    classes = counts.sum(1)[:, order]
    panels = [min(9.0, max(3.2, 0.3 * len(order)))]
    panels += [min(6.0, max(1.6, 0.45 * len(plan.domains)))] if plan.domains else []
    panels += [min(4.5, max(0.8, 0.36 * plan.num_stages))] if _has_timetable(plan) else []
    panels += [1.5]
    height = 2.1 + min(8.0, max(1.0, 0.8 + 0.26 * len(clients)))
    figure = Figure(figsize=(sum(panels) + 2.2, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, len(panels), sharey=True, width_ratios=panels))
    _draw_classes(axes[0], plan, clients, classes, groups, colours)
    if plan.domains:
        _draw_domains(axes[1], plan, clients, counts.sum(2), colours)
    if _has_timetable(plan):
        _draw_timetable(axes[-2], plan, clients, colours)
    _draw_sizes(axes[-1], plan, clients, colours)
    if not _numbered(order, clients):
        _draw_scale(figure, axes, int(classes.max()))
    figure.suptitle(
        _title(plan, len(clients)), x=0.01, ha="left", fontsize=11, color=INK, linespacing=1.5, parse_math=False
    )
    figure.savefig(path, dpi=130)
    return path


def _by_domain(plan: Plan) -> bool:
    """Whether domains arrive one after another, and all classes with each."""
    return bool(plan.rule["stream"]["kind"] == "domain_incremental")


def _has_timetable(plan: Plan) -> bool:
    """Whether clients work on different tasks at one stage; otherwise every row would be the same."""
    in_step = plan.rule["stream"].get("arrival", "synchronous") == "synchronous"
    return len(plan.tasks) > 1 and not in_step


def _numbered(order: Sequence[int], clients: Sequence[int]) -> bool:
    """Whether cells are large enough to hold numbers."""
    return len(order) <= 30 and len(clients) <= 30


def _strength(counts: np.ndarray, most: int) -> np.ndarray:
    """Ink of a cell in [0, 1]. The square root keeps small holdings visible; any holding starts at a tenth."""
    return np.where(counts > 0, 0.1 + 0.9 * np.sqrt(counts / max(1, most)), 0.0)


def _draw_scale(figure: Any, axes: list[Any], most: int) -> None:
    """A bar that says how many examples a strength stands for, in grey: the colour is the task's."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize, to_rgb

    ramp = _strength(np.linspace(0, most, 256), most)[:, None]
    colours = ListedColormap(_over_paper(np.array(to_rgb(INK)), ramp))
    bar = figure.colorbar(
        ScalarMappable(Normalize(0, max(1, most)), colours), ax=axes, location="bottom", fraction=0.05, aspect=50
    )
    bar.outline.set_visible(False)
    bar.ax.locator_params(axis="x", nbins=5, integer=True)
    bar.ax.tick_params(length=0, labelsize=8, colors=INK)
    bar.set_label("examples of a class on a client", fontsize=8, color=FAINT)


def _counts(plan: Plan, clients: Sequence[int]) -> np.ndarray:
    """Examples held in the end, int64 [clients, domains, classes]; one domain where the data have none."""
    last = plan.num_stages - 1
    return np.stack([plan.domain_counts(c, last).numpy() for c in clients])


def _colours(tasks: int) -> np.ndarray:
    from matplotlib.colors import LinearSegmentedColormap

    ramp = LinearSegmentedColormap.from_list("tasks", RAMP)
    return ramp(np.linspace(0, 1, tasks) if tasks > 1 else np.array([0.18]))[:, :3]


def _title(plan: Plan, shown: int) -> str:
    stream, partition = plan.rule["stream"], plan.rule["partition"]
    who = f"{plan.num_clients:,} clients" if plan.num_clients > 1 else "1 client"
    who += f" ({shown} shown)" if shown < plan.num_clients else ""
    tasks = f"{len(plan.tasks)} tasks" if len(plan.tasks) > 1 else "1 task"
    arrival = str(stream.get("arrival", "synchronous"))
    when = "" if stream["kind"] == "static" else f" · {ARRIVALS.get(arrival, 'explicit schedule')}"
    options = ", ".join(f"{k} {v}" for k, v in partition.items() if v and k not in ("kind", "clients", "name"))
    how = partition["kind"] + (f" ({options})" if options else "")
    what = f"{plan.num_classes} classes in {tasks}"
    if plan.domains:
        many = f"{len(plan.domains)} domain{'s' * (len(plan.domains) > 1)}"
        what = f"{plan.num_classes} classes · {many} in {tasks}" if _by_domain(plan) else f"{what} · {many}"
    first = f"{plan.source.name} · {who} · {what}{when}"
    return f"{first}\npartition: {how} · seed {plan.seed}"


def _draw_classes(
    axis: Any, plan: Plan, clients: Sequence[int], counts: np.ndarray, groups: Sequence[Sequence[int]], colours: Any
) -> None:
    order = [c for group in groups for c in group]
    hues = np.array([_ink()]) if len(groups) < len(plan.tasks) else colours
    _draw_held(axis, clients, counts, np.repeat(hues, [len(g) for g in groups], axis=0))
    edges = np.cumsum([len(g) for g in groups])
    for edge in edges[:-1]:
        axis.axvline(edge - 0.5, color="white", linewidth=2.5)
    if len(order) <= 40:
        _name_columns(axis, [plan.source.class_names[c] for c in order])
    else:
        axis.set_xticks([])
    axis.set_xlabel("class, in order of arrival" if len(groups) > 1 else "class", color=INK)
    axis.set_ylabel("client", color=INK)
    _client_ticks(axis, clients)
    if len(groups) > 1:
        word = "task " if len(groups) <= 6 and plan.num_classes >= 10 else ""
        _name_tasks(axis, edges - np.array([len(g) for g in groups]) / 2 - 0.5, word, colours)
    else:
        axis.set_title("examples held", fontsize=9, color=FAINT, loc="left", pad=16 if len(plan.tasks) > 1 else 6)
    _plain(axis)
    axis.tick_params(axis="y", labelleft=True)


def _draw_domains(axis: Any, plan: Plan, clients: Sequence[int], counts: np.ndarray, colours: np.ndarray) -> None:
    arriving = _by_domain(plan)
    order = [d for (d,) in plan.task_domains] if arriving else list(range(len(plan.domains)))
    hues = colours if arriving else np.repeat(np.array([_ink()]), len(order), axis=0)
    _draw_held(axis, clients, counts[:, order], hues)
    if len(order) <= 40:
        _name_columns(axis, [plan.domains[d] for d in order])
    else:
        axis.set_xticks([])
    axis.set_xlabel("domain, in order of arrival" if arriving else "domain", color=INK)
    if arriving and len(order) <= 30:
        _name_tasks(axis, np.arange(len(order)), "", colours)
    else:
        held = "examples held" if _numbered(order, clients) else f"up to {int(counts.max()):,} held"
        axis.set_title(held, fontsize=9, color=FAINT, loc="left", pad=16 if len(plan.tasks) > 1 else 6)
    _plain(axis)


def _draw_held(axis: Any, clients: Sequence[int], counts: np.ndarray, hues: np.ndarray) -> None:
    """Cells of clients and columns: hues [columns, 3], as strong as the counts [clients, columns] say."""
    cells = _over_paper(hues[None], _strength(counts, int(counts.max()))[..., None])
    axis.imshow(cells, aspect="auto", interpolation="nearest")
    _grid(axis, counts.shape[1], len(clients))
    if _numbered(range(counts.shape[1]), clients):
        _write_counts(axis, counts, cells)


def _name_columns(axis: Any, names: Sequence[str]) -> None:
    rotation = 0 if max(map(len, names)) <= 2 else 60
    place = {"ha": "right", "rotation_mode": "anchor"} if rotation else {}
    axis.set_xticks(range(len(names)), names, rotation=rotation, fontsize=8, parse_math=False, **place)


def _name_tasks(axis: Any, middles: np.ndarray, word: str, colours: np.ndarray) -> None:
    for task, middle in enumerate(middles):
        axis.annotate(
            f"{word}{task}", (middle, 1), xycoords=("data", "axes fraction"), xytext=(0, 4),
            textcoords="offset points", ha="center", va="bottom", fontsize=9, color=colours[task], fontweight="bold",
        )  # fmt: skip
    axis.set_title("task" if not word else "", fontsize=9, color=FAINT, loc="left", pad=16)


def _write_counts(axis: Any, counts: np.ndarray, cells: np.ndarray) -> None:
    light = cells @ np.array([0.299, 0.587, 0.114])  # as bright as the eye finds red, green and blue
    for row, column in zip(*np.nonzero(counts), strict=True):
        ink = INK if light[row, column] > 0.52 else "white"
        axis.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=6.5, color=ink)


def _draw_timetable(axis: Any, plan: Plan, clients: Sequence[int], colours: np.ndarray) -> None:
    tasks = np.array([[_task(plan, c, s) for s in range(plan.num_stages)] for c in clients])
    held = np.array([[plan.size(c, s) > 0 for s in range(plan.num_stages)] for c in clients])
    hue = colours[np.maximum(tasks, 0)]
    strength = np.where(tasks >= 0, np.where(held, 0.92, 0.18), 0.0)[..., None]
    axis.imshow(_over_paper(hue, strength), aspect="auto", interpolation="nearest")
    _grid(axis, plan.num_stages, len(clients))
    if len(clients) <= 30 and plan.num_stages <= 20:
        for row, column in zip(*np.nonzero(tasks >= 0), strict=True):
            ink = "white" if held[row, column] else FAINT
            axis.text(column, row, str(tasks[row, column]), ha="center", va="center", fontsize=7, color=ink)
    step = 1 if plan.num_stages <= 12 else 2 if plan.num_stages <= 24 else 5
    axis.set_xticks(range(0, plan.num_stages, step))
    axis.tick_params(axis="x", labelsize=8)
    axis.set_xlabel("stage", color=INK)
    pale = ", pale: no examples" if plan.num_stages > 3 and (~held & (tasks >= 0)).any() else ""
    title = f"task worked on{pale}" if plan.num_stages > 3 else "when"
    axis.set_title(title, fontsize=9, color=FAINT, loc="left", pad=16 if len(plan.tasks) > 1 else 6)
    _plain(axis)


def _task(plan: Plan, client: int, stage: int) -> int:
    task = plan.task_of(client, stage)
    return -1 if task is None else task


def _draw_sizes(axis: Any, plan: Plan, clients: Sequence[int], colours: np.ndarray) -> None:
    left = np.zeros(len(clients))
    worked = [{_task(plan, c, s) for s in range(plan.num_stages)} for c in clients]
    for task, part in enumerate(plan.parts):
        sizes = np.array([part.size(c) if task in mine else 0 for c, mine in zip(clients, worked, strict=True)], float)
        axis.barh(range(len(clients)), sizes, left=left, height=0.78, color=colours[task], linewidth=0)
        left += sizes
    axis.set_xlim(0, max(1.0, left.max()) * 1.04)
    axis.set_xlabel("examples", color=INK)
    axis.locator_params(axis="x", nbins=3)
    axis.tick_params(axis="x", labelsize=8)
    axis.set_title("in all", fontsize=9, color=FAINT, loc="left", pad=16 if len(plan.tasks) > 1 else 6)
    _plain(axis)


def _ink() -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    return to_rgb(INK)


def _over_paper(hue: np.ndarray, strength: np.ndarray) -> np.ndarray:
    from matplotlib.colors import to_rgb

    return np.array(to_rgb(EMPTY)) * (1 - strength) + hue * strength


def _grid(axis: Any, columns: int, rows: int) -> None:
    width = 1.2 if max(columns, rows) <= 40 else 0.4
    axis.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axis.grid(which="minor", color="white", linewidth=width)


def _client_ticks(axis: Any, clients: Sequence[int]) -> None:
    step = max(1, -(-len(clients) // 25))
    shown = range(0, len(clients), step)
    axis.set_yticks(list(shown), [str(clients[i]) for i in shown], fontsize=8)


def _plain(axis: Any) -> None:
    for side in axis.spines.values():
        side.set_visible(False)
    axis.tick_params(which="both", length=0, colors=INK)
