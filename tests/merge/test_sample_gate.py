"""The gate over adapters: its loss in numbers, and that it learns."""

import math

import pytest
import torch
from torch.nn import functional as F

from fedloom.merge.prompt_gate import initial, scores
from fedloom.merge.sample_gate import choices, gate_logits, gate_loss, squared_variation, trained

TREE = initial(2, 3, hidden=16, seed=0)
RNG = torch.Generator().manual_seed(0)
TWO = torch.cat([torch.randn(40, 2, generator=RNG) * 0.1 + 1, torch.randn(40, 2, generator=RNG) * 0.1 - 1])


def test_it_reads_the_trees_of_the_prompt_gate():
    assert torch.equal(gate_logits(TREE, TWO), scores(TREE, TWO))
    assert torch.equal(choices(TREE, TWO), scores(TREE, TWO).argmax(1))


def test_the_published_sizes_give_396293_parameters():
    assert sum(tensor.numel() for tensor in initial(768, 5).values()) == 396_293


def test_the_variation_is_k_when_collapsed_and_0_when_uniform():
    assert squared_variation(torch.tensor([6.0, 0.0, 0.0, 0.0])).item() == pytest.approx(4, rel=1e-6)
    assert squared_variation(torch.full((4,), 2.0)).item() == 0
    assert squared_variation(torch.tensor([3.0])).item() == 0


def test_the_loss_in_numbers():
    zero = torch.zeros(4, 5)
    assert gate_loss(zero, torch.full((4, 5), 0.2), 0.02).item() == pytest.approx(math.log(2))
    one = torch.full((4, 5), -30.0)
    one[:, 0] = 30.0
    target = F.one_hot(torch.zeros(4, dtype=torch.long), 5).float()
    assert gate_loss(one, target, 0.02).item() == pytest.approx(0.02 * 5, rel=1e-5)


def test_balance_pushes_a_collapsed_gate_apart():
    logits = torch.tensor([[2.0, 0.0, 0.0]] * 4, requires_grad=True)
    (gate_loss(logits, torch.sigmoid(logits.detach()), 1.0)).backward()
    assert (logits.grad[:, 0] > 0).all() and (logits.grad[:, 1:] < 0).all()


def test_it_learns_whose_features_are_whose():
    targets = F.one_hot(torch.tensor([2] * 40 + [0] * 40), 3).float()
    gate = trained(TREE, TWO, targets, 1, epochs=60)
    assert choices(gate, TWO).tolist() == [2] * 40 + [0] * 40
    again = trained(TREE, TWO, targets, 1, epochs=60)
    assert all(torch.equal(gate[name], again[name]) for name in gate)
    assert not torch.equal(gate["out.bias"], trained(TREE, TWO, targets, 2, epochs=60)["out.bias"])


def test_nothing_to_learn_from_or_divergence_leaves_the_gate():
    none = trained(TREE, torch.zeros(0, 2), torch.zeros(0, 3), 0)
    wild = trained(TREE, 1e30 * TWO, torch.ones(80, 3), 0, lr=1e30, epochs=3)
    for name, tensor in TREE.items():
        assert torch.equal(none[name], tensor) and torch.equal(wild[name], tensor)
