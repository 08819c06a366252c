"""Second stage: the image tower learns to meet the texts of its pictures among those of all classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.errors import DataError
from fedloom.pretraining.machine import has_bf16
from fedloom.pretraining.recipe import ImageStage
from fedloom.pretraining.text import encode_text, tokens
from fedloom.pretraining.training import Trainer, Watch
from fedloom.pretraining.words import TEMPLATES


class Normalize:
    """uint8 [n, 3, H, W] -> float32 of about mean 0 and deviation 1; by mean and std per channel, of [0, 1]."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        self.mean, self.std = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)

    def __call__(self, x: Tensor) -> Tensor:
        """The same on every device."""
        return ((x / 255) - self.mean.to(x.device)) / self.std.to(x.device)


@torch.no_grad()
def class_texts(model: Any, names: Sequence[str], templates: Sequence[str] = TEMPLATES) -> Tensor:
    """Mean over the templates of normalised text features, normalised again, float32 [classes, width]."""
    place = model.text_projection.device
    ids = [tokens(names, template, model.context_length).to(place) for template in templates]
    return F.normalize(torch.stack([F.normalize(encode_text(model, part), dim=-1) for part in ids]).mean(0), dim=-1)


@torch.no_grad()
def accuracy(model: Any, x: Tensor, y: Tensor, texts: Tensor, normalize: Normalize) -> float:
    """Share of the pictures, uint8 [n, 3, H, W], whose feature is closest to the text of their class."""
    place = texts.device
    parts = zip(x.split(500), y.split(500), strict=True)
    hits = [model.visual(normalize(a.to(place))) @ texts.T for a, _ in parts]
    return float((torch.cat(hits).argmax(1).cpu() == y).double().mean())


def train_images(
    model: Any, x: Tensor, y: Tensor, names: Sequence[str], normalize: Normalize, options: ImageStage, seed: int,
    watch: Watch,
) -> Trainer:  # fmt: skip
    """Train the image tower and the scale in place by cross-entropy over the frozen texts of all classes.

    x: uint8 [n, 3, H, W]; y: int64 [n], ids of `names`. The way through the tower is in bf16 where the device has it.
    Raises `DataError` for fewer pictures than a batch.
    """
    size, batches = options.batch_size, len(x) // options.batch_size
    if batches == 0:
        raise DataError(f"images.batch_size is {size}, but there are {len(x)} pictures; lower it")
    model.visual.to(memory_format=torch.channels_last).train()
    parameters = [*model.visual.parameters(), model.logit_scale]
    trainer = Trainer(
        "images", "cross-entropy", parameters, [p for p in parameters if p.dim() <= 1], lr=options.lr,
        weight_decay=options.weight_decay, warmup=options.warmup, steps=options.epochs * batches, seed=seed,
    )  # fmt: skip
    if watch.left is not None:
        trainer.load(watch.left)
    else:
        model.logit_scale.data.fill_(options.scale).log_()
    texts, rng = class_texts(model, names), trainer.rng
    place = texts.device
    low = has_bf16(place)

    def loss(step: int) -> Tensor:
        if step % batches == 0:
            trainer.memory["order"] = torch.randperm(len(x), generator=rng)
        rows = trainer.memory["order"][step % batches * size :][:size]
        batch = augmented(normalize(x[rows].to(place)), options.zoom, rng)
        batch, goal = mixed(batch, F.one_hot(y[rows], len(names)).float().to(place), options.cutmix, rng)
        with torch.autocast(place.type, dtype=torch.bfloat16, enabled=low):
            found = model.visual(batch.contiguous(memory_format=torch.channels_last))
        logits = model.logit_scale.exp() * F.normalize(found.float(), dim=-1) @ texts.T
        return F.cross_entropy(logits, goal, label_smoothing=options.label_smoothing)

    trainer.run(loss, watch)
    model.visual.eval()
    return trainer


def augmented(x: Tensor, zoom: float, rng: torch.Generator) -> Tensor:
    """Flipped, shifted and enlarged at random, picture by picture; [batch, 3, H, W] normalised.

    zoom: a window of side 1 - zoom to 1 is enlarged, placed at random so that it may stick out by an eighth of half
    the picture's side, where it shows zeros.
    """
    n = len(x)
    side = 1 - zoom * torch.rand(n, generator=rng)
    flip = torch.where(torch.rand(n, generator=rng) < 0.5, -1.0, 1.0)
    room = 1 - side + 0.125
    shift = (2 * torch.rand(n, 2, generator=rng) - 1) * room[:, None]
    theta = torch.zeros(n, 2, 3)
    theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = side * flip, side, shift
    grid = F.affine_grid(theta.to(x.device), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def mixed(x: Tensor, goal: Tensor, share: float, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """CutMix on a share of the batches: a box of every picture, the same one, comes from another of the batch.

    x: [batch, 3, H, W]; goal: [batch, classes], mixed by the box's area. The box has the picture's proportions and
    lies within it, its area is uniform. Source: Yun et al., "CutMix" (ICCV 2019), with lambda from Beta(1, 1).
    """
    if float(torch.rand((), generator=rng)) >= share:
        return x, goal
    height, width = x.shape[-2:]
    kept = float(torch.rand((), generator=rng))
    tall, wide = round(height * (1 - kept) ** 0.5), round(width * (1 - kept) ** 0.5)
    top = int(torch.randint(height - tall + 1, (), generator=rng))
    left = int(torch.randint(width - wide + 1, (), generator=rng))
    other = torch.randperm(len(x), generator=rng)
    box = (..., slice(top, top + tall), slice(left, left + wide))
    x = x.clone()
    x[box] = x[(other, *box)]
    part = tall * wide / (height * width)
    return x, (1 - part) * goal + part * goal[other]
