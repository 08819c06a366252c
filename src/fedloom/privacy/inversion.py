"""Feature and gradient inversion: which pictures would make a client send what it has sent?

The attacker knows the network and sees one vector, a mean of features or the direction of an update. It looks for
pictures x that minimise 1 - cos(g(x), observed) + weight * TV(x), where g is what the client computes; Geiping et al.,
"Inverting Gradients - How easy is it to break privacy in federated learning?" (NeurIPS 2020), eq. (4), for gradients.
Adam steps on the pixels, each followed by a projection on [0, 1].

Decisions where the papers are silent: TV is the mean absolute difference of neighbours, vertical and horizontal ones
added; the start is mid-grey with Gaussian noise of deviation 0.1; what is kept is the iterate with the least
objective, not the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedloom.core.errors import ConfigError

Seen = Callable[[Tensor], Tensor]
LEAST_ERROR = 1e-10  # mean squared error up to which PSNR tells pictures apart: 100 dB


def total_variation(x: Tensor) -> Tensor:
    """Mean absolute difference of vertical neighbours plus that of horizontal ones; x: [n, channels, H, W]."""
    rows, columns = x.diff(dim=-2).abs(), x.diff(dim=-1).abs()
    return rows.sum() / max(1, rows.numel()) + columns.sum() / max(1, columns.numel())


@dataclass(frozen=True)
class Inversion:
    """The attack. steps, lr: of Adam. tv: weight of the total variation."""

    steps: int = 2000
    lr: float = 0.1
    tv: float = 1e-4

    def __post_init__(self) -> None:
        for name, value, fits, wanted in (
            ("steps", self.steps, self.steps >= 1, "1 or more"),
            ("lr", self.lr, self.lr > 0, "above 0"),
            ("tv", self.tv, self.tv >= 0, "0 or more"),
        ):
            if not fits:
                raise ConfigError(f"{name} of the inversion is {value}; it must be {wanted}")

    def __call__(self, seen: Seen, observed: Tensor, shape: Sequence[int], seed: int = 0) -> Tensor:
        """Pictures of this shape, [n, channels, H, W] in [0, 1], that look to the attacker like the client's.

        seen: such pictures -> the vector that the client would send, differentiable. observed: what it has sent, of
        the same size. Raises `ConfigError` for an observed vector of another size, or without a direction.
        """
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            return self._search(seen, observed.detach().flatten(), shape, seed)

    def _search(self, seen: Seen, observed: Tensor, shape: Sequence[int], seed: int) -> Tensor:
        rng = torch.Generator().manual_seed(seed)
        start = (0.5 + 0.1 * torch.randn(*shape, generator=rng)).clamp(0, 1)
        x = start.to(observed.device).requires_grad_()
        _check(seen(x), observed)
        optimizer = torch.optim.Adam([x], lr=self.lr)
        best, least = x.detach().clone(), torch.inf
        for step in range(self.steps + 1):
            loss = 1 - F.cosine_similarity(seen(x).flatten(), observed, dim=0) + self.tv * total_variation(x)
            if float(loss.detach()) < least:
                best, least = x.detach().clone(), float(loss.detach())
            if step < self.steps:
                (x.grad,) = torch.autograd.grad(loss, x)
                optimizer.step()
                x.data.clamp_(0, 1)
        return best


def _check(found: Tensor, observed: Tensor) -> None:
    if found.numel() != observed.numel():
        raise ConfigError(
            f"the attacker sees {observed.numel()} numbers, and the network makes {found.numel()}; give it the network "
            "that the client had"
        )
    if not bool(observed.any()) or not bool(observed.isfinite().all()):
        raise ConfigError("what the attacker sees has no direction: it is zero or not finite")


def mean_feature(features: Seen) -> Seen:
    """What a client sends as feature summary: pictures -> the mean of their features [d]. features: [n, d]."""
    return lambda x: features(x).mean(0)


def gradient(loss: Seen, params: Sequence[Tensor]) -> Seen:
    """What an update shows: pictures -> the gradient of `loss(pictures)` by all parameters as one vector.

    The update of one step of plain gradient descent points against it; of other optimisers and of several steps it is
    an approximation. params: tensors that require a gradient. The labels are in `loss`: the attacker knows them.
    """

    def seen(x: Tensor) -> Tensor:
        found = torch.autograd.grad(loss(x), params, create_graph=True)
        return torch.cat([part.flatten() for part in found])

    return seen


@dataclass(frozen=True)
class Likeness:
    """How much reconstructions look like the pictures they are matched with.

    order: int64 [n], which reconstruction belongs to each picture. psnr: [n], dB; ssim: [n], 1 for equal pictures.
    """

    order: Tensor
    psnr: Tensor
    ssim: Tensor


def likeness(found: Tensor, pictures: Tensor) -> Likeness:
    """Match reconstructions with pictures, one to one so that the sum of PSNR is the largest, and compare the pairs.

    Both [n, channels, H, W] in [0, 1]. SSIM (Wang et al. 2004) has an 11x11 Gaussian window of deviation 1.5, range 1
    and pictures mirrored at their borders. Raises `ConfigError` for different shapes, for sides below 11, and where
    torchmetrics is missing.
    """
    from scipy.optimize import linear_sum_assignment

    if found.shape != pictures.shape or found.dim() != 4:
        raise ConfigError(f"reconstructions of shape {list(found.shape)} cannot be matched with {list(pictures.shape)}")
    found, pictures = found.detach().cpu(), pictures.detach().cpu()
    pairs = psnr(found[None], pictures[:, None])
    _, columns = linear_sum_assignment(pairs.numpy(), maximize=True)
    order = torch.from_numpy(columns)
    return Likeness(order, pairs[torch.arange(len(order)), order], ssim(found[order], pictures))


def psnr(found: Tensor, pictures: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB for a range of 1, over the last three dimensions; 100 at most."""
    error = (found.double() - pictures.double()).square().mean((-3, -2, -1))
    return -10 * error.clamp(min=LEAST_ERROR).log10()


def ssim(found: Tensor, pictures: Tensor) -> Tensor:
    """Structural similarity [n] of pictures [n, channels, H, W]; see `likeness`."""
    if min(found.shape[-2:]) < 11:
        raise ConfigError(f"SSIM needs pictures of at least 11x11, got {found.shape[-2]}x{found.shape[-1]}")
    measure = _torchmetrics().structural_similarity_index_measure
    values: Tensor = measure(found.double(), pictures.double(), sigma=1.5, data_range=1.0, reduction="none")
    return values.reshape(len(found))


def _torchmetrics() -> Any:
    try:
        from torchmetrics.functional import image
    except ImportError as error:
        raise ConfigError("SSIM needs the extra 'vision'; install it with: pip install 'fedloom[vision]'") from error
    return image
