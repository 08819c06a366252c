"""Cohorts: counts and fractions, bounds, determinism, cost on a range."""

from collections import Counter

import pytest
import torch

from fedloom.core import ConfigError
from fedloom.select.sampling import cohort_size, uniform_cohort


@pytest.mark.parametrize(
    ("available", "size", "count"),
    [
        (10, 3, 3),
        (10, 30, 10),
        (10, 0.25, 3),
        (10, 0.001, 1),
        (5, 0.1, 1),
        (10, 1.0, 10),
        (100, 0.07, 7),
        (100, 0.2, 20),
        (0, 0.5, 0),
    ],
)
def test_sizes(available, size, count):
    assert cohort_size(available, size) == count


@pytest.mark.parametrize("size", [0, -1, 0.0, 1.5, -0.1, float("nan"), True, "3", None])
def test_bad_sizes(size):
    with pytest.raises(ConfigError, match=r"training.cohort"):
        cohort_size(10, size)


def test_neither_other_draws_nor_the_order_of_rounds_change_a_cohort():
    first = [uniform_cohort(range(10), 3, 0, "cohort", r) for r in range(5)]
    torch.rand(7)
    again = [uniform_cohort(list(range(10)), 3, 0, "cohort", r) for r in reversed(range(5))]
    assert first == again[::-1] and len({tuple(drawn) for drawn in first}) > 1


def test_cohorts_are_sorted_distinct_members():
    members = [2, 3, 5, 7, 11, 13]
    drawn = uniform_cohort(members, 4, 0, "cohort", 1)
    assert drawn == sorted(set(drawn)) and len(drawn) == 4 and set(drawn) <= set(members)


def test_the_key_names_the_draw():
    members = range(50)
    assert uniform_cohort(members, 5, 0, 1) == uniform_cohort(members, 5, 0, 1)
    assert uniform_cohort(members, 5, 0, 1) != uniform_cohort(members, 5, 0, 2)
    assert uniform_cohort(members, 5, 0, "1") != uniform_cohort(members, 5, 0, 1)


def test_everyone_when_all_are_asked_for():
    assert uniform_cohort([3, 1, 2], 9, 0) == [1, 2, 3]
    assert uniform_cohort([], 2, 0) == []


def test_draws_are_uniform():
    counts = Counter(client for r in range(2000) for client in uniform_cohort(range(5), 2, "uniform", r))
    assert all(abs(counts[c] - 800) < 100 for c in range(5))  # 800 expected, standard deviation 22


def test_a_range_is_not_expanded():
    class Members:
        def __len__(self):
            return 100_000

        def __getitem__(self, i):
            return 7 * i

        def __iter__(self):
            raise AssertionError("expanded")

    drawn = uniform_cohort(Members(), 10, 0)
    assert len(drawn) == 10 and all(c % 7 == 0 for c in drawn)
