"""Training a part of a network while the rest stays as it is, statistics and dropout included."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def resting(module: nn.Module, moving: Collection[str]) -> Iterator[None]:
    """Inside the block, submodules that hold none of the moving parameters (by name) run in evaluation mode.

    The training loop's phases hold the values of other parameters still; this adds batch statistics and dropout. It
    works by a forward pre-hook, so that it lasts although the loop switches the whole network to training mode.
    """
    live = {id(param) for name, param in module.named_parameters() if name in moving}
    still = [m for m in module.modules() if _parameters(m) and live.isdisjoint(_parameters(m))]

    def rest(*_: object) -> None:
        for part in still:
            part.eval()

    handle = module.register_forward_pre_hook(rest)
    try:
        yield
    finally:
        handle.remove()


def _parameters(module: nn.Module) -> set[int]:
    return {id(param) for param in module.parameters()}
