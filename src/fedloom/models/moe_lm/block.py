"""A mixture-of-experts block of stacked feed-forward experts.

Source: Fedus et al., "Switch Transformers" (JMLR 2022), eqs. (1)-(2), for one expert per token; no capacity, so no
token is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.errors import ConfigError, pick
from fedloom.core.moe import MoELayer
from fedloom.models.checkpointing import set_checkpointing
from fedloom.models.moe_lm.layers import find_layers

Combine = Callable[[Tensor], Tensor]


def probability(top: Tensor) -> Tensor:
    """The gate's own probabilities, as in Switch Transformers: the output shrinks where the gate is unsure."""
    return top


def renormalised(top: Tensor) -> Tensor:
    """Divided by their sum over the chosen experts; a single one has 1, and its gate no gradient from the task."""
    return top / top.sum(1, keepdim=True)


def straight_through(top: Tensor) -> Tensor:
    """Values as `renormalised`; the gradient is that of log p, so the gate learns and the output is not scaled."""
    return renormalised(top.detach()) * (top / top.detach())


COMBINES: dict[str, Combine] = {
    "probability": probability,
    "renormalised": renormalised,
    "straight_through": straight_through,
}


class Router(nn.Module):
    """A linear gate without bias; softmax over experts in fp32."""

    def __init__(self, hidden: int, experts: int, top_k: int, combine: Combine):
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ConfigError(f"top_k must be between 1 and the number of experts, {experts}, got {top_k}")
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        nn.init.normal_(self.weight, std=0.02)
        self.top_k, self.num_experts, self.combine = top_k, experts, combine

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[tokens, hidden] -> logits [tokens, experts], weights and expert ids [tokens, top_k]."""
        logits = F.linear(hidden, self.weight)
        top, chosen = logits.softmax(1, dtype=torch.float32).topk(self.top_k, dim=1)
        return logits, self.combine(top).to(hidden.dtype), chosen


class Experts(nn.Module):
    """Two linear layers per expert, stacked: `up` [E, inner, H], `down` [E, H, inner], with biases."""

    def __init__(self, hidden: int, inner: int, experts: int, act: Callable[[Tensor], Tensor]):
        super().__init__()
        self.up, self.up_bias = _linear(experts, inner, hidden)
        self.down, self.down_bias = _linear(experts, hidden, inner)
        self.act = act

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[tokens, hidden], expert ids and weights [tokens, k] -> [tokens, hidden]."""
        out = torch.zeros_like(hidden)
        for expert in range(len(self.up)):
            tokens, rank = (chosen == expert).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            inner = self.act(F.linear(hidden[tokens], self.up[expert], self.up_bias[expert]))
            found = F.linear(inner, self.down[expert], self.down_bias[expert])
            out = out.index_add(0, tokens, (found * weights[tokens, rank, None]).to(out.dtype))
        return out


class MoEBlock(nn.Module):
    """`router` and `experts` on the last dimension of its input.

    combine: what weighs the chosen experts, a name of `COMBINES`.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        top_k: int = 1,
        combine: str = "straight_through",
        act: Callable[[Tensor], Tensor] = F.relu,
    ):
        super().__init__()
        self.router = Router(hidden, experts, top_k, pick("combine", combine, COMBINES))
        self.experts = Experts(hidden, inner, experts, act)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> the same shape."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        _, weights, chosen = self.router(flat)
        return self.experts(flat, chosen, weights).view(hidden.shape)


class MoEMlp(nn.Module):
    """Vectors or images: a linear layer, then blocks with residual connections; an example is one token.

    width: of the features. inner: of each expert.
    """

    memory_format = "contiguous"

    def __init__(
        self,
        input_shape: Sequence[int],
        width: int = 32,
        inner: int = 64,
        experts: int = 4,
        top_k: int = 1,
        layers: int = 1,
    ):
        super().__init__()
        for option, value in {"width": width, "inner": inner, "experts": experts, "layers": layers}.items():
            if value < 1:
                raise ConfigError(f"moe_mlp: {option} must be at least 1, got {value}")
        self.input = nn.Linear(math.prod(input_shape), width)
        self.blocks = nn.ModuleList(MoEBlock(width, inner, experts, top_k) for _ in range(layers))
        self.num_features = width

    @property
    def moe_layers(self) -> tuple[MoELayer, ...]:
        """The blocks; see `fedloom.core.moe`."""
        return find_layers(self)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of each block in the backward pass."""
        set_checkpointing(self.blocks, enable)

    def forward(self, x: Tensor) -> Tensor:
        """Features [batch, width] of inputs [batch, ...]."""
        hidden = F.relu(self.input(x.flatten(1)))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


def _linear(experts: int, rows: int, columns: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Weights and biases with the initial values of `nn.Linear`, each expert its own."""
    layers = [nn.Linear(columns, rows) for _ in range(experts)]
    weight = torch.stack([layer.weight.detach() for layer in layers])
    return nn.Parameter(weight), nn.Parameter(torch.stack([layer.bias.detach() for layer in layers]))
