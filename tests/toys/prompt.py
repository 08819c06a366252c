"""A few prompt tensors and a head are trained in front of a frozen encoder; only they travel.

Source: none, it is a test case; the idea is that of Lester et al., "The Power of Scale for Parameter-Efficient
Prompt Tuning" (2021).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedloom.core import Batches, Context, Method, ModelSpec, Payload, Reply, Update
from fedloom.core.seeds import seeded
from fedloom.local import LocalSGD
from fedloom.merge.mean import replies_mean


class Encoder(nn.Module):
    """Frozen: tokens [batch, tokens, 2] -> features [batch, dim], the last token attending to all.

    Batch normalisation and dropout show whether frozen parts stay in evaluation mode.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.position = nn.Parameter(torch.randn(dim))
        self.embed, self.norm, self.drop = nn.Linear(2, dim), nn.BatchNorm1d(dim), nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.position
        attention = torch.softmax(hidden @ hidden[:, -1:].mT / hidden.shape[-1] ** 0.5, dim=1)
        return self.drop(self.norm((attention * hidden).sum(1)))


class Prompted(nn.Module):
    """Prompts [prompts, 2] in front of the input as a token, the frozen encoder, a fixed-width head."""

    class_rows = {"head.weight": 0, "head.bias": 0}

    def __init__(self, prompts: int, num_classes: int, dim: int = 8):
        super().__init__()
        self.encoder = Encoder(dim).requires_grad_(False)
        self.prompts = nn.Parameter(torch.randn(prompts, 2))
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        tokens = torch.cat([self.prompts.expand(len(x), -1, -1), x.unsqueeze(1)], dim=1)
        feats = self.encoder(tokens)
        return {"logits": self.head(feats), "feats": feats}


@dataclass(frozen=True)
class Prompt(Method):
    """FedAvg over what is trainable."""

    local: LocalSGD
    prompts: int = 3

    reveals: ClassVar[Mapping[str, str]] = {"params": "prompts and a head trained on the client's data"}

    def module(self, spec: ModelSpec) -> nn.Module:
        with seeded(spec.seed, "prompted"):
            return Prompted(self.prompts, spec.num_classes)

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        end = self.local(down, data, ctx)
        return Update(state, {"params": end.params}, metrics=end.metrics)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        return {**server, "params": replies_mean(replies, "params", server["params"])}


def prompt(*, local: LocalSGD, prompts: int = 3) -> Prompt:
    """Assemble the method."""
    return Prompt(local, prompts)
