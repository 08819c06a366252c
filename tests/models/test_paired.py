"""A private and a shared extractor: the formula, the sizes, the inputs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedloom.core import ConfigError
from fedloom.models import NetworkSpec
from fedloom.models.paired import Paired, paired, small_extractor
from toys.federation import BlobSpec

SPEC = NetworkSpec("mlp", 3, (4,), seed=1, options=(("hidden", (6,)),))


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_features_are_both_extractors_weighed_by_the_gate_and_the_weights_sum_to_one():
    net, x = paired(SPEC, 5, 7), drawn(8, 4)
    out = net(x)
    own = net.private(x)
    common = net.shared(x) @ net.projection.weight.T + net.projection.bias
    hidden = torch.cat([own, common], 1) @ net.gate[0].weight.T + net.gate[0].bias
    a = (hidden.clamp(min=0) @ net.gate[2].weight.T + net.gate[2].bias).softmax(1)
    torch.testing.assert_close(out["gates"], a)
    torch.testing.assert_close(out["gates"].sum(1), torch.ones(8))
    torch.testing.assert_close(out["feats"], a[:, :1] * own + a[:, 1:] * common)
    torch.testing.assert_close(out["logits"], out["feats"] @ net.head.weight.T + net.head.bias)


def test_equal_widths_need_no_projection():
    assert isinstance(paired(SPEC, 6, 7).projection, nn.Identity)
    assert isinstance(paired(SPEC, 5, 7).projection, nn.Linear)


def test_every_part_has_its_own_stream_and_the_private_parts_start_as_the_default_classifier():
    one, two, plain = paired(SPEC, 5, 7), paired(SPEC, 6, 9), SPEC.classifier().state_dict()
    for name, tensor in plain.items():
        mine = name.replace("backbone.", "private.")
        assert torch.equal(one.state_dict()[mine], tensor) and torch.equal(two.state_dict()[mine], tensor)
    again = paired(SPEC, 5, 7).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in one.state_dict().items())
    other = paired(replace(SPEC, seed=2), 5, 7)
    assert not torch.equal(other.shared.layer.weight, one.shared.layer.weight)


def test_the_shared_extractor_has_the_same_shapes_whatever_the_private_one():
    wide = paired(replace(SPEC, options=(("hidden", (50, 9)),)), 5, 7)
    sizes = [[p.shape for p in net.shared.parameters()] for net in (paired(SPEC, 5, 7), wide)]
    assert sizes[0] == sizes[1] == [(5, 4), (5,)]
    assert isinstance(wide.projection, nn.Linear) and wide.head.in_features == 9


def test_images_of_any_size_are_read_by_two_convolutions():
    for shape in [(1, 8, 8), (3, 33, 20), (1, 1, 1)]:
        net = small_extractor(SimpleNamespace(input_shape=shape), 5)
        assert net(drawn(2, *shape)).shape == (2, 5)
        assert sum(p.numel() for p in net.parameters()) == 9 * shape[0] * 16 + 16 + 9 * 16 * 32 + 32 + 32 * 5 + 5


def test_text_is_read_by_the_mean_of_its_tokens_whatever_the_padding():
    net = small_extractor(SimpleNamespace(input_shape=(6,), vocab_size=10), 5)
    ids = torch.tensor([[1, 2, 3, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0, 0, 0]]).bool()
    found = net({"input_ids": ids, "attention_mask": mask})
    mean = net.tokens.weight[1:4].mean(0)
    torch.testing.assert_close(found[0], (net.layer.weight @ mean + net.layer.bias).clamp(min=0))
    other = net({"input_ids": ids.masked_fill(~mask, 7), "attention_mask": mask})
    assert torch.equal(found, other)
    assert torch.equal(net({"input_ids": ids[:, :3], "attention_mask": mask[:, :3]}), found)


def test_multiple_choice_and_unknown_inputs_are_refused_in_words():
    with pytest.raises(ConfigError, match=r"input_shape \(2, 4, 9\).*no multiple choice"):
        small_extractor(SimpleNamespace(input_shape=(2, 4, 9), vocab_size=10), 5)
    with pytest.raises(ConfigError, match="input_shape None"):
        small_extractor(SimpleNamespace(), 5)


def test_layout_and_checkpointing_come_from_the_private_backbone():
    spec = NetworkSpec("small_cnn", 3, (3, 8, 8), options=(("width", 8),))
    net = paired(spec, 5, 7)
    assert net.memory_format == "channels_last"
    net.set_grad_checkpointing(True)
    assert "forward" in net.private.convs[0].__dict__
    toy = Paired(BlobSpec().backbone(), nn.Linear(2, 8), 8, 6, 4, 0)
    assert toy.memory_format == "contiguous"
    with pytest.raises(ConfigError, match="Features has no set_grad_checkpointing"):
        toy.set_grad_checkpointing()
