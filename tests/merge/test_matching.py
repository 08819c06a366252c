"""Experts in the server's order: assignments, lazy trees, and invariance of the network and of the merge."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.core import PayloadError
from fedloom.core.moe import MoELayer, Slice, inputs_recorded
from fedloom.core.tree import Tensors
from fedloom.merge.matching import (
    COSTS,
    Permuted,
    Side,
    assignment,
    located,
    match,
    permuted_statistics,
    pooled_centroids,
)
from fedloom.merge.semantic import SemanticMerge
from fedloom.models.spec import NetworkSpec

EXPERTS = 4


def network() -> Any:
    net: Any = (
        NetworkSpec("moe_mlp", 3, (2,), 0, options={"layers": 2, "experts": EXPERTS, "top_k": 2}).classifier().eval()
    )
    rng = torch.Generator().manual_seed(1)
    for layer in net.moe_layers:  # a router that uses all of its experts
        net.get_parameter(layer.gate[0]).data.normal_(generator=rng)
    return net


def inputs() -> Tensor:
    return 3 * torch.randn(400, 2, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def run(net: Any, tree: Tensors) -> dict[str, Tensor]:
    with inputs_recorded(net):
        found: dict[str, Tensor] = torch.func.functional_call(net, dict(tree), (inputs(),))
    return found


def measured(net: Any, tree: Tensors) -> dict[str, Tensor]:
    """Routing statistics of one pass."""
    out = run(net, tree)
    sent = out["dispatched"].float()
    count = sent.sum(1)
    sums = torch.einsum("lte,lth->leh", sent, out["expert_inputs"])
    return {
        "count": count,
        "centroid": sums / count[..., None].clamp(min=1),
        "mean": out["routing"].exp().mean(1),
        "hidden": out["expert_inputs"].mean(1),
        "tokens": torch.tensor([400.0]),
    }


def params(net: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def trained(base: Tensors, seed: int) -> dict[str, Tensor]:
    """A client near the others, that moved roughly the same way."""
    rng, common = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(99)
    return {
        n: p + 0.02 * torch.randn(p.shape, generator=common) + 0.005 * torch.randn(p.shape, generator=rng)
        for n, p in base.items()
    }


def shuffled(tree: Tensors, net: Any, orders: Tensor) -> dict[str, Tensor]:
    """The tree with experts and gate rows in another order, by hand: place e holds what was in orders[l, e]."""
    found = dict(tree)
    for layer, order in zip(net.moe_layers, orders, strict=True):
        for name in (*layer.gate, *layer.expert_names):
            found[name] = torch.stack([tree[name][source] for source in order.tolist()])
    return found


ORDERS = torch.tensor([[2, 0, 3, 1], [1, 0, 2, 3]])


@pytest.mark.parametrize("cost", COSTS)
def test_a_permuted_client_is_restored_and_merges_as_if_it_never_was(cost: str) -> None:
    net = network()
    old, layers = params(net), net.moe_layers
    trees = [trained(old, seed) for seed in range(3)]
    statistics = [measured(net, tree) for tree in trees]
    mixed = shuffled(trees[2], net, ORDERS)
    torch.testing.assert_close(run(net, mixed)["logits"], run(net, trees[2])["logits"], rtol=0, atol=1e-6)
    given, stats = [*trees[:2], mixed], [*statistics[:2], permuted_statistics(statistics[2], ORDERS)]
    torch.testing.assert_close(stats[2]["centroid"], measured(net, mixed)["centroid"], rtol=0, atol=1e-5)

    found = match(layers, given, stats, old, pooled_centroids(statistics[:2]), cost=COSTS[cost])
    assert torch.equal(found.orders[:2], torch.arange(EXPERTS).expand(2, 2, -1))
    assert torch.equal(found.orders[2], ORDERS.argsort(1))
    assert found.trees[0] is given[0] and found.statistics[1] is stats[1]
    plain, plainly = SemanticMerge()(trees, [1, 1, 1], old, layers, statistics)
    matched, region = SemanticMerge()(found.trees, [1, 1, 1], old, layers, found.statistics)
    assert all(torch.equal(a, b) for a, b in zip(plainly, region, strict=True))
    assert all(torch.equal(plain[name], matched[name]) for name in plain)
    for name in trees[2]:
        assert torch.equal(found.trees[2][name], trees[2][name])

    _, by_index = SemanticMerge()(given, [1, 1, 1], old, layers, stats)
    moved = torch.arange(EXPERTS) != ORDERS
    both = moved & (region.shares[2] > 0) & (by_index.shares[2] > 0)
    assert both.sum() > 2
    right, wrong = region.similarity[both][:, 0, 2], by_index.similarity[both][:, 0, 2]
    assert float(right.min()) > 0.98 and float(wrong.mean()) < 0.42 and bool((wrong < right).all())
    assert float(by_index.shares[2][both].max()) < 0.25 and float(region.shares[2][both].mean()) > 0.33


def test_without_reference_centroids_parameters_are_compared() -> None:
    net = network()
    old = params(net)
    mixed = shuffled(trained(old, 1), net, ORDERS)
    found = match(net.moe_layers, [mixed], [measured(net, mixed)], old)
    assert torch.equal(found.orders[0], ORDERS.argsort(1))


def apart() -> tuple[MoELayer, dict[str, Tensor]]:
    """Experts that are tensors of their own, as in Switch Transformers."""
    layer = MoELayer("m", tuple((Slice(f"m.{e}.w"), Slice(f"m.{e}.b")) for e in range(3)), ("m.gate",), 1, 2)
    tree = {f"m.{e}.{n}": torch.full((2,), 10.0 * e + i) for e in range(3) for i, n in enumerate("wb")}
    return layer, {**tree, "m.gate": torch.arange(3.0)[:, None].expand(3, 2).contiguous(), "rest": torch.ones(1)}


def test_experts_that_are_tensors_of_their_own_change_names() -> None:
    layer, tree = apart()
    order = torch.tensor([[2, 0, 1]])
    view = Permuted(tree, [layer], order)
    assert sorted(view) == sorted(tree) and len(view) == len(tree)
    assert view["m.0.w"] is tree["m.2.w"] and view["m.1.b"] is tree["m.0.b"] and view["rest"] is tree["rest"]
    assert view["m.gate"][:, 0].tolist() == [2, 0, 1]
    assert located(view, Slice("m.0.w")) == (tree, Slice("m.2.w")) and located(tree, Slice("x")) == (tree, Slice("x"))
    lacking = Permuted({n: t for n, t in tree.items() if not n.startswith("m.2")}, [layer], order)
    assert "m.0.w" not in list(lacking) and "m.2.w" in list(lacking)
    found = match([layer], [dict(view)], [{}], tree, cost=COSTS["parameters"])
    assert found.orders[0, 0].tolist() == [1, 2, 0]
    assert all(torch.equal(found.trees[0][name], tree[name]) for name in tree)


def test_distances_of_parameters_by_hand() -> None:
    layer, tree = apart()
    other = {**tree, "m.1.w": torch.tensor([0.0, 1.0])}
    cost = COSTS["parameters"](layer, 0, Side(tree, None), Side(other, None))
    expected = torch.empty(3, 3)
    for e, f in itertools.product(range(3), range(3)):
        expected[e, f] = sum((tree[f"m.{e}.{n}"] - other[f"m.{f}.{n}"]).square().sum() for n in "wb")
    torch.testing.assert_close(cost, expected.double(), rtol=1e-12, atol=1e-9)


def test_the_assignment_is_the_cheapest_and_prefers_the_identity() -> None:
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        cost = torch.rand(4, 4, generator=rng).double()
        best = min(itertools.permutations(range(4)), key=lambda p: sum(float(cost[e, f]) for e, f in enumerate(p)))
        assert tuple(assignment(cost).tolist()) == best
    assert assignment(torch.zeros(5, 5).double()).tolist() == [0, 1, 2, 3, 4]
    assert assignment(torch.full((5, 5), 3.0).double()).tolist() == [0, 1, 2, 3, 4]
    pair = torch.tensor([[1.0, 1, 9], [1, 1, 9], [9, 9, 0]]).double()
    assert assignment(pair).tolist() == [0, 1, 2]


def test_experts_that_were_not_used_are_told_apart_by_their_parameters() -> None:
    layer, tree = apart()
    server = {"count": torch.tensor([[5.0, 0.0, 0.0]]), "centroid": torch.tensor([[[3.0, 0], [0, 0], [0, 0]]])}
    client = {"count": torch.tensor([[0.0, 2.0, 0.0]]), "centroid": torch.tensor([[[0, 0], [3.0, 1], [0, 0]]])}
    order = torch.tensor([[2, 0, 1]])
    assert match([layer], [dict(Permuted(tree, [layer], order))], [client], tree, server).orders.tolist() == [
        [[1, 2, 0]]
    ]


def test_experts_that_were_not_used_stay_where_they_are() -> None:
    layer, tree = apart()
    centers = torch.tensor([[[0.0, 0.0], [4.0, 0.0], [0.0, 0.0]]])
    server = {"count": torch.tensor([[5.0, 5.0, 0.0]]), "centroid": centers}
    drifted = torch.tensor([[[0.0, 1.0], [4.0, 3.0], [0.0, 0.0]]])
    client = {"count": torch.tensor([[1.0, 1.0, 0.0]]), "centroid": drifted}
    assert match([layer], [tree], [client], tree, server).orders.tolist() == [[[0, 1, 2]]]
    nobody = {"count": torch.zeros(1, 3), "centroid": torch.zeros(1, 3, 2)}
    assert match([layer], [tree], [nobody], tree, server).orders.tolist() == [[[0, 1, 2]]]
    swapped = {"count": torch.tensor([[1.0, 1.0, 0.0]]), "centroid": drifted[:, [1, 0, 2]]}
    assert match([layer], [tree], [swapped], tree, server).orders.tolist() == [[[1, 0, 2]]]


def test_statistics_move_with_their_experts() -> None:
    order = torch.tensor([[1, 0], [0, 1]])
    given = {"count": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "hidden": torch.tensor([[5.0, 6.0], [7.0, 8.0]])}
    found = permuted_statistics(given, order)
    assert found["count"].tolist() == [[2, 1], [3, 4]] and found["hidden"] is given["hidden"]


def test_pooled_centroids_are_those_of_all_tokens() -> None:
    one = {"count": torch.tensor([[1.0, 0.0]]), "centroid": torch.tensor([[[2.0], [0.0]]])}
    two = {"count": torch.tensor([[3.0, 0.0]]), "centroid": torch.tensor([[[6.0], [0.0]]])}
    found = pooled_centroids([one, two])
    assert found["count"].tolist() == [[4, 0]] and found["centroid"].tolist() == [[[5], [0]]]


def test_numbers_of_trees_and_statistics_must_agree() -> None:
    layer, tree = apart()
    with pytest.raises(PayloadError, match="1 trees but 0 clients' routing statistics"):
        match([layer], [tree], [], tree)
