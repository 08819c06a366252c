"""Outputs of a two-tower network with adapters, made of given logits."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.core import Batch


def out(image: Tensor | None = None, text: Tensor | None = None, *, top_k: int = 2) -> dict[str, Tensor]:
    """image [layers, B, E], text [layers, S, E]: logits; the gates are softmaxes over the k largest."""
    found = {"logits": torch.zeros(1, 1), "shown": torch.arange(text.shape[1] if text is not None else 1)}
    for name, logits in (("image", image), ("text", text)):
        if logits is not None:
            kept = logits.topk(min(top_k, logits.shape[2]), 2)
            gates = torch.zeros_like(logits).scatter(2, kept.indices, kept.values.softmax(2))
            found |= {f"{name}_routing": logits, f"{name}_gates": gates}
    return found


def batch(labels: list[int]) -> Batch:
    return Batch(torch.empty(0), torch.tensor(labels), torch.empty(0))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Logits in double precision with a gradient."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64).requires_grad_()
