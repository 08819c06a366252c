"""A tiny CLIP that is trained in a second, planted pictures for it, and a teacher without weights."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.pretraining.recipe import Recipe, resolve

COLOURS = {"red": (210, 40, 40), "green_leaf": (40, 190, 60), "deep blue": (50, 60, 200), "grey": (128, 128, 128)}
TINY: dict[str, Any] = {
    "model": {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 8, "patch_size": 4, "layers": 1, "width": 16, "head_width": 8},
        "text_cfg": {"context_length": 32, "width": 16, "heads": 2, "layers": 1},
        "stem": {"widths": [8, 16, 16], "blocks": [0, 1]},
    },
    "text": {"steps": 30, "batch_size": 64, "words": 20, "warmup": 3, "lr": 0.01},
    "images": {"epochs": 4, "batch_size": 20, "warmup": 3, "lr": 0.005},
}


def draw_folder(folder: Path, each: int = 40) -> Path:
    """PNG pictures of 8x8 in train/ and test/, one class per colour, `each` and half as many per class; noisy."""
    from PIL import Image

    rng = torch.Generator().manual_seed(5)
    for split, count in (("train", each), ("test", each // 2)):
        for name, colour in COLOURS.items():
            for k in range(count):
                noise = 60 * torch.randn(8, 8, 3, generator=rng)
                array = (torch.tensor(colour) + noise).clamp(0, 255).to(torch.uint8).numpy()
                path = folder / split / name / f"{k}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(path)
    return folder


def embeddings(sentences: Sequence[str]) -> Tensor:
    """What a teacher could say: the mean of random directions, one per word, of length 1; [sentences, 32]."""
    return torch.stack([F.normalize(sum(map(_direction, text.split()), torch.zeros(32)), dim=0) for text in sentences])


def _direction(word: str) -> Tensor:
    return torch.randn(32, generator=torch.Generator().manual_seed(zlib.crc32(word.strip(".").encode())))


def tiny(folder: Path | str, **layer: Any) -> Recipe:
    """The tiny recipe on a folder of pictures, tested on that folder's test part."""
    name = f"folder:{folder}"
    base = {"data": {"name": name, "whole": False}, "zeroshot": [name]}
    return resolve("clip-small", base, TINY, layer)
