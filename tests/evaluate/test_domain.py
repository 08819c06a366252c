import pytest

from fedloom.evaluate.domain import domain_summary


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
