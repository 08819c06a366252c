"""The test split is stratified, and data without domains keep the fingerprint that they always had."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core import DataError
from fedloom.data.source import assemble, held_out, measure


def test_the_split_without_domains_takes_a_fifth_of_every_class():
    y = np.repeat([0, 1, 2], [10, 1, 4])
    taken = held_out(y, fraction=0.2, seed=0, where="toy")
    assert np.bincount(y[taken], minlength=3).tolist() == [2, 0, 1]


def test_the_split_with_domains_takes_a_fifth_of_every_class_of_every_domain():
    y, domains = np.tile([0, 1], 100), np.repeat([0, 1], [150, 50])
    taken = held_out(y, domains, fraction=0.2, seed=0, where="toy")
    cells = np.bincount(domains[taken] * 2 + y[taken])
    assert cells.tolist() == [15, 15, 5, 5]


def test_one_domain_is_split_as_data_without_domains():
    y = np.random.default_rng(0).integers(0, 5, 200)
    without = held_out(y, fraction=0.3, seed=4, where="toy")
    assert np.array_equal(held_out(y, np.zeros_like(y), fraction=0.3, seed=4, where="toy"), without)
    assert not np.array_equal(held_out(y, fraction=0.3, seed=5, where="toy"), without)


def test_domains_are_part_of_the_fingerprint():
    x, y, domains = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])
    plain = assemble("toy", (x, y), (x, y), ("a", "b"))
    assert (
        plain.fingerprint == "f0d0e21b36ef6751482564ecc883717ff8e99c1f82745aa1a6bc65047ef2bbd6"
    )  # runs hold such names
    parts = [(x, y, domains), (x, y, domains)]
    found = assemble("toy", *parts, ("a", "b"), domain_names=("s", "t"))
    other = assemble("toy", *parts, ("a", "b"), domain_names=("s", "u"))
    moved = assemble("toy", (x, y, 1 - domains), parts[1], ("a", "b"), domain_names=("s", "t"))
    assert len({source.fingerprint for source in (plain, found, other, moved)}) == 4
    assert found.without_domains().fingerprint == plain.fingerprint and plain.without_domains() is plain


def test_unequal_domain_labels_are_refused():
    x, y = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])
    with pytest.raises(DataError, match="the train split has 4 inputs but 3 domain labels"):
        assemble("toy", (x, y, y[:3]), (x, y, y), ("a", "b"), domain_names=("s", "t"))


@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_statistics_are_the_floats_next_to_the_exact_ones(number, channels, seed):
    """No sum of floats, whose order is the processor's: the fingerprint, which names runs, holds these numbers."""
    x = np.random.default_rng(seed).integers(0, 256, (number, channels, 4, 4), dtype=np.uint8)
    mean, std = measure(torch.from_numpy(x))
    for k in range(channels):
        values = [Fraction(int(v), 255) for v in x[:, k].ravel()]
        exact = sum(values) / len(values)
        variance = sum((v - exact) ** 2 for v in values) / len(values)
        assert mean[k] == float(exact)
        assert abs(Fraction(std[k]) ** 2 - variance) <= variance * Fraction(1, 2**51)


def test_a_constant_channel_is_divided_by_one():
    x = torch.full((5, 2, 3, 3), 51, dtype=torch.uint8)
    x[0, 1, 0, 0] = 52
    mean, std = measure(x)
    assert mean[0] == 0.2 and std[0] == 1.0 and 0 < std[1] < 0.01
    assert measure(torch.zeros(4, 3)) == ((), ())
    assert measure(torch.tensor([[0, 255]], dtype=torch.uint8)) == ((0.5,), (0.5,))
