"""Fusion of several prompts' texts: against torch's attention, loops by hand and the identity; weights of the sum."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedloom.core import ConfigError
from fedloom.core.errors import pick
from fedloom.core.seeds import generator, seeded
from fedloom.models.clip.fusion import (
    WEIGHTS,
    ConstantWeight,
    CrossAttention,
    EntropyWeight,
    MeanOfTexts,
    PerceptronWeight,
    entropy,
)


def units(*shape: int, name: str = "x") -> torch.Tensor:
    return F.normalize(torch.randn(*shape, generator=generator("fusion", name, *shape)), dim=-1)


def attention(width: int = 32, pooled: int = 8, heads: int = 2, **options) -> CrossAttention:
    with seeded("fusion"):
        return CrossAttention(width, pooled, heads, **options)


def by_hand(net: CrossAttention, feats: torch.Tensor, texts: torch.Tensor, scale: float) -> torch.Tensor:
    """One picture, class and head at a time."""
    f, t = net.pooled(feats), net.pooled(texts)
    k = f.shape[1] // net.heads
    rows = []
    for b in range(len(f)):
        for c in range(t.shape[1]):
            query, key, value = net.query(f[b]), net.key(t[:, c]), net.value(t[:, c])
            heads = []
            for h in range(net.heads):
                part = slice(h * k, (h + 1) * k)
                weights = torch.softmax(scale * (key[:, part] @ query[part]), 0)
                heads.append(weights @ value[:, part])
            rows.append(net.out(torch.cat(heads)))
    return torch.stack(rows).view(len(f), t.shape[1], -1)


@pytest.mark.parametrize(("scale", "factor"), [("ten", 10.0), ("sqrt", 4**-0.5)])
def test_it_is_attention_class_by_class(scale, factor):
    net, feats, texts = attention(scale=scale), units(5, 32), units(3, 4, 32)
    torch.testing.assert_close(net(feats, texts)[0], by_hand(net, feats, texts, factor))


def test_with_the_usual_scale_it_is_torchs_attention():
    net, feats, texts = attention(scale="sqrt", pooling="none"), units(5, 32), units(3, 4, 32)
    torchs = nn.MultiheadAttention(32, 2)
    with torch.no_grad():
        torchs.in_proj_weight.copy_(torch.cat([net.query.weight, net.key.weight, net.value.weight]))
        torchs.in_proj_bias.copy_(torch.cat([net.query.bias, net.key.bias, net.value.bias]))
        torchs.out_proj.load_state_dict(net.out.state_dict())
        wanted = torch.stack([torchs(feats, texts[:, c], texts[:, c])[0] for c in range(4)], 1)
    torch.testing.assert_close(net(feats, texts)[0], wanted)


@pytest.mark.parametrize("options", [{}, {"pooling": "learned"}, {"pooling": "none"}, {"residual": True}])
def test_the_short_way_to_the_scores_gives_the_same_values_and_gradients(options):
    net, feats, texts = attention(**options).double(), units(5, 32).double(), units(3, 4, 32).double()
    feats.requires_grad_()
    texts.requires_grad_()
    inputs = [feats, texts, *net.parameters()]
    fused, share = net(feats, texts)
    long = torch.einsum("bd,bcd->bc", net.pooled(feats), fused)
    short, same = net.similarity(feats, texts)
    torch.testing.assert_close(short, long)
    torch.testing.assert_close(share, same)
    target = units(5, 4, name="target").double()
    for a, b in zip(*(torch.autograd.grad((s * target).sum(), inputs) for s in (short, long)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("pooled", [8, 32])
def test_one_shared_prompt_that_equals_the_own_one_gives_the_own_texts(pooled):
    """Invariant 2: e_bc = pi(t_c), so that the shared logits are exp(ls) pi(f) . pi(t)."""
    net, feats, text = attention(pooled=pooled).identity_(), units(5, 32), units(4, 32)
    texts = torch.stack([text, text])
    fused, share = net(feats, texts)
    stride = 32 // pooled
    torch.testing.assert_close(fused, text[:, ::stride].expand(5, -1, -1))
    torch.testing.assert_close(net.similarity(feats, texts)[0], feats[:, ::stride] @ text[:, ::stride].T)
    assert torch.equal(share, torch.tensor([0.5, 0.5]))


def test_attention_sums_to_one_over_the_own_and_the_shared_prompts():
    net, feats, texts = attention(), units(5, 32), units(7, 4, 32)
    weights = net._weights(net.pooled(feats), net.pooled(texts))
    assert weights.shape == (2, 5, 7, 4)
    torch.testing.assert_close(weights.sum(2), torch.ones(2, 5, 4))
    share = net(feats, texts)[1]
    assert share.shape == (7,) and not share.requires_grad
    torch.testing.assert_close(share, weights.mean((0, 1, 3)).detach())


def test_the_order_of_the_prompts_is_irrelevant():
    net, feats, texts = attention(), units(5, 32), units(6, 4, 32)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    (fused, share), (other, moved) = net(feats, texts), net(feats, texts[order])
    torch.testing.assert_close(fused, other)
    torch.testing.assert_close(share[order], moved)


def test_parameters_of_vit_b_16():
    assert sum(p.numel() for p in CrossAttention(512).parameters()) == 66_048
    assert sum(p.numel() for p in CrossAttention(512, pooling="learned").parameters()) == 66_048 + 128 * 512
    assert sum(p.numel() for p in CrossAttention(512, pooling="none").parameters()) == 4 * 512 * 513


def test_a_learned_pooling_starts_as_the_slice_and_learns():
    learned, sliced = attention(pooling="learned"), attention()
    sliced.load_state_dict(learned.state_dict(), strict=False)
    feats, texts = units(5, 32), units(3, 4, 32)
    torch.testing.assert_close(learned(feats, texts)[0], sliced(feats, texts)[0])
    learned.similarity(feats, texts)[0].sum().backward()
    assert (learned.pooled.weight.grad != 0).all()


def test_the_residual_is_of_the_own_text_and_starts_with_length_one():
    net, feats, texts = attention(residual=True), units(5, 32), units(3, 4, 32)
    fused = net(feats, texts)[0]
    torch.testing.assert_close(fused.norm(dim=-1), torch.ones(5, 4), rtol=1e-2, atol=0)
    nn.init.zeros_(net.out.weight), nn.init.zeros_(net.out.bias)
    own = F.layer_norm(texts[0, :, ::4], (8,)) * 8**-0.5
    torch.testing.assert_close(net(feats, texts)[0], own.expand(5, -1, -1))


@pytest.mark.parametrize("make", [attention, lambda: attention(residual=True), lambda: MeanOfTexts(32, 8)])
def test_under_autocast_scores_are_as_exact_as_without(make):
    fusion, feats, texts = make(), units(5, 32), units(3, 4, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = fusion.similarity(feats, texts)[0]
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, fusion.similarity(feats, texts)[0])


def test_without_attention_it_is_the_mean_of_the_texts():
    net, feats, texts = MeanOfTexts(32, 8), units(5, 32), units(3, 4, 32)
    fused, share = net(feats, texts)
    torch.testing.assert_close(fused[2, 1], (texts[0, 1, ::4] + texts[1, 1, ::4] + texts[2, 1, ::4]) / 3)
    torch.testing.assert_close(net.similarity(feats, texts)[0], torch.einsum("bd,bcd->bc", feats[:, ::4], fused))
    assert share.tolist() == pytest.approx([1 / 3] * 3) and not list(net.parameters())


def test_widths_that_do_not_divide_are_refused_in_words():
    with pytest.raises(
        ConfigError, match=r"method\.pooled is 128, which does not divide the joint width 200 .* divisor"
    ):
        CrossAttention(200)
    with pytest.raises(ConfigError, match=r"method\.pooled is 12, .* joint width 32"):
        MeanOfTexts(32, 12)
    with pytest.raises(ConfigError, match=r"method\.heads is 5, which does not divide the width 8; take a divisor"):
        CrossAttention(32, 8, 5)
    with pytest.raises(ConfigError, match="unknown pooling 'slices'"):
        CrossAttention(32, 8, pooling="slices")
    with pytest.raises(ConfigError, match="unknown scale"):
        CrossAttention(32, 8, scale="eleven")
    CrossAttention(200, pooling="none")


def test_entropies_are_those_of_torch_and_keep_finite_gradients():
    logits = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 4.0]], dtype=torch.float64)
    wanted = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy(logits), wanted)
    assert entropy(logits)[0].item() == pytest.approx(math.log(3))
    sure = torch.tensor([[0.0, 500.0]], requires_grad=True)
    entropy(sure).sum().backward()
    assert entropy(sure).item() == 0 and torch.equal(sure.grad, torch.zeros(1, 2))


@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_every_weight_starts_at_one_half_for_every_picture(name):
    weight = pick("mix", name, WEIGHTS)(32)(10 * units(5, 4), 10 * units(5, 4, name="shared"), units(5, 32))
    assert torch.equal(weight, torch.full((5, 1), 0.5))


def test_the_surer_logits_count_more_where_the_slope_is_positive():
    weight = EntropyWeight()
    weight.slope.data.fill_(2.0)
    weight.bias.data.fill_(0.5)
    local, shared = torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0]])
    gap = math.log(3) - entropy(local)[0].item()
    found = weight(local, shared, units(2, 32))
    assert found.flatten().tolist() == pytest.approx([1 / (1 + math.exp(-2 * s * gap - 0.5)) for s in (1, -1)])
    ((found * local + (1 - found) * shared).logsumexp(1).sum()).backward()
    assert weight.slope.grad != 0 and weight.bias.grad != 0


def test_a_constant_of_one_leaves_the_local_logits_alone():
    local, shared = units(5, 4), units(5, 4, name="shared")
    weight = ConstantWeight(1.0)(local, shared, units(5, 32))
    assert torch.equal(weight * local + (1 - weight) * shared, local)


def test_the_perceptron_reads_the_picture():
    weight = PerceptronWeight(32)
    feats = units(5, 32)
    nn.init.ones_(weight.out.weight)
    found = weight(units(5, 4), units(5, 4), feats)
    hidden = F.relu(feats @ weight.hidden.weight.T + weight.hidden.bias)
    torch.testing.assert_close(found[:, 0], torch.sigmoid(hidden.sum(1)))
