"""A network with experts whose examples are one to three tokens, padded to three, and that has batch statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedloom.core.moe import MoELayer
from fedloom.core.seeds import seeded
from fedloom.models.heads import Classifier
from fedloom.models.moe_lm.block import MoEBlock
from fedloom.models.moe_lm.layers import find_layers
from fedloom.models.moe_lm.routed import routed

LENGTH = 3


class TokenFeatures(nn.Module):
    """{"tokens": [B, 3, 2], "attention_mask": [B, 3]} -> the mean feature of the real tokens [B, width]."""

    def __init__(self, width: int, experts: int, top_k: int, layers: int):
        super().__init__()
        self.num_features = width
        self.norm, self.input = nn.BatchNorm1d(2), nn.Linear(2, width)
        self.blocks = nn.ModuleList(MoEBlock(width, width, experts, top_k) for _ in range(layers))

    @property
    def moe_layers(self) -> tuple[MoELayer, ...]:
        return find_layers(self)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        mask = x["attention_mask"]
        tokens = self.norm(x["tokens"].flatten(0, 1)).view_as(x["tokens"])
        hidden = torch.relu(self.input(tokens))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return (hidden * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True)


class TokenMixture(nn.Module):
    """Inputs [B, 2] become tokens, more of them where the features are positive."""

    class_rows = {"body.head.weight": 0, "body.head.bias": 0}

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body: Any = routed(body)

    @property
    def moe_layers(self) -> tuple[MoELayer, ...]:
        return tuple(layer.prefixed("body.") for layer in self.body.moe_layers)

    @property
    def records_inputs(self) -> bool:
        return self.body.records_inputs

    @records_inputs.setter
    def records_inputs(self, value: bool) -> None:
        self.body.records_inputs = value

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        tokens = torch.stack([x, x.flip(1), x.square() / 3], 1)
        length = 1 + (x > 0).sum(1)
        return self.body({"tokens": tokens, "attention_mask": torch.arange(LENGTH) < length[:, None]})


@dataclass(frozen=True)
class TokenSpec:
    """A `ModelSpec` for the blobs."""

    num_classes: int = 6
    seed: int = 0
    experts: int = 4
    top_k: int = 2
    layers: int = 2

    input_shape: ClassVar[tuple[int, ...]] = (2,)

    def backbone(self) -> nn.Module:
        with seeded(self.seed, "backbone"):
            return TokenFeatures(8, self.experts, self.top_k, self.layers)

    def classifier(self) -> nn.Module:
        body = self.backbone()
        with seeded(self.seed, "head"):
            return TokenMixture(Classifier(body, self.num_classes))
