"""Numbers over seeds, against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from fedloom.evaluate.comparison import budget, compared, current_task_accuracy, measures

T_2 = 4.302652729749464  # 97.5 % quantile of Student's t with 2 degrees of freedom


def summaries(accuracies: dict[int, float], visits: int | None = 100) -> dict[int, dict[str, object]]:
    return {seed: {"final_accuracy": value, "sample_visits": visits} for seed, value in accuracies.items()}


def test_measures_keep_numbers_only() -> None:
    found = measures({"final_accuracy": 0.5, "forgetting": None, "bytes_up": 7, "method": "x", "domain_mean": True})
    assert found == {"final_accuracy": 0.5, "bytes_up": 7}


def test_pooled_data_have_no_traffic_and_no_clients() -> None:
    known = {"final_accuracy": 0.5, "bytes_up": 7, "bytes_down": 8, "per_client_accuracy_mean": 0.5}
    known |= {"per_client_accuracy_worst10": 0.1, "personal_domain_mean": 0.4, "personal_domain_std": 0.1}
    known |= {"personal_domain_worst": 0.2, "sample_visits": 9}
    assert measures(known) == known == measures({**known, "data_view": "stream"})
    for view in ("pooled_cumulative", "pooled_cumulative_all"):
        assert measures({**known, "data_view": view}) == {"final_accuracy": 0.5, "sample_visits": 9}
    found = compared({"a": {0: known}, "b": {0: {**known, "data_view": "pooled_cumulative"}}, "c": {}}, "a")
    assert {label: entry["pooled"] for label, entry in found.items()} == {"a": False, "b": True, "c": False}
    assert "per_client_accuracy_mean" not in found["b"]["tests"]


def test_each_domain_is_a_measure_before_their_mean_and_tested() -> None:
    first = {"domain_accuracy": {"photo": 0.5, "art": None}, "domain_mean": 0.5, "accuracy_within_task": 0.25}
    assert list(measures(first).items()) == [
        ("accuracy_within_task", 0.25), ("domain_accuracy[photo]", 0.5), ("domain_mean", 0.5),
    ]  # fmt: skip
    assert measures({**first, "data_view": "pooled_cumulative"}) == measures(first), "the global view"
    second = {"domain_accuracy": {"art": 0.75, "photo": 0.25}, "domain_mean": 0.5}
    found = compared({"a": {0: first, 1: second}, "b": {0: second, 1: second}}, "a")
    metrics = found["a"]["metrics"]
    assert list(metrics) == ["accuracy_within_task", "domain_accuracy[photo]", "domain_accuracy[art]", "domain_mean"]
    assert metrics["domain_accuracy[photo]"]["values"] == {"0": 0.5, "1": 0.25}
    assert metrics["domain_accuracy[photo]"]["mean"] == 0.375
    assert metrics["domain_accuracy[art]"]["values"] == {"1": 0.75}
    tests = found["b"]["tests"]
    assert list(tests) == ["domain_accuracy[art]", "domain_accuracy[photo]", "domain_mean"]
    assert tests["domain_accuracy[photo]"]["difference"] == -0.125 and tests["domain_accuracy[photo]"]["n"] == 2
    assert tests["domain_accuracy[art]"]["n"] == 1, "the seeds of both"


@pytest.mark.parametrize("nothing", [None, {}, [0.5], {"photo": None}, {"photo": "high"}])
def test_without_accuracies_of_domains_there_are_no_measures_of_them(nothing: object) -> None:
    assert measures({"final_accuracy": 0.5, "domain_accuracy": nothing}) == {"final_accuracy": 0.5}


def test_peak_memory_of_the_process_is_not_compared() -> None:
    assert measures({"final_accuracy": 0.5, "peak_rss_bytes": 10**9}) == {"final_accuracy": 0.5}


def test_current_task_accuracy_is_the_mean_of_the_diagonal() -> None:
    assert current_task_accuracy([[0.9, None], [0.1, 0.7]]) == pytest.approx(0.8)
    assert current_task_accuracy([[0.9, 0.4, None], [0.1, 0.7, 0.5]]) == pytest.approx((0.9 + 0.4 + 0.5) / 3)
    assert current_task_accuracy([[0.9]]) is None, "a single stage has no current task"
    assert current_task_accuracy(None) is None
    assert measures({"accuracy_matrix": [[0.5, None], [0.0, 0.25]]}) == {"current_task_accuracy": 0.375}


def test_mean_interval_and_paired_test_by_hand() -> None:
    ours, theirs = {0: 0.5, 1: 0.6, 2: 0.7}, {0: 0.4, 1: 0.4, 2: 0.4}
    found = compared({"theirs": summaries(theirs), "ours": summaries(ours)}, "theirs")
    accuracy = found["ours"]["metrics"]["final_accuracy"]
    half = T_2 * 0.1 / math.sqrt(3)
    assert accuracy["mean"] == pytest.approx(0.6) and accuracy["std"] == pytest.approx(0.1) and accuracy["n"] == 3
    assert (accuracy["low"], accuracy["high"]) == (pytest.approx(0.6 - half), pytest.approx(0.6 + half))
    assert accuracy["values"] == {"0": 0.5, "1": 0.6, "2": 0.7}
    test = found["ours"]["tests"]["final_accuracy"]
    t = 0.2 / (0.1 / math.sqrt(3))  # differences 0.1, 0.2, 0.3
    assert test["difference"] == pytest.approx(0.2) and test["n"] == 3
    assert test["p_t"] == pytest.approx(1 - t / math.sqrt(2 + t * t)), "closed form for 2 degrees of freedom"
    assert test["p_wilcoxon"] == pytest.approx(0.25), "all 3 signs alike: 2 of 2^3 cases"
    assert found["theirs"]["tests"] == {}
    assert found["ours"]["tests"].keys() == {"final_accuracy"}, "costs are not tested"


def test_tests_are_over_the_seeds_of_both() -> None:
    found = compared({"a": summaries({0: 0.5, 1: 0.6}), "b": summaries({1: 0.5, 2: 0.9, 3: 0.8})}, "a")
    test = found["b"]["tests"]["final_accuracy"]
    assert test == {"difference": pytest.approx(-0.1), "n": 1, "p_t": None, "p_wilcoxon": None}
    assert found["b"]["metrics"]["final_accuracy"]["n"] == 3
    assert compared({"a": {}, "b": summaries({0: 0.5})}, "a")["b"]["tests"] == {}


def test_one_seed_has_no_interval() -> None:
    found = compared({"a": summaries({4: 0.5})}, "a")["a"]["metrics"]["final_accuracy"]
    assert found == {"mean": 0.5, "n": 1, "std": None, "low": None, "high": None, "values": {"4": 0.5}}


def test_budgets_are_equal_seed_by_seed() -> None:
    same = {0: {"sample_visits": 100}, 1: {"sample_visits": 120}}
    found = budget({"a": same, "b": dict(same)}, "a")
    assert found == {
        "equal": True,
        "visits": {"a": {"0": 100, "1": 120}, "b": {"0": 100, "1": 120}},
        "share": {"a": 1.0, "b": 1.0},
    }
    swapped = {0: {"sample_visits": 120}, 1: {"sample_visits": 100}}
    assert budget({"a": same, "b": swapped}, "a")["equal"] is False
    more = budget({"a": same, "b": {1: {"sample_visits": 180}}}, "a")
    assert more["equal"] is False and more["share"]["b"] == 1.5, "over the seeds of both"
    assert budget({"a": same, "b": {2: {"sample_visits": 1}}}, "a") == {
        "equal": None,
        "visits": {"a": {"0": 100, "1": 120}, "b": {"2": 1}},
        "share": {"a": 1.0, "b": None},
    }
