"""The picture of a sweep: the metric of every method over the settings, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.report.columns import PLAIN, words
from fedloom.report.drawn import plain, save_svg
from fedloom.report.fronts import WIDE
from fedloom.report.plots import figure, look, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import ErrorbarContainer

PICTURE = "sweep.svg"
SPREAD = 0.5  # of the distance between settings that are names, over which the methods of one stand side by side

Content = Mapping[str, Any]


def numbers(settings: Mapping[str, Content]) -> tuple[str, list[float]] | None:
    """The only key in which the settings differ and its values, where these are numbers; None for other settings."""
    keys = dict.fromkeys(key for found in settings.values() for key in found["set"])
    sets = {key: [found["set"].get(key) for found in settings.values()] for key in keys}
    differing = [key for key, values in sets.items() if any(value != values[0] for value in values)]
    if len(differing) != 1:
        return None
    values = sets[differing[0]]
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return None
    return (differing[0], [float(value) for value in values]) if len(set(values)) == len(values) else None


def save(content: Content, path: Path) -> bool:
    """Draw the picture as SVG; False, and no file, where fewer than two settings have results."""
    having = [label for label, found in content["settings"].items() if found["results"]]
    if len(having) < 2:
        path.unlink(missing_ok=True)
        return False
    settings = {label: content["settings"][label] for label in having}
    along, labels = numbers(settings), content["methods"]
    with styled():
        made = figure(max(5.2, 1.1 * len(settings) + 1.6), 3.8 + 0.2 * -(-len(labels) // 3))
        ax = made.subplots()
        drawn = [_method(ax, content, label, i, settings, along) for i, label in enumerate(labels)]
        _along(ax, settings, along)
        lower = ", lower is better" if content["lower_is_better"] else ""
        ax.set_ylabel(f"{plain(words(content['metric']))}{'' if content['metric'] in PLAIN else ', %'}{lower}")
        ax.set_title("Mean and 95 % interval over seeds" if len(content["seeds"]) > 1 else "One seed")
        shown = [(mark, plain(label)) for mark, label in zip(drawn, labels, strict=True) if mark is not None]
        made.legend(*zip(*shown, strict=True), loc="outside lower center", ncols=min(3, len(shown)))
        save_svg(made, path)
    return True


def _method(
    ax: Axes,
    content: Content,
    label: str,
    i: int,
    settings: Mapping[str, Content],
    along: tuple[str, Sequence[float]] | None,
) -> ErrorbarContainer | None:
    """Points of a method with their intervals, joined where settings are numbers; None where it has no result."""
    many = len(content["methods"])
    places = along[1] if along else [k + SPREAD * ((i + 0.5) / many - 0.5) for k in range(len(settings))]
    found = [(x, s["results"][label]) for x, s in zip(places, settings.values(), strict=True) if label in s["results"]]
    if not found:
        return None
    scale = 1.0 if content["metric"] in PLAIN else 100.0
    found = sorted(found, key=lambda pair: pair[0])
    means = [scale * result["mean"] for _, result in found]
    ends = [[_width(result, end, scale) for _, result in found] for end in ("low", "high")]
    color, marker, stroke = look(i)
    style: Any = ":" if label in content.get("pooled", ()) else stroke
    line = {"linestyle": style, "lw": 1.6} if along else {"linestyle": ""}
    x = [place for place, _ in found]
    return ax.errorbar(x, means, yerr=ends, color=color, marker=marker, elinewidth=1.2, **line)


def _width(result: Content, end: str, scale: float) -> float:
    """From the mean to an end of the interval; 0 for a single seed."""
    return 0.0 if result[end] is None else scale * abs(result[end] - result["mean"])


def _along(ax: Axes, settings: Mapping[str, Content], along: tuple[str, Sequence[float]] | None) -> None:
    """Scale, ticks and name of the axis of the settings."""
    if along is None:
        ax.set_xticks(range(len(settings)), [plain(label, 24) for label in settings])
        ax.set_xlim(-0.6, len(settings) - 0.4)
        return
    key, values = along
    if min(values) > 0 and max(values) > WIDE * min(values):
        ax.set_xscale("log")
    ax.set_xticks(values, [f"{value:g}" for value in values])
    ax.minorticks_off()
    ax.set_xlabel(plain(key))
