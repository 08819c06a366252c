"""Inner products of what clients changed in an expert, chunk by chunk: no client's update is ever held whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

BLOCK = 1 << 21  # entries of the buffer, all vectors together: 8 MB in fp32
SPAN = 8192  # entries that one matrix product adds up in fp32; sums over spans are in float64
SEED = 0  # of the random signs, the same on every server

Change = Callable[[Tensor], Tensor]


def unchanged(update: Tensor) -> Tensor:
    """The update as it is."""
    return update


class Gram:
    """Sums up G_ij = <f(v_i - base), f(v_j - base)> over tensors.

    change: f, entry by entry. sketch: r > 0 takes the products of random projections to r numbers instead: every entry
    is added with a random sign to the number at its position modulo r, which keeps products in expectation, with a
    relative error of about 1 / sqrt(r) of the norms. Differences are in float64, of half precision in fp32.
    """

    def __init__(self, change: Change = unchanged, sketch: int = 0):
        self.change, self.sketch = change, sketch
        self._buffer = torch.empty(0)

    @torch.no_grad()
    def __call__(self, values: Sequence[Sequence[Tensor]], bases: Sequence[Tensor]) -> Tensor:
        """The products [C, C] in float64, summed over tensors.

        values: per tensor, that of each of the C vectors, all in the shape of the tensor's base.
        """
        count = len(values[0])
        width = max(self.sketch, 1)
        total = torch.zeros(count, width if self.sketch else count, dtype=torch.float64)
        signs = torch.Generator().manual_seed(SEED)
        for tensors, base in zip(values, bases, strict=True):
            flat, origin = [tensor.reshape(-1) for tensor in tensors], base.reshape(-1)
            step = max(SPAN, BLOCK // count // SPAN * SPAN)
            for at in range(0, len(origin), step):
                updates = self.change(self._updates(flat, origin, at, min(step, len(origin) - at)))
                total += _fold(updates, width, signs) if self.sketch else _products(updates)
        found = total @ total.T if self.sketch else total
        return (found + found.T) / 2

    def _updates(self, values: Sequence[Tensor], base: Tensor, at: int, width: int) -> Tensor:
        wide = torch.float64 if base.dtype in (torch.float32, torch.float64) else torch.float32
        size = (len(values) + 1) * width
        if self._buffer.dtype != wide or self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=wide)
        rows = self._buffer[:size].view(len(values) + 1, width)
        for row, tensor in zip(rows, (*values, base), strict=True):
            row.copy_(tensor[at : at + width])
        return rows[:-1].sub_(rows[-1])


def _products(rows: Tensor) -> Tensor:
    """rows @ rows.T in float64, a span at a time."""
    count, width = rows.shape
    whole = width // SPAN * SPAN
    tail = rows[:, whole:]
    found = (tail @ tail.T).double()
    if whole:
        spans = rows[:, :whole].view(count, -1, SPAN).transpose(0, 1)
        found += torch.bmm(spans, spans.transpose(1, 2)).double().sum(0)
    return found


def _fold(rows: Tensor, width: int, signs: torch.Generator) -> Tensor:
    """Rows [C, n] with random signs, added up over positions that agree modulo `width`: [C, width] in float64."""
    count, length = rows.shape
    sign = torch.randint(0, 2, (length,), generator=signs, dtype=torch.int8).mul_(2).sub_(1)
    whole = length // width * width
    signed = rows * sign
    found = signed[:, :whole].view(count, -1, width).sum(1, dtype=torch.float64)
    found[:, : length - whole] += signed[:, whole:]
    return found
