"""A network that mixes its own prompt's texts with those of received prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedloom.core import ConfigError
from fedloom.models.clip.prompted import Mixed, Prompted
from toys.clip import toy_clip

X = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
MIXED = Mixed(Prompted(4), pooled=4, heads=2)
PROMPTS = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))


def network(mixed=MIXED):
    return mixed(toy_clip(joint=8))


@torch.no_grad()
def test_without_received_prompts_the_logits_are_those_of_the_prompt_alone():
    net, plain = network().eval(), Prompted(4)(toy_clip(joint=8)).eval()
    assert torch.equal(net(X)["logits"], plain(X)["logits"]) and "attention" not in net(X)
    net.receive(PROMPTS)
    assert not torch.allclose(net(X)["logits"], plain(X)["logits"])
    net.receive(None)
    assert torch.equal(net(X)["logits"], plain(X)["logits"])


@torch.no_grad()
def test_the_two_parts_are_added_and_only_the_own_one_is_weighed():
    nets = {share: network(replace(MIXED, share=share)).eval() for share in (0.0, 0.5, 1.0)}
    local = nets[0.0](X)["logits"]
    for net in nets.values():
        net.receive(PROMPTS)
    zero, half, one = (net(X)["logits"] for net in nets.values())
    out, texts = nets[0.0](X), torch.stack([nets[0.5].texts(v)[0] for v in PROMPTS])
    fused, share = nets[0.0].fusion(out["feats"], torch.cat([out["texts"][None], texts]))
    gated = 10 * torch.einsum("bd,bcd->bc", out["feats"][:, ::2], fused)
    torch.testing.assert_close(zero, gated)
    torch.testing.assert_close(half, 0.5 * local + gated)
    torch.testing.assert_close(one, local + gated)
    torch.testing.assert_close(out["attention"], share)


@torch.no_grad()
def test_the_order_of_received_prompts_is_irrelevant():
    net = network().eval()
    net.receive(PROMPTS)
    first = net(X)
    net.receive(PROMPTS[[2, 0, 1]])
    again = net(X)
    torch.testing.assert_close(again["logits"], first["logits"])
    torch.testing.assert_close(again["attention"], first["attention"][[0, 3, 1, 2]])


def test_no_gradient_reaches_received_prompts():
    net, prompts = network().train(), PROMPTS.clone().requires_grad_()
    net.receive(prompts)
    net(X)["logits"].square().sum().backward()
    assert prompts.grad is None
    trained = {name for name, p in net.named_parameters() if p.grad is not None and p.grad.any()}
    assert trained == {"context", *(f"fusion.{part}" for part, _ in net.fusion.named_parameters())}


def test_received_prompts_are_encoded_once_while_the_own_prompt_trains(monkeypatch):
    net, sentences = network().train(), []
    plain = net.towers.text
    monkeypatch.setattr(net.towers, "text", lambda x, *a: sentences.append(len(x)) or plain(x, *a))
    net.receive(PROMPTS)
    for _ in range(4):
        net(X)["logits"].square().sum().backward()
        with torch.no_grad():
            net.context -= 0.1 * net.context.grad
    classes = len(net.shown)
    assert sentences == [classes, 3 * classes, classes, classes, classes]
    net.show([0, 2])
    net(X)
    assert sentences[5:] == [2, 3 * 2], "other classes have other texts"


@torch.no_grad()
def test_classes_that_are_not_shown_take_no_part():
    net = network().eval()
    net.receive(PROMPTS)
    whole = net(X)["logits"]
    net.show([1, 4])
    some = net(X)["logits"]
    torch.testing.assert_close(some[:, [1, 4]], whole[:, [1, 4]])
    assert torch.isneginf(some[:, [0, 2, 3, 5]]).all()


def test_a_narrow_clip_is_not_pooled_and_a_wide_one_by_a_divisor_alone():
    assert Mixed(Prompted(4))(toy_clip(joint=8)).fusion.out.weight.shape == (8, 8)
    assert Mixed(Prompted(4))(toy_clip(joint=256)).fusion.out.weight.shape == (128, 128)
    with pytest.raises(ConfigError, match=r"method\.pooled is 128, .* joint width 200"):
        Mixed(Prompted(4))(toy_clip(joint=200))
