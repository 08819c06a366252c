"""A projection head between the backbone and the classifier."""

from __future__ import annotations

from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.core.method import ModelSpec
from fedloom.core.seeds import seeded
from fedloom.models.heads import Classifier


class Projected(nn.Module):
    """A backbone of features [batch, width]: `backbone` -> Linear(d, d) -> ReLU -> Linear(d, width).

    d: the backbone's `num_features`. Initial values are torch's defaults for `Linear`.
    Source: Li, He and Song, "Model-Contrastive Federated Learning" (CVPR 2021), network architecture: a perceptron
    of two layers, whose output the classifier reads. Raises `ConfigError` for a width below 1.
    """

    def __init__(self, backbone: nn.Module, width: int = 256):
        super().__init__()
        if width < 1:
            raise ConfigError(f"the projection's width must be at least 1, got {width}")
        d: int = backbone.num_features  # type: ignore[assignment]  # any backbone has it
        self.backbone, self.num_features = backbone, width
        self.projection = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, width))

    @property
    def memory_format(self) -> str:
        """The layout in which the backbone is fastest: "contiguous" or "channels_last"."""
        return getattr(self.backbone, "memory_format", "contiguous")

    def forward(self, x: Tensor) -> Tensor:
        """Projected features [batch, width] of inputs [batch, ...]."""
        return self.projection(self.backbone(x))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of the backbone's blocks in the backward pass."""
        switch = getattr(self.backbone, "set_grad_checkpointing", None)
        if switch is None:
            raise ConfigError(
                f"training.grad_checkpointing: {type(self.backbone).__name__} has no set_grad_checkpointing; "
                "set it to false"
            )
        switch(enable)


def projected_classifier(spec: ModelSpec, width: int = 256) -> Classifier:
    """The configured backbone, a projection to `width`, and a fixed-width linear head on it.

    "feats" of its outputs are the projected features. Projection and head have random streams of their own, so the
    backbone starts as the default classifier's does.
    """
    body = spec.backbone()
    with seeded(spec.seed, "projection"):
        body = Projected(body, width)
    with seeded(spec.seed, "head"):
        return Classifier(body, spec.num_classes)
