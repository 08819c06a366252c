"""A backbone with a classifier of fixed width.

The head has one row per class of the whole stream from the start. Rows of classes that have not arrived are frozen
and masked by the training loop, so it equals a head that grows, and rows of old classes never move in memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.core.moe import MoELayer, moe_layers


class Classifier(nn.Module):
    """`backbone` [batch, ...] -> [batch, num_features], then `head`, linear to [batch, num_classes].

    `class_rows` names the parameters with one row per class and the dimension of those rows.
    """

    class_rows: Mapping[str, int] = {"head.weight": 0, "head.bias": 0}

    def __init__(self, backbone: nn.Module, num_classes: int, head: nn.Linear | None = None):
        super().__init__()
        if num_classes < 1:
            raise ConfigError(f"num_classes must be at least 1, got {num_classes}")
        self.backbone = backbone
        self.head = head or nn.Linear(backbone.num_features, num_classes)
        self.num_features, self.num_classes = backbone.num_features, num_classes

    @property
    def memory_format(self) -> str:
        """The layout in which the backbone is fastest: "contiguous" or "channels_last"."""
        return getattr(self.backbone, "memory_format", "contiguous")

    @property
    def moe_layers(self) -> tuple[MoELayer, ...]:
        """The backbone's mixture-of-experts layers, as this network names them."""
        return moe_layers(self.backbone, "backbone.")

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """`{"logits": [batch, num_classes], "feats": [batch, num_features]}`."""
        feats = self.backbone(x)
        return {"logits": self.head(feats), "feats": feats}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of the backbone's blocks in the backward pass."""
        self.backbone.set_grad_checkpointing(enable)
