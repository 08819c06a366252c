import numpy as np
import pytest

from fedloom.evaluate.domain import domain_summary, holders_mean


def test_the_worked_example_of_the_spec():
    """Four domains at 90, 80, 70 and 60 per cent: AVG 75, STD 12.910 with ddof 1 and 11.180 with ddof 0."""
    found = domain_summary({"a": 0.9, "b": 0.8, "c": 0.7, "d": 0.6})
    assert found["domain_mean"] == pytest.approx(0.75)
    assert found["domain_std_ddof1"] == pytest.approx(0.12910, abs=5e-6)
    assert found["domain_std"] == pytest.approx(0.11180, abs=5e-6)


def test_known_values():
    found = domain_summary({"photo": 0.9, "sketch": 0.5, "art": 0.7})
    assert found["domain_mean"] == pytest.approx(0.7)
    assert found["domain_std"] == pytest.approx((0.08 / 3) ** 0.5)
    assert found["domain_std_ddof1"] == pytest.approx(0.2)
    assert found["domain_worst"] == 0.5


def test_one_domain_has_no_ddof1_deviation():
    assert domain_summary({"photo": 0.9}) == {
        "domain_mean": 0.9,
        "domain_std": 0.0,
        "domain_std_ddof1": None,
        "domain_worst": 0.9,
    }


def test_no_domain():
    assert set(domain_summary({}).values()) == {None}
    assert domain_summary({}).keys() == domain_summary({"a": 1.0}).keys()


def test_domains_without_an_accuracy_are_left_out():
    assert domain_summary({"a": 0.25, "b": None, "c": 0.75}) == domain_summary({"a": 0.25, "c": 0.75})
    assert domain_summary({"a": None}) == domain_summary({})


def test_the_mean_of_a_domain_is_over_the_clients_that_hold_it():
    accuracy = np.array([[0.5, 0.1, np.nan, 0.9], [0.7, 0.3, 0.4, 0.9], [0.9, 0.8, np.nan, 0.9]])
    held = np.array([[3, 0, 1, 0], [1, 9, 0, 0], [2, 1, 5, 0]])
    assert holders_mean(accuracy, held) == [pytest.approx(0.7), pytest.approx((0.3 + 0.8) / 2), None, None]
    assert holders_mean(np.zeros((0, 2)), np.zeros((0, 2))) == [None, None]
    with pytest.raises(ValueError, match=r"\[3, 4\] do not fit the examples held \[3, 3\]"):
        holders_mean(accuracy, held[:, :3])
