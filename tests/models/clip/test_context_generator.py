"""The generator of context vectors, and the mixture of contexts that is evaluated."""

import pytest
import torch
from torch.nn import functional as F

from fedloom.core import ConfigError
from fedloom.models.clip.context_generator import ContextGenerator, Generator
from toys.clip import toy_clip

X = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))


def network(layer=1, **sizes):
    return Generator(3, layer)(toy_clip(**sizes))


def mixture(adapters=3):
    net = network().rebuild(adapters)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in (net.contexts, net.gate["out"].weight):
            parameter.copy_(torch.randn(parameter.shape, generator=rng))
        net.gate["out"].bias.zero_()
        hidden = net.gate["hidden"](net.parts(X)[1]).relu()
        net.gate["out"].bias.copy_(-net.gate["out"](hidden).mean(0))
    return net.eval()


@torch.no_grad()
@pytest.mark.parametrize("layer", [1, 2])
def test_h_is_the_mean_token_behind_the_block_and_features_are_clips(layer):
    net = network(layer).eval()
    tokens = net.towers.image_start(X, layer)
    assert torch.allclose(net(X)["early"], tokens.mean(1), atol=1e-6)
    assert torch.allclose(net(X)["feats"], F.normalize(net.towers.model.visual(X), dim=-1), atol=1e-5)
    assert torch.equal(net.image(X)[0], net(X)["feats"])


@torch.no_grad()
def test_texts_have_the_mean_context_of_the_batch():
    net = network().eval()
    first, _, _, second = net.generator
    early = net(X)["early"]
    contexts = (early @ first.weight.T + first.bias).relu() @ second.weight.T + second.bias
    expected, _ = net.texts(contexts.mean(0).view(3, -1))
    assert torch.allclose(net(X)["texts"], expected, atol=1e-5)
    assert torch.allclose(net(X)["logits"], 10 * net(X)["feats"] @ expected.T, atol=1e-4)


def test_the_published_sizes_give_4985856_parameters():
    net = Generator()(toy_clip(width=768, text_width=512, layers=1))
    assert sum(p.numel() for p in net.parameters() if p.requires_grad) == 4_985_856


def test_the_generator_trains_and_nothing_else():
    net = network()
    F.cross_entropy(net(X)["logits"], torch.tensor([0, 1, 2, 3, 4])).backward()
    moving = {name for name, p in net.named_parameters() if p.grad is not None and p.grad.any()}
    assert moving == {f"generator.{k}.{part}" for k in (0, 3) for part in ("weight", "bias")}


@torch.no_grad()
def test_a_picture_is_scored_with_the_context_that_the_gate_chooses():
    net = mixture()
    out = net(X)
    assert len(set(out["chosen"].tolist())) > 1
    for k in range(len(X)):
        texts, _ = net.texts(net.contexts)
        expected = 10 * out["feats"][k] @ texts[out["chosen"][k]].T
        assert torch.allclose(out["logits"][k], expected, atol=1e-4)
        assert torch.allclose(net(X[k : k + 1])["logits"][0], out["logits"][k], atol=1e-4)


@torch.no_grad()
def test_logits_do_not_depend_on_the_order_or_number_of_classes():
    net = mixture()
    whole = net(X)["logits"]
    net.show((4, 1, 3))
    assert torch.allclose(net(X)["logits"][:, [1, 3, 4]], whole[:, [1, 3, 4]], atol=1e-4)
    assert torch.isneginf(net(X)["logits"][:, [0, 2, 5]]).all()


@torch.no_grad()
def test_texts_of_all_contexts_are_computed_once():
    net, calls = mixture(), []
    inner = net.towers.text
    net.towers.text = lambda *a, **k: calls.append(1) or inner(*a, **k)
    for _ in range(3):
        net(X)
    assert len(calls) == 3


@torch.no_grad()
def test_measures_are_of_each_pictures_own_texts():
    net, y = mixture(), torch.tensor([0, 1, 2, 3, 4])
    out = net(X)
    cosines = out["logits"] / 10
    own = cosines[torch.arange(5), y]
    total, count = net.measures(out, y)["matched_cosine"]
    assert count == 5 and total == pytest.approx(own.sum().item(), abs=1e-4)
    margin = own - (cosines.sum(1) - own) / 5
    assert net.measures(out, y)["alignment"] == pytest.approx((margin.sum().item(), 5), abs=1e-4)


def test_the_mixture_shares_the_frozen_towers():
    net = network()
    assert net.rebuild(2).towers is net.towers


@pytest.mark.parametrize("layer", [0, 3])
def test_a_block_that_the_tower_lacks_is_refused(layer):
    with pytest.raises(ConfigError, match=rf"extract_layer must be in 1 .. 2.*got {layer}"):
        ContextGenerator(toy_clip(), 3, layer)
