"""Routing statistics against counts by hand, and what must not show in them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.core import Batches, ConfigError, Context
from fedloom.core.moe import MoELayer, Slice, inputs_recorded, moe_layers
from fedloom.core.seeds import generator
from fedloom.local.routing_statistics import (
    MARGINS,
    SHARES,
    RoutingRecord,
    RoutingStatistics,
    measured_routing,
    real_tokens,
    routing_numbers,
)
from fedloom.local.sgd import LocalSGD
from local.blobs import context, data
from toys.token_mixture import TokenSpec

PROBS = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5], [0.1, 0.8, 0.1]])


def outputs(probs: Tensor, top_k: int = 1, mask: Any = None, dispatched: Tensor | None = None) -> dict[str, Tensor]:
    """What a network of one layer returns for tokens with these probabilities [T, E]."""
    selected = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, probs.topk(top_k, 1).indices, True)
    return {
        "routing": probs.log()[None],
        "selected": selected[None],
        "dispatched": (selected if dispatched is None else dispatched)[None],
        "token_mask": torch.ones(len(probs), dtype=torch.bool) if mask is None else torch.tensor(mask),
        "expert_inputs": torch.arange(2.0 * len(probs)).view(1, -1, 2),
    }


def layer(top_k: int = 1, experts: int = 3, hidden: int = 2) -> MoELayer:
    return MoELayer("moe", tuple((Slice(f"{e}"),) for e in range(experts)), ("gate",), top_k, hidden)


def closed(out: dict[str, Tensor], examples: int = 3, top_k: int = 1, **options: Any) -> dict[str, Tensor]:
    statistics = RoutingStatistics(**options)
    return statistics.closed(statistics.sums(out, examples, [layer(top_k)]), context(seed=1, client=2))


def test_every_statistic_of_three_tokens():
    found = closed(outputs(PROBS))
    torch.testing.assert_close(found["mean"], PROBS.mean(0, keepdim=True))
    torch.testing.assert_close(found["margin"], torch.tensor([[0.3, 0.7, 0.2]]))
    assert found["count"].tolist() == [[1, 1, 1]] and found["tokens"].tolist() == [3]
    assert found["centroid"].tolist() == [[[0, 1], [4, 5], [2, 3]]] and found["hidden"].tolist() == [[2, 3]]
    assert {value.dtype for value in found.values()} == {torch.float32}


def test_the_boundary_margin_of_the_specification():
    probs = torch.tensor([[0.6, 0.3, 0.1]])
    torch.testing.assert_close(closed(outputs(probs), 1)["margin"], torch.tensor([[0.3, 0.0, 0.0]]))
    torch.testing.assert_close(closed(outputs(probs, 2), 1, 2)["margin"], torch.tensor([[0.5, 0.2, 0.0]]))


def test_with_as_many_experts_as_are_chosen_the_next_probability_is_zero():
    torch.testing.assert_close(closed(outputs(PROBS[:1], 3), 1, 3)["margin"], PROBS[:1])


def test_margins_by_name():
    tokens = real_tokens(outputs(PROBS[:1], 2), 1)
    found = {name: margin(tokens, [2])[0, 0].expand(3).tolist() for name, margin in MARGINS.items()}
    spread = 1 + (0.6 * math.log(0.6) + 0.3 * math.log(0.3) + 0.1 * math.log(0.1)) / math.log(3)
    assert found["top1_top2"] == pytest.approx([0.3] * 3, abs=1e-6)
    assert found["entropy"] == pytest.approx([spread] * 3, abs=1e-6)
    assert found["logit_margin"] == pytest.approx([math.log(6), math.log(3), 0], abs=1e-6)


def test_shares_by_name():
    # two examples of two places, the second with padding
    probs, mask = torch.cat([PROBS, PROBS[:1]]), [True, True, True, False]
    found = {name: closed(outputs(probs, 2, mask), 2, 2, share=share)["mean"][0] for name, share in SHARES.items()}
    torch.testing.assert_close(found["soft"], PROBS.mean(0))
    torch.testing.assert_close(found["hard"], torch.tensor([2, 3, 1]) / 6)
    renormalised = torch.tensor([[0.6 / 0.9, 0.3 / 0.9, 0], [0, 0.3 / 0.8, 0.5 / 0.8], [0.1 / 0.9, 0.8 / 0.9, 0]])
    torch.testing.assert_close(found["topk_renorm"], renormalised.mean(0))
    torch.testing.assert_close(found["per_sample_mean"], PROBS[:2].mean(0) / 2 + PROBS[2] / 2)


def test_tokens_that_a_capacity_drops_are_in_the_margin_and_in_no_count():
    dispatched = torch.tensor([[True, False, False], [False, False, False], [False, True, False]])
    found = closed(outputs(PROBS, dispatched=dispatched))
    assert found["count"].tolist() == [[1, 1, 0]] and found["centroid"][0, 2].tolist() == [0, 0]
    assert found["margin"][0, 2].item() == pytest.approx(0.2)


def test_nothing_is_found_on_no_token():
    found = closed(outputs(PROBS, mask=[False] * 3))
    assert all(not value.any() for value in found.values())


def test_centroids_of_few_tokens_are_withheld():
    probs = torch.cat([PROBS, PROBS[:1]])
    found = closed(outputs(probs), 4, min_count=2)
    assert found["centroid"][0].any(1).tolist() == [True, False, False] and found["count"].tolist() == [[2, 1, 1]]


def test_clipping_bounds_what_one_token_adds():
    found = closed(outputs(PROBS), clip=0.5)
    assert found["centroid"].norm(dim=2).max() <= 0.5 + 1e-6
    torch.testing.assert_close(found["centroid"][0, 1], torch.tensor([4.0, 5.0]) / (2 * math.sqrt(41)))


def test_noise_has_the_stated_deviation_and_another_draw_per_client():
    many = outputs(PROBS[:1].expand(4, 3))
    options = {"clip": 1.0, "noise": 2.0}
    statistics = RoutingStatistics(**options)
    sums = statistics.sums(many, 4, [layer()])
    wide = {**sums, "centroid": torch.zeros(1, 3, 4000), "hidden": torch.zeros(1, 4000)}
    one, two = (statistics.closed(wide, context(client=k))["centroid"] for k in (0, 1))
    assert one[0, 0].std().item() == pytest.approx(2 * 2 / 4, rel=0.1) and not torch.equal(one, two)
    assert not one[0, 1:].any(), "an expert without tokens has nothing to hide"
    with pytest.raises(ConfigError, match=r"mu_noise 0.5 .* set mu_clip above 0"):
        RoutingStatistics(noise=0.5)


def test_a_projection_common_to_all_clients_keeps_distances_on_average():
    statistics = RoutingStatistics(dims=400)
    vectors = torch.randn(1, 3, 40, generator=generator("v"), dtype=torch.float64)
    sums = {**statistics.sums(outputs(PROBS), 3, [layer()]), "centroid": vectors, "hidden": vectors[:, 0]}
    one, two = (statistics.closed(sums, context(client=k, round=k))["centroid"] for k in (0, 1))
    assert torch.equal(one, two) and one.shape == (1, 3, 400)
    before, after = torch.pdist(vectors[0]), torch.pdist(one[0].double())
    torch.testing.assert_close(after, before, rtol=0.25, atol=0)


def bound(**given: Any) -> Context:
    ctx = context(TokenSpec().classifier, **given)
    ctx.bind(**ctx.init_state())
    return ctx


def measured(ctx: Context, examples: Batches, size: int = 8, limit: int = 100, **options: Any) -> dict[str, Tensor]:
    statistics = RoutingStatistics(**options)
    return statistics.closed(measured_routing(ctx, examples, statistics, batch_size=size, max_batches=limit), ctx)


def test_neither_the_order_nor_the_cut_of_batches_shows():
    ctx, examples = bound(), data(30)
    first = measured(ctx, examples)
    mixed = examples.subset(torch.randperm(30, generator=generator("mixed")))
    for other in (measured(ctx, examples, size=30), measured(ctx, mixed, size=7)):
        for name, value in first.items():
            torch.testing.assert_close(other[name], value, rtol=1e-6, atol=1e-7)
    assert first["tokens"].item() == sum(int((b.x > 0).sum()) + len(b.y) for b in examples.epoch())


def test_longer_padding_does_not_show():
    out = outputs(PROBS)
    longer = outputs(torch.cat([PROBS, torch.full((3, 3), 1 / 3)]), mask=[True] * 3 + [False] * 3)
    for name, value in closed(out, 1).items():
        assert torch.equal(closed(longer, 1)[name], value)


def test_of_many_batches_some_are_drawn_anew_each_round_and_training_sees_no_trace():
    examples = data(60)
    one, again, later = (measured(bound(round=r), examples, limit=2) for r in (0, 0, 1))
    assert torch.equal(one["mean"], again["mean"]) and not torch.equal(one["mean"], later["mean"])
    ctx = bound()
    before = {name: value.clone() for name, value in ctx.net.take()[1].items()}
    ctx.net.train(True)
    measured(ctx, examples)
    assert ctx.net.module.training and not ctx.net.module.records_inputs
    assert all(torch.equal(value, before[name]) for name, value in ctx.net.take()[1].items())


def test_the_received_gate_is_compared_token_by_token():
    ctx, examples = bound(), data(10)
    state = ctx.init_state()
    other = {name: value + 0.5 for name, value in state["params"].items()}
    ctx.bind(other, state["buffers"])
    statistics = RoutingStatistics()
    received = ctx.teacher(state["params"], state["buffers"], "received")
    sums = measured_routing(ctx, examples, statistics, batch_size=10, max_batches=1, received=received)
    with ctx.evaluating():
        x = next(iter(examples.epoch(batch_size=10, shuffle=False))).x
        out, theirs = ctx.apply(x), received(x)
    real = out["token_mask"]
    expected = (out["routing"].exp() * theirs["routing"].exp())[:, real].mean(1)
    torch.testing.assert_close(statistics.closed(sums, ctx)["product"], expected, rtol=1e-5, atol=1e-6)


def test_the_record_of_training_is_of_the_last_epoch_before_each_step():
    statistics, examples = RoutingStatistics(), data(20)
    for epochs in (1, 2):
        ctx = context(TokenSpec().classifier)
        loop = LocalSGD(epochs=epochs, batch_size=20, carries={"record": RoutingRecord(statistics)})
        with inputs_recorded(ctx.net.module):
            end = loop(ctx.init_state(), examples, ctx, ref={"moe_layers": moe_layers(ctx.net.module)})
        found = statistics.closed(end.carry["record"], ctx)
        start = context(TokenSpec().classifier)
        if epochs == 2:
            start_state = LocalSGD(epochs=1, batch_size=20)(start.init_state(), examples, start)
            start.bind(start_state.params, start_state.buffers)
        else:
            start.bind(**start.init_state())
        start.net.train(True)
        with torch.no_grad(), inputs_recorded(start.net.module):
            (batch,) = examples.epoch(epochs - 1, 20)
            expected = statistics.closed(statistics.sums(start.apply(batch.x), 20, moe_layers(start.net.module)), start)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_without_centroids_no_input_is_recorded():
    found = measured(bound(), data(10), centroids=False)
    assert found.keys() == {"mean", "margin", "count", "tokens"}


def test_a_client_without_examples_has_zeros():
    found = measured(bound(), data(0))
    assert found["centroid"].shape == (2, 4, 8) and all(not value.any() for value in found.values())


def test_metrics_of_a_known_routing():
    probs = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])
    numbers = routing_numbers(RoutingStatistics().sums(outputs(probs), 2, [layer()]))
    assert numbers["gate_entropy"] == pytest.approx(1.5 * math.log(2))
    assert numbers["load_cv"] == pytest.approx(math.sqrt(2))  # loads 2, 0, 0
