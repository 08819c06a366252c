"""Which prompts are sent: the best by score, draws, and the size of the pool."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fedloom.core import ConfigError
from fedloom.core.seeds import generator
from fedloom.select.dispatch import DISPATCHES, ByGate, at_random, check_dispatch, the_first

SCORES = torch.tensor([0.1, 3.0, -1.0, 3.0, 2.0, 0.5])


def draws(rule, scores, count=2, pool=6, turns=300):
    return [tuple(rule(scores, pool, count, generator("dispatch", i)).tolist()) for i in range(turns)]


def test_the_best_are_sent_and_the_lower_index_first_among_equals():
    best = ByGate(explore=0.0)
    assert best(SCORES, 6, 3, generator(0)).tolist() == [1, 3, 4]
    assert best(SCORES, 6, 1, generator(0)).tolist() == [1]
    assert best(torch.zeros(6), 6, 2, generator(0)).tolist() == [0, 1]
    for turn in range(20):
        scores = torch.randn(64, generator=generator("scores", turn))
        found = best(scores, 64, 8, generator(turn))
        left = torch.ones(64, dtype=torch.bool).index_fill(0, found, False)
        assert len(found.unique()) == 8 and scores[found].min() >= scores[left].max()
        assert found.tolist() == sorted(found.tolist()) and found.dtype == torch.int64


def test_without_scores_or_with_spoilt_ones_the_prompts_are_drawn():
    spoilt = SCORES.index_fill(0, torch.tensor([2]), torch.nan)
    for scores in (None, spoilt):
        found = draws(ByGate(explore=0.0), scores)
        assert len(set(found)) == 15  # all pairs out of six
        counts = Counter(k for pair in found for k in pair)
        assert all(70 < counts[k] < 130 for k in range(6))  # 100 expected, standard deviation 8


def test_exploring_draws_with_its_probability():
    off = [found for found in draws(ByGate(explore=0.3), SCORES, turns=1000) if found != (1, 3)]
    # a draw is (1, 3) by chance in one of 15: 0.3 * 14 / 15 = 0.28 of 1000, standard deviation 14
    assert 230 < len(off) < 330 and len(set(off)) == 14
    assert set(draws(ByGate(explore=0.0), SCORES)) == {(1, 3)}
    assert len(set(draws(ByGate(explore=1.0), SCORES))) == 15


def test_the_alternatives_do_not_look_at_the_scores():
    for name, rule in (("random", at_random), ("fixed", the_first)):
        assert DISPATCHES[name](0.1) is rule
        assert draws(rule, SCORES, turns=20) == draws(rule, None, turns=20) == draws(rule, -SCORES, turns=20)
    assert set(draws(the_first, SCORES)) == {(0, 1)}
    assert len(set(draws(at_random, SCORES))) == 15
    assert DISPATCHES["gate"](0.25) == ByGate(0.25)


@pytest.mark.parametrize("name", sorted(DISPATCHES))
def test_the_generator_alone_says_what_is_drawn(name):
    rule = DISPATCHES[name](0.5)
    first = draws(rule, SCORES, turns=20)
    torch.rand(5)
    assert draws(rule, SCORES, turns=20) == first


@pytest.mark.parametrize("name", sorted(DISPATCHES))
def test_a_pool_that_is_too_small_is_sent_whole(name):
    for scores in (None, SCORES):
        assert DISPATCHES[name](0.1)(scores, 6, 9, generator(0)).tolist() == [0, 1, 2, 3, 4, 5]


def test_bad_numbers_are_refused_in_words():
    check_dispatch(1, 1)
    check_dispatch(8, 64)
    for count in (0, 65):
        with pytest.raises(ConfigError, match=rf"dispatch is {count} and the pool holds 64 prompts; set .* at most 64"):
            check_dispatch(count, 64)
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match=r"explore must be in \[0, 1\], got"):
            ByGate(share)
