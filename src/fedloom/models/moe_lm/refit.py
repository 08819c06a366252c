"""Fitting grafts to what the mixture-of-experts layers of a network do on a client's tokens.

Per layer: the expert that stands best for the whole layer alone, then its second layer by least squares, held near what
it was: min over D of sum_t ||y_t - D a(h_t)||^2 + r ||D - D_0||^2, where y = MoE(h), a(h) is what the second layer
reads (with a constant 1 where it has a bias) and r is `ridge` times the mean of sum_t a(h_t)^2 over the entries of a.
As D_0 is allowed, the squared error never grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedloom.core.batches import Batches
from fedloom.core.context import Context
from fedloom.core.tree import Tensors
from fedloom.models.moe_lm.grafts import GRAFTS, Graft, blocks_watched, expert_tensors

Experts = Sequence[Tensors]  # of one layer
Costs = Callable[[Graft, Experts, Tensor, Tensor, Tensor], Tensor]
Tokens = tuple[Tensor, Tensor, Tensor]  # of one layer: h and y [tokens, H], "dispatched" [tokens, E]


def fp32(expert: Tensors) -> dict[str, Tensor]:
    """The expert in fp32, as the tokens are."""
    return {name: tensor.float() for name, tensor in expert.items()}


def squared_errors(graft: Graft, experts: Experts, hidden: Tensor, output: Tensor, dispatched: Tensor) -> Tensor:
    """sum_t ||y_t - f_e(h_t)||^2 per expert, float64 [E]; f_e is the expert alone, without the gate's weight."""
    return torch.stack([(output - graft.whole(hidden, fp32(expert))).double().square().sum() for expert in experts])


def least_used(graft: Graft, experts: Experts, hidden: Tensor, output: Tensor, dispatched: Tensor) -> Tensor:
    """Minus the number of tokens that each expert processed, float64 [E]."""
    return -dispatched.double().sum(0)


COSTS: Mapping[str, Costs] = {"closest": squared_errors, "most_used": least_used}


def normal_equations(graft: Graft, expert: Tensors, hidden: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """sum_t a a^T [n, n] and sum_t a (y - f(h))^T [n, H], float64."""
    read = graft.inner(hidden, expert).double()
    if "down_bias" in expert:
        read = torch.cat([read, read.new_ones(len(read), 1)], 1)
    return read.T @ read, read.T @ (output - graft.whole(hidden, expert)).double()


def refitted(expert: Tensors, gram: Tensor, cross: Tensor, ridge: float) -> dict[str, Tensor]:
    """The expert with the second layer that solves the normal equations; the first layer stays."""
    held = ridge * gram.diagonal().mean().clamp(min=1e-12)
    move = torch.linalg.solve(gram + held * torch.eye(len(gram), dtype=gram.dtype, device=gram.device), cross).T
    down = expert["down"]
    found = {**expert, "down": (down + move[:, : down.shape[1]]).to(down.dtype)}
    if "down_bias" in expert:
        found["down_bias"] = (expert["down_bias"] + move[:, -1]).to(down.dtype)
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def fitted_grafts(ctx: Context, data: Batches, costs: Costs, ridge: float, bias: float) -> dict[str, Tensor]:
    """Parameters of all grafts of the bound network, whose grafts must be of no effect, fitted to all tokens of `data`.

    costs: what the chosen expert of each layer has least of, the first one of several. bias: b of every gate; w is 0.
    Two passes in evaluation mode; padding does not count.
    """
    module, params = ctx.net.module, {name: p.detach() for name, p in ctx.net.module.named_parameters()}
    grafts: Sequence[Graft] = module.get_submodule(GRAFTS)  # type: ignore[assignment]  # a ModuleList of them
    layers = module.moe_layers
    experts = [[expert_tensors(layer, e, params) for e in range(layer.num_experts)] for layer in layers]
    totals: list[Tensor | float] = [0.0] * len(layers)
    for batch in _tokens(ctx, data):
        totals = [a + costs(g, e, *t) for a, g, e, t in zip(totals, grafts, experts, batch, strict=True)]
    chosen = [fp32(own[int(torch.as_tensor(total).argmin())]) for own, total in zip(experts, totals, strict=True)]
    sums: list[tuple[Tensor, Tensor]] = []
    for batch in _tokens(ctx, data):
        found = [normal_equations(g, e, *t[:2]) for g, e, t in zip(grafts, chosen, batch, strict=True)]
        sums = [(a + c, b + d) for (a, b), (c, d) in zip(sums, found, strict=True)] if sums else found
    tree: dict[str, Tensor] = {}
    for k, (expert, own) in enumerate(zip(chosen, sums, strict=True)):
        gate = {"gate_weight": torch.zeros_like(grafts[k].gate_weight), "gate_bias": own[0].new_tensor(bias)}
        new = {n: t.to(grafts[k].down.dtype) for n, t in {**refitted(expert, *own, ridge), **gate}.items()}
        tree |= {f"{GRAFTS}.{k}.{name}": tensor.detach() for name, tensor in new.items()}
    return tree


def _tokens(ctx: Context, data: Batches) -> Iterator[list[Tokens]]:
    for batch in data.epoch(batch_size=32, purpose="graft", shuffle=False):
        with ctx.evaluating(), blocks_watched(ctx.net.module) as seen:
            out = ctx.apply(batch.x)
        kept = out["token_mask"]
        yield [(h[kept], y[kept], d[kept]) for (h, y), d in zip(seen, out["dispatched"], strict=True)]
