"""Rules on numbers that can be redone by hand: what holds, what does not, and why it says so."""

from __future__ import annotations

from typing import Any

import pytest
from scipy.stats import t as student

from fedloom.claims.rules import HELD, NOT_HELD, RULES, TOO_FEW, Found, check_arguments, judged, steps
from fedloom.core import ConfigError

ACCURACY = "final_accuracy"


def seeds(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


def around(mean: float, by: float = 0.01) -> dict[int, float]:
    """Three seeds whose interval is mean ± t * by / sqrt(3), 0.0248 for 0.01."""
    return seeds(mean - by, mean, mean + by)


def found(metric: str = ACCURACY, **labels: dict[int, float]) -> Found:
    return Found({"": {label: {metric: values} for label, values in labels.items()}})


def verdict(rule: str, numbers: Found, many: int = 3, **arguments: Any) -> tuple[str, tuple[str, ...]]:
    return judged([{"rule": rule, **arguments}], numbers, many)


def test_above_is_held_where_the_intervals_are_apart() -> None:
    half = 0.01 / 3**0.5 * student.ppf(0.975, 2)
    assert half == pytest.approx(0.0248, abs=1e-4)
    numbers = found(ours=around(0.56), one=around(0.5), other=around(0.4))
    word, reasons = verdict("above", numbers, metric=ACCURACY, first="ours")
    assert word == HELD
    assert reasons == ("ours (56.0 ± 2.5) is above one (50.0 ± 2.5)", "ours (56.0 ± 2.5) is above other (40.0 ± 2.5)")


def test_above_is_not_held_where_the_order_is_right_and_the_intervals_overlap() -> None:
    numbers = found(ours=around(0.54), one=around(0.5), other=around(0.4))
    word, reasons = verdict("above", numbers, metric=ACCURACY, first="ours")
    assert word == NOT_HELD
    assert reasons == ("ours (54.0 ± 2.5) is above one (50.0 ± 2.5), but the intervals overlap",)


def test_above_is_not_held_where_the_order_is_wrong_or_equal() -> None:
    for ours in (0.5, 0.3):
        word, reasons = verdict("above", found(ours=around(ours), one=around(0.5)), metric=ACCURACY, first="ours")
        assert word == NOT_HELD and "is not above one" in reasons[0]


def test_two_seeds_are_too_few_whatever_the_numbers() -> None:
    numbers = found(ours=seeds(0.9, 0.9), one=seeds(0.1, 0.1))
    word, reasons = verdict("above", numbers, many=2, metric=ACCURACY, first="ours")
    assert word == TOO_FEW and reasons == ("2 where a verdict needs 3",)


def test_above_looks_at_the_others_that_are_named_and_at_every_setting() -> None:
    labels = {"ours": {ACCURACY: around(0.6)}, "one": {ACCURACY: around(0.4)}, "best": {ACCURACY: around(0.9)}}
    worse = {**labels, "one": {ACCURACY: around(0.7)}}
    check = {"rule": "above", "metric": ACCURACY, "first": "ours", "others": ["one"]}
    assert [step.holds for step in steps([check], Found({"a": labels, "b": worse}))] == [True, False]


def test_below_is_above_turned_round() -> None:
    low, high = (
        found("domain_std", ours=around(0.05), one=around(0.11)),
        found("domain_std", ours=around(0.2), one=around(0.1)),
    )
    assert verdict("below", low, metric="domain_std", first="ours")[0] == HELD
    assert verdict("below", high, metric="domain_std", first="ours")[0] == NOT_HELD


def test_a_ladder_rises_step_by_step() -> None:
    ladder = {"none": around(0.3), "some": around(0.4), "full": around(0.5)}
    assert verdict("rises", found(**ladder), metric=ACCURACY)[0] == HELD
    word, reasons = verdict("rises", found(**{**ladder, "some": around(0.48)}), metric=ACCURACY)
    assert word == NOT_HELD and reasons == ("full (50.0 ± 2.5) is above some (48.0 ± 2.5), but the intervals overlap",)
    assert verdict("rises", found(**ladder), metric=ACCURACY, labels=["full", "some", "none"])[0] == NOT_HELD
    assert verdict("falls", found(**ladder), metric=ACCURACY, labels=["full", "some", "none"])[0] == HELD


def test_costs_without_spread_are_apart_where_they_differ() -> None:
    numbers = found("parameters", small=seeds(10, 10, 10), large=seeds(11, 11, 11))
    assert verdict("rises", numbers, metric="parameters")[0] == HELD
    assert verdict("rises", found("parameters", a=seeds(9, 9, 9), b=seeds(9, 9, 9)), metric="parameters")[0] == NOT_HELD


def test_a_peak_is_above_both_ends() -> None:
    arguments = {"metric": ACCURACY, "labels": ["low", "a", "b", "high"]}
    inside = found(low=around(0.3), a=around(0.35), b=around(0.5), high=around(0.4))
    assert verdict("peak", inside, **arguments)[0] == HELD
    at_the_end = found(low=around(0.3), a=around(0.35), b=around(0.5), high=around(0.6))
    word, reasons = verdict("peak", at_the_end, **arguments)
    assert word == NOT_HELD and reasons == ("b (50.0 ± 2.5) is not above high (60.0 ± 2.5)",)


def test_what_is_kept_is_a_share_seed_by_seed() -> None:
    start = {"ours": {ACCURACY: seeds(0.8, 0.6, 0.4)}, "theirs": {ACCURACY: seeds(0.8, 0.6, 0.4)}}
    end = {"ours": {ACCURACY: seeds(0.72, 0.546, 0.356)}, "theirs": {ACCURACY: seeds(0.4, 0.303, 0.198)}}
    arguments = {"metric": ACCURACY, "first": "ours", "others": ["theirs"], "start": "even", "end": "skewed"}
    word, reasons = verdict("keeps", Found({"even": start, "skewed": end}), **arguments)
    assert word == HELD, "shares are 0.90, 0.91, 0.89 and 0.50, 0.505, 0.495, though accuracies differ by far more"
    assert reasons[0].startswith("what ours keeps (90.0 ± 2.5) is above what theirs keeps (50.0 ± 1.2)")
    assert (
        verdict("keeps", Found({"even": start, "skewed": {**end, "theirs": end["ours"]}}), **arguments)[0] == NOT_HELD
    )


def test_a_loss_is_judged_by_the_upper_end_of_its_interval() -> None:
    arguments = {"metric": ACCURACY, "first": "noisy", "than": "clean", "limit": 0.003}
    paired = found(clean=seeds(0.8, 0.6, 0.4), noisy=seeds(0.799, 0.5985, 0.3995))
    word, reasons = verdict("costs_at_most", paired, **arguments)
    assert word == HELD and reasons == ("noisy loses 0.1 ± 0.1 against clean, at most 0.3 is claimed",)
    spread = found(clean=seeds(0.8, 0.6, 0.4), noisy=seeds(0.81, 0.59, 0.4))
    assert verdict("costs_at_most", spread, **arguments)[0] == NOT_HELD, "no loss in the mean, and no certainty"


def test_a_ratio_is_judged_by_the_upper_end_of_its_interval() -> None:
    arguments = {"metric": "train_seconds", "first": "ours", "than": "theirs", "times": 1.1}
    assert (
        verdict("at_most_times", found("train_seconds", ours=seeds(5, 10, 20), theirs=seeds(5, 10, 20)), **arguments)[0]
        == HELD
    )
    word, reasons = verdict(
        "at_most_times", found("train_seconds", ours=seeds(5, 10, 24), theirs=seeds(5, 10, 20)), **arguments
    )
    assert word == NOT_HELD and reasons[0].startswith("ours has 1.067 ± 0.287 times the train_seconds of theirs")


def test_sooner_counts_rounds_to_the_accuracy_that_the_other_ends_with() -> None:
    theirs = [0.2, 0.3, 0.4, 0.5]
    curves = {"theirs": dict.fromkeys(range(3), theirs), "ours": {s: [0.3, 0.5, 0.6, 0.6] for s in range(3)}}
    word, reasons = judged([{"rule": "sooner", "first": "ours", "other": "theirs"}], Found({"": {}}, {"": curves}), 3)
    assert word == HELD and reasons == ("ours reaches the accuracy of theirs 2.000 ± 0.000 times sooner",)
    late = {**curves, "ours": dict.fromkeys(range(3), theirs)}
    assert (
        judged([{"rule": "sooner", "first": "ours", "other": "theirs"}], Found({"": {}}, {"": late}), 3)[0] == NOT_HELD
    )
    never = {**curves, "ours": {**curves["ours"], 1: [0.1, 0.1, 0.1, 0.1]}}
    word, reasons = judged([{"rule": "sooner", "first": "ours", "other": "theirs"}], Found({"": {}}, {"": never}), 3)
    assert word == NOT_HELD and reasons == ("ours never reaches the accuracy of theirs with seed 1",)
    with pytest.raises(ConfigError, match=r"no run of 'theirs' has accuracies per round; set evaluate.every to 1"):
        judged([{"rule": "sooner", "first": "ours", "other": "theirs"}], Found({"": {}}, {"": {"ours": {0: [1.0]}}}), 3)
    apart = {"ours": {0: theirs}, "theirs": {1: theirs}}
    with pytest.raises(ConfigError, match="no seed in common"):
        judged([{"rule": "sooner", "first": "ours", "other": "theirs"}], Found({"": {}}, {"": apart}), 3)


def test_a_verdict_needs_something_to_compare() -> None:
    for checks in ([], [{"rule": "above", "metric": ACCURACY, "first": "ours"}]):
        with pytest.raises(ConfigError, match="the claim compares nothing"):
            judged(checks, found(ours=around(0.5)), 3)


def test_a_number_that_some_runs_lack_leaves_too_few_seeds() -> None:
    values = {label: {ACCURACY: {1: mean, 2: mean + 0.01}} for label, mean in (("ours", 0.5), ("one", 0.1))}
    word, reasons = judged([{"rule": "above", "metric": ACCURACY, "first": "ours"}], Found({"": values}), 3)
    assert word == TOO_FEW and reasons[0].endswith("over 2 where a verdict needs 3")


def test_a_share_of_nothing_is_refused() -> None:
    still = Found({k: {label: {ACCURACY: dict.fromkeys(range(3), 0.0)} for label in ("ours", "one")} for k in "ab"})
    check = {"rule": "keeps", "metric": ACCURACY, "first": "ours", "others": ["one"], "start": "a", "end": "b"}
    with pytest.raises(ConfigError, match="is 0 with seed 0, so that nothing is a share of it"):
        judged([check], still, 3)


def test_a_metric_that_no_run_has_is_named() -> None:
    with pytest.raises(ConfigError, match="no run of 'ours' has the metric forgetting"):
        verdict("above", found(ours=around(0.5), one=around(0.4)), metric="forgetting", first="ours")


def test_a_check_with_an_unknown_rule_or_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown rule 'abve'. Did you mean 'above'?"):
        check_arguments({"rule": "abve"})
    with pytest.raises(ConfigError, match=r"rule above: missing a required argument: 'first'"):
        check_arguments({"rule": "above", "metric": ACCURACY})
    with pytest.raises(ConfigError, match=r"rule above: got an unexpected keyword argument 'best'"):
        check_arguments({"rule": "above", "metric": ACCURACY, "first": "ours", "best": "ours"})
    assert set(RULES) == {
        "above", "below", "rises", "falls", "peak", "keeps", "costs_at_most", "at_most_times", "sooner"
    }  # fmt: skip
