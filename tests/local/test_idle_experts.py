"""Experts without tokens stay as they are, bit for bit, whatever the optimiser."""

from __future__ import annotations

import fnmatch
from dataclasses import replace

import pytest
import torch

from fedloom.core import Batches, Context, Stage
from fedloom.core.context import Net
from fedloom.core.moe import expert_parts, moe_layers
from fedloom.core.seeds import generator
from fedloom.local import SGD, AdamW, LocalSGD, Phase
from fedloom.local.carries.routing_average import RoutingAverage
from fedloom.local.terms import CrossEntropy
from fedloom.local.terms.expert_balance import ExpertBalance
from fedloom.local.terms.routing_consistency import RoutingConsistency
from fedloom.local.terms.routing_stability import RoutingStability
from fedloom.models.clip.adapters import Adapters, adapter_layers
from fedloom.models.clip.network import ClipNetwork
from fedloom.models.clip.words import learnable
from toys.clip import LENGTH, toy_clip
from toys.federation import expert_spec

OPTIMIZERS = [SGD(lr=0.1, weight_decay=0.1), SGD(lr=0.1, momentum=0.9, weight_decay=0.1), AdamW(weight_decay=0.1)]


def context() -> Context:
    net = Net(expert_spec().classifier)
    return Context(net=net, stage=Stage(0, 1, 1, tuple(range(6)), tuple(range(6))), num_classes=6)


def data(count: int = 24) -> Batches:
    x, y = torch.randn(count, 2, generator=generator("idle")), torch.arange(count) % 6
    return Batches(x, y, torch.arange(count), key=("idle",), prepare=lambda x, rng: x)


def moved(end, down, ctx) -> torch.Tensor:
    """Whether any tensor of an expert has changed, bool [layers, experts]."""
    layers = moe_layers(ctx.net.module)
    return torch.tensor(
        [
            [any(not torch.equal(p.of(end.params), p.of(down["params"])) for p in expert) for expert in layer.experts]
            for layer in layers
        ]
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_only_experts_that_saw_a_token_move(optimizer):
    ctx = context()
    down = ctx.init_state()
    few = data(3)
    with ctx.evaluating():
        ctx.bind(down["params"], down["buffers"])
        used = ctx.apply(next(iter(few.epoch(shuffle=False))).x)["dispatched"].any(1)
    assert not used.all() and used.any()
    end = LocalSGD(optimizer, batch_size=8)(down, few, ctx)
    assert torch.equal(moved(end, down, ctx), used)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_an_expert_decays_once_it_has_been_used(optimizer):
    ctx, whole = context(), data()
    with_decay = LocalSGD(optimizer, batch_size=4)(ctx.init_state(), whole, ctx)
    without = LocalSGD(replace(optimizer, weight_decay=0.0), batch_size=4)(ctx.init_state(), whole, ctx)
    name = moe_layers(ctx.net.module)[0].expert_names[0]
    assert moved(with_decay, ctx.init_state(), ctx).any()
    assert not torch.equal(with_decay.params[name], without.params[name])


def test_a_later_phase_does_not_undo_what_an_earlier_one_did():
    ctx = context()
    down = ctx.init_state()
    phases = (Phase(epochs=1), Phase(("*experts*", "head.*"), epochs=1))
    one, two = (LocalSGD(SGD(lr=0.1, weight_decay=0.01), phases=p)(down, data(), ctx) for p in (phases[:1], phases))
    assert bool((moved(two, down, ctx) | ~moved(one, down, ctx)).all())


def test_an_auxiliary_loss_of_the_network_is_added():
    ctx = context()
    down = ctx.init_state()

    def added(module, args, output):
        return {**output, "aux_loss": 3 * module.head.weight.square().sum()}

    plain = LocalSGD(SGD(lr=0.01))(down, data(), ctx)
    ctx.net.module.register_forward_hook(added)
    pushed = LocalSGD(SGD(lr=0.01))(down, data(), ctx)
    assert pushed.metrics["loss"] > plain.metrics["loss"]
    assert pushed.params["head.weight"].norm() < plain.params["head.weight"].norm()


def clip_context(**options) -> Context:
    def network() -> ClipNetwork:
        clip = toy_clip()
        image, text = adapter_layers(clip.towers, Adapters(**{"dropout": 0.0, **options}), 0)
        phrases = learnable(clip.words, 2, LENGTH)
        context = torch.full((2, clip.towers.text_width), 0.1)
        return ClipNetwork(clip, phrases, context=context, image_layers=image, text_layers=text)

    return Context(net=Net(network), stage=Stage(0, 1, 1, tuple(range(6)), tuple(range(6))), num_classes=6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_adapters_that_no_sample_was_routed_to_do_not_move(optimizer):
    ctx = clip_context(noise=False)
    down, few = ctx.init_state(), data(3)
    with ctx.evaluating():
        ctx.bind(down["params"], down["buffers"])
        out = ctx.apply(next(iter(few.epoch(shuffle=False))).x)
    used = torch.cat([out[f"{tower}_gates"].amax(1) > 0 for tower in ("image", "text")]).flatten()
    assert not used.all() and used.any()
    end = LocalSGD(optimizer, batch_size=8)(down, few, ctx)
    parts = expert_parts(ctx.net.module)
    moved = [any(not torch.equal(p.of(end.params), p.of(down["params"])) for p in expert) for expert in parts]
    assert moved == used.tolist()


def test_adapters_and_routers_stay_bit_for_bit_in_a_phase_of_prompts_and_prompts_in_one_of_adapters():
    ctx = clip_context(dropout=0.4)
    down, routing = ctx.init_state(), {"image": torch.full((2, 8), 0.125), "text": torch.full((2, 8), 0.125)}
    terms = (
        CrossEntropy(),
        ExpertBalance("cv", 1.0),
        RoutingConsistency("contrastive", 1.0),
        RoutingStability("kl", 1.0),
    )
    loop = LocalSGD(AdamW(weight_decay=0.1), batch_size=8, terms=terms, carries={"routing": RoutingAverage()})
    ref = {"routing_target": routing, "routing_average": routing}
    for moving in ("*_adapters.*", "context"):
        end = replace(loop, phases=(Phase((moving,)),))(down, data(), ctx, ref=ref)
        changed = {name for name, tensor in end.params.items() if not torch.equal(tensor, down["params"][name])}
        assert changed and changed == set(fnmatch.filter(changed, moving))
        assert not torch.equal(end.carry["routing"]["text"], routing["text"])
