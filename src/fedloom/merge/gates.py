"""How the gates of mixture-of-experts layers are merged.

For a linear softmax gate and a given hidden state, the mean of gate matrices with one weight per client is exactly the
normalised geometric mean of the clients' routing distributions (a logarithmic opinion pool). Weights per row are not:
softmax ignores a vector that is added to all rows, and such means do not, unless the rows are centred.
Source: Fang et al., FedAlign-MoE (arXiv 2603.21276), which asks for aggregation of gates "in distribution space".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedloom.core.errors import PayloadError
from fedloom.core.moe import MoELayer
from fedloom.core.payload import is_finite
from fedloom.core.tree import Tensors
from fedloom.merge.mean import weighted_mean
from fedloom.merge.parts import Selected
from fedloom.merge.sources import Source, blame, sources

STEPS = 50  # of L-BFGS


def pooled_gates(
    trees: Sequence[Tensors],
    weights: Tensor,
    old: Tensors,
    layers: Sequence[MoELayer],
    *,
    who: Sequence[object] | None = None,
) -> dict[str, Tensor]:
    """W <- sum_i w_i W_i, with one weight per client and layer [C, L]; the gates' names that are in `old`."""
    merged: dict[str, Tensor] = {}
    for at, layer in enumerate(layers):
        part = _gate(old, layer)
        merged |= weighted_mean([Selected(tree, part) for tree in trees], weights[:, at].tolist(), part, who=who)
    return merged


@torch.no_grad()
def row_weighted_gates(
    trees: Sequence[Tensors],
    weights: Tensor,
    sizes: Tensor,
    old: Tensors,
    layers: Sequence[MoELayer],
    *,
    who: Sequence[object] | None = None,
) -> dict[str, Tensor]:
    """Row e <- sum_i w_i(e) (W_i[e] - mean row of W_i) + sum_i (n_i / N) mean row of W_i.

    weights: [C, L, E], summing to 1 over clients. sizes: n [C]. Adding one vector to all rows of a client's gate thus
    moves all rows of the result alike, which changes no probability of a softmax. Rows of a sigmoid router, whose
    scores a common vector does change, are not centred: row e <- sum_i w_i(e) W_i[e].
    """
    clients = sources(trees, sizes.tolist(), old, who)
    merged: dict[str, Tensor] = {}
    for at, layer in enumerate(layers):
        for name, tensor in _gate(old, layer).items():
            owners = [client for client in clients if name in client.names]
            if not owners:
                merged[name] = tensor
                continue
            merged[name] = _row_weighted(name, tensor, owners, weights[:, at], centred=layer.score == "softmax")
    return merged


def _row_weighted(name: str, old: Tensor, owners: Sequence[Source], weights: Tensor, *, centred: bool) -> Tensor:
    total = torch.zeros(old.shape, dtype=torch.float64)
    count = sum(client.weight for client in owners)
    for client in owners:
        value = client.read_like(name, old).double().cpu()
        mean = value.mean(0, keepdim=True) if centred else torch.zeros_like(value[:1])
        rows = weights[client.position].view(-1, *(1,) * (old.dim() - 1))
        total += rows * (value - mean) + (client.weight / count) * mean
    merged = total.to(old)
    if not is_finite(merged):
        raise blame(name, owners)
    return merged


def distilled_gates(
    trees: Sequence[Tensors],
    weights: Tensor,
    statistics: Sequence[Tensors],
    start: Tensors,
    layers: Sequence[MoELayer],
) -> dict[str, Tensor]:
    """Linear gates fitted to q(e|h) = sum_i w_i(e) p_i(e|h), renormalised, on the hidden states that the server has.

    These are the clients' centroids "centroid" [L, E, H], each counting by its tokens "count" [L, E]; zeros stand for
    one that was withheld. The fit minimises KL(q || p) over weight and bias, from the gates in `start` (the pooled
    ones, say), by at most 50 steps of L-BFGS in float64; tensors that are no weight or bias keep their values in
    `start`.
    weights: [C, L, E]. trees: with the gates' parameters. Raises `PayloadError` for a gate that is not linear.
    """
    merged: dict[str, Tensor] = {}
    for at, layer in enumerate(layers):
        part = _gate(start, layer)
        if not part:  # a frozen gate
            continue
        weight, bias = _linear(part, layer)
        points = torch.cat([one["centroid"][at].double() for one in statistics])
        count = torch.cat([one["count"][at].double() for one in statistics]) * points.any(1)
        names = [name for name in (weight, bias) if name is not None]
        goal = torch.zeros(len(points), layer.num_experts, dtype=torch.float64)
        for tree, own in zip(trees, weights[:, at], strict=True):
            goal += own * _probs(points, [tree[name].double().cpu() for name in names], layer.score).exp()
        goal = goal / goal.sum(1, keepdim=True)
        found = _fitted(points, count / count.sum().clamp(min=1), goal, [part[name] for name in names], layer.score)
        merged |= {name: value.to(part[name]) for name, value in zip(names, found, strict=True)}
    return merged


@torch.enable_grad()
def _fitted(points: Tensor, count: Tensor, goal: Tensor, start: Sequence[Tensor], score: str) -> list[Tensor]:
    values = [tensor.detach().double().cpu().clone().requires_grad_() for tensor in start]
    search = torch.optim.LBFGS(values, max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        total = -(count[:, None] * goal * _probs(points, values, score)).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    search.step(loss)  # type: ignore[no-untyped-call]
    return [value.detach() for value in values]


def _probs(points: Tensor, gate: Sequence[Tensor], score: str) -> Tensor:
    """log p(e|h) of a linear gate, [points, E]."""
    logits = torch.nn.functional.linear(points, *gate)
    scores = torch.nn.functional.logsigmoid(logits) if score == "sigmoid" else logits
    return scores.log_softmax(1)


def _linear(gate: Tensors, layer: MoELayer) -> tuple[str, str | None]:
    matrices = [name for name, tensor in gate.items() if tensor.dim() == 2]
    vectors = [name for name, tensor in gate.items() if tensor.dim() == 1]
    if len(matrices) != 1 or len(vectors) > 1 or len(matrices) + len(vectors) != len(gate):
        raise PayloadError(
            f"the gate of '{layer.name}' is not linear ({', '.join(gate)}), so it cannot be distilled; set gate_mode "
            "to pooled"
        )
    return matrices[0], vectors[0] if vectors else None


def _gate(tree: Tensors, layer: MoELayer) -> dict[str, Tensor]:
    return {name: tree[name] for name in layer.gate if name in tree}
