"""Fronts against brute force, and how they are drawn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.report import fronts, plots
from fedloom.report.fronts import CostAxis, Point
from fedloom.report.units import short_count

few = st.integers(0, 3).map(float)
some = st.builds(Point, st.none() | few, few, pooled=st.booleans())


@given(st.dictionaries(st.sampled_from("abcdef"), some), st.booleans())
def test_a_front_is_what_no_other_federation_dominates(points, lower):
    def dominates(other, mine):
        no_worse = other.value <= mine.value if lower else other.value >= mine.value
        better = other.value < mine.value if lower else other.value > mine.value
        return other.cost <= mine.cost and no_worse and (other.cost < mine.cost or better)

    found = fronts.front(points, lower=lower)
    counted = {label: p for label, p in points.items() if p.cost is not None and not p.pooled}
    for label, mine in counted.items():
        assert (label in found) is not any(dominates(other, mine) for other in counted.values())
    assert bool(found) is bool(counted) and found == [label for label in counted if label in found]


def draw(points, write=short_count, **options):
    with plots.styled():
        made = plots.figure(4, 3)
        ax = made.subplots()
        fronts.draw(ax, points, CostAxis("title", "cost", write), order=list(points), **options)
        made.canvas.draw()
    return ax


def lines(ax, **wanted):
    return [line for line in ax.get_lines() if all(getattr(line, f"get_{k}")() == v for k, v in wanted.items())]


def test_points_stand_at_cost_and_value_filled_on_the_front():
    points = {"a": Point(2.0, 0.5), "none": Point(None, 0.9), "b": Point(4.0, 0.75, 0.7, 0.8), "c": Point(5.0, 0.6)}
    ax = draw(points)
    dots = [line for line in ax.get_lines() if line.get_marker() != "None"]
    assert [(*line.get_xdata(), *line.get_ydata()) for line in dots] == [(2, 50), (4, 75), (5, 60)]
    assert [(line.get_color(), line.get_marker()) for line in dots] == [plots.look(i)[:2] for i in (0, 2, 3)]
    assert [line.get_markerfacecolor() == line.get_color() for line in dots] == [True, True, False]
    best, interval = lines(ax, marker="None")
    assert list(interval.get_ydata()) == pytest.approx([70.0, 80.0])
    assert list(zip(*best.get_data(), strict=True)) == [(2, 50), (4, 75)], "none is dearer and no better"
    assert best.get_drawstyle() == "steps-post"


def test_pooled_data_stand_as_a_level_beside_the_front():
    ax = draw({"a": Point(2.0, 0.5), "joint": Point(1.0, 0.9, pooled=True), "far": Point(None, 0.8, pooled=True)})
    assert [list(line.get_ydata()) for line in lines(ax, linestyle=":")] == [[90, 90], [80, 80]]
    assert len([line for line in ax.get_lines() if line.get_marker() != "None"]) == 1
    assert list(lines(ax, drawstyle="steps-post")[0].get_xdata()) == [2.0]


@pytest.mark.parametrize(
    ("costs", "scale"),
    [((1e6, 1e9), "log"), ((0, 1e6, 1e9), "symlog"), ((1, 5), "linear"), ((0, 5), "linear"), ((0, 0), "linear")],
)
def test_costs_that_differ_widely_have_a_logarithmic_axis(costs, scale):
    ax = draw({str(i): Point(cost, 0.5) for i, cost in enumerate(costs)})
    assert ax.get_xscale() == scale
    low, high = ax.get_xlim()
    assert all(low < cost < high for cost in costs)
    if scale == "log":
        assert {"1 M", "1 G"} <= {tick.get_text() for tick in ax.get_xticklabels()}
