"""The towers run block by block are the towers themselves."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fedloom.models.clip.towers import Towers, routed_by
from fedloom.models.clip.words import fixed, learnable
from toys.clip import LENGTH, WORDS, toy_clip, toy_model


class Doubling(torch.nn.Module):
    """An adapter that adds what it is routed by, and tells it."""

    def forward(self, x, token):
        return token[:, None].expand_as(x), token


def test_features_are_those_of_the_model():
    model, towers = toy_model(3).eval(), toy_clip(seed=3).towers
    phrases = fixed(WORDS, "a photo of a {}.", LENGTH)
    part = phrases.of(torch.arange(len(WORDS)))
    found, _ = towers.text(towers.embedded(part), part.eot)
    torch.testing.assert_close(found, F.normalize(model.encode_text(phrases.ids), dim=-1))
    x = torch.randn(5, 2)
    whole = towers.image_end(towers.image_through(towers.image_start(x), [None, None])[0])
    torch.testing.assert_close(whole, F.normalize(model.visual(x), dim=-1))
    ahead = towers.image_start(x, 1)
    torch.testing.assert_close(towers.image_end(towers.image_through(ahead, [None, None], start=1)[0]), whole)


def test_context_takes_the_place_of_the_slots_alone():
    towers = toy_clip().towers
    phrases = learnable(WORDS[:3], 2, LENGTH).of(torch.arange(3))
    common, own = torch.randn(2, towers.text_width), torch.randn(3, 2, towers.text_width)
    plain = towers.embedded(phrases)
    for context in (common, own):
        found = towers.embedded(phrases, context)
        assert torch.equal(found[:, 1:3], context.expand(3, 2, -1))
        assert torch.equal(found[:, 3:], plain[:, 3:]) and torch.equal(found[:, 0], plain[:, 0])


def test_adapters_read_the_stream_after_attention_and_are_added_to_it():
    towers, layer = toy_clip().towers, Doubling()
    block, x = towers.image_blocks[0], torch.randn(4, 3, towers.image_width)
    found, told = towers.image_through(x, [layer, None])
    middle = x + block.attention(block.ln_1(x))
    assert torch.equal(told[0], middle[:, 0])
    after = middle + block.mlp(block.ln_2(middle)) + middle[:, :1]
    torch.testing.assert_close(found, towers.image_blocks[1](after))


def test_any_position_or_a_mean_of_them_routes():
    x = torch.randn(2, 4, 3)
    assert torch.equal(routed_by(x, 0), x[:, 0])
    assert torch.equal(routed_by(x, torch.tensor([3, 1])), torch.stack([x[0, 3], x[1, 1]]))
    torch.testing.assert_close(routed_by(x, torch.full((2, 4), 0.25)), x.mean(1))


def test_nothing_of_a_frozen_clip_trains_and_checkpointing_changes_no_gradient():
    towers = Towers(toy_model())
    assert not any(p.requires_grad for p in towers.parameters())
    grads = []
    for towers.checkpointing in (False, True):
        x = torch.ones(2, 3, towers.image_width, requires_grad=True)
        towers.image_end(towers.image_through(x, [None, None])[0])[:, 0].sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
