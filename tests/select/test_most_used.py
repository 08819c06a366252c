"""Freezing the experts that a task used most."""

import torch

from fedloom.select.most_used import most_used

NONE = torch.zeros(2, 4, dtype=torch.bool)


def test_the_largest_of_each_layer_are_frozen():
    usage = torch.tensor([[1.0, 5.0, 3.0, 2.0], [9.0, 0.0, 0.0, 1.0]])
    assert most_used(usage, NONE, 2).int().tolist() == [[0, 1, 1, 0], [1, 0, 0, 1]]
    assert not most_used(usage, NONE, 0).any()


def test_frozen_experts_stay_so_and_others_join_them():
    usage = torch.tensor([[1.0, 5.0, 3.0, 2.0]])
    first = torch.tensor([[False, True, False, False]])
    assert most_used(usage, first, 1).int().tolist() == [[0, 1, 1, 0]]


def test_one_expert_always_stays_free():
    usage = torch.tensor([[1.0, 5.0, 3.0, 2.0]])
    assert most_used(usage, NONE[:1], 9).int().tolist() == [[0, 1, 1, 1]]
    assert most_used(usage, most_used(usage, NONE[:1], 9), 1).int().tolist() == [[0, 1, 1, 1]]
    assert most_used(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.bool), 1).int().tolist() == [[0]]


def test_of_equal_ones_the_first_counts():
    assert most_used(torch.ones(1, 4), NONE[:1], 2).int().tolist() == [[1, 1, 0, 0]]
