"""A private and a shared extractor whose features a gate weighs per example."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.batches import Inputs
from fedloom.core.errors import ConfigError
from fedloom.core.method import ModelSpec
from fedloom.core.seeds import seeded
from fedloom.models.mixing import masked_mean

SHARED = "shared."  # prefix of the names that belong to the shared extractor


class VectorExtractor(nn.Module):
    """One linear layer with ReLU on the flattened input -> [batch, width]."""

    def __init__(self, input_shape: Sequence[int], width: int):
        super().__init__()
        self.layer = nn.Linear(math.prod(input_shape), width)

    def forward(self, x: Tensor) -> Tensor:
        """Features [batch, width]."""
        return F.relu(self.layer(x.flatten(1)))


class ImageExtractor(nn.Module):
    """Two 3x3 convolutions (16 and 32 channels, every other pixel), their mean over the image, a linear layer."""

    def __init__(self, input_shape: Sequence[int], width: int):
        super().__init__()
        self.one = nn.Conv2d(input_shape[0], 16, 3, stride=2, padding=1)
        self.two = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.layer = nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        """Features [batch, width] of images [batch, channels, height, width]."""
        maps = F.relu(self.two(F.relu(self.one(x))))
        return F.relu(self.layer(maps.mean((2, 3))))


class TextExtractor(nn.Module):
    """Embeddings of tokens, their mean without padding, a linear layer with ReLU."""

    def __init__(self, vocab_size: int, width: int):
        super().__init__()
        self.tokens, self.layer = nn.Embedding(vocab_size, width), nn.Linear(width, width)

    def forward(self, x: Inputs) -> Tensor:
        """Features [batch, width] of "input_ids" and "attention_mask" [batch, length]."""
        mask = x["attention_mask"].bool()
        ids = x["input_ids"].masked_fill(~mask, 0)
        return F.relu(self.layer(masked_mean(self.tokens(ids), mask)))


def small_extractor(spec: ModelSpec, width: int) -> nn.Module:
    """A small extractor of `width` features for the inputs of a spec, told by its `input_shape` and `vocab_size`.

    Raises `ConfigError` for multiple choice, whose examples are several texts, and for unknown inputs.
    """
    shape, vocabulary = getattr(spec, "input_shape", None), getattr(spec, "vocab_size", 0)
    if shape is None or (vocabulary and len(shape) != 1):
        raise ConfigError(
            f"the method needs a small network for the inputs, and makes none for input_shape {shape}; it takes "
            "vectors, images and texts of one class each, no multiple choice"
        )
    if vocabulary:
        return TextExtractor(vocabulary, width)
    return ImageExtractor(shape, width) if len(shape) == 3 else VectorExtractor(shape, width)


class Paired(nn.Module):
    """Features a_L * F(x) + a_G * P(G(x)) under a linear head.

    private: F, a backbone with `num_features`. shared: G, of `width` features. projection: P, linear, where the widths
    differ. gate: two linear layers with ReLU between, on both features; softmax gives (a_L, a_G) per example.
    """

    class_rows = {"head.weight": 0, "head.bias": 0}

    def __init__(self, private: nn.Module, shared: nn.Module, width: int, num_classes: int, hidden: int, seed: int):
        super().__init__()
        d: int = private.num_features  # type: ignore[assignment]  # any backbone has it
        self.private, self.shared, self.num_features = private, shared, d
        with seeded(seed, "projection"):
            self.projection = nn.Linear(width, d) if width != d else nn.Identity()
        with seeded(seed, "gate"):
            self.gate = nn.Sequential(nn.Linear(2 * d, hidden), nn.ReLU(), nn.Linear(hidden, 2))
        with seeded(seed, "head"):
            self.head = nn.Linear(d, num_classes)

    @property
    def memory_format(self) -> str:
        """The layout in which the private backbone is fastest."""
        return getattr(self.private, "memory_format", "contiguous")

    def forward(self, x: Inputs) -> dict[str, Tensor]:
        """`{"logits": [batch, classes], "feats": [batch, d], "gates": (a_L, a_G) [batch, 2]}`."""
        own, common = self.private(x), self.projection(self.shared(x))
        gates = self.gate(torch.cat([own, common], 1)).softmax(1)
        feats = gates[:, :1] * own + gates[:, 1:] * common
        return {"logits": self.head(feats), "feats": feats, "gates": gates}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of the private backbone's blocks in the backward pass."""
        switch = getattr(self.private, "set_grad_checkpointing", None)
        if switch is None:
            raise ConfigError(
                f"training.grad_checkpointing: {type(self.private).__name__} has no set_grad_checkpointing; "
                "set it to false"
            )
        switch(enable)


def paired(spec: ModelSpec, width: int, hidden: int) -> Paired:
    """The configured backbone beside a small extractor; each part has a random stream of its own."""
    with seeded(spec.seed, "shared"):
        shared = small_extractor(spec, width)
    return Paired(spec.backbone(), shared, width, spec.num_classes, hidden, spec.seed)
