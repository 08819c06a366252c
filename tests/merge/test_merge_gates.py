"""Merging gates: opinion pools in closed form, what a softmax cannot see, and a fit on centroids."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from fedloom.core import PayloadError
from fedloom.core.moe import MoELayer
from fedloom.core.seeds import generator
from fedloom.merge.gates import distilled_gates, pooled_gates, row_weighted_gates
from fedloom.merge.mean import weighted_mean

EXPERTS, HIDDEN, CLIENTS = 4, 5, 3
LAYERS = [MoELayer(name, ((),) * EXPERTS, (f"{name}.weight", f"{name}.bias"), 1, HIDDEN) for name in ("a", "b")]
WEIGHTS = torch.tensor([[0.5, 0.2], [0.3, 0.2], [0.2, 0.6]], dtype=torch.float64)
ROWS = torch.rand(CLIENTS, 2, EXPERTS, generator=generator("rows"), dtype=torch.float64) + 0.1
ROWS = ROWS / ROWS.sum(0)
SIZES = torch.tensor([4.0, 1.0, 3.0])


def tree(client: int) -> dict[str, Tensor]:
    rng = generator("gates", client)
    gates = {}
    for layer in LAYERS:
        gates |= {layer.gate[0]: torch.randn(EXPERTS, HIDDEN, generator=rng)}
        gates |= {layer.gate[1]: torch.randn(EXPERTS, generator=rng)}
    return {**gates, "other": torch.full((2,), float(client))}


TREES, OLD = [tree(i) for i in range(CLIENTS)], tree(9)
POINTS = torch.randn(50, HIDDEN, generator=generator("points"), dtype=torch.float64)


def log_probs(gates: dict[str, Tensor], layer: MoELayer, points: Tensor = POINTS) -> Tensor:
    weight, bias = (gates[name].double() for name in layer.gate)
    return torch.nn.functional.linear(points, weight, bias).log_softmax(1)


def test_pooling_is_the_normalised_geometric_mean_of_the_distributions():
    merged = pooled_gates(TREES, WEIGHTS, OLD, LAYERS)
    assert merged.keys() == OLD.keys() - {"other"}
    for at, layer in enumerate(LAYERS):
        mean = sum(w * log_probs(t, layer) for w, t in zip(WEIGHTS[:, at], TREES, strict=True)).log_softmax(1)
        assert (log_probs(merged, layer).exp() - mean.exp()).abs().max() < 1e-6


def test_a_vector_added_to_all_rows_of_one_gate_changes_nothing():
    shifted = [dict(t) for t in TREES]
    shifted[1]["a.weight"] = shifted[1]["a.weight"] + torch.arange(HIDDEN)
    shifted[1]["a.bias"] = shifted[1]["a.bias"] - 3
    for merge in (
        lambda trees: row_weighted_gates(trees, ROWS, SIZES, OLD, LAYERS),
        lambda trees: pooled_gates(trees, WEIGHTS, OLD, LAYERS),
    ):
        one, two = merge(TREES), merge(shifted)
        assert (log_probs(one, LAYERS[0]).exp() - log_probs(two, LAYERS[0]).exp()).abs().max() < 1e-6
    uncentred = [
        {"a.weight": sum(ROWS[i, 0, :, None] * t["a.weight"] for i, t in enumerate(trees)), "a.bias": torch.zeros(4)}
        for trees in (TREES, shifted)
    ]
    one, two = (log_probs(gates, LAYERS[0]).exp() for gates in uncentred)
    assert (one - two).abs().max() > 0.05, "which rows that are not centred do not"


def test_rows_of_equal_weights_are_the_mean():
    rows = (SIZES / SIZES.sum()).double()[:, None, None].expand(CLIENTS, 2, EXPERTS)
    merged = row_weighted_gates(TREES, rows, SIZES, OLD, LAYERS)
    mean = weighted_mean(TREES, SIZES.tolist(), OLD)
    for name, value in merged.items():
        torch.testing.assert_close(value, mean[name], rtol=1e-6, atol=1e-6)


def statistics(client: int) -> dict[str, Tensor]:
    rng = generator("centroids", client)
    count = torch.randint(0, 5, (2, EXPERTS), generator=rng).float()
    return {"centroid": torch.randn(2, EXPERTS, HIDDEN, generator=rng) * (count > 0).unsqueeze(2), "count": count}


def test_distillation_comes_near_the_mixture_of_the_distributions():
    known = [statistics(i) for i in range(CLIENTS)]
    start = {**OLD, **pooled_gates(TREES, WEIGHTS, OLD, LAYERS)}
    merged = distilled_gates(TREES, ROWS, known, start, LAYERS)
    for at, layer in enumerate(LAYERS):
        points = torch.cat([one["centroid"][at] for one in known]).double()
        count = torch.cat([one["count"][at] for one in known]).double()
        goal = sum(ROWS[i, at] * log_probs(t, layer, points).exp() for i, t in enumerate(TREES))
        goal = goal / goal.sum(1, keepdim=True)

        def gap(gates, layer=layer, points=points, count=count, goal=goal):
            terms = (goal * (goal.log() - log_probs(gates, layer, points))).sum(1)
            return ((count * terms).sum() / count.sum()).item()

        assert gap(merged) < 0.25 * gap(start)


def test_a_distilled_gate_of_clients_that_agree_is_theirs():
    known = [statistics(i) for i in range(CLIENTS)]
    merged = distilled_gates([OLD] * CLIENTS, ROWS, known, OLD, LAYERS)
    for name, value in merged.items():
        torch.testing.assert_close(value, OLD[name], rtol=0, atol=1e-6)


def test_a_withheld_centroid_is_no_hidden_state_of_zeros():
    known = [statistics(i) for i in range(CLIENTS)]
    start = {**OLD, **pooled_gates(TREES, WEIGHTS, OLD, LAYERS)}
    known[0]["centroid"][0, 1] = 0
    known[0]["count"][0, 1] = 0
    without = distilled_gates(TREES, ROWS, known, start, LAYERS)
    known[0]["count"][0, 1] = 50
    for name, value in distilled_gates(TREES, ROWS, known, start, LAYERS).items():
        assert torch.equal(value, without[name])


def test_a_frozen_gate_is_not_distilled():
    frozen = MoELayer("c", ((),) * EXPERTS, (), 1, HIDDEN)
    known = [{name: torch.cat([value, value[:1]]) for name, value in statistics(i).items()} for i in range(CLIENTS)]
    rows = torch.cat([ROWS, ROWS[:, :1]], 1)
    merged = distilled_gates(TREES, rows, known, OLD, [*LAYERS, frozen])
    assert merged.keys() == OLD.keys() - {"other"}


def test_a_gate_that_is_not_linear_cannot_be_distilled():
    layer = MoELayer("moe", ((),) * 2, ("g.one", "g.two"), 1, 2)
    gates = {"g.one": torch.ones(2, 2), "g.two": torch.ones(2, 2)}
    known = {"centroid": torch.ones(1, 2, 2), "count": torch.ones(1, 2)}
    with pytest.raises(PayloadError, match=r"gate of 'moe' is not linear .* gate_mode to pooled"):
        distilled_gates([gates], torch.ones(1, 1, 2).double(), [known], gates, [layer])


def test_a_gate_that_is_not_finite_is_blamed_on_its_client():
    bad = {**TREES[1], "b.bias": torch.tensor([1.0, torch.nan, 0, 0])}
    for merge in (
        lambda trees: row_weighted_gates(trees, ROWS, SIZES, OLD, LAYERS, who=[4, 7, 8]),
        lambda trees: pooled_gates(trees, WEIGHTS, OLD, LAYERS, who=[4, 7, 8]),
    ):
        with pytest.raises(PayloadError, match=r"client 7: 'b.bias' holds NaN"):
            merge([TREES[0], bad, TREES[2]])


def test_rows_of_a_sigmoid_router_are_not_centred():
    layers = [dataclasses.replace(layer, score="sigmoid") for layer in LAYERS]
    merged = row_weighted_gates(TREES, ROWS, SIZES, OLD, layers)
    for at, layer in enumerate(layers):
        rows = torch.stack([tree[layer.gate[0]].double() for tree in TREES])
        by_hand = (ROWS[:, at, :, None] * rows).sum(0)
        torch.testing.assert_close(merged[layer.gate[0]].double(), by_hand, rtol=0, atol=1e-6)
