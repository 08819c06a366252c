"""What a client tells the server about its pictures: one mean feature, with noise where privacy is asked for.

Source: Guo, Chen and Cui, "Fed-Duet" (ICLR 2026): f~ = mean over a few batches of the batch-mean feature of length 1,
clipped to norm C, plus N(0, (C sigma)^2 I). Read as: the batches are drawn anew every round, by a stream of the pass's
own, because in the order in which data are stored the first batch may hold a single class.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fedloom.core.batches import Batches
from fedloom.core.context import Context
from fedloom.core.errors import ConfigError, pick
from fedloom.core.seeds import generator
from fedloom.local.features import feats


def feature_summary(ctx: Context, data: Batches, *, width: int, batches: int = 1, batch_size: int = 16) -> Tensor:
    """Mean over `batches` batches of the batch-mean feature [width] under the bound network, fp32 on the CPU.

    A pass: evaluation mode, no augmentation, no gradient; the network and what training sees stay as they were. Of
    features of length 1 its norm is at most 1. A client without examples gives zeros.
    Raises `ConfigError` for a network without features or with features of another width.
    """
    count = min(len(data), batches * batch_size)
    drawn = torch.randperm(len(data), generator=generator(ctx.seed_for("summary")))[:count]
    means = []
    with ctx.evaluating():
        for batch in data.subset(drawn).epoch(batch_size=batch_size, purpose="summary", shuffle=False):
            means.append(feats(ctx.apply(batch.x)).float().mean(0).cpu())
    if not means:
        return torch.zeros(width)
    if means[0].shape != (width,):
        raise ConfigError(
            f"the summary is to have {width} entries and the features have {len(means[0])}; make them equal"
        )
    return torch.stack(means).mean(0)


Noise = Callable[[torch.Size, torch.Generator], Tensor]


def gaussian(shape: torch.Size, rng: torch.Generator) -> Tensor:
    """Standard normal noise."""
    return torch.randn(shape, generator=rng, dtype=torch.float64)


def laplace(shape: torch.Size, rng: torch.Generator) -> Tensor:
    """Laplace noise of scale 1, thus of variance 2: the difference of two exponential draws."""
    first, second = (torch.empty(shape, dtype=torch.float64).exponential_(generator=rng) for _ in range(2))
    return first - second


NOISES: dict[str, Noise] = {"gaussian": gaussian, "laplace": laplace}


def privatised(
    summary: Tensor, *, sigma: float, rng: torch.Generator, clip: float = 1.0, noise: str = "gaussian"
) -> Tensor:
    """The summary cut to norm `clip`, plus noise of scale clip * sigma per entry; itself where neither does anything.

    noise: see `NOISES`; sigma is the deviation of Gaussian noise and the scale b of Laplace noise, both per clip. With
    clip 1, 512 entries and sigma 10 the noise has a norm of about 226.
    Raises `ConfigError` for sigma below 0 and a clip that is not above 0.
    """
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ConfigError(f"sigma must be a finite number of at least 0, got {sigma}")
    if not (math.isfinite(clip) and clip > 0):
        raise ConfigError(f"clip must be a finite number above 0, got {clip}")
    draw = pick("noise", noise, NOISES)
    norm = torch.linalg.vector_norm(summary.double()).item()
    cut = summary * (clip / norm) if norm > clip else summary
    return cut if sigma == 0 else (cut.double() + clip * sigma * draw(summary.shape, rng)).to(summary.dtype)
