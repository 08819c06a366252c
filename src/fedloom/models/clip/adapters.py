"""Adapters beside a block's perceptron: experts that a router chooses per sample, and shared ones that all pass.

y = sum_{e in top-k} g_e A_e(x) + mean_s S_s(x), with A(x) = scale (W_up drop(relu(W_down x + b_down)) + b_up), S alike.
The router scores a sample by one of its tokens h: z = W h, while it learns + eps (softplus(W_noise h) + 0.01) with
eps ~ N(0, 1) per expert. At the start W_up and all biases are zero, so that the block is as it was.

Source: Guo et al., "Fed-Duet" (ICLR 2026), whose blocks are those of Yu et al., "Boosting Continual Learning of
Vision-Language Models via Mixture-of-Experts Adapters" (CVPR 2024), with a shared adapter.

Where they are silent: one gate vector serves the whole sequence of a sample. Noise is drawn only while the router is
trained, dropout only while its adapters are: what a phase of training holds still behaves as in evaluation. Experts of
equal score are taken by index. A softmax over all experts, cut to the chosen ones and divided by its sum, equals one
over the chosen ones and is no form of its own. Losses on routing are for routers: while a router is held still, what it
tells has no gradient, although a prompt in front of it may learn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.errors import ConfigError, pick
from fedloom.core.moe import Slice
from fedloom.core.seeds import seeded
from fedloom.models.clip.towers import Towers

LEAST_NOISE = 0.01
Gate = Callable[[Tensor, Tensor], Tensor]


def selected(scores: Tensor, chosen: Tensor) -> Tensor:
    """Softmax over the scores of the chosen experts alone; scores [N, E], chosen [N, k] -> [N, k]."""
    return scores.gather(1, chosen).softmax(1)


def masked(scores: Tensor, chosen: Tensor) -> Tensor:
    """Softmax over all experts, of which the chosen ones' part is used: it sums to less than 1."""
    return scores.softmax(1).gather(1, chosen)


GATES: dict[str, Gate] = {"selected": selected, "masked": masked}
Where = Literal["both", "vision", "text"]
TOWERS: dict[str, tuple[str, ...]] = {"both": ("vision", "text"), "vision": ("vision",), "text": ("text",)}


@dataclass(frozen=True)
class Adapters:
    """What stands in a block; see the module.

    experts: E. top_k: experts per sample, at most E count. bottleneck: hidden units of an expert. dropout: of hidden
    units. shared: number of shared adapters. shared_width: hidden units of one, None for bottleneck * experts.
    router_std: deviation of W at the start, 0 for zeros. noise: whether W_noise exists; it starts at zero. gate_norm:
    a key of `GATES`. Raises `ConfigError` for values that no layer can have.
    """

    experts: int = 8
    top_k: int = 2
    bottleneck: int = 64
    scale: float = 0.3
    dropout: float = 0.4
    shared: int = 1
    shared_width: int | None = None
    router_std: float = 0.02
    noise: bool = True
    gate_norm: str = "selected"

    def __post_init__(self) -> None:
        pick("gate_norm", self.gate_norm, GATES)
        width = 1 if self.shared_width is None else self.shared_width
        least = {"experts": 1, "top_k": 1, "bottleneck": 1, "shared": 0}
        values = {name: getattr(self, name) for name in least} | {"shared_width": width}
        for name, value in values.items():
            if value < least.get(name, 1):
                raise ConfigError(f"adapters: {name} must be at least {least.get(name, 1)}, got {value}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"adapters: dropout must be at least 0 and below 1, got {self.dropout}")
        for name, value in (("scale", self.scale), ("router_std", self.router_std)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"adapters: {name} must be a finite number of at least 0, got {value}")


class Routing(NamedTuple):
    """logits [N, E]: scores without noise. gates [N, E]: 0 for experts that were not chosen."""

    logits: Tensor
    gates: Tensor


class Bottlenecks(nn.Module):
    """Adapters of one shape, stacked: down_weight [n, hidden, width], up_weight [n, width, hidden], and biases.

    down_weight is uniform in +-1 / sqrt(width), Kaiming with a = sqrt 5, by torch's own generator; all else is zero.
    """

    def __init__(self, count: int, width: int, hidden: int, scale: float, dropout: float):
        super().__init__()
        self.scale, self.dropout = scale, dropout
        bound = width**-0.5
        self.down_weight = nn.Parameter(torch.empty(count, hidden, width).uniform_(-bound, bound))
        self.down_bias = nn.Parameter(torch.zeros(count, hidden))
        self.up_weight = nn.Parameter(torch.zeros(count, width, hidden))
        self.up_bias = nn.Parameter(torch.zeros(count, width))

    def mean(self, x: Tensor) -> Tensor:
        """The mean of all adapters, as one of hidden width n * hidden; [..., width] -> the same."""
        count = len(self.down_weight)
        hidden = self._hidden(x, self.down_weight.flatten(0, 1), self.down_bias.flatten())
        up = self.up_weight.transpose(0, 1).flatten(1)
        return F.linear(hidden, up, self.up_bias.sum(0)) * (self.scale / count)

    def routed(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        """sum_j gates[:, j] A_{chosen[:, j]}(x); x [N, L, width], gates and chosen [N, k] -> [N, L, width].

        Samples are sorted by expert and each expert computes its own, so that others cost nothing and get no gradient;
        on a GPU their numbers are waited for once. In a graph that is exported every expert computes all samples.
        """
        if torch.compiler.is_exporting():
            return self._by_all(x, gates, chosen)
        picked = chosen.flatten()
        order = picked.argsort(stable=True)
        counts = picked.bincount(minlength=len(self.down_weight)).tolist()
        rows = order // chosen.shape[1]
        factors = (self.scale * gates.flatten()[order]).view(-1, 1, 1)
        parts = (torch.split(tensor, counts) for tensor in (x.index_select(0, rows), rows, factors))
        total = torch.zeros_like(x)
        for part, place, factor, (down, down_bias, up, up_bias) in zip(*parts, self._each(), strict=True):
            if len(place):
                hidden = self._hidden(part, down, down_bias)
                added = F.linear(hidden * factor, up) + factor * up_bias
                total.index_add_(0, place, added.to(total.dtype))
        return total

    def _by_all(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        weights = gates.new_zeros(x.shape[0], len(self.down_weight)).scatter(1, chosen, self.scale * gates)
        total = torch.zeros_like(x)
        for weight, (down, down_bias, up, up_bias) in zip(weights.unbind(1), self._each(), strict=True):
            total = total + weight.view(-1, 1, 1) * F.linear(self._hidden(x, down, down_bias), up, up_bias)
        return total

    def _hidden(self, x: Tensor, down: Tensor, bias: Tensor) -> Tensor:
        hidden = F.relu(F.linear(x, down, bias))
        return F.dropout(hidden, self.dropout, self.training and self.down_weight.requires_grad)

    def _each(self) -> Iterator[tuple[Tensor, ...]]:
        tensors = (self.down_weight, self.down_bias, self.up_weight, self.up_bias)
        return zip(*(tensor.unbind() for tensor in tensors), strict=True)


class Router(nn.Module):
    """Scores of the experts for a token, with and without the noise of training; in the parameters' precision."""

    def __init__(self, experts: int, width: int, std: float, noise: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width) * std)
        self.noise = nn.Parameter(torch.zeros(experts, width)) if noise else None

    def forward(self, token: Tensor) -> tuple[Tensor, Tensor]:
        """token [N, width] -> clean logits [N, E], and what experts are chosen by [N, E]."""
        with torch.autocast(token.device.type, enabled=False):
            token = token.to(self.weight.dtype)
            clean = F.linear(token, self.weight)
            if self.noise is None or not (self.training and self.weight.requires_grad):
                return clean, clean
            spread = F.softplus(F.linear(token, self.noise)) + LEAST_NOISE
            return clean, clean + torch.randn_like(clean) * spread


class AdapterLayer(nn.Module):
    """A `towers.Layer`: its tensors are named `local.*` (the experts), `shared.*` and `router.*`."""

    def __init__(self, width: int, options: Adapters):
        super().__init__()
        self.top_k, self.gates = min(options.top_k, options.experts), GATES[options.gate_norm]
        shape = (options.scale, options.dropout)
        self.router = Router(options.experts, width, options.router_std, options.noise)
        self.local = Bottlenecks(options.experts, width, options.bottleneck, *shape)
        inner = options.shared_width or options.bottleneck * options.experts
        self.shared = Bottlenecks(options.shared, width, inner, *shape) if options.shared else None

    @property
    def expert_parts(self) -> tuple[tuple[Slice, ...], ...]:
        """The slices of each expert; see `fedloom.core.moe.expert_parts`."""
        names = [f"local.{name}" for name, _ in self.local.named_parameters()]
        count = len(self.local.down_weight)
        return tuple(tuple(Slice(name, (slice(e, e + 1),)) for name in names) for e in range(count))

    def forward(self, x: Tensor, token: Tensor) -> tuple[Tensor, Routing]:
        """x [N, L, width], token [N, width] -> what is added [N, L, width], and the routing."""
        clean, scores = self.router(token)
        chosen = _largest(scores, self.top_k)
        gates = self.gates(scores, chosen)
        added = self.local.routed(x, gates, chosen)
        if self.shared is not None:
            added = added + self.shared.mean(x)
        told = Routing(clean, torch.zeros_like(scores).scatter(1, chosen, gates))
        return added, told if self.router.weight.requires_grad else Routing(told.logits.detach(), told.gates.detach())


def _largest(scores: Tensor, count: int) -> Tensor:
    """Indices [N, count] of the largest scores [N, E], the lower one first among equals."""
    if torch.compiler.is_exporting():  # ONNX has no stable sort, and its top-k is defined so
        return scores.topk(count, dim=1).indices
    return scores.argsort(dim=1, descending=True, stable=True)[:, :count]


Stack = list[nn.Module | None]


def adapter_layers(
    towers: Towers, options: Adapters, seed: int, *, where: Where = "both", last: int = 0
) -> tuple[Stack, Stack]:
    """Layers for the blocks of the image tower and of the text tower, None for a block without.

    where: the towers that get some. last: only that many last blocks of each, all where a tower has fewer; 0 for all.
    Every layer draws from a stream of its own, named by the seed, its tower and its block.
    """
    if last < 0:
        raise ConfigError(f"the number of last blocks with adapters must be at least 0, which means all, got {last}")
    there = pick("towers with adapters", where, TOWERS)
    sizes = {
        "vision": (towers.image_width, len(towers.image_blocks)),
        "text": (towers.text_width, len(towers.text_blocks)),
    }
    found: dict[str, Stack] = {}
    for tower, (width, count) in sizes.items():
        first = max(count - last, 0) if last else 0
        found[tower] = [
            _drawn(width, options, seed, tower, k) if tower in there and k >= first else None for k in range(count)
        ]
    return found["vision"], found["text"]


def _drawn(width: int, options: Adapters, seed: int, tower: str, block: int) -> AdapterLayer:
    with seeded(seed, "adapters", tower, block):
        return AdapterLayer(width, options)
