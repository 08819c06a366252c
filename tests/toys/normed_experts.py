"""A network for the blobs with mixture-of-experts layers and a batch normalisation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fedloom.core.seeds import seeded
from fedloom.models.heads import Classifier
from fedloom.models.moe_lm.block import MoEMlp
from fedloom.models.moe_lm.routed import routed

from .federation import BlobSpec


class NormedExperts(MoEMlp):
    """Two layers of four experts, then batch norm."""

    def __init__(self) -> None:
        super().__init__((2,), width=8, inner=8, experts=4, layers=2)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


@dataclass(frozen=True)
class NormedExpertSpec(BlobSpec):
    """A `ModelSpec` for the blobs."""

    def backbone(self) -> nn.Module:
        with seeded(self.seed, "backbone"):
            return NormedExperts()

    def classifier(self) -> nn.Module:
        body = self.backbone()
        with seeded(self.seed, "head"):
            return routed(Classifier(body, self.num_classes))
