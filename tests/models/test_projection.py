"""The projection head: its formula, its size, its initial values, and what it takes from the backbone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedloom.core import ConfigError
from fedloom.models import NetworkSpec
from fedloom.models.projection import Projected, projected_classifier


class Wide(nn.Module):
    """A backbone without parameters of its own."""

    num_features = 512

    def forward(self, x):
        return x.flatten(1)


def spec(name: str = "digits_cnn", seed: int = 3) -> NetworkSpec:
    return NetworkSpec(name, 6, (1, 8, 8) if name == "digits_cnn" else (3, 8, 8), seed=seed)


def images(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def test_features_are_two_linear_layers_with_one_relu_between():
    net = projected_classifier(spec(), 24)
    first, _, second = net.backbone.projection
    hidden = net.backbone.backbone(images()) @ first.weight.T + first.bias
    assert (hidden < 0).any() and (hidden > 0).any(), "both sides of the ReLU are met"
    z = hidden.clamp(min=0) @ second.weight.T + second.bias
    out = net(images())
    torch.testing.assert_close(out["feats"], z)
    torch.testing.assert_close(out["logits"], z @ net.head.weight.T + net.head.bias)
    assert out["feats"].shape == (5, 24) and out["logits"].shape == (5, 6) and (z < 0).any(), "no ReLU at the end"


def test_a_single_image_keeps_its_batch_dimension():
    net = projected_classifier(spec(), 24)
    assert net(images(1))["feats"].shape == (1, 24) and net(images(1))["logits"].shape == (1, 6)


def test_on_512_features_it_has_the_published_size():
    count = sum(p.numel() for p in Projected(Wide()).parameters())
    assert count == 512**2 + 512 + 512 * 256 + 256 == 393_984


def test_the_head_has_the_class_rows_and_reads_the_projection():
    net = projected_classifier(spec(), 24)
    params = dict(net.named_parameters())
    assert net.class_rows == {"head.weight": 0, "head.bias": 0}
    assert params["head.weight"].shape == (6, 24) and net.num_features == 24


def test_initial_values_repeat_depend_on_the_seed_and_leave_the_backbone_as_it_is():
    one, two, other = (projected_classifier(spec(seed=s), 24).state_dict() for s in (3, 3, 4))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["backbone.projection.0.weight"], other["backbone.projection.0.weight"])
    plain = spec().classifier().backbone.state_dict()
    assert plain and all(torch.equal(one[f"backbone.backbone.{name}"], value) for name, value in plain.items())
    narrow = projected_classifier(spec(), 12).state_dict()
    assert torch.equal(narrow["backbone.projection.0.weight"], one["backbone.projection.0.weight"])


def test_layout_comes_from_the_backbone():
    assert projected_classifier(spec("small_cnn")).memory_format == "channels_last"
    assert projected_classifier(spec()).memory_format == "contiguous"
    assert Projected(Wide()).memory_format == "contiguous"


def test_checkpointing_recomputes_the_backbone_and_changes_no_gradient():
    def gradients(enable: bool) -> tuple[list[torch.Tensor], int]:
        net, calls = projected_classifier(spec("resnet8"), 8), []
        net.set_grad_checkpointing(enable)
        net.backbone.backbone.blocks[0].conv1.register_forward_hook(lambda *_: calls.append(1))
        net(images(4).expand(4, 3, 8, 8))["logits"].sum().backward()
        return [p.grad for p in net.parameters()], len(calls)

    (plain, once), (again, twice) = gradients(False), gradients(True)
    assert (once, twice) == (1, 2)
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b)


def test_a_backbone_without_the_switch_is_named():
    with pytest.raises(ConfigError, match="Wide has no set_grad_checkpointing"):
        Projected(Wide()).set_grad_checkpointing()


def test_a_width_below_one_is_refused():
    with pytest.raises(ConfigError, match="width must be at least 1, got 0"):
        Projected(Wide(), 0)
