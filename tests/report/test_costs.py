import pytest

from fedloom.report import costs, plots
from fedloom.report.costs import Point

TRAFFIC, OPERATIONS = costs.COSTS


def draw(points, cost):
    with plots.styled():
        made = plots.figure(4, 3)
        ax = made.subplots()
        costs.scatter(ax, points, cost)
        made.canvas.draw()
    return ax


def test_the_point_of_a_run_adds_up_what_is_sent_both_ways():
    summary = {"bytes_up": 3, "bytes_down": 4, "flops_per_example": 9, "final_accuracy": 0.5}
    assert costs.of_summary(summary) == Point(7, 9, 0.5)
    assert costs.of_summary({**summary, "data_view": "pooled_cumulative"}) == Point(None, 9, 0.5)
    assert costs.of_summary({"final_accuracy": "odd", "bytes_up": 3}) == Point(3, None, None)


def test_the_points_of_methods_are_means_with_the_interval_of_accuracy():
    metrics = {
        "final_accuracy": {"mean": 0.5, "low": 0.4, "high": 0.6},
        "bytes_up": {"mean": 1e6},
        "bytes_down": {"mean": 2e6},
    }
    content = {"methods": {"a": {"metrics": metrics}, "b": {"metrics": {}}}}
    assert costs.of_methods(content) == {"a": Point(3e6, None, 0.5, 0.4, 0.6), "b": Point(None, None, None)}


def test_a_cost_is_drawn_where_two_points_differ_in_it():
    same = [Point(5, 1, 0.5), Point(5, 2, 0.6)]
    assert costs.drawable(same) == [OPERATIONS]
    assert costs.drawable([*same, Point(6, None, 0.7)]) == [TRAFFIC, OPERATIONS]
    assert costs.drawable([Point(5, 1, 0.5), Point(6, 2, None)]) == []
    assert costs.drawable([]) == []


def test_points_stand_at_cost_and_accuracy_in_the_look_of_their_position():
    ax = draw([Point(2e6, 1, 0.5), Point(None, 2, 0.9), Point(4e6, 3, 0.75, 0.7, 0.8)], TRAFFIC)
    dots = [line for line in ax.get_lines() if line.get_marker() != "None"]
    assert [(*line.get_xdata(), *line.get_ydata()) for line in dots] == [(2e6, 50.0), (4e6, 75.0)]
    assert [(line.get_color(), line.get_marker()) for line in dots] == [plots.look(0)[:2], plots.look(2)[:2]]
    (interval,) = [line for line in ax.get_lines() if line.get_marker() == "None"]
    assert list(interval.get_ydata()) == pytest.approx([70.0, 80.0])
    assert ax.get_xlim()[0] == 0 and ax.get_xscale() == "linear"


def test_costs_that_differ_widely_have_a_logarithmic_axis():
    ax = draw([Point(1, 1e6, 0.5), Point(2, 1e9, 0.6)], OPERATIONS)
    assert ax.get_xscale() == "log"
    assert {"1 M", "1 G"} <= {tick.get_text() for tick in ax.get_xticklabels()}
    assert draw([Point(1, 0, 0.5), Point(2, 1e9, 0.6)], OPERATIONS).get_xscale() == "linear"
