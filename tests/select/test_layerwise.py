"""Masks that know one layer at a time: densities and what is left of each kind of layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedloom.core import ConfigError
from fedloom.core.seeds import generator
from fedloom.select.layerwise import layer_masks
from toys.pruned import network


def masks_of(module: nn.Module, ratio: float) -> dict[str, torch.Tensor]:
    return layer_masks(module, dict(module.named_parameters()), ratio)


@pytest.mark.parametrize(("ratio", "left"), [(0.25, 0.5625), (0.5, 0.25), (0.75, 0.0625)])
def test_convolutions_keep_the_square_of_what_is_left(ratio: float, left: float) -> None:
    module = network("resnet8", torch.float32)
    masks = masks_of(module, ratio)
    density = {name: float(mask.float().mean()) for name, mask in masks.items()}
    body = "backbone.blocks"
    assert "backbone.stem.weight" not in masks and "backbone.norm.weight" not in masks
    assert density[f"{body}.0.conv1.weight"] == density[f"{body}.1.shortcut.0.weight"] == 1 - ratio
    twice = [f"{body}.0.conv2", f"{body}.1.conv1", f"{body}.1.conv2", f"{body}.2.conv2", f"{body}.2.shortcut.0"]
    assert {density[f"{name}.weight"] for name in twice} == {left}
    assert density[f"{body}.1.norm1.weight"] == density["head.weight"] == 1 - ratio
    assert not any(name.endswith("bias") for name in masks)


def test_the_masks_of_adjacent_layers_do_not_match() -> None:
    masks = masks_of(network("resnet8", torch.float32), 0.5)
    outputs = masks["backbone.blocks.1.conv1.weight"].flatten(1).any(1)
    inputs = masks["backbone.blocks.1.conv2.weight"].transpose(0, 1).flatten(1).any(1)
    norm = masks["backbone.blocks.1.norm1.weight"]
    assert not torch.equal(outputs, inputs) and not torch.equal(outputs, norm)


def test_the_smallest_slices_go_inputs_before_outputs() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3), nn.Conv2d(4, 2, 1), nn.Conv2d(2, 2, 3), nn.Linear(4, 1))
    weights = {f"{k}.weight": torch.ones_like(layer.weight) for k, layer in enumerate(net)}
    weights["3.weight"] = torch.tensor([[5.0, -9.0], [-6.0, 1.0]]).view(2, 2, 1, 1).expand(2, 2, 3, 3)
    weights["4.weight"] = torch.tensor([[2.0, -1.0, 3.0, 0.5]])
    masks = layer_masks(net, weights, 0.5)
    assert list(masks) == ["1.weight", "2.weight", "3.weight", "4.weight"]
    # inputs: 11 and 10, so the second goes; of what is left, outputs 5 and 6: the first goes
    assert masks["3.weight"][:, :, 0, 0].tolist() == [[False, False], [True, False]]
    assert masks["4.weight"].tolist() == [[True, False, True, False]]
    assert masks["1.weight"].flatten(1).any(1).tolist() == [False, True]  # ties: the first goes


def test_numbers_removed_are_rounded_and_nothing_is_named_for_nothing() -> None:
    net = nn.Sequential(nn.BatchNorm1d(5), nn.BatchNorm1d(5))
    weights = {f"{k}.weight": torch.rand(5, generator=generator("norms")) - 0.5 for k in range(2)}
    for ratio, removed in ((0.2, 1), (0.4, 2), (0.45, 2), (0.6, 3), (0.9, 4)):
        (mask,) = layer_masks(net, weights, ratio).values()
        least = set(weights["1.weight"].abs().sort().indices[:removed].tolist())
        assert set((~mask).nonzero().flatten().tolist()) == least
    assert layer_masks(net, weights, 0.0) == {}
    for ratio in (1.0, -0.1):
        with pytest.raises(ConfigError, match=r"removed shares in \[0, 1\)"):
            layer_masks(net, weights, ratio)
