"""A model of open_clip's class `CLIP` as what methods build on: frozen towers with words, or a trainable backbone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fedloom.models.clip.checkpoint import OPENAI, Statistics, check_model
from fedloom.models.clip.network import Clip
from fedloom.models.clip.pictures import Normalize, check_pictures, normalization, renormalized
from fedloom.models.clip.towers import Towers

Given = tuple[Sequence[float], Sequence[float]]


def is_clip_model(module: Any) -> bool:
    """Whether a module is of open_clip's class `CLIP`."""
    library = sys.modules.get("open_clip")
    return library is not None and isinstance(module, library.CLIP)


def checked_clip(model: Any) -> tuple[Any, Statistics]:
    """The user's own CLIP in fp32 and (mean, std) of pictures as it wants them: those it says, else OpenAI's.

    Raises `ConfigError` for one whose towers are not those that prompts and adapters work with.
    """
    check_model(model, type(model).__name__)
    said = getattr(model.visual, "preprocess_cfg", None) or {}
    return model.float(), (tuple(said.get("mean", OPENAI[0])), tuple(said.get("std", OPENAI[1])))


def clip_of(
    model: Any,
    own: Statistics,
    told: str = "CLIP",
    *,
    input_shape: Sequence[int],
    words: Sequence[str],
    statistics: Given,
    seed: int,
    repeats: bool,
) -> Clip:
    """The same around a model of open_clip's class `CLIP`. own: (mean, std) of pictures as it wants them."""
    towers, normalize = Towers(model), normalization(statistics, own)
    check_pictures(told, input_shape, towers.image_size, normalize)
    return Clip(towers, tuple(words), seed, normalize, repeats)


class ImageTower(nn.Module):
    """The image tower of a CLIP as a backbone: pictures [batch, C, H, W] -> features [batch, num_features]."""

    memory_format = "contiguous"

    def __init__(self, visual: Any, normalize: Normalize | None):
        super().__init__()
        self.visual, self.normalize = visual, normalize
        self.num_features = int(visual.proj.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        """Features in the joint space, of any length."""
        found: Tensor = self.visual(renormalized(x, self.normalize))
        return found

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of each block in the backward pass."""
        self.visual.set_grad_checkpointing(enable)


def image_tower_of(
    model: Any, own: Statistics, input_shape: Sequence[int], statistics: Given, told: str = "CLIP"
) -> ImageTower:
    """The image tower of a model of open_clip's class `CLIP`. own: (mean, std) of pictures as it wants them."""
    size, normalize = model.visual.image_size, normalization(statistics, own)
    check_pictures(told, input_shape, (size, size) if isinstance(size, int) else tuple(size), normalize)
    return ImageTower(model.visual, normalize)
