"""Scores of classes by their names, and when texts and pictures are computed."""

from __future__ import annotations

import torch

from fedloom.models.clip.network import ClipNetwork
from fedloom.models.clip.words import fixed, learnable
from toys.clip import LENGTH, toy_clip


def prompted(clip=None, context=4) -> ClipNetwork:
    clip = clip or toy_clip()
    start = torch.randn(context, clip.towers.text_width, generator=torch.Generator().manual_seed(0))
    return ClipNetwork(clip, learnable(clip.words, context, LENGTH), context=start)


def test_logits_are_scaled_cosines_of_shown_classes_and_others_are_minus_infinity():
    clip = toy_clip()
    net = ClipNetwork(clip, fixed(clip.words, "a photo of a {}.", LENGTH)).eval()
    x = torch.randn(3, 2)
    whole = net(x)
    torch.testing.assert_close(whole["logits"], 10 * whole["feats"] @ whole["texts"].T)
    net.show([4, 1])
    some = net(x)
    assert some["shown"].tolist() == [1, 4]
    torch.testing.assert_close(some["logits"][:, [1, 4]], whole["logits"][:, [1, 4]])
    assert torch.equal(some["logits"][:, [0, 2, 3, 5]], torch.full((3, 4), -torch.inf))


def test_a_class_more_changes_nothing_for_the_others():
    net = prompted().eval()
    net.show([0, 1])
    two = net.texts(net.context)[0]
    net.show([0, 1, 3])
    torch.testing.assert_close(net.texts(net.context)[0][:2], two)


def test_texts_are_computed_once_until_something_changes(monkeypatch):
    net, calls = prompted().eval(), []
    inner = net.towers.text
    monkeypatch.setattr(net.towers, "text", lambda *a, **k: calls.append(1) or inner(*a, **k))
    with torch.no_grad():
        first = net(torch.randn(2, 2))["texts"]
        net(torch.randn(2, 2))
        assert len(calls) == 1
        net.context.add_(1.0)
        assert not torch.equal(net(torch.randn(2, 2))["texts"], first) and len(calls) == 2
        net.show([0])
        net(torch.randn(2, 2))
    assert len(calls) == 3
    net.train()
    for _ in range(2):  # the context trains: every step needs its own graph
        net(torch.randn(2, 2))["logits"][:, 0].sum().backward()
    assert len(calls) == 5 and net.context.grad.abs().sum() > 0
    net.context.requires_grad_(False)
    net(torch.randn(2, 2))
    net(torch.randn(2, 2))
    assert len(calls) == 5  # as in evaluation: the context has not moved since


def test_pictures_come_normalised_as_the_model_wants_them():
    clip = toy_clip()
    raw = torch.rand(4, 3, 1, 2)
    mean, std, own_mean, own_std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7), (0.4, 0.4, 0.4), (0.2, 0.3, 0.1)
    net = ClipNetwork(clip, fixed(clip.words, "{}", LENGTH))
    net.normalize = (mean, std, own_mean, own_std)
    columns = [torch.tensor(v).view(3, 1, 1) for v in net.normalize]
    torch.testing.assert_close(
        net._normalized((raw - columns[0]) / columns[1]), (raw - columns[2]) / columns[3], atol=1e-5, rtol=1e-5
    )


def test_augmented_pictures_are_not_kept_in_training():
    clip = toy_clip()
    for repeats, kept in ((True, 3), (False, 0)):
        net = prompted(clip)
        net.repeats = repeats
        net.train()(torch.randn(3, 2))
        assert len(net._prefix.kept) == kept
        net.eval()(torch.randn(3, 2))
        assert len(net._prefix.kept) == kept + 3


def test_several_prompts_are_encoded_together_as_one_by_one():
    net, prompts = prompted().eval(), torch.randn(3, 4, toy_clip().towers.text_width)
    net.show([1, 2, 5])
    found = net.texts_in(prompts)
    assert found.shape == (3, 3, net.towers.width) and found is net.texts_in(prompts)
    for one, prompt in zip(found, prompts, strict=True):
        torch.testing.assert_close(one, net.texts(prompt)[0].detach())
