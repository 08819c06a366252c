"""How often one example uses each weight of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


@torch.no_grad()
def output_positions(module: nn.Module, input_shape: Sequence[int]) -> dict[str, int]:
    """Name of a layer's weight -> positions of its output [1, channels, ...], 1 for a linear layer's.

    Counted in one forward pass in evaluation mode, on zeros of the shape of one example; layers that it does not reach
    are left out. The weight of a convolution or linear layer takes as many multiply-adds per entry.
    """
    found: dict[str, int] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda layer, inputs, out: found.update({f"{name}.weight" if name else "weight": out[0, 0].numel()})

    layers = [
        (name, part) for name, part in module.named_modules() if isinstance(getattr(part, "weight", None), Tensor)
    ]
    hooks = [part.register_forward_hook(note(name)) for name, part in layers]
    was_training = module.training
    try:
        module.eval()(torch.zeros(1, *input_shape, device=next(module.parameters()).device))
    finally:
        module.train(was_training)
        for hook in hooks:
            hook.remove()
    return found
