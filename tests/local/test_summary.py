"""The mean feature that a client tells, and its noise."""

from __future__ import annotations

import pytest
import torch

from fedloom.core import ConfigError
from fedloom.core.seeds import generator
from fedloom.local import SGD, LocalSGD
from fedloom.local.features import features
from fedloom.local.summary import feature_summary, privatised
from fedloom.models.clip.network import ClipNetwork
from fedloom.models.clip.words import fixed
from local.blobs import context, data
from local.test_features import Plain
from toys.clip import toy_clip


def bound(spec=None, **given):
    ctx = context(spec, **given)
    state = ctx.init_state()
    ctx.bind(state["params"], state["buffers"])
    return ctx


def clip_network():
    clip = toy_clip(joint=8)
    return ClipNetwork(clip, fixed(clip.words, "a photo of a {}.", clip.towers.length))


def test_one_batch_of_everything_is_the_mean_feature_and_two_batches_count_alike():
    ctx, examples = bound(), data(20)
    all_features, _ = features(ctx, examples)
    torch.testing.assert_close(feature_summary(ctx, examples, width=8, batch_size=20), all_features.mean(0))
    order = torch.randperm(20, generator=generator(ctx.seed_for("summary")))
    halves = [all_features[order[:15]].mean(0), all_features[order[15:]].mean(0)]
    torch.testing.assert_close(
        feature_summary(ctx, examples, width=8, batches=2, batch_size=15), (halves[0] + halves[1]) / 2
    )


def test_only_the_batches_asked_for_are_read_and_they_are_drawn_anew_every_round():
    examples = data(40)
    first = feature_summary(bound(round=0), examples, width=8, batches=2, batch_size=5)
    assert (examples.visits.count, examples.visits.passes) == (0, 10)
    assert torch.equal(feature_summary(bound(round=0), examples, width=8, batches=2, batch_size=5), first)
    assert not torch.equal(feature_summary(bound(round=1), examples, width=8, batches=2, batch_size=5), first)


def test_the_summary_of_a_clip_has_a_norm_of_at_most_1():
    ctx = bound(clip_network)
    found = feature_summary(ctx, data(20), width=8, batches=2, batch_size=7)
    assert found.shape == (8,) and 0 < found.norm() <= 1 + 1e-6 and not found.requires_grad


def test_the_pass_leaves_the_network_and_training_as_they_were():
    loop, ctx = LocalSGD(SGD(lr=0.1), batch_size=8), bound()
    down, read = ctx.init_state(), data(20)
    without = loop(down, data(20), ctx)
    ctx.bind(down["params"], down["buffers"])
    ctx.net.train(True)
    feature_summary(ctx, read, width=8)
    assert ctx.net.module.training
    after = loop(down, read, ctx)
    assert all(torch.equal(after.params[name], tensor) for name, tensor in without.params.items())
    assert all(torch.equal(after.buffers[name], tensor) for name, tensor in without.buffers.items())


def test_a_client_without_examples_gives_zeros():
    assert torch.equal(feature_summary(bound(), data(0), width=8), torch.zeros(8))


def test_networks_without_fitting_features_are_refused_in_words():
    with pytest.raises(ConfigError, match="the network gives only logits"):
        feature_summary(bound(Plain), data(), width=8)
    with pytest.raises(ConfigError, match="is to have 5 entries and the features have 8; make them equal"):
        feature_summary(bound(), data(), width=5)


def test_without_noise_a_short_summary_is_as_it_was_and_a_long_one_is_cut():
    short, long = torch.tensor([0.6, 0.8]), torch.tensor([3.0, 4.0])
    rng = generator("noise")
    assert torch.equal(privatised(short, sigma=0.0, rng=rng), short)
    torch.testing.assert_close(privatised(long, sigma=0.0, rng=rng), torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(privatised(long, sigma=0.0, clip=2.0, rng=rng), torch.tensor([1.2, 1.6]))


@pytest.mark.parametrize(("noise", "variance", "fourth"), [("gaussian", 1.0, 3.0), ("laplace", 2.0, 6.0)])
def test_noise_has_the_scale_clip_times_sigma(noise, variance, fourth):
    zeros = torch.zeros(100_000)
    found = privatised(zeros, sigma=0.5, clip=4.0, noise=noise, rng=generator("scale", noise)) / 2
    assert found.dtype == torch.float32 and found.mean().abs() < 0.02
    assert found.square().mean().item() == pytest.approx(variance, rel=0.03)
    assert (found**4).mean().item() / variance**2 == pytest.approx(fourth, rel=0.1)  # the tails tell them apart


def test_sigma_10_drowns_512_entries_of_norm_1():
    summary = torch.nn.functional.normalize(torch.ones(512), dim=0)
    gaps = [(privatised(summary, sigma=10.0, rng=generator("sigma", i)) - summary).norm().item() for i in range(20)]
    assert sum(gaps) / 20 == pytest.approx(226, rel=0.02)


def test_noise_is_drawn_from_the_generator_alone():
    summary = torch.tensor([0.6, 0.8])
    first = privatised(summary, sigma=1.0, rng=generator("a"))
    torch.rand(3)
    assert torch.equal(privatised(summary, sigma=1.0, rng=generator("a")), first)
    assert not torch.equal(privatised(summary, sigma=1.0, rng=generator("b")), first)


def test_bad_options_are_refused_in_words():
    summary, rng = torch.ones(2), generator("bad")
    with pytest.raises(ConfigError, match="sigma must be a finite number of at least 0, got -1"):
        privatised(summary, sigma=-1.0, rng=rng)
    with pytest.raises(ConfigError, match="clip must be a finite number above 0, got 0"):
        privatised(summary, sigma=1.0, clip=0.0, rng=rng)
    with pytest.raises(ConfigError, match="unknown noise 'gauss'"):
        privatised(summary, sigma=1.0, noise="gauss", rng=rng)
