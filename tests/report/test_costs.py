import json

import numpy as np
import pytest
from scipy import stats

from fedloom.evaluate.comparison import compared
from fedloom.report import costs, fronts, pareto, plots
from fedloom.report.fronts import Point
from fedloom.report.groups import Group
from fedloom.report.record import RunRecord

TRAFFIC, TRAINING, OPERATIONS = costs.COSTS
POOLED = {"data_view": "pooled_cumulative"}


def group(name, *summaries):
    return Group(name, tuple(RunRecord(None, status="done", summary=summary) for summary in summaries))


def test_traffic_is_what_is_sent_both_ways():
    assert costs.traffic({"bytes_up": 3, "bytes_down": 4}) == 7
    assert costs.traffic({"bytes_up": 3, "bytes_down": "odd"}) == 3
    assert costs.traffic({"bytes_up": 3, "bytes_down": 4, **POOLED}) is None and costs.traffic({}) is None


def test_training_is_a_forward_pass_and_twice_that_per_visit():
    assert costs.training({"flops_per_example": 9, "sample_visits": 10}) == 3 * 9 * 10
    assert costs.training({"flops_per_example": 9}) is None
    assert costs.operations({"flops_per_example": 9}) == 9


def test_the_point_of_a_group_is_of_means_with_the_interval_of_accuracy():
    accuracies = [0.4, 0.5, 0.75]
    summaries = [{"final_accuracy": a, "bytes_up": 2 * i, "flops_per_example": 9} for i, a in enumerate(accuracies)]
    groups = [group("a", *summaries), group("b", {"bytes_up": 4}), group("c", {"final_accuracy": 0.5, **POOLED})]
    found = costs.points(groups, TRAFFIC)
    low, high = stats.t.interval(0.95, 2, np.mean(accuracies), stats.sem(accuracies))
    assert found["a"] == pytest.approx((2, 0.55, low, high, False))
    assert found.keys() == {"a", "c"} and found["c"] == Point(None, 0.5, pooled=True)
    assert costs.points(groups[:1], OPERATIONS)["a"].cost == 9


def test_a_cost_is_drawn_where_two_federations_differ_in_it():
    def one(up, flops, accuracy=0.5, **more):
        known = {"bytes_up": up, "flops_per_example": flops, "final_accuracy": accuracy}
        return group(f"{up} {flops}", {key: value for key, value in known.items() if value is not None} | more)

    same = [one(5, 1), one(5, 2)]
    assert costs.drawable(same) == [OPERATIONS]
    assert costs.drawable([*same, one(6, None)]) == [TRAFFIC, OPERATIONS]
    assert costs.drawable([one(5, 1), one(6, 2, None)]) == []
    assert costs.drawable([one(5, 1), one(6, 2, **POOLED)]) == [], "pooled data are no federation"
    assert costs.drawable([]) == []


def test_accuracies_are_in_per_cent_in_the_look_of_their_position():
    groups = [group(str(i), {"final_accuracy": a, "bytes_up": b}) for i, (a, b) in enumerate([(0.5, 2e6), (0.75, 4e6)])]
    with plots.styled():
        made = plots.figure(4, 3)
        ax = made.subplots()
        costs.scatter(ax, groups, TRAFFIC)
        made.canvas.draw()
    dots = [line for line in ax.get_lines() if line.get_marker() != "None"]
    assert [(*line.get_xdata(), *line.get_ydata()) for line in dots] == [(2e6, 50.0), (4e6, 75.0)]
    assert [line.get_color() for line in dots] == [plots.look(i)[0] for i in range(2)]
    assert all(tick.get_text().endswith(" %") for tick in ax.get_yticklabels())


def test_the_page_and_compare_json_have_the_same_fronts():
    runs = {
        "fedavg": [(0.5, 4e6, 3), (0.52, 4e6, 3)], "cheap": [(0.4, 1e5, 3), (0.45, 1e5, 3)],
        "worse": [(0.3, 5e6, 5), (0.3, 5e6, 5)], "joint": [(0.9, 1.0, 1), (0.9, 1.0, 1)],
    }  # fmt: skip
    summaries = {
        label: [
            {"final_accuracy": a, "bytes_up": b, "bytes_down": b, "sample_visits": n, "flops_per_example": 9}
            | (POOLED if label == "joint" else {})
            for a, b, n in found
        ]
        for label, found in runs.items()
    }
    methods = compared({label: dict(enumerate(found)) for label, found in summaries.items()}, "fedavg")
    told = pareto.fronts({"methods": json.loads(json.dumps(methods))})
    groups = [group(label, *found) for label, found in summaries.items()]
    assert told == {
        key: fronts.front(costs.points(groups, cost)) for key, cost in (("bytes", TRAFFIC), ("train_flops", TRAINING))
    }
    assert told["bytes"] == ["fedavg", "cheap"] and "joint" not in told["train_flops"]
