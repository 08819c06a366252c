import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedloom.evaluate.statistics import Interval, compare_paired, mean_interval

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
    assert found.better()
    assert not found.better(alpha=1e-6)
    assert not compare_paired(B, A).better()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_a_method_is_never_better_than_itself(values):
    found = compare_paired(values, values)
    assert not found.better()
    assert found.p_t in (None, 1.0)
    assert found.p_wilcoxon in (None, 1.0)


@pytest.mark.parametrize("noise", [0.0, 1e-12])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_same_difference_for_every_seed_has_no_t_test(n, noise):
    b = np.linspace(0.2, 0.6, n)
    found = compare_paired(b + 0.1 + noise * np.arange(n), b)
    assert (found.t, found.p_t) == (None, None) and not found.better()
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


def test_single_pair_decides_nothing():
    found = compare_paired([0.9], [0.1])
    assert found.p_t is None
    assert not found.better()


def test_some_equal_pairs_raise_no_warning():
    assert 0 < compare_paired([0.5, 0.5, 0.7, 0.8], [0.5, 0.4, 0.6, 0.9]).p_wilcoxon <= 1


def test_bad_pairs():
    with pytest.raises(ValueError, match="got 2 and 1"):
        compare_paired([0.1, 0.2], [0.1])
    with pytest.raises(ValueError, match="finite"):
        compare_paired([np.inf], [0.1])
