"""Experts that no token has reached yet must not move: weight decay and transforms would move them all the same.

All clients' unrouted experts would drift in one direction, which looks like agreement between clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedloom.core.moe import Slice
from fedloom.core.tree import Tensors


class IdleExperts:
    """The experts of a network that have had no gradient so far in this piece of local training.

    experts: of the network, each one's slices. live: its trainable parameters. start: their values at the start.
    """

    def __init__(self, experts: Sequence[tuple[Slice, ...]], live: Mapping[str, Tensor], start: Tensors):
        held = [tuple(part for part in expert if part.name in live) for expert in experts]
        self.idle: list[tuple[Slice, ...]] = [expert for expert in held if expert]
        self.live, self.start = live, start

    @torch.no_grad()
    def note(self, grads: Tensors) -> None:
        """Forget those that have a gradient now; one wait for the device while there are idle ones, none later."""
        moving = [(e, part) for e, expert in enumerate(self.idle) for part in expert if part.name in grads]
        if moving:
            touched = torch.stack([part.of(grads).any() for _, part in moving]).tolist()
            awake = {e for (e, _), flag in zip(moving, touched, strict=True) if flag}
            self.idle = [expert for e, expert in enumerate(self.idle) if e not in awake]

    @torch.no_grad()
    def restore(self, moving: Tensors) -> None:
        """Give the idle ones the values that they had at the start; parameters that do not move have them."""
        for expert in self.idle:
            for part in expert:
                if part.name in moving:
                    part.of(self.live).copy_(part.of(self.start))
