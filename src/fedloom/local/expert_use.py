"""How much the experts contribute to what a network makes of a client's data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.batches import Batches
from fedloom.core.context import Context
from fedloom.core.moe import MoELayer, inputs_recorded, moe_layers


def expert_importance(ctx: Context, data: Batches, batch_size: int = 32) -> Tensor:
    """I(e) = sum_t d(e|t) p(e|t) ||f_e(h_t)||, divided by its sum over the experts of a layer: float32 [L, E].

    Over the tokens that are no padding, for the bound network in evaluation mode, which is left as it was. f_e(h) is
    what expert e makes of h, not weighed by the gate. A layer that no token reached has zeros.
    Source: Fang et al., HFedMoE (arXiv 2601.00583), for the idea of weighing experts by their contribution.
    """
    module = ctx.net.module
    layers = moe_layers(module)
    total = torch.zeros(len(layers), layers[0].num_experts, dtype=torch.float64)
    with ctx.evaluating(), inputs_recorded(module):
        for batch in data.epoch(batch_size=batch_size, purpose="importance", shuffle=False):
            out = ctx.apply(batch.x)
            used = out["dispatched"] & out["token_mask"][None, :, None]
            for at, layer in enumerate(layers):
                for expert in used[at].any(0).nonzero().flatten().tolist():
                    tokens = used[at, :, expert].nonzero().flatten()
                    made = expert_outputs(module, layer, expert, out["expert_inputs"][at, tokens])
                    norms = torch.linalg.vector_norm(made.float(), dim=1)
                    total[at, expert] += (out["routing"][at, tokens, expert].exp() * norms).double().sum().cpu()
    return (total / total.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)).float()


def expert_outputs(module: nn.Module, layer: MoELayer, expert: int, hidden: Tensor) -> Tensor:
    """f_e of hidden [tokens, H], in the dtype of the experts: [tokens, H].

    Experts are modules of their own, or one module that is called with hidden, ids and weights [tokens, k].
    """
    container: Any = module.get_submodule(f"{layer.name}.experts" if layer.name else "experts")
    hidden = hidden.to(next(container.parameters()).dtype)
    if isinstance(container, nn.ModuleDict | nn.ModuleList):
        one: Tensor = list(container.children())[expert](hidden)
        return one
    ids = torch.full((len(hidden), 1), expert, dtype=torch.int64, device=hidden.device)
    stacked: Tensor = container(hidden, ids, torch.ones_like(hidden[:, :1]))
    return stacked
