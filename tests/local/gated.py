"""Small prunable networks in float64, away from their initial values, and data with two domains for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fedloom.core import Batches, Context
from fedloom.core.seeds import generator, seeded
from fedloom.models.compact import prunable
from fedloom.models.heads import Classifier
from fedloom.models.registry import backbone
from local.blobs import context
from toys.federation import BlobSpec

SHAPES = {"toy": (2,), "mlp": (2,), "small_cnn": (3, 8, 8), "resnet8": (3, 8, 8)}
OPTIONS: dict[str, dict[str, Any]] = {"mlp": {"hidden": [7, 5]}, "small_cnn": {"width": 4}}


def network(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Norms and biases have values of both signs, as after some training."""
    with seeded(name):
        if name == "toy":
            net = BlobSpec(6).classifier()
        else:
            net = Classifier(backbone(name, input_shape=SHAPES[name], **OPTIONS.get(name, {})), 6)
        for part in net.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                nn.init.uniform_(part.weight, 0.5, 1.5)
                nn.init.normal_(part.bias, std=0.3)
                part.running_mean.normal_(std=0.3)
                part.running_var.uniform_(0.5, 1.5)
    return prunable(net.to(dtype), SHAPES[name])


def gated_context(name: str, dtype: torch.dtype = torch.float64, **given: Any) -> Context:
    return context(lambda: network(name, dtype), **given)


def examples(name: str, count: int, *, domains: int = 2, dtype: torch.dtype = torch.float64, prepare=None) -> Batches:
    """Domain k is moved and stretched; labels of 3 classes."""
    x = torch.randn(count, *SHAPES[name], generator=generator("gated", name), dtype=torch.float64)
    y = torch.randint(0, 3, (count,), generator=generator("gated", "classes"))
    ids = torch.arange(count) % domains
    x = (x * (1 + ids.view(-1, *(1,) * (x.dim() - 1))) + ids.view(-1, *(1,) * (x.dim() - 1))).to(dtype)
    return Batches(x, y, torch.arange(count), key=("gated",), prepare=prepare or (lambda x, rng: x), domains=ids)
