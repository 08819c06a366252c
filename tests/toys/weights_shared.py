"""A network for the blobs in which one example uses a convolution's weights at two positions, a linear layer's once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fedloom.core.seeds import seeded

from .federation import BlobSpec


class Sliding(nn.Module):
    """Conv1d over the two features, then linear, batch norm and ReLU."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.num_features = width
        self.conv, self.fc = nn.Conv1d(1, 6, 1), nn.Linear(12, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(self.conv(x[:, None]).relu().flatten(1))).relu()


@dataclass(frozen=True)
class SlidingSpec(BlobSpec):
    """A `ModelSpec` for the blobs."""

    def backbone(self) -> nn.Module:
        with seeded(self.seed, "backbone"):
            return Sliding()
