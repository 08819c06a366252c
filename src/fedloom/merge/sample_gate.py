"""A gate over adapters, trained by the server on features that clients have uploaded.

Source: the public code of MoAFCL (`bear-zd/MoAFCL`; ICMR 2025). g = Linear(width, 512), ReLU, dropout 0.2,
Linear(512, k) on a feature; 500 epochs of SGD with rate 1.5 and batches of 100 on

    L = BCE(g(h), t) + balance * CV^2(sum_b softmax(g(h_b)))

with t the target of the client that h is from. A tree as `fedloom.merge.prompt_gate` makes it.
Decisions: the importances of CV^2 are sums of the softmax over all adapters; of first choices, which the code sums,
they would be counts, and neither these nor its CV^2 of the loads have a gradient. CV^2 is 0 for one adapter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.payload import is_finite
from fedloom.core.seeds import generator
from fedloom.core.tree import Tensors


def gate_logits(tree: Tensors, features: Tensor, kept: Tensor | None = None) -> Tensor:
    """g [n, k] of features [n, width]; kept: factors of the hidden units [n, 512], None without dropout."""
    hidden = F.linear(features, tree["hidden.weight"], tree["hidden.bias"]).relu()
    return F.linear(hidden if kept is None else hidden * kept, tree["out.weight"], tree["out.bias"])


@torch.no_grad()
def choices(tree: Tensors, features: Tensor) -> Tensor:
    """The adapter of each feature [n, width]: int64 [n], the first of equal ones."""
    return gate_logits(tree, features).argmax(-1)


def squared_variation(importance: Tensor) -> Tensor:
    """CV^2 [] of k importances: unbiased variance / (mean^2 + 1e-10); 0 for k = 1."""
    if len(importance) == 1:
        return importance.new_zeros(())
    return importance.var() / (importance.mean().square() + 1e-10)


def gate_loss(logits: Tensor, targets: Tensor, balance: float) -> Tensor:
    """L, a scalar, of logits and targets [batch, k]."""
    fit = F.binary_cross_entropy_with_logits(logits, targets)
    return fit + balance * squared_variation(logits.softmax(-1).sum(0))


def trained(
    tree: Tensors,
    features: Tensor,
    targets: Tensor,
    seed: int,
    *,
    epochs: int = 500,
    lr: float = 1.5,
    batch_size: int = 100,
    dropout: float = 0.2,
    balance: float = 0.02,
) -> dict[str, Tensor]:
    """The gate after SGD on features [n, width] with targets [n, k]; `tree` where there are none.

    seed: of order and dropout. Where training diverges, the gate stays as it was.
    """
    rng, params = generator(seed), {name: tensor.clone().requires_grad_() for name, tensor in tree.items()}
    values = list(params.values())
    for _ in range(epochs if len(features) else 0):
        for index in torch.split(torch.randperm(len(features), generator=rng), batch_size):
            kept = (torch.rand(len(index), len(tree["hidden.bias"]), generator=rng) >= dropout) / (1 - dropout)
            with torch.enable_grad():
                loss = gate_loss(gate_logits(params, features[index], kept), targets[index], balance)
                grads = torch.autograd.grad(loss, values)
            with torch.no_grad():
                torch._foreach_add_(values, list(grads), alpha=-lr)
    found = {name: tensor.detach() for name, tensor in params.items()}
    return found if all(map(is_finite, found.values())) else dict(tree)
