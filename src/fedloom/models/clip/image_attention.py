"""Attention over the entries of a picture's feature.

Source: Lu et al., "FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning" (IEEE Data
Engineering Bulletin 2023, arXiv 2302.13485).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.seeds import seeded
from fedloom.models.clip.network import Clip, ClipNetwork
from fedloom.models.clip.words import fixed


class ImageAttention(ClipNetwork):
    """Features f' = normalise(a(f) * f) with a(f) = softmax(W2 tanh(W1 f + b1) + b2) over the d entries of f.

    f has length 1, so its length before that does not matter. W1 and W2 are d x d: 2 d (d + 1) parameters train, and
    start as torch starts linear layers. template: of the sentences about the classes.
    """

    def __init__(self, clip: Clip, template: str):
        super().__init__(clip, fixed(clip.words, template, clip.towers.length))
        d = clip.towers.width
        with seeded(clip.seed, "attention"):
            self.attention = nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.Linear(d, d), nn.Softmax(-1))

    def image(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        """Features f' [batch, d] of length 1; no routing."""
        feats, routing = super().image(x)
        return F.normalize(self.attention(feats) * feats, dim=-1), routing


@dataclass(frozen=True)
class Attention:
    """Makes an `ImageAttention` with sentences of this template."""

    template: str = "a photo of a {}."

    def __call__(self, clip: Clip) -> ImageAttention:
        """The network."""
        return ImageAttention(clip, self.template)
