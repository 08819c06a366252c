"""Means in which the others count by how alike they are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedloom.core import PayloadError
from fedloom.merge.similarity import cosines, similar_means

OLD = {"w": torch.zeros(2)}


def means(*values: tuple[float, float], tau: float = 0.5) -> Tensor:
    found = similar_means([{"w": torch.tensor(v)} for v in values], OLD, tau)
    return torch.stack([tree["w"] for tree in found])


def test_two_clients_at_right_angles_weigh_themselves_more():
    """softmax(1 / .5, 0) = (.8808, .1192)."""
    found = means((1.0, 0.0), (0.0, 1.0))
    assert found.tolist() == [pytest.approx([0.8808, 0.1192], abs=5e-5), pytest.approx([0.1192, 0.8808], abs=5e-5)]


def test_clients_that_point_the_same_way_share_alike_whatever_their_lengths():
    assert torch.equal(means((1.0, 0.0), (3.0, 0.0)), torch.tensor([[2.0, 0.0], [2.0, 0.0]]))


def test_a_large_tau_gives_everybody_the_plain_mean_and_a_small_one_its_own():
    values = [(1.0, 0.0), (0.0, 1.0), (-1.0, 5.0)]
    plain = torch.tensor(values).mean(0)
    torch.testing.assert_close(means(*values, tau=1e9), plain.expand(3, 2))
    torch.testing.assert_close(means(*values, tau=1e-3), torch.tensor(values))


def test_it_is_the_formula_client_by_client_and_tensor_by_tensor():
    rng = torch.Generator().manual_seed(0)
    shapes = {"conv": (4, 1, 3, 3), "scale": (4,)}
    trees = [{name: torch.randn(shape, generator=rng) for name, shape in shapes.items()} for _ in range(5)]
    found = similar_means(trees, trees[0], 0.3)
    for name in shapes:
        v = [tree[name].double().flatten() for tree in trees]
        for i, mine in enumerate(v):
            raw = [math.exp(float(mine @ other / (mine.norm() * other.norm())) / 0.3) for other in v]
            want = sum(weight / sum(raw) * other for weight, other in zip(raw, v, strict=True))
            torch.testing.assert_close(found[i][name].flatten(), want.float())
            assert found[i][name].shape == shapes[name]


def test_zeros_are_like_nothing_and_stay_zeros_among_themselves():
    assert torch.equal(cosines(torch.tensor([[0.0, 0.0], [2.0, 0.0]])), torch.tensor([[0.0, 0.0], [0.0, 1.0]]))
    assert not means((0.0, 0.0), (0.0, 0.0)).any()
    assert torch.equal(means((0.0, 0.0), (2.0, 0.0))[0], torch.tensor([1.0, 0.0]))


def test_one_client_keeps_its_values_and_a_name_that_it_lacks_keeps_the_old_one():
    mine = torch.tensor([0.1, -0.7])
    found = similar_means([{"w": mine}, {}], OLD, 0.5)
    assert torch.equal(found[0]["w"], mine) and found[1]["w"] is OLD["w"]


def test_what_does_not_fit_is_refused_naming_client_and_tensor():
    with pytest.raises(PayloadError, match=r"client 7: 'w' has shape \(1,\)"):
        similar_means([{"w": torch.ones(2)}, {"w": torch.ones(1)}], OLD, 0.5, who=[3, 7])
    with pytest.raises(PayloadError, match="client 7: 'w' holds NaN"):
        similar_means([{"w": torch.ones(2)}, {"w": torch.tensor([1.0, math.inf])}], OLD, 0.5, who=[3, 7])
