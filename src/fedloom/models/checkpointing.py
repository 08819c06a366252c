"""Activation checkpointing per block that leaves the buffers of a block as one forward pass leaves them.

Non-reentrant checkpointing runs the forward of a block again during backward. That second pass would update the
running statistics of batch normalisation twice, so it runs on copies of the buffers which are then dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn


def set_checkpointing(blocks: Iterable[nn.Module], enable: bool) -> None:
    """Switch activation checkpointing of every block on or off; without gradient a block runs as usual."""
    for block in blocks:
        if enable:
            block.forward = MethodType(_checkpointed, block)
        else:
            block.__dict__.pop("forward", None)


def nested_blocks(module: nn.Module) -> list[nn.Module]:
    """Blocks of a foreign network: the composite members of its outermost `Sequential`s and `ModuleList`s."""
    found: list[nn.Module] = []
    for child in module.children():
        is_list = isinstance(child, nn.Sequential | nn.ModuleList)
        found += _members(child) if is_list else nested_blocks(child)
    return found


def _members(container: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for member in container.children():
        if type(member) in (nn.Sequential, nn.ModuleList):
            found += _members(member)
        elif next(member.children(), None) is not None:
            found.append(member)
    return found


def _checkpointed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _copied_buffers(block)

    forward = type(block).forward
    if not torch.is_grad_enabled():
        return forward(block, *args, **kwargs)
    return checkpoint(forward, block, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextmanager
def _copied_buffers(block: nn.Module) -> Iterator[None]:
    kept = [(owner, dict(owner._buffers)) for owner in block.modules() if owner._buffers]
    for owner, buffers in kept:
        owner._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
    try:
        yield
    finally:
        for owner, buffers in kept:
            owner._buffers.update(buffers)
