"""Sums of a network's own measures, by hand."""

import itertools
import math

import pytest
import torch

from fedloom.core import PayloadError
from fedloom.evaluate.measures import checked, summed, values


def test_sums_and_counts_are_added_and_read_as_means_and_perplexity():
    parts = [{"nll": (2.0, 4.0), "accuracy_norm": (1.0, 2.0)}, {"nll": (4.0, 2.0)}, {"accuracy_norm": (2.0, 2.0)}]
    assert summed(parts) == {"nll": (6.0, 6.0), "accuracy_norm": (3.0, 4.0)}
    assert values(summed(parts)) == {"perplexity": math.e, "accuracy_norm": 0.75}
    assert list(values({"a": (1.0, 2.0), "nll": (0.0, 1.0)}).items()) == [("a", 0.5), ("perplexity", 1.0)]
    assert summed([]) == values({}) == {}


def test_the_order_of_the_parts_is_all_one():
    parts = [{"nll": (value, 1.0)} for value in (1e16, 1.0, -1e16, 0.1)]
    assert {summed(order)["nll"] for order in itertools.permutations(parts)} == {(1.1, 4.0)}


@pytest.mark.parametrize("pair", [(1.0, 0.0), (math.nan, 2.0), (math.inf, 2.0), (5000.0, 1.0)])
def test_what_has_no_finite_value_is_none(pair):
    assert values({"nll": pair}) == {"perplexity": None}


def test_infinite_sums_are_no_crash():
    assert values(summed([{"nll": (math.inf, 1.0)}, {"nll": (-math.inf, 1.0)}])) == {"perplexity": None}
    assert values(summed([{"nll": (1e308, 1.0)}] * 3)) == {"perplexity": None}


def test_tensors_become_numbers_and_anything_else_is_refused():
    assert checked({"nll": (torch.tensor(1.5), torch.tensor(3))}) == {"nll": (1.5, 3.0)}
    for odd in (None, 5, {"nll": 3.0}, {"nll": (1.0,)}, {"nll": ("x", 1)}, {"nll": (torch.zeros(2), 1)}):
        with pytest.raises(PayloadError, match=r"the network's measures must be \(sum, count\) per name, got"):
            checked(odd)
    for count in (-1.0, math.nan, math.inf):
        with pytest.raises(PayloadError, match=r"the network's measure 'nll' has the count .*at least 0"):
            checked({"nll": (1.0, count)})
