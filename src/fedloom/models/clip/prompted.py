"""Networks whose texts are learned: context vectors around the class names.

Source: Zhou et al., "Learning to Prompt for Vision-Language Models" (IJCV 2022); the context starts from N(0, 0.02^2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.seeds import seeded
from fedloom.models.clip.fusion import CrossAttention
from fedloom.models.clip.network import Clip, ClipNetwork
from fedloom.models.clip.words import Position, learnable

STD = 0.02


def context(clip: Clip, *shape: int) -> Tensor:
    """Context vectors [*shape, text width] at their start."""
    with seeded(clip.seed, "prompt"):
        return STD * torch.randn(*shape, clip.towers.text_width)


@dataclass(frozen=True)
class Prompted:
    """Makes a network with one context of `n_ctx` vectors for all classes."""

    n_ctx: int = 16
    position: Position = "end"

    def __call__(self, clip: Clip) -> ClipNetwork:
        """The network. Raises `ConfigError` for a class name that does not fit beside the context."""
        phrases = learnable(clip.words, self.n_ctx, clip.towers.length, self.position)
        return ClipNetwork(clip, phrases, context=context(clip, self.n_ctx))


class ClassContexts(ClipNetwork):
    """A network whose every class has context vectors of its own, [classes, n, text width]."""

    class_rows = {"context": 0}


@dataclass(frozen=True)
class ClassPrompted:
    """Makes a network with a context of `n_ctx` vectors for each class."""

    n_ctx: int = 16
    position: Position = "end"

    def __call__(self, clip: Clip) -> ClassContexts:
        """The network. Raises `ConfigError` for a class name that does not fit beside the context."""
        phrases = learnable(clip.words, self.n_ctx, clip.towers.length, self.position)
        return ClassContexts(clip, phrases, context=context(clip, len(clip.words), self.n_ctx))


class PromptMixture(ClipNetwork):
    """logits = share exp(ls) f_b . t_c + exp(ls) pi(f_b) . e_bc: the second part is not weighed, unlike Fed-Duet's.

    e_bc: of `attention` over the own prompt and those received, whose shares are a further output, "attention" [1 + n].
    Without any received, logits = exp(ls) f_b . t_c.
    """

    def __init__(self, clip: Clip, prompted: Prompted, attention: CrossAttention, share: float):
        phrases = learnable(clip.words, prompted.n_ctx, clip.towers.length, prompted.position)
        super().__init__(clip, phrases, context=context(clip, prompted.n_ctx))
        self.fusion, self.share = attention, share
        self.received: Tensor | None = None

    def receive(self, prompts: Tensor | None) -> None:
        """Take other clients' prompts [n, n_ctx, text width], or none; they are encoded once for the shown classes."""
        self.received = None if prompts is None else prompts.detach().to(self.towers.scale.device)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """See the class and `ClipNetwork`."""
        out = super().forward(x)
        if self.received is None:
            return out
        feats, texts = out["feats"], out["texts"]
        fused, share = self.fusion.similarity(feats, torch.cat([texts[None], self.texts_in(self.received)]))
        logits = self.share * self.similarity(feats, texts) + self.towers.scale.float() * fused
        return out | {"logits": self.widened(logits), "attention": share}


@dataclass(frozen=True)
class Mixed:
    """Makes a `PromptMixture`. pooled, heads: of its attention; a joint width below `pooled` is taken whole."""

    prompted: Prompted
    pooled: int = 128
    heads: int = 8
    share: float = 0.5

    def __call__(self, clip: Clip) -> PromptMixture:
        """The network. Raises `ConfigError` for a class name that does not fit, and for widths that do not divide."""
        width = clip.towers.width
        with seeded(clip.seed, "fusion"):
            attention = CrossAttention(width, min(self.pooled, width), self.heads)
        return PromptMixture(clip, self.prompted, attention, self.share)
