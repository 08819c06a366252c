"""Passes over a client's data that train nothing: they read the bound network and leave it as it was."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.batches import Batches
from fedloom.core.context import Context
from fedloom.core.seeds import generator

Labels = Callable[[Tensor, Tensor, torch.Generator], Tensor]


def true_labels(logits: Tensor, y: Tensor, rng: torch.Generator) -> Tensor:
    """The examples' own labels: the empirical Fisher."""
    return y


def model_labels(logits: Tensor, y: Tensor, rng: torch.Generator) -> Tensor:
    """Labels [batch] drawn from softmax(logits) [batch, classes]: an unbiased estimate of the true Fisher.

    The examples' own where the softmax is not finite: a model that has diverged is refused by its gradients.
    """
    shares = logits.softmax(1).cpu()
    finite = shares.isfinite().all(1)
    drawn = torch.multinomial(torch.where(finite[:, None], shares, 1.0), 1, generator=rng)[:, 0]
    return torch.where(finite, drawn, y.cpu()).to(y.device)


LABELS: dict[str, Labels] = {"true": true_labels, "model": model_labels}


def diagonal_fisher(
    ctx: Context, data: Batches, *, scope: str = "seen", labels: Labels = true_labels
) -> dict[str, Tensor]:
    """F_i = mean over the examples of (d CE / d theta_i)^2, for the bound network in evaluation mode.

    Squares are of every example's own gradient: the square of a batch's mean gradient is smaller by up to the size of
    the batch. scope: classes of the softmax, as in `CrossEntropy`. labels: (logits inside the scope, labels,
    generator) -> labels that the cross-entropy is taken against; the generator is the pass's own.
    Returns a tree of the trainable parameters on the run's device, with zeros for a client without examples, for
    parameters that the logits do not depend on, and in the rows of classes that have not arrived.
    Source: Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks" (PNAS 2017), the F of eq. (3);
    Kunstner et al., "Limitations of the empirical Fisher approximation" (NeurIPS 2019), on the two kinds of labels.
    """
    trainable = set(ctx.net.trainable)
    params = {name: param for name, param in ctx.net.module.named_parameters() if name in trainable}
    wanted, sums = list(params.values()), [torch.zeros_like(param) for param in params.values()]
    mask, rng = ctx.class_mask(scope), generator(ctx.seed_for("fisher"))
    with ctx.evaluating(), torch.enable_grad():
        for one in data.epoch(batch_size=1, purpose="fisher", shuffle=False):
            logits = ctx.apply(one.x)["logits"]
            logits = logits if mask is None else logits + mask
            loss = F.cross_entropy(logits, labels(logits.detach(), one.y.to(logits.device), rng))
            grads = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
            torch._foreach_addcmul_(sums, grads, grads)
    fisher = {name: total / max(1, len(data)) for name, total in zip(params, sums, strict=True)}
    for name, dim in ctx.class_rows.items():
        if name in fisher:
            fisher[name].index_fill_(dim, ctx.unseen.to(fisher[name].device), 0)
    return fisher
