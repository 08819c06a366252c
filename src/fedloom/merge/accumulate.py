"""Weighted sums in float64, whose working memory is used again for the next tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 262_144  # entries; a float64 buffer of 2 MB stays in the cache, so widening costs no memory traffic


class Accumulator:
    """Weighted sum of tensors of one shape, in float64 (complex128 for complex tensors).

    Adds in the order of the calls, so equal calls give equal bits, also with another number of threads.
    Peak memory is one float64 tensor of the largest size seen, and two buffers of `CHUNK` entries.
    largest: entries of the largest tensor to come, where it is known: memory that grows step by step costs time.
    """

    def __init__(self, largest: int = 0) -> None:
        self._largest = largest
        self._memory, self._buffers = torch.empty(0), torch.empty(2, 0)
        self._sum, self._started = self._memory, False

    def start(self, like: Tensor) -> None:
        """Begin a sum of tensors with the shape of `like`."""
        wide = _wide(like)
        kept = self._memory
        if kept.dtype != wide or kept.device != like.device or kept.numel() < like.numel():
            size = max(like.numel(), self._largest)
            self._memory = torch.empty(size, dtype=wide, device=like.device)
        self._make_buffers(like)
        self._sum, self._started = self._memory[: like.numel()], False

    def add(self, tensor: Tensor, weight: float) -> None:
        """Add weight * tensor."""
        for total, part in zip(_chunks(self._sum), _chunks(tensor.reshape(-1)), strict=True):
            self._add(total, part, weight, self._started)
        self._started = True

    def mean(self, weight: float, like: Tensor) -> Tensor:
        """The sum divided by `weight`, with the shape and dtype of `like`; integers rounded, half to even."""
        out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        for total, part in zip(_chunks(self.view(like).view(-1)), _chunks(out.view(-1)), strict=True):
            self._divide(total, weight, part)
        return out

    def mean_of(self, tensors: Sequence[Tensor], weights: Sequence[float], like: Tensor) -> Tensor:
        """The weighted mean of tensors that are in memory at once; the same bits as `start`, `add` ..., `mean`.

        Chunk by chunk, so the sum itself stays in the cache.
        """
        self._make_buffers(like)
        out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        for target, *parts in zip(_chunks(out.view(-1)), *(_chunks(t.reshape(-1)) for t in tensors), strict=True):
            total = self._buffers[1, : len(target)]
            for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
                self._add(total, part, weight, i > 0)
            self._divide(total, sum(weights), target)
        return out

    def ratio(self, weights: Tensor, old: Tensor) -> Tensor:
        """The sum divided entry by entry by `weights`, with the dtype of `old`; where they are 0, `old`.

        weights: float64, broadcastable to the shape of `old`.
        """
        owned = weights > 0
        quotient = self.view(old).div_(weights.where(owned, torch.ones_like(weights)))
        if not _inexact(old):
            quotient.round_()
        return torch.where(owned, quotient.to(old.dtype), old)

    def view(self, like: Tensor) -> Tensor:
        """The running sum in the shape of `like`, to add to parts of it; zero before the first addition."""
        if not self._started:
            self._sum.zero_()
            self._started = True
        return self._sum.view(like.shape)

    def _make_buffers(self, like: Tensor) -> None:
        wide, kept = _wide(like), self._buffers
        if kept.dtype != wide or kept.device != like.device or kept.shape[1] < min(CHUNK, like.numel()):
            self._buffers = torch.empty(2, min(CHUNK, like.numel()), dtype=wide, device=like.device)

    def _add(self, total: Tensor, part: Tensor, weight: float, started: bool) -> None:
        wide = self._buffers[0, : len(part)].copy_(part)
        if started:
            total.add_(wide, alpha=weight)
        else:
            torch.mul(wide, weight, out=total)

    def _divide(self, total: Tensor, weight: float, into: Tensor) -> None:
        quotient = torch.div(total, weight, out=self._buffers[0, : len(into)])
        into.copy_(quotient if _inexact(into) else quotient.round_())


def _wide(like: Tensor) -> torch.dtype:
    return torch.complex128 if like.is_complex() else torch.float64


def _inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _chunks(flat: Tensor) -> tuple[Tensor, ...]:
    return (flat,) if flat.numel() <= CHUNK else torch.split(flat, CHUNK)
