"""What is gained at what price: the methods of a comparison that no other beats in both, and their picture.

A method's point is its mean over seeds: the metric of the table against bytes sent both ways, and against the
operations of training. See `fedloom.report.fronts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.report.columns import PLAIN, tested, words
from fedloom.report.drawn import plain, save_svg
from fedloom.report.fronts import CostAxis, Point, draw, front, in_megabytes, mark, placed
from fedloom.report.plots import figure, styled
from fedloom.report.units import short_count

Content = Mapping[str, Any]

PICTURE = "pareto.svg"


class Price(NamedTuple):
    """A cost. key: its name in compare.json; measures: whose means make it."""

    key: str
    measures: tuple[str, ...]
    axis: CostAxis


PRICES = (
    Price("bytes", ("bytes_up", "bytes_down"), CostAxis("Against traffic", "MB sent both ways", in_megabytes)),
    Price("train_flops", ("train_flops",), CostAxis("Against computation", "FLOPs of training", short_count)),
)


def fronts(content: Content) -> dict[str, list[str]]:
    """Cost -> labels of the methods on its front, in the order of the table."""
    lower = bool(content.get("lower_is_better"))
    return {price.key: front(_points(content, price), lower=lower) for price in PRICES}


def _points(content: Content, price: Price) -> dict[str, Point]:
    """Label -> point of the methods that have the metric."""
    having = {label: e for label, e in content["methods"].items() if tested(content) in e["metrics"]}
    return {label: _point(entry, content, price) for label, entry in having.items()}


def _point(entry: Content, content: Content, price: Price) -> Point:
    value, costs = entry["metrics"][tested(content)], [entry["metrics"].get(key) for key in price.measures]
    cost = None if None in costs else sum(found["mean"] for found in costs if found)
    return Point(cost, value["mean"], value["low"], value["high"], _pooled(entry))


def _pooled(entry: Content) -> bool:
    return bool(entry.get("pooled"))


def save(content: Content, path: Path) -> bool:
    """Draw the picture as SVG; False, and no file, where no cost has two methods to compare."""
    panels = [price for price in PRICES if len(placed(_points(content, price))) > 1]
    if not panels:
        path.unlink(missing_ok=True)
        return False
    labels, key, lower = list(content["methods"]), tested(content), bool(content.get("lower_is_better"))
    unit = f"{'' if key in PLAIN else ', %'}{', lower is better' if lower else ''}"
    with styled():
        made = figure(4.4 * len(panels) + 0.4, 4.0 + 0.2 * -(-len(labels) // 3))
        for ax, price in zip(made.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            scale = 1.0 if key in PLAIN else 100.0
            draw(ax, _points(content, price), price.axis, order=labels, scale=scale, lower=lower)
            ax.set_ylabel(f"{plain(words(key))}{unit}")
        marks = [mark(i, pooled=_pooled(entry)) for i, entry in enumerate(content["methods"].values())]
        made.legend(marks, [plain(label) for label in labels], loc="outside lower center", ncols=min(3, len(labels)))
        save_svg(made, path)
    return True
