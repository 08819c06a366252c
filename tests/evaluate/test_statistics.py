from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedloom.evaluate.statistics import ROUNDING, Interval, compare_paired, holm, mean_interval, mean_ranks

A = [0.61, 0.64, 0.60, 0.66, 0.63, 0.65, 0.62, 0.67]
B = [0.58, 0.60, 0.59, 0.61, 0.64, 0.59, 0.57, 0.60]


def test_interval_by_hand():
    found = mean_interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.std == 1.0
    assert found.half_width == pytest.approx(4.302653 / 3**0.5, abs=1e-6)
    assert (found.low, found.high) == pytest.approx((2 - found.half_width, 2 + found.half_width))


def test_interval_agrees_with_scipy():
    low, high = stats.t.interval(0.9, len(A) - 1, np.mean(A), stats.sem(A))
    found = mean_interval(A, 0.9)
    assert (found.low, found.high) == pytest.approx((low, high))


def test_one_value_has_no_interval():
    assert mean_interval([0.5]) == Interval(0.5, 1)
    assert Interval(0.5, 1).half_width is None


@pytest.mark.parametrize(("values", "level"), [([], 0.95), ([1.0, np.nan], 0.95), ([1.0, 2.0], 1.0), ([1.0, 2.0], 0.0)])
def test_bad_values(values, level):
    with pytest.raises(ValueError, match=r"value|level"):
        mean_interval(values, level)


def test_paired_tests_agree_with_scipy():
    found = compare_paired(A, B)
    t, w = stats.ttest_rel(A, B), stats.wilcoxon(np.subtract(A, B))
    assert (found.t, found.p_t) == pytest.approx((t.statistic, t.pvalue))
    assert (found.w, found.p_wilcoxon) == pytest.approx((w.statistic, w.pvalue))
    assert found.difference == pytest.approx(np.mean(A) - np.mean(B))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_a_method_does_not_differ_from_itself(values):
    found = compare_paired(values, values)
    assert found.difference == 0
    assert found.p_t in (None, 1.0)
    assert found.p_wilcoxon in (None, 1.0)


@pytest.mark.parametrize("noise", [0.0, 1e-12])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_same_difference_for_every_seed_has_no_t_test(n, noise):
    b = np.linspace(0.2, 0.6, n)
    found = compare_paired(b + 0.1 + noise * np.arange(n), b)
    assert (found.t, found.p_t) == (None, None)
    assert found.difference == pytest.approx(0.1)
    assert found.p_wilcoxon == pytest.approx(2 / 2**n), "all signs alike, whatever the noise"


def test_a_small_spread_that_is_no_noise_is_tested():
    found = compare_paired([0.3, 0.5, 0.7 + 1e-6], [0.2, 0.4, 0.6])
    assert found.p_t == pytest.approx(stats.ttest_1samp([0.1, 0.1, 0.1 + 1e-6], 0).pvalue, rel=1e-4)


def test_what_differs_by_noise_alone_is_equal():
    found = compare_paired([0.1 + 0.2, 0.5, 0.7], [0.3, 0.5, 0.7 + 1e-15])
    assert (found.p_t, found.p_wilcoxon) == (1.0, 1.0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=9))
def test_no_values_raise_a_warning(pairs):
    found = compare_paired(*(np.divide(side, 7) for side in zip(*pairs, strict=True)))
    assert all(p is None or 0 < p <= 1 for p in (found.p_t, found.p_wilcoxon))


def test_ties_are_ties_in_spite_of_noise():
    a, b = [0.3, 0.5, 0.2, 0.9], [0.2, 0.4, 0.3, 0.5]  # 0.1, 0.1, -0.1 on paper, and 0.4
    assert compare_paired(a, b).p_wilcoxon == stats.wilcoxon([1, 1, -1, 4]).pvalue


@settings(deadline=None, max_examples=20)
@given(st.floats(0.01, 0.99), st.lists(st.floats(-0.9, 0.9), min_size=1, max_size=4), st.sampled_from([-1.0, 1.0]))
def test_noise_leaves_ties_of_differences_wherever_they_lie(size, noise, sign):
    base = np.zeros(len(noise) + 2)
    differences = np.array([0.001, 1.0, *(sign * (size + v * ROUNDING / 2) for v in noise)])
    same = [0.001, 1.0, *(sign * size for _ in noise)]
    assert compare_paired(differences, base).w == compare_paired(same, base).w


def test_single_pair_decides_nothing():
    found = compare_paired([0.9], [0.1])
    assert (found.p_t, found.p_wilcoxon) == (None, None)


def test_some_equal_pairs_raise_no_warning():
    assert 0 < compare_paired([0.5, 0.5, 0.7, 0.8], [0.5, 0.4, 0.6, 0.9]).p_wilcoxon <= 1


def test_bad_pairs():
    with pytest.raises(ValueError, match="got 2 and 1"):
        compare_paired([0.1, 0.2], [0.1])
    with pytest.raises(ValueError, match="finite"):
        compare_paired([np.inf], [0.1])


def closed_testing(p_values):
    """Holm's correction by its definition: a hypothesis falls with every set of them that holds it, by Bonferroni."""
    every = range(len(p_values))
    sets = [s for size in range(1, len(p_values) + 1) for s in combinations(every, size)]
    return [max(min(1.0, len(s) * min(p_values[j] for j in s)) for s in sets if i in s) for i in every]


def test_holm_of_a_known_case():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.2]) == [0.2] and holm([]) == []
    assert holm([0.6, 0.7]) == [1.0, 1.0], "never above 1"


@given(st.lists(st.sampled_from([0.0, 0.001, 0.01, 0.02, 0.04, 0.3, 0.5, 0.9, 1.0]) | st.floats(0, 1), max_size=7))
def test_holm_is_the_closed_test_of_bonferroni(p_values):
    assert holm(p_values) == pytest.approx(closed_testing(p_values))


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan")])
def test_what_is_no_probability_is_not_corrected(bad):
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
        holm([0.5, bad])


def counted_ranks(values, lower):
    """1, and for each other value 1 where it is better and a half where it is equal."""
    found = [[] for _ in values]
    for block in zip(*values, strict=True):
        for i, mine in enumerate(block):
            better = sum(v < mine if lower else v > mine for v in block)
            found[i].append(1 + better + (block.count(mine) - 1) / 2)
    return [sum(ranks) / len(ranks) for ranks in found]


@settings(deadline=None)
@given(st.data(), st.booleans())
def test_mean_ranks_are_counted_with_ties_shared(data, lower):
    methods, blocks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    row = st.lists(st.sampled_from([-0.5, 0.0, 0.25, 0.5, 1.0]), min_size=blocks, max_size=blocks)
    values = data.draw(st.lists(row, min_size=methods, max_size=methods))
    assert mean_ranks(values, lower=lower) == pytest.approx(counted_ranks(values, lower))


def test_mean_ranks_agree_with_scipy_whose_smallest_is_first():
    values = np.array([[0.1, 0.5, 0.3], [0.4, 0.5, 0.2], [0.3, 0.6, 0.3]])
    assert mean_ranks(values, lower=True) == pytest.approx(stats.rankdata(values, axis=0).mean(1))
    assert mean_ranks(values) == pytest.approx(stats.rankdata(-values, axis=0).mean(1))


def test_values_that_differ_by_noise_share_their_rank():
    assert mean_ranks([[0.1 + 0.2], [0.3], [0.1]]) == [1.5, 1.5, 3.0]


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.floats(-0.9, 0.9), st.floats(1e-3, 1e3), st.booleans())
def test_ranks_part_where_the_gap_exceeds_the_rounding_wherever_values_lie(places, start, size, lower):
    """Values lie 0.4 roundings or a multiple of it apart: up to two such steps are noise, three are not."""
    values = size * np.append(1.0, start + 0.4 * ROUNDING * np.array(places))
    ranks = mean_ranks(values[:, None], lower=lower)
    for (mine, rank), (other, against) in product(zip(places, ranks[1:], strict=True), repeat=2):
        between = sorted(p for p in places if min(mine, other) <= p <= max(mine, other))
        if all(b - a <= 2 for a, b in pairwise(between)):
            assert rank == against
        else:
            assert (rank < against) is ((mine < other) is lower)


@pytest.mark.parametrize("bad", [[], [[]], [[np.nan], [0.1]]])
def test_what_cannot_be_ranked_is_refused(bad):
    with pytest.raises(ValueError, match="value"):
        mean_ranks(bad)
