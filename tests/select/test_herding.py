"""Herding against a greedy loop over all choices, its first pick and its prefixes."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.select.herding import herd


def draw(count, width=3, seed=0):
    return F.normalize(torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def gap(features, picks):
    """How far the mean of some examples is from the mean of all, by the definition."""
    return float((features.mean(0) - torch.stack([features[k] for k in picks]).mean(0)).norm())


def greedy(features, count):
    """Algorithm 4 by hand: try every example that is left, keep the best, the lowest position first."""
    picks = []
    while len(picks) < min(count, len(features)):
        left = [k for k in range(len(features)) if k not in picks]
        picks.append(min(left, key=lambda k: (gap(features, [*picks, k]), k)))
    return picks


def test_equals_the_greedy_loop():
    for seed in range(10):
        features = draw(12, seed=seed)
        assert herd(features, 12).tolist() == greedy(features, 12)
        assert herd(features, 4).tolist() == greedy(features, 4)


def test_the_first_pick_is_the_nearest_to_the_class_mean():
    features = draw(30, 5)
    nearest = (features - features.mean(0)).norm(dim=1).argmin()
    assert herd(features, 1).tolist() == [int(nearest)]


def test_numbers_on_a_line():
    """The mean is 3; 3 is on it; then (3 + x) / 2 is nearest to 3 for 2, and (3 + 2 + x) / 3 for 4."""
    assert herd(torch.tensor([[0.0], [2.0], [3.0], [4.0], [6.0]]), 3).tolist() == [2, 1, 3]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 15), st.integers(0, 20), st.integers(0, 20), st.integers(0, 10**6))
def test_picks_for_fewer_are_a_prefix_and_no_example_is_taken_twice(size, fewer, more, seed):
    features, fewer = draw(size, seed=seed), min(fewer, more)
    picks = herd(features, more).tolist()
    assert herd(features, fewer).tolist() == picks[:fewer]
    assert len(picks) == len(set(picks)) == min(size, more)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 12), st.integers(0, 10**6))
def test_no_other_example_would_have_been_a_better_next_pick(size, seed):
    features = draw(size, 2, seed)
    picks = herd(features, size).tolist()
    for k in range(size):
        best = min(gap(features, [*picks[:k], j]) for j in range(size) if j not in picks[:k])
        assert gap(features, picks[: k + 1]) <= best + 1e-12


def test_more_than_there_are_gives_all_and_none_gives_none():
    features = draw(5)
    assert sorted(herd(features, 99).tolist()) == [0, 1, 2, 3, 4]
    assert herd(features, 0).tolist() == herd(features[:0], 3).tolist() == []
    assert herd(features, 2).dtype == torch.int64


def test_equal_examples_are_taken_in_order():
    assert herd(torch.ones(4, 3), 4).tolist() == [0, 1, 2, 3]
    features = draw(3).float().repeat_interleave(2, 0)
    assert herd(features, 1).item() % 2 == 0


def test_the_picks_stand_for_the_class_better_than_as_many_at_random():
    features = draw(60, 8)
    rng = torch.Generator().manual_seed(1)
    random = [gap(features, torch.randperm(60, generator=rng)[:10].tolist()) for _ in range(50)]
    assert gap(features, herd(features, 10).tolist()) < min(random)
