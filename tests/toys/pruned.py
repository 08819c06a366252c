"""Prunable networks away from their initial values, masks of channels, and inputs that fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from fedloom.core.seeds import generator, seeded
from fedloom.models import Classifier, NetworkSpec
from fedloom.models.channels import Channels
from fedloom.models.compact import prunable
from fedloom.models.foreign import Foreign

from .federation import BlobSpec

SHAPES = {
    "toy": (2,),
    "mlp": (2, 3, 3),
    "digits_cnn": (1, 8, 8),
    "small_cnn": (3, 8, 8),
    "resnet8": (3, 8, 8),
    "resnet18": (3, 8, 8),
    "basic": (3, 32, 32),
    "bottleneck": (3, 32, 32),
}
OPTIONS: dict[str, tuple[tuple[str, Any], ...]] = {"mlp": (("hidden", (9, 7)),)}
RESNETS = {"basic": BasicBlock, "bottleneck": Bottleneck}  # of torchvision, with one block in each stage
SMALL = ("toy", "mlp", "digits_cnn", "small_cnn", "resnet8")
CLASSES = 4


def network(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A classifier of 4 classes whose norms have drawn values and statistics, so that every channel matters."""
    module = prunable(_classifier(name), SHAPES[name]).to(dtype)
    rng = generator(0, "norms")
    with torch.no_grad():
        for norm in (m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)):
            norm.weight.copy_(torch.rand(norm.num_features, generator=rng) + 0.5)
            norm.running_var.copy_(torch.rand(norm.num_features, generator=rng) + 0.5)
            norm.bias.copy_(0.5 * torch.randn(norm.num_features, generator=rng))
            norm.running_mean.copy_(0.5 * torch.randn(norm.num_features, generator=rng))
    return module


def _classifier(name: str) -> nn.Module:
    if name == "toy":
        return BlobSpec(CLASSES).classifier()
    if name not in RESNETS:
        return NetworkSpec(name, CLASSES, SHAPES[name], options=OPTIONS.get(name, ())).classifier()
    with seeded(0, name):
        body = ResNet(RESNETS[name], [1, 1, 1, 1])
        width, body.fc = body.fc.in_features, nn.Identity()
        return Classifier(Foreign(body, width), CLASSES)


def inputs(name: str, batch: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Examples and labels."""
    x = torch.randn(batch, *SHAPES[name], generator=generator(seed, "inputs"), dtype=torch.float64)
    return x.to(dtype), torch.arange(batch) % CLASSES


def some(channels: Channels, share: float = 0.5, seed: int = 0) -> Tensor:
    """A drawn mask that keeps about this share of the channels, and at least one of every group."""
    rng = generator(seed, "mask")
    mask = torch.rand(channels.total, generator=rng) < share
    for part in channels.split(mask):
        part[int(torch.randint(len(part), (), generator=rng))] = True
    return mask


def compact(module: Any, mask: Tensor) -> Any:
    """The compact network with the module's values."""
    kept = module.channels.kept(mask)
    small = module.rebuild(module.channels.widths(kept))
    small.load_state_dict(module.channels.gather(module.state_dict(), kept))
    return small.train(module.training)
