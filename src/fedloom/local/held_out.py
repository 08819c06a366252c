"""Setting examples of a client aside."""

from __future__ import annotations

import torch

from fedloom.core.batches import Batches
from fedloom.core.seeds import generator


def held_out(data: Batches, parts: int, seed: int) -> tuple[Batches, Batches]:
    """The examples without every `parts`-th of them, and those, drawn at random: n - n // parts and n // parts."""
    order = torch.randperm(len(data), generator=generator(seed))
    return data.subset(order[len(data) // parts :]), data.subset(order[: len(data) // parts])
