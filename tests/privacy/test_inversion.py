"""Inversion attacks on networks small enough to know the answer, and the numbers that tell how alike pictures are."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch.nn import functional as F

from fedloom.core import ConfigError
from fedloom.privacy.inversion import (
    Inversion,
    gradient,
    likeness,
    mean_feature,
    psnr,
    ssim,
    total_variation,
)
from toys.clip import toy_clip


def smooth(count: int, seed: int) -> torch.Tensor:
    """Smooth grey pictures of 16x16."""
    rng = torch.Generator().manual_seed(seed)
    return F.interpolate(torch.rand(count, 1, 4, 4, generator=rng), size=16, mode="bilinear")


def features(x: torch.Tensor) -> torch.Tensor:
    """As many features as pixels, of length 1."""
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) / 16
    return F.normalize(torch.tanh(2 * (x.flatten(1) - 0.3) @ weight), dim=-1)


def test_total_variation_by_hand():
    x = torch.tensor([[[[0.0, 1.0], [0.5, 0.25]]]])
    assert float(total_variation(x)) == pytest.approx((0.5 + 0.75) / 2 + (1.0 + 0.25) / 2)
    assert float(total_variation(torch.full((2, 3, 4, 4), 0.7))) == 0
    assert float(total_variation(x[..., :1, :])) == 1, "a single row has no vertical neighbours"


def test_psnr_of_a_constant_error_and_of_none():
    x = torch.full((2, 3, 4, 4), 0.5)
    found = x + torch.tensor([0.1, 0.0]).view(2, 1, 1, 1)
    assert psnr(found, x).tolist() == pytest.approx([20.0, 100.0], abs=1e-5)


def test_ssim_is_that_of_wang_with_a_gaussian_window_of_eleven_pixels():
    rng = torch.Generator().manual_seed(3)
    x, y = torch.rand(2, 1, 16, 16, generator=rng).double(), smooth(2, 5).double()
    line = torch.exp(-(torch.arange(-5, 6).double() ** 2) / (2 * 1.5**2))
    window = (line[:, None] * line / line.sum() ** 2)[None, None]

    def mean(values: torch.Tensor) -> torch.Tensor:
        return F.conv2d(values, window)

    x, y = (F.pad(z, (5, 5, 5, 5), mode="reflect") for z in (x, y))
    a, b = mean(x), mean(y)
    spread_x, spread_y, both = mean(x * x) - a * a, mean(y * y) - b * b, mean(x * y) - a * b
    top = (2 * a * b + 0.01**2) * (2 * both + 0.03**2)
    want = (top / ((a * a + b * b + 0.01**2) * (spread_x + spread_y + 0.03**2))).mean((1, 2, 3))
    x, y = x[..., 5:-5, 5:-5], y[..., 5:-5, 5:-5]
    torch.testing.assert_close(ssim(x, y), want, atol=1e-6, rtol=0)
    assert ssim(y, y).tolist() == pytest.approx([1.0, 1.0])


def test_reconstructions_are_matched_one_to_one_by_the_largest_sum_of_psnr():
    pictures = smooth(4, 7)
    order = [2, 0, 3, 1]
    found = torch.empty_like(pictures)
    found[order] = pictures + 0.01
    result = likeness(found, pictures)
    assert result.order.tolist() == order
    assert result.psnr.tolist() == pytest.approx([40.0] * 4, abs=1e-3)
    assert all(value > 0.99 for value in result.ssim.tolist())
    same = likeness(pictures[:1].expand(2, -1, -1, -1), pictures[:2])
    assert sorted(same.order.tolist()) == [0, 1], "none is used twice"


def test_one_picture_is_read_off_its_feature_and_the_mean_of_several_hides_them():
    attack = Inversion(steps=200)
    alone, several = smooth(1, 1), smooth(4, 1)
    seen = mean_feature(features)
    single = likeness(attack(seen, seen(alone), alone.shape), alone)
    mixed = likeness(attack(seen, seen(several), several.shape), several)
    unrelated = likeness(smooth(1, 2), alone)
    assert float(single.ssim) > 0.6 > float(unrelated.ssim) + 0.3
    assert float(single.psnr) > float(mixed.psnr.mean()) + 5 and float(single.ssim) > float(mixed.ssim.mean()) + 0.3


def test_an_update_gives_the_picture_away_that_made_it():
    weight, bias = torch.zeros(3, 256, requires_grad=True), torch.zeros(3, requires_grad=True)
    picture, label = smooth(1, 4), torch.tensor([2])
    seen = gradient(lambda x: F.cross_entropy(x.flatten(1) @ weight.T + bias, label), (weight, bias))
    sent = -0.5 * seen(picture)  # parameters after a step of SGD minus those before
    found = likeness(Inversion(steps=200, tv=0.0)(seen, -sent, picture.shape), picture)
    assert float(found.psnr) > 40 and float(found.ssim) > 0.99


def test_the_gradient_that_is_compared_is_that_of_autograd():
    weight = torch.randn(2, 4, requires_grad=True)
    x, y = torch.randn(3, 4), torch.tensor([0, 1, 1])
    found = gradient(lambda z: F.cross_entropy(z @ weight.T, y), (weight,))(x)
    want = (F.softmax(x @ weight.T, 1) - F.one_hot(y, 2)).T @ x / 3
    torch.testing.assert_close(found, want.flatten().detach())


def test_updates_of_a_text_prompt_can_be_differentiated_twice_through_attention():
    from fedloom.models.clip.network import ClipNetwork
    from fedloom.models.clip.words import learnable

    clip = toy_clip()
    context = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    network = ClipNetwork(clip, learnable(clip.words, 2, 24), context=context).eval()

    def loss(x: torch.Tensor) -> torch.Tensor:
        towers = clip.towers
        feats = towers.image_end(towers.image_start(x.flatten(1)[:, :2], len(towers.image_blocks)))
        return F.cross_entropy(network.similarity(feats, network.texts(network.context)[0]), torch.tensor([1]))

    seen = gradient(loss, [network.context])
    picture = torch.tensor([[[[0.9, 0.2]]]])
    observed = seen(picture).detach()
    found = Inversion(steps=100, lr=0.02)(seen, observed, picture.shape)
    before = F.cosine_similarity(seen(torch.full_like(picture, 0.5)).flatten(), observed.flatten(), dim=0)
    after = F.cosine_similarity(seen(found).flatten(), observed.flatten(), dim=0)
    assert float(after.detach()) > 0.999 > float(before.detach())


def test_the_attack_depends_on_its_seed_alone_and_keeps_the_best_of_its_steps():
    picture = smooth(1, 1)
    seen = mean_feature(features)
    runs = [Inversion(steps=5)(seen, seen(picture), picture.shape, seed) for seed in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    wild = Inversion(steps=5, lr=1e3, tv=0.0)
    start = (0.5 + 0.1 * torch.randn(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))).clamp(0, 1)

    def gap(x: torch.Tensor) -> float:
        return 1 - float(F.cosine_similarity(seen(x), seen(picture), dim=0))

    assert gap(wild(seen, seen(picture), picture.shape)) <= gap(start), "no step may be worse than none"
    assert all(bool(((x >= 0) & (x <= 1)).all()) for x in runs)


def test_what_cannot_be_attacked_is_refused_in_words(monkeypatch: pytest.MonkeyPatch):
    seen, x = mean_feature(features), smooth(1, 1)
    with pytest.raises(ConfigError, match="the attacker sees 3 numbers, and the network makes 256"):
        Inversion(steps=1)(seen, torch.ones(3), x.shape)
    for nothing in (torch.zeros(256), torch.full((256,), math.nan)):
        with pytest.raises(ConfigError, match="has no direction"):
            Inversion(steps=1)(seen, nothing, x.shape)
    for name, value, low in (("steps", 0, "1 or more"), ("lr", 0.0, "above 0"), ("tv", -1.0, "0 or more")):
        with pytest.raises(ConfigError, match=f"{name} of the inversion is {value}; it must be {low}"):
            Inversion(**{name: value})
    with pytest.raises(ConfigError, match=r"reconstructions of shape \[2, 1, 16, 16\] cannot be matched"):
        likeness(smooth(2, 0), x)
    with pytest.raises(ConfigError, match="SSIM needs pictures of at least 11x11, got 8x8"):
        ssim(x[..., :8, :8], x[..., :8, :8])
    monkeypatch.setitem(sys.modules, "torchmetrics.functional", None)
    with pytest.raises(ConfigError, match=r"the extra 'vision'; install it with: pip install 'fedloom\[vision\]'"):
        ssim(x, x)
