"""The fit of a graft: which expert, the least squares, and that the error never grows."""

from __future__ import annotations

import pytest
import torch

from fedloom.core import Batches, Context, Net, Stage
from fedloom.core.moe import moe_layers
from fedloom.models.moe_lm.grafts import blocks_watched, expert_tensors, grafted
from fedloom.models.moe_lm.refit import COSTS, fitted_grafts, normal_equations, refitted
from toys.federation import experiment, expert_spec
from toys.language_models import CLASSES, text_spec, texts

FLEX = "fedloom.methods.flex:flex"


def at_work(top_k: int = 2, seed: int = 0):
    """A context bound to the initial network, data, and per layer (h, y, dispatched) of all tokens."""
    whole = experiment(FLEX, spec=expert_spec(seed=seed, top_k=top_k), seed=seed)
    ctx, data = whole.context(whole.net(), 0, round=0, client=0), whole.plan.train(0, 0, 0, "train")
    ctx.bind(**ctx.init_state())
    x, _ = data.stored(torch.arange(len(data)))
    with ctx.evaluating(), blocks_watched(ctx.net.module) as seen:
        out = ctx.apply(x)
    return ctx, data, [(h, y, d) for (h, y), d in zip(seen, out["dispatched"], strict=True)]


def experts_of(ctx, layer: int):
    params = {name: p.detach() for name, p in ctx.net.module.named_parameters()}
    found = moe_layers(ctx.net.module)[layer]
    return [expert_tensors(found, e, params) for e in range(found.num_experts)]


def error(ctx, layer: int, expert, hidden, output) -> float:
    return float((output - ctx.net.module.grafts[layer].whole(hidden, expert)).square().sum())


def graft_of(tree, layer: int):
    prefix = f"grafts.{layer}."
    return {name.removeprefix(prefix): tensor for name, tensor in tree.items() if name.startswith(prefix)}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reconstruction_error_is_at_most_that_of_the_best_single_expert(seed: int):
    ctx, data, layers = at_work(seed=seed)
    tree = fitted_grafts(ctx, data, COSTS["closest"], 1e-3, -2.0)
    for k, (h, y, _) in enumerate(layers):
        single = [error(ctx, k, expert, h, y) for expert in experts_of(ctx, k)]
        assert error(ctx, k, graft_of(tree, k), h, y) < min(single)


def test_the_most_used_expert_keeps_its_first_layer_and_improves_on_itself():
    ctx, data, layers = at_work()
    tree = fitted_grafts(ctx, data, COSTS["most_used"], 1e-3, -2.0)
    for k, (h, y, dispatched) in enumerate(layers):
        used = experts_of(ctx, k)[int(dispatched.sum(0).argmax())]
        own = graft_of(tree, k)
        assert torch.equal(own["up"], used["up"]) and torch.equal(own["up_bias"], used["up_bias"])
        assert error(ctx, k, own, h, y) < error(ctx, k, used, h, y)
        assert float(own["gate_bias"]) == -2.0 and not own["gate_weight"].any()


def test_the_second_layer_is_the_least_squares_solution():
    ctx, _, layers = at_work()
    h, y, _ = layers[0]
    graft, expert = ctx.net.module.grafts[0], experts_of(ctx, 0)[1]
    with torch.no_grad():
        found = refitted(expert, *normal_equations(graft, expert, h, y), ridge=1e-3)
        read = torch.cat([graft.inner(h, expert), torch.ones(len(h), 1)], 1).double()
    start = torch.cat([expert["down"], expert["down_bias"][:, None]], 1).double()
    held = (1e-3 * read.square().sum(0).mean()).sqrt() * torch.eye(read.shape[1], dtype=torch.float64)
    stacked = torch.cat([read, held]), torch.cat([y.double(), held @ start.T])
    want = torch.linalg.lstsq(*stacked).solution.T
    torch.testing.assert_close(
        torch.cat([found["down"], found["down_bias"][:, None]], 1).double(), want, atol=1e-5, rtol=1e-4
    )


def test_a_large_ridge_leaves_the_expert_as_it_was():
    ctx, data, _ = at_work()
    tree = fitted_grafts(ctx, data, COSTS["most_used"], 1e9, -2.0)
    own = graft_of(tree, 0)
    near = [float((own["down"] - expert["down"]).abs().max()) for expert in experts_of(ctx, 0)]
    assert min(near) < 1e-6


def test_tokens_that_no_unit_reads_give_an_unchanged_expert():
    ctx, _, _ = at_work()
    expert = experts_of(ctx, 0)[0]
    zero = torch.zeros(9, 9, dtype=torch.float64), torch.zeros(9, 8, dtype=torch.float64)
    assert torch.equal(refitted(expert, *zero, ridge=1e-3)["down"], expert["down"])


def test_the_graft_of_one_expert_per_token_is_that_expert_where_all_tokens_go_to_it():
    ctx, data, _ = at_work(top_k=1)
    state = ctx.init_state()
    for name in ("backbone.blocks.0.router.weight", "backbone.blocks.1.router.weight"):
        state["params"][name] = torch.zeros_like(state["params"][name])  # a tie, which one expert wins for every token
    ctx.bind(**state)
    x, _ = data.stored(torch.arange(len(data)))
    with ctx.evaluating():
        winners = ctx.apply(x)["dispatched"].sum(1)
    assert ((winners == len(data)).sum(1) == 1).all()
    tree = fitted_grafts(ctx, data, COSTS["closest"], 1e-3, -2.0)
    for k in (0, 1):
        for name, tensor in experts_of(ctx, k)[int(winners[k].argmax())].items():
            torch.testing.assert_close(graft_of(tree, k)[name], tensor, atol=1e-5, rtol=1e-5)


def test_the_result_has_the_networks_names_and_shapes_and_the_network_stays():
    ctx, data, _ = at_work()
    before = {name: p.clone() for name, p in ctx.net.module.named_parameters()}
    tree = fitted_grafts(ctx, data, COSTS["closest"], 1e-3, -1.0)
    fresh = Net(lambda: grafted(expert_spec().classifier(), "flex")).fresh()["params"]
    want = {name: tensor.shape for name, tensor in fresh.items() if name.startswith("grafts.")}
    assert {name: tensor.shape for name, tensor in tree.items()} == want
    assert all(torch.equal(before[name], p) for name, p in ctx.net.module.named_parameters())
    assert data.visits.count == 0 and data.visits.passes == 2 * len(data)


@pytest.mark.parametrize("architecture", ["switch_encoder", "mixtral"])
def test_padding_changes_nothing_in_the_fit_of_a_language_model(architecture: str):
    pytest.importorskip("transformers")
    net, classes = Net(lambda: grafted(text_spec(architecture).classifier(), "flex")), tuple(range(CLASSES))
    ctx, rows = Context(net, Stage(0, 1, 1, classes, classes), CLASSES), torch.arange(4)
    trees = []
    for width in (12, 17):
        x = texts((12, 7, 1, 9), width)
        data = Batches(x, rows % CLASSES, rows, key=(0,), prepare=lambda x, rng: x)
        trees.append(fitted_grafts(ctx, data, COSTS["closest"], 1e-2, -2.0))
    assert len(trees[0]) == len(net.module.moe_layers) * 4
    for name, tensor in trees[0].items():
        torch.testing.assert_close(tensor, trees[1][name], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("architecture", ["switch_encoder", "mixtral"])
@pytest.mark.parametrize("costs", COSTS)
def test_experts_in_half_precision_get_grafts_of_their_type(architecture: str, costs: str):
    pytest.importorskip("transformers")
    net = Net(lambda: grafted(text_spec(architecture, dtype="bfloat16").classifier(), "flex"))
    classes, rows = tuple(range(CLASSES)), torch.arange(4)
    ctx = Context(net, Stage(0, 1, 1, classes, classes), CLASSES)
    data = Batches(texts((12, 7, 1, 9)), rows % CLASSES, rows, key=(0,), prepare=lambda x, rng: x)
    tree = fitted_grafts(ctx, data, COSTS[costs], 1e-2, -2.0)
    own = {name: p for name, p in net.module.named_parameters() if name in tree}
    assert len(own) == len(tree) and all(t.dtype == own[n].dtype == torch.bfloat16 for n, t in tree.items())
