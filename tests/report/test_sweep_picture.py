"""The picture of a sweep."""

import re
from xml.etree import ElementTree

import pytest

from fedloom.report.sweep_picture import numbers, save


def result(mean, half=0.03):
    return {"mean": mean, "low": None if half is None else mean - half, "high": None if half is None else mean + half}


def content(sets, **more):
    results = {"fedavg": result(0.5), "_prox$mu$": result(0.6), "joint": result(0.9, 0.01)}
    return {
        "methods": [*results, "absent"], "pooled": ["joint"], "metric": "final_accuracy", "lower_is_better": False,
        "seeds": [0, 1, 2], "settings": {str(k): {"set": s, "results": results} for k, s in enumerate(sets)}, **more,
    }  # fmt: skip


def words(path):
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    return [re.sub("\u200b", "", "".join(node.itertext())) for node in root.iter() if node.text]


ALPHAS = [{"partition.alpha": alpha, "training.rounds": 5} for alpha in (1.0, 0.01, 0.1)]


@pytest.mark.parametrize(
    ("sets", "found"),
    [
        (ALPHAS, ("partition.alpha", [1.0, 0.01, 0.1])),
        ([{"a": 1}, {"a": 2, "b": 3}], None),
        ([{"a": 1}, {"b": 2}], None),
        ([{"a": True}, {"a": False}], None),
        ([{"a": "x"}, {"a": 2}], None),
        ([{"a": 1}, {}], None),
        ([{"a": 1}, {"a": 2}, {"a": 1.0}], None),
        ([{"a": 1}, {"a": 1}], None),
    ],
)
def test_settings_are_an_axis_of_numbers_where_they_differ_in_one_number(sets, found):
    assert numbers(content(sets)["settings"]) == found


def test_numbers_are_along_an_axis_with_their_key(tmp_path):
    assert save(content(ALPHAS), tmp_path / "sweep.svg")
    shown = words(tmp_path / "sweep.svg")
    for word in ("partition.alpha", "0.01", "0.1", "1", "final accuracy, %", "fedavg", "_prox$mu$", "joint"):
        assert word in shown, word
    assert "absent" not in shown and "Mean and 95 % interval over seeds" in shown


def test_other_settings_are_named(tmp_path):
    assert save(content([{"a": "x"}, {"b": 2}], lower_is_better=True, seeds=[0]), tmp_path / "sweep.svg")
    shown = words(tmp_path / "sweep.svg")
    assert {"0", "1", "final accuracy, %, lower is better", "One seed"} <= set(shown)


def test_one_seed_has_points_without_intervals(tmp_path):
    found = content(ALPHAS, seeds=[0])
    for setting in found["settings"].values():
        setting["results"] = {"fedavg": result(0.5, None)}
    assert save(found, tmp_path / "sweep.svg") and "joint" not in words(tmp_path / "sweep.svg")


def test_without_two_settings_that_have_results_there_is_no_picture(tmp_path):
    found = content(ALPHAS)
    for setting in list(found["settings"].values())[1:]:
        setting["results"] = {}
    (tmp_path / "sweep.svg").write_text("of before")
    assert not save(found, tmp_path / "sweep.svg") and list(tmp_path.iterdir()) == []


def test_the_same_content_is_the_same_picture(tmp_path):
    assert save(content(ALPHAS), tmp_path / "a.svg") and save(content(ALPHAS), tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
