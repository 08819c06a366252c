"""The fronts of a comparison, and the picture."""

import re
from xml.etree import ElementTree

import pytest

from fedloom.report import pareto


def measured(mean, half=None):
    low, high = (None, None) if half is None else (mean - half, mean + half)
    return {"mean": mean, "std": None, "low": low, "high": high, "n": 3, "values": {}}


def method(accuracy, traffic, flops, pooled=False):
    known = {"bytes_up": traffic, "bytes_down": traffic, "train_flops": flops}
    costs = {key: measured(value) for key, value in known.items() if value is not None}
    return {
        "metrics": {"final_accuracy": measured(accuracy, 0.02), "forgetting": measured(accuracy), **costs},
        "pooled": pooled,
    }


METHODS = {
    "fedavg": method(0.50, 4e6, 1.0e12),
    "_prox$mu$": method(0.52, 4e6, 1.2e12),
    "zero <shot>": method(0.30, 0, 1e9),
    "cheap": method(0.45, 1e5, 3e12),
    "joint": method(0.70, None, 1e12, pooled=True),
    "unknown": method(0.99, None, None),
}


def test_fronts_are_over_traffic_and_over_computation():
    assert pareto.fronts({"methods": METHODS}) == {
        "bytes": ["_prox$mu$", "zero <shot>", "cheap"],
        "train_flops": ["fedavg", "_prox$mu$", "zero <shot>"],
    }
    lower = {"methods": METHODS, "metric": "forgetting", "lower_is_better": True}
    assert pareto.fronts(lower)["bytes"] == ["zero <shot>"]
    assert pareto.fronts({"methods": {}}) == {"bytes": [], "train_flops": []}
    assert pareto.fronts({"methods": METHODS, "metric": "domain_mean"}) == {"bytes": [], "train_flops": []}


def test_the_picture_names_every_method_and_both_costs(tmp_path):
    assert pareto.save({"methods": METHODS}, tmp_path / "pareto.svg")
    text = (tmp_path / "pareto.svg").read_text(encoding="utf-8")
    words = [
        re.sub("\u200b", "", "".join(node.itertext())) for node in ElementTree.fromstring(text).iter() if node.text
    ]
    for label in METHODS:
        assert label in words, label
    for word in (
        "Against traffic",
        "Against computation",
        "MB sent both ways",
        "FLOPs of training",
        "final accuracy, %",
    ):
        assert word in words
    assert "0" in words and "10" in words, "zero traffic has a place on the logarithmic axis"
    assert [path.name for path in tmp_path.iterdir()] == ["pareto.svg"]
    pareto.save({"methods": METHODS}, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == text, "the same numbers, the same bytes"


def test_nothing_to_compare_leaves_no_picture(tmp_path):
    (tmp_path / "pareto.svg").write_text("of an earlier call")
    assert not pareto.save(
        {"methods": {"fedavg": METHODS["fedavg"], "joint": METHODS["joint"]}}, tmp_path / "pareto.svg"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("costs", [(0, 0), (5e6, 5e6), (1e6, 4e6), (0, 4e6), (1, 1e12)])
def test_costs_of_any_size_are_drawn(tmp_path, costs):
    methods = {name: method(0.5, cost, None) for name, cost in zip("ab", costs, strict=True)}
    content = {"methods": methods, "metric": "forgetting", "lower_is_better": True}
    assert pareto.save(content, tmp_path / "pareto.svg")
    text = (tmp_path / "pareto.svg").read_text(encoding="utf-8")
    assert "forgetting, %, lower is better" in text and "Against computation" not in text
