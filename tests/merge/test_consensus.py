"""The shortest mean of directions, and the step that is made of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.core import PayloadError
from fedloom.merge.consensus import consensus, shortest_mean


def tree(*values: float, name: str = "w") -> dict[str, Tensor]:
    return {name: torch.tensor(values)}


def step(*moves: tuple[float, float], start: tuple[float, float] = (0.0, 0.0)) -> Tensor:
    """What the clients' moves from `start` make of it, less `start`."""
    origin = torch.tensor(start)
    return consensus([{"w": origin + torch.tensor(move)} for move in moves], {"w": origin})["w"] - origin


def test_orthogonal_moves_share_the_step_whatever_their_lengths():
    assert shortest_mean(torch.eye(2)).tolist() == pytest.approx([0.5, 0.5], abs=1e-15)
    assert torch.equal(step((2.0, 0.0), (0.0, 4.0)), torch.tensor([1.5, 1.5]))


def test_equal_directions_give_the_mean_length_and_opposite_ones_nothing():
    assert torch.equal(step((3.0, 4.0), (6.0, 8.0)), torch.tensor([4.5, 6.0]))
    assert torch.equal(step((2.0, 0.0), (-4.0, 0.0)), torch.zeros(2))


def test_a_direction_between_two_others_is_left_out():
    """Of 0, 10 and 80 degrees the chord from 0 to 80 is nearest to the origin: its middle, cos 40 from it."""
    angles = torch.deg2rad(torch.tensor([0.0, 10.0, 80.0], dtype=torch.float64))
    units = torch.stack([angles.cos(), angles.sin()], 1)
    torch.testing.assert_close(shortest_mean(units @ units.T), torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64))


@given(seed=st.integers(0, 10_000), count=st.integers(1, 12), size=st.integers(1, 8), bias=st.sampled_from([0, 1, 3]))
def test_the_shortest_mean_fulfils_the_conditions_of_its_problem(seed: int, count: int, size: int, bias: float):
    """p is the shortest point of the hull if and only if u_i . p >= p . p for all i."""
    rng = torch.Generator().manual_seed(seed)
    units = torch.randn(count, size, generator=rng, dtype=torch.float64) + bias * torch.randn(size, generator=rng)
    units = units / units.norm(dim=1, keepdim=True)
    shares = shortest_mean(units @ units.T)
    point = shares @ units
    assert (shares >= 0).all() and float(shares.sum()) == pytest.approx(1, abs=1e-12)
    assert float((units @ point).min() - point @ point) >= -1e-10


def test_no_client_is_opposed_and_no_mean_of_the_directions_is_shorter():
    rng = torch.Generator().manual_seed(3)
    moves = torch.randn(4, 2, 3, generator=rng)
    old = {"w": torch.randn(2, 3, generator=rng)}
    new = consensus([{"w": old["w"] + move} for move in moves], old)["w"] - old["w"]
    flat, lengths = moves.flatten(1), moves.flatten(1).norm(dim=1)
    tried = torch.distributions.Dirichlet(torch.ones(4)).sample((20_000,)) @ (flat / lengths[:, None])
    assert float(new.norm()) <= float((tried.norm(dim=1) * lengths.mean()).min()) + 1e-5
    assert bool((flat @ new.flatten() >= -1e-4).all())


def test_a_client_that_stands_still_has_no_direction_but_shortens_the_step():
    assert torch.equal(step((2.0, 0.0), (0.0, 0.0)), torch.tensor([1.0, 0.0]))


def test_a_tensor_that_nobody_has_or_moves_is_the_old_object():
    old = {**tree(1.0, 2.0), **tree(3.0, name="gone"), "none": torch.zeros(0, 3)}
    merged = consensus([tree(1.0, 2.0), {**tree(1.0, 2.0), "none": torch.zeros(0, 3)}], old)
    assert list(merged) == list(old) and all(merged[name] is old[name] for name in old)


def test_one_client_gives_its_own_values_whatever_the_others_lack():
    rng = torch.Generator().manual_seed(0)
    old, new = torch.randn(1000, generator=rng), torch.randn(1000, generator=rng)
    assert torch.equal(consensus([{"w": new}, {}], {"w": old})["w"], new)


def test_tensors_are_merged_apart_in_pieces_and_keep_shape_and_dtype(monkeypatch):
    rng = torch.Generator().manual_seed(1)
    old = {
        name: torch.randn(3, 5, generator=rng).to(kind) for name, kind in (("a", torch.bfloat16), ("b", torch.float))
    }
    trees = [{name: (t + torch.randn(3, 5, generator=rng)).to(t.dtype) for name, t in old.items()} for _ in range(3)]
    whole = consensus(trees, old)
    monkeypatch.setattr("fedloom.merge.consensus.CHUNK", 4)
    pieces = consensus(trees, old)
    for name, tensor in old.items():
        assert whole[name].dtype == tensor.dtype and whole[name].shape == tensor.shape
        torch.testing.assert_close(pieces[name], whole[name])
        alone = consensus([{name: tree[name]} for tree in trees], {name: tensor})
        assert torch.equal(alone[name], whole[name])


def test_what_does_not_fit_is_refused_naming_client_and_tensor():
    with pytest.raises(PayloadError, match=r"client 7: 'w' has shape \(1,\)"):
        consensus([tree(1.0, 2.0), tree(1.0)], tree(0.0, 0.0), who=[3, 7])
    with pytest.raises(PayloadError, match="client 3: 'w' holds NaN"):
        consensus([tree(float("nan"), 2.0), tree(1.0, 1.0)], tree(0.0, 0.0), who=[3, 7])
    with pytest.raises(PayloadError, match="'other' is not a tensor that the server holds"):
        consensus([tree(1.0, name="other")], tree(0.0))
