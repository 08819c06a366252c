"""Tiny random language models with experts, one of each supported architecture, and texts for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.core.moe import MoELayer
from fedloom.core.tree import Tensors
from fedloom.models.spec import NetworkSpec

VOCAB, LENGTH, CLASSES, OPTIONS = 50, 12, 3, 4
DECODERS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3")
ARCHITECTURES = ("switch_encoder", *DECODERS)
TINY = {"hidden": 16, "inner": 24, "layers": 4, "heads": 4, "experts": 4}


def text_spec(
    architecture: str, *, shape: Sequence[int] = (LENGTH,), classes: int = CLASSES, **options: Any
) -> NetworkSpec:
    """A network for texts of up to 12 tokens; two mixture-of-experts layers."""
    encoder = architecture == "switch_encoder"
    chosen = {**TINY, "layers": 4 if encoder else 2, **({} if encoder else {"architecture": architecture}), **options}
    name = architecture if encoder else "moe_decoder"
    return NetworkSpec(name, classes, tuple(shape), options=chosen, vocab_size=VOCAB)


def choice_spec(architecture: str, **options: Any) -> NetworkSpec:
    """A network for questions with four options."""
    return text_spec(architecture, shape=(2, OPTIONS, LENGTH), classes=OPTIONS, **options)


def texts(lengths: Sequence[int] = (12, 7, 1), width: int = LENGTH, seed: int = 0) -> dict[str, Tensor]:
    """Token ids of texts of these lengths, padded to `width` with id 0; the same tokens for every width."""
    ids = torch.randint(1, VOCAB, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    padded = torch.zeros(len(lengths), width, dtype=torch.int64)
    padded[:, : max(lengths)] = ids
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return {"input_ids": padded * mask, "attention_mask": mask}


def questions(count: int = 3, seed: int = 0) -> dict[str, Tensor]:
    """Questions of three tokens with four options each, of 1 to 6 tokens and 4 characters per token."""
    sizes = torch.randint(1, 7, (count, OPTIONS), generator=torch.Generator().manual_seed(seed))
    flat = texts([3 + n for n in sizes.flatten().tolist()], seed=seed)
    x = {name: tensor.view(count, OPTIONS, LENGTH) for name, tensor in flat.items()}
    scored = x["attention_mask"] & (torch.arange(LENGTH) >= 3)
    return {**x, "scored": scored * 4 * sizes.unsqueeze(2)}


def permuted(tree: Tensors, layers: Sequence[MoELayer], orders: Tensor) -> dict[str, Tensor]:
    """The tree with its experts and gate rows in another order: the expert in place e is orders[l, e] of the tree.

    orders: int64 [L, E]. A network computes the same function with it; tensors that it leaves alone are shared.
    """
    found = dict(tree)
    for layer, order in zip(layers, orders.tolist(), strict=True):
        found |= {name: tree[name][order] for name in layer.gate}
        found |= {name: tree[name].clone() for name in layer.expert_names}
        for place, source in enumerate(order):
            for into, part in zip(layer.experts[place], layer.experts[source], strict=True):
                into.of(found).copy_(part.of(tree))
    return found
