"""Which client gets which of a list of rates: shares of a network's width, say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fedloom.core.context import Context
from fedloom.core.seeds import generator

Assignment = Callable[[Sequence[float], Context], float]


def fixed(rates: Sequence[float], ctx: Context) -> float:
    """One after the other by client id: client k has rate k modulo their number, in every round."""
    return rates[(ctx.client or 0) % len(rates)]


def dynamic(rates: Sequence[float], ctx: Context) -> float:
    """Drawn for every client in every round, all equally likely; server and client draw the same."""
    return rates[int(torch.randint(len(rates), (), generator=generator(ctx.seed_for("rate"))))]


ASSIGNMENTS: dict[str, Assignment] = {"fixed": fixed, "dynamic": dynamic}
