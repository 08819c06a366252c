"""A CLIP small enough for every test: open_clip's blocks, two tokens per example, random values.

Its image tower reads vectors of two numbers, so that it fits the federation of blobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedloom.core.seeds import seeded
from fedloom.models.clip.network import Clip
from fedloom.models.clip.packages import open_clip
from fedloom.models.clip.towers import Towers

WORDS = ("cat", "dog", "polar bear", "red maple tree", "sea", "truck", "rose", "lamp", "king", "cloud")
LENGTH = 24


class Visual(nn.Module):
    """The attributes of open_clip's image tower that are used."""

    image_size = (1, 2)

    def __init__(self, inputs: int, width: int, layers: int, joint: int):
        super().__init__()
        Transformer = open_clip().transformer.Transformer

        self.class_embedding = nn.Parameter(torch.randn(width))
        self.embed = nn.Linear(inputs, 2 * width)
        self.transformer = Transformer(width, layers, heads=2)
        self.ln_post, self.proj = nn.LayerNorm(width), nn.Parameter(torch.randn(width, joint) * width**-0.5)

    def _embeds(self, x: Tensor) -> Tensor:
        tokens = self.embed(x.flatten(1)).view(len(x), 2, -1)
        return torch.cat([self.class_embedding.expand(len(x), 1, -1), tokens], 1)

    def _pool(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.ln_post(tokens)[:, 0], tokens

    def forward(self, x: Tensor) -> Tensor:
        return self._pool(self.transformer(self._embeds(x)))[0] @ self.proj


class Model(nn.Module):
    """The attributes of open_clip's CLIP that are used."""

    def __init__(self, inputs: int, width: int, text_width: int, layers: int, joint: int):
        super().__init__()
        Transformer = open_clip().transformer.Transformer

        self.visual = Visual(inputs, width, layers, joint)
        self.token_embedding = nn.Embedding(49408, text_width)
        self.positional_embedding = nn.Parameter(torch.randn(LENGTH, text_width) * 0.1)
        self.transformer = Transformer(text_width, layers, heads=2)
        self.ln_final = nn.LayerNorm(text_width)
        self.text_projection = nn.Parameter(torch.randn(text_width, joint) * text_width**-0.5)
        self.logit_scale = nn.Parameter(torch.tensor(10.0).log())
        mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
        self.register_buffer("attn_mask", mask, persistent=False)

    def encode_text(self, ids: Tensor) -> Tensor:
        x = self.token_embedding(ids) + self.positional_embedding
        x = self.ln_final(self.transformer(x, attn_mask=self.attn_mask))
        return x[torch.arange(len(x)), ids.argmax(-1)] @ self.text_projection


def toy_model(
    seed: int = 0, *, inputs: int = 2, width: int = 16, text_width: int = 8, layers: int = 2, joint: int = 128
):
    """The whole model with random values, trainable."""
    with seeded(seed, "toy-clip"):
        return Model(inputs, width, text_width, layers, joint)


def toy_clip(num_classes: int = 6, seed: int = 0, **sizes: int) -> Clip:
    """Frozen towers and words for the classes."""
    return Clip(Towers(toy_model(seed, **sizes)), WORDS[:num_classes], seed)


@dataclass(frozen=True)
class ClipSpec:
    """A `ModelSpec` for the blobs whose network is a CLIP."""

    num_classes: int = 6
    seed: int = 0
    joint: int = 128

    input_shape: ClassVar[tuple[int, ...]] = (2,)

    def clip(self) -> Clip:
        return toy_clip(self.num_classes, self.seed, joint=self.joint)

    def backbone(self) -> Any:
        raise AssertionError("a method for vision-language models has no use for a backbone")

    classifier = backbone
