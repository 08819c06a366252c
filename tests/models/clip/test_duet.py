"""How local and shared prompts are fused, and when shared ones are encoded."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fedloom.models.clip.adapters import Adapters
from fedloom.models.clip.duet import DuetParts
from fedloom.models.clip.words import encoded
from toys.clip import toy_clip

PARTS = DuetParts(pooled=16, heads=2)
X = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))


def network(**changes):
    net = dataclasses.replace(PARTS, **changes)(toy_clip())
    shared = torch.randn(3, len(net.context), 8, generator=torch.Generator().manual_seed(1))
    net.receive(shared)
    return net


def test_logits_weigh_both_kinds_per_picture():
    net = network().eval()
    with torch.no_grad():
        net.fusion["mix"].slope.fill_(0.7)
        out = net(X)
        local = net.similarity(out["feats"], out["texts"])
        texts = torch.cat([out["texts"][None], net.texts_in(net.shared_prompts)])
        fused, mass = net.fusion["attention"](out["feats"], texts)
        shared = 10 * torch.einsum("bd,bcd->bc", out["feats"][:, ::8], fused)
        weight = out["local_weight"][:, None]
    torch.testing.assert_close(out["logits"], weight * local + (1 - weight) * shared)
    torch.testing.assert_close(out["attention"], mass)
    assert mass.sum() == pytest.approx(1) and len(mass) == 4 and 0 < weight.min() < weight.max() < 1


def test_the_weight_starts_at_one_half_and_one_gives_the_local_logits():
    net = network().eval()
    out = net(X)
    assert torch.equal(out["local_weight"], torch.full((5,), 0.5))
    with torch.no_grad():
        net.fusion["mix"].bias.fill_(100.0)
    torch.testing.assert_close(net(X)["logits"], net.similarity(out["feats"], out["texts"]))


def test_shared_logits_may_count_whole():
    half, whole = network(weight="constant").eval(), network(weight="sum").eval()
    out, local = half(X), half.similarity(half(X)["feats"], half(X)["texts"])
    torch.testing.assert_close(whole(X)["logits"], 2 * out["logits"] - 0.5 * local)


@pytest.mark.parametrize("served", ["local", "shared"])
def test_other_logits_can_be_served_but_training_is_fused(served):
    net, plain = network(served=served), network()
    assert torch.equal(net.train()(X)["logits"], plain.train()(X)["logits"])
    assert not torch.equal(net.eval()(X)["logits"], plain.eval()(X)["logits"])
    if served == "local":
        torch.testing.assert_close(net(X)["logits"], net.similarity(net(X)["feats"], net(X)["texts"]))


def test_shared_prompts_are_encoded_once_a_round_while_adapters_train_and_anew_for_evaluation(monkeypatch):
    net = network(adapters=Adapters(experts=2, bottleneck=4, shared_width=4, dropout=0.5)).train()
    sentences, plain = [], net.towers.text
    monkeypatch.setattr(net.towers, "text", lambda x, *a: sentences.append(len(x)) or plain(x, *a))
    net.eval().encode()
    net.train()
    assert sentences == [3 * 6]
    fixed = net._encoded.clone()
    for _ in range(3):
        net(X)["logits"].square().sum().backward()
        with torch.no_grad():
            for p in net.text_adapters.parameters():
                if p.grad is not None:
                    p -= p.grad
    assert sentences == [18, 6, 6, 6] and torch.equal(net._encoded, fixed)
    net.eval()(X)
    assert sentences[4:] == [6, 18]
    assert not torch.equal(net.texts_in(net.shared_prompts), fixed)


def test_without_received_prompts_logits_are_the_local_ones():
    net = PARTS(toy_clip()).eval()
    out = net(X)
    assert "attention" not in out
    torch.testing.assert_close(out["logits"], net.similarity(out["feats"], out["texts"]))


def test_the_local_prompt_starts_as_the_layout_says():
    clip = toy_clip()
    words = clip.towers.model.token_embedding.weight[encoded("a photo of a")]
    assert torch.equal(PARTS(clip).context, words)
    copies = dataclasses.replace(PARTS, layout="copies")(toy_clip(3))
    assert copies.context.shape == (16, 8) and float(copies.context.detach().std()) == pytest.approx(0.02, rel=0.3)
    assert dataclasses.replace(PARTS, prompts=False)(clip).context is None
