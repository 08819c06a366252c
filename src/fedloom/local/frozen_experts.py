"""Experts that must not move while the rest of their layer trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from fedloom.core.errors import ConfigError


@contextmanager
def frozen_experts(module: nn.Module, frozen: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside the block the frozen entries of stacked parameters get a gradient of zero.

    frozen: name -> bool [experts], of parameters [experts, ...] that require gradients. The training loop then takes
    the experts for idle ones and holds them still, weight decay included (`fedloom.local.idle_experts`).
    Raises `ConfigError` for a name that the network does not have.
    """
    params = dict(module.named_parameters())
    if unknown := sorted(frozen.keys() - params.keys()):
        raise ConfigError(f"{type(module).__name__} has no parameter '{unknown[0]}' to freeze experts of")
    with ExitStack() as stack:
        for name, mask in frozen.items():
            held = mask.to(params[name].device).view(-1, *[1] * (params[name].dim() - 1))
            handle = params[name].register_hook(lambda grad, held=held: grad.masked_fill(held, 0))  # type: ignore[no-untyped-call]
            stack.callback(handle.remove)
        yield
