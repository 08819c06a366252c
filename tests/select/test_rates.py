"""Rates by client id, and rates that are drawn."""

from collections import Counter

from fedloom.core import Context, Stage
from fedloom.select.rates import dynamic, fixed

RATES = (1.0, 0.5, 0.25)


def context(client, round=0, seed=0):
    return Context(None, Stage(0, 1, 9, (0,), (0,)), 1, num_clients=9, seed=seed, round=round, client=client)


def test_fixed_rates_go_by_client_id_whatever_the_round():
    assert [fixed(RATES, context(k)) for k in range(5)] == [1.0, 0.5, 0.25, 1.0, 0.5]
    assert all(fixed(RATES, context(4, round)) == 0.5 for round in range(9))


def test_drawn_rates_are_equally_likely_and_the_same_wherever_they_are_drawn():
    drawn = {(k, r): dynamic(RATES, context(k, r)) for k in range(40) for r in range(30)}
    assert drawn == {(k, r): dynamic(RATES, context(k, r)) for k in range(40) for r in range(30)}
    counts = Counter(drawn.values())
    assert set(counts) == set(RATES) and all(330 < count < 470 for count in counts.values())
    assert drawn != {(k, r): dynamic(RATES, context(k, r, seed=1)) for k in range(40) for r in range(30)}
