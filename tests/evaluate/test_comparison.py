"""Numbers over seeds, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_what_the_network_measures_itself_is_compared_and_tested() -> None:
    first = {"final_accuracy": 0.5, "measures": {"perplexity": 12.0, "accuracy_norm": None, "other": 1.0}}
    assert measures(first) == {"final_accuracy": 0.5, "measures.perplexity": 12.0}
    second = {"final_accuracy": 0.5, "measures": {"perplexity": 8.0, "accuracy_norm": 0.25}}
    found = compared({"a": {0: first}, "b": {0: second}}, "a")["b"]
    assert found["metrics"]["measures.accuracy_norm"]["mean"] == 0.25
    assert found["tests"]["measures.perplexity"]["difference"] == -4.0
    for nothing in (None, {}, 3, [1.0]):
        assert measures({"final_accuracy": 0.5, "measures": nothing}) == {"final_accuracy": 0.5}


@pytest.mark.parametrize("nothing", [None, {}, [0.5], {"photo": None}, {"photo": "high"}])
def test_without_accuracies_of_domains_there_are_no_measures_of_them(nothing: object) -> None:
    assert measures({"final_accuracy": 0.5, "domain_accuracy": nothing}) == {"final_accuracy": 0.5}


def test_peak_memory_is_compared_where_it_is_the_runs_own() -> None:
    assert measures({"final_accuracy": 0.5, "peak_rss_bytes": 10**9}) == {"final_accuracy": 0.5}
    assert measures({"peak_rss_bytes": 10**9, "own_peak_rss_bytes": 7}) == {"own_peak_rss_bytes": 7}


def test_training_operations_are_three_forward_passes_per_visit() -> None:
    assert measures({"sample_visits": 10, "flops_per_example": 7})["train_flops"] == 210
    for missing in ("sample_visits", "flops_per_example"):
        assert "train_flops" not in measures({"sample_visits": 10, "flops_per_example": 7, missing: None})


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
    none = {"p_t": None, "p_holm": None, "p_wilcoxon": None}
    assert test == {"difference": pytest.approx(-0.1), "n": 1, "better": False, **none}
    assert found["b"]["metrics"]["final_accuracy"]["n"] == 3
    assert compared({"a": {}, "b": summaries({0: 0.5})}, "a")["b"]["tests"] == {}


def test_p_values_are_corrected_within_one_result() -> None:
    base = summaries({0: 0.40, 1: 0.41, 2: 0.42})
    found = compared(
        {
            "base": base,
            "far": summaries({0: 0.60, 1: 0.615, 2: 0.62}),
            "near": summaries({0: 0.44, 1: 0.43, 2: 0.46}),
            "same": dict(base),
            "even": summaries({0: 0.50, 1: 0.51, 2: 0.52}),  # by as much on every seed, so without a t-test
            "few": {1: {"forgetting": 0.1}, 2: {"forgetting": 0.3}},
        },
        "base",
    )
    tests = {label: entry["tests"]["final_accuracy"] for label, entry in found.items() if entry["tests"]}
    assert list(tests) == ["far", "near", "same", "even"]
    raw = {label: test["p_t"] for label, test in tests.items()}
    assert raw["far"] < raw["near"] < raw["same"] == 1.0 and raw["even"] is None
    assert tests["far"]["p_holm"] == pytest.approx(3 * raw["far"])
    assert tests["near"]["p_holm"] == pytest.approx(2 * raw["near"])
    assert tests["same"]["p_holm"] == 1.0 and tests["even"]["p_holm"] is None
    assert tests["far"]["p_holm"] < 0.05 and raw["near"] < 0.05 < tests["near"]["p_holm"]
    assert {label: test["better"] for label, test in tests.items()} == {
        "far": True, "near": False, "same": False, "even": False,
    }  # fmt: skip


def test_what_is_significant_alone_need_not_be_among_many() -> None:
    base = summaries({0: 0.5, 1: 0.5, 2: 0.5})
    good = summaries({0: 0.57, 1: 0.6, 2: 0.64})
    alone = compared({"base": base, "good": good}, "base")["good"]["tests"]["final_accuracy"]
    assert alone["p_holm"] == alone["p_t"] < 0.05 and alone["better"]
    among = compared({"base": base, "good": good, "b": dict(base), "c": dict(base)}, "base")["good"]["tests"]
    assert among["final_accuracy"]["p_t"] == alone["p_t"] and not among["final_accuracy"]["better"]


@pytest.mark.parametrize(
    ("key", "sign"), [("final_accuracy", 1), ("forgetting", -1), ("domain_std", -1), ("measures.perplexity", -1)]
)
def test_better_is_to_the_good_side(key: str, sign: int) -> None:
    def runs(*values: float) -> dict[int, dict[str, object]]:
        head, dot, name = key.partition(".")
        return {seed: {head: {name: value} if dot else value} for seed, value in enumerate(values)}

    found = compared({"a": runs(0.5, 0.5, 0.5), "more": runs(0.7, 0.71, 0.72), "less": runs(0.3, 0.31, 0.32)}, "a")
    assert [found[label]["tests"][key]["better"] for label in ("more", "less")] == [sign > 0, sign < 0]
    best = "more" if sign > 0 else "less"
    assert {label: entry["ranks"][key] for label, entry in found.items()}[best] == 1.0
    assert found["a"]["ranks"][key] == 2.0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_a_method_is_never_better_than_itself(values: list[float]) -> None:
    runs = summaries(dict(enumerate(values)))
    found = compared({"a": runs, "again": runs}, "a")
    assert not found["again"]["tests"]["final_accuracy"]["better"]
    assert found["a"]["ranks"] == found["again"]["ranks"] == {"final_accuracy": 1.5}


def test_two_seeds_never_win() -> None:
    found = compared({"a": summaries({0: 0.1, 1: 0.1}), "b": summaries({0: 0.9, 1: 0.9001})}, "a")["b"]
    assert found["tests"]["final_accuracy"]["p_holm"] < 0.05 and not found["tests"]["final_accuracy"]["better"]


def test_ranks_are_means_over_the_seeds_of_all() -> None:
    found = compared(
        {
            "a": summaries({0: 0.5, 1: 0.6, 2: 0.1}),
            "b": summaries({0: 0.5, 1: 0.7}),
            "c": summaries({0: 0.4, 1: 0.8}),
            "none": {},
        },
        "a",
    )
    assert {label: entry["ranks"] for label, entry in found.items()} == {
        "a": {"final_accuracy": 2.25}, "b": {"final_accuracy": 1.75}, "c": {"final_accuracy": 2.0}, "none": {},
    }  # fmt: skip
    apart = compared({"a": summaries({0: 0.5}), "b": summaries({1: 0.7})}, "a")
    assert apart["a"]["ranks"] == apart["b"]["ranks"] == {}
    alone = compared({"a": summaries({0: 0.5}), "b": {}}, "a")
    assert alone["a"]["ranks"] == {}


def test_pooled_data_change_no_rank_and_have_none() -> None:
    runs = {"a": summaries({0: 0.5, 1: 0.6}), "b": summaries({0: 0.5, 1: 0.7})}
    without = compared(runs, "a")
    for value in (0.1, 0.5, 0.9):
        one = {seed: {**run, "data_view": "pooled_cumulative"} for seed, run in summaries({0: value}).items()}
        found = compared({"joint": one, **runs}, "a")
        assert found["joint"]["ranks"] == {} and found["joint"]["tests"]["final_accuracy"]["n"] == 1
        assert {label: found[label]["ranks"] for label in runs} == {label: without[label]["ranks"] for label in runs}
    assert compared({"a": runs["a"], "joint": one}, "a")["a"]["ranks"] == {}, "none to compare with"


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
