"""The Fisher information of channels, measured at gates that multiply the activations of channel groups.

The network's module offers `gated(gates)`, a block inside which the activation of every channel after its ReLU is
multiplied by a gate, [C] or [batch, C], the same one wherever the activation passes. With a row of gates per example
one backward pass gives the gate gradients of all examples at once, as evaluation mode does not mix them. A channel
whose gate is 0 still has a gradient, where its weights have none: the score with which it can come back.
Source: Lin et al., "Domain Sensitive Federated Learning with Fisher-Informed Pruning" (FEDFIP, CVPR 2026), the F_j of
the pruning module, written there for one scalar w_j. That w_j is a gate is a decision; the table `IMPORTANCES` holds
others. The single gate of a residual group makes its score the square of the sum over the places it gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.batches import Batch, Batches
from fedloom.core.context import Context
from fedloom.core.errors import ConfigError
from fedloom.core.seeds import generator
from fedloom.local.passes import Labels, model_labels, true_labels

PURPOSE = "gate-fisher"


class Pass(NamedTuple):
    """One measurement: the examples, the gates [C] at which they are measured, and how."""

    ctx: Context
    data: Batches
    gates: Tensor
    scope: str
    batch_size: int


Importance = Callable[[Pass], Tensor]


def gate_fisher(
    ctx: Context,
    data: Batches,
    gates: Tensor,
    *,
    importance: Importance | None = None,
    samples: int = 512,
    batch_size: int = 64,
    scope: str = "seen",
) -> Tensor:
    """Scores of all C channels of the bound network in evaluation mode, float64 [C] on the CPU.

    data: the examples (of one domain, say); of more than `samples` a draw of that many, from a stream of the pass's
    own. gates: [C], the 0/1 mask at which the scores are taken. importance: one of `IMPORTANCES`, None for "gate".
    batch_size: gates take activations of this many examples at once. scope: classes of the softmax, as in
    `CrossEntropy`. The network, its mode and what training sees stay as they were. Without examples the scores are 0.
    Raises `ConfigError` for fewer than 1 sample.
    """
    if samples < 1:
        raise ConfigError(f"fisher_samples must be at least 1, got {samples}")
    if len(data) > samples:
        drawn = torch.randperm(len(data), generator=generator(ctx.seed_for(PURPOSE)))[:samples]
        data = data.subset(drawn.sort().values)
    if not len(data):
        return torch.zeros(len(gates), dtype=torch.float64)
    with ctx.evaluating(), torch.enable_grad():
        return (importance or gate)(Pass(ctx, data, gates, scope, batch_size)).cpu()


def gate_gradients(
    ctx: Context,
    batch: Batch,
    gates: Tensor,
    *,
    scope: str = "seen",
    labels: Labels = true_labels,
    rng: torch.Generator | None = None,
    create_graph: bool = False,
) -> Tensor:
    """d CE(x_b) / d z_j of every example b and gate j, [batch, C], at z = gates [C].

    For a network in the mode that the caller has set; gradients must be enabled. labels, rng: what the cross-entropy
    is taken against, see `diagonal_fisher`. create_graph: whether the result can be differentiated by the parameters.
    """
    rows = _gates(ctx, gates).expand(len(batch.y), -1).clone().requires_grad_()
    with _module(ctx).gated(rows):
        loss = summed_loss(ctx, batch, scope, labels, rng)
    (grads,) = torch.autograd.grad(loss, rows, create_graph=create_graph)
    return grads


def summed_loss(
    ctx: Context,
    batch: Batch,
    scope: str = "seen",
    labels: Labels = true_labels,
    rng: torch.Generator | None = None,
) -> Tensor:
    """The sum over the batch of every example's own cross-entropy, for the bound network as it stands."""
    logits, mask = ctx.apply(batch.x)["logits"], ctx.class_mask(scope)
    logits = logits if mask is None else logits + mask
    wanted = labels(logits.detach(), batch.y.to(logits.device), rng or generator(0))
    return F.cross_entropy(logits, wanted, reduction="sum")


def gate(measured: Pass) -> Tensor:
    """F_j = mean over the examples of (d CE / d z_j)^2, for the examples' own labels."""
    return _mean_square(measured, true_labels)


def model_labelled(measured: Pass) -> Tensor:
    """The same for labels drawn from the network's own prediction: an estimate of the true Fisher."""
    return _mean_square(measured, model_labels)


def batch_grad(measured: Pass) -> Tensor:
    """The square of the mean gradient of every batch, averaged: smaller by up to the size of a batch."""
    total = torch.zeros(len(measured.gates), dtype=torch.float64)
    for grads in _gradients(measured, true_labels):
        total += len(grads) * grads.mean(0).square().cpu()
    return total / len(measured.data)


def weight_sum(measured: Pass) -> Tensor:
    """The diagonal Fisher of the weights that make channel j, summed: the mean over examples of squared gradients.

    One backward pass per example. 0 for a channel whose gate is 0.
    """
    return torch.cat(_weights(measured)[0])


def weight_mean(measured: Pass) -> Tensor:
    """`weight_sum` divided by the number of weights that make the channel."""
    sums, counts = _weights(measured)
    return torch.cat([total / count for total, count in zip(sums, counts, strict=True)])


IMPORTANCES: dict[str, Importance] = {
    "gate": gate,
    "model_labels": model_labelled,
    "batch_grad": batch_grad,
    "weight_sum": weight_sum,
    "weight_mean": weight_mean,
}


def _mean_square(measured: Pass, labels: Labels) -> Tensor:
    total = torch.zeros(len(measured.gates), dtype=torch.float64)
    for grads in _gradients(measured, labels):
        total += grads.square().sum(0).cpu()
    return total / len(measured.data)


def _gradients(measured: Pass, labels: Labels) -> Iterator[Tensor]:
    """Gate gradients [batch, C] in float64, batch by batch."""
    ctx, rng = measured.ctx, generator(measured.ctx.seed_for(PURPOSE, "labels"))
    for batch in measured.data.epoch(batch_size=measured.batch_size, purpose=PURPOSE, shuffle=False):
        yield gate_gradients(ctx, batch, measured.gates, scope=measured.scope, labels=labels, rng=rng).double()


def _weights(measured: Pass) -> tuple[list[Tensor], list[int]]:
    """Per group the summed Fisher of its channels' weights, float64 [c_g], and the number of weights of a channel."""
    ctx, module = measured.ctx, _module(measured.ctx)
    groups, params = module.channels.groups, dict(module.named_parameters())
    names = [name for group in groups for name in group.writers]
    sums = [torch.zeros(len(params[name]), dtype=torch.float64) for name in names]
    gates = _gates(ctx, measured.gates)
    for one in measured.data.epoch(batch_size=1, purpose=PURPOSE, shuffle=False):
        with module.gated(gates):
            loss = summed_loss(ctx, one, measured.scope)
        grads = torch.autograd.grad(loss, [params[n] for n in names], allow_unused=True, materialize_grads=True)
        for total, grad in zip(sums, grads, strict=True):
            total += grad.flatten(1).double().square().sum(1).cpu()
    by_name = {name: total / len(measured.data) for name, total in zip(names, sums, strict=True)}
    per_group = [torch.stack([by_name[name] for name in group.writers]).sum(0) for group in groups]
    return per_group, [sum(params[name][0].numel() for name in group.writers) for group in groups]


def _gates(ctx: Context, gates: Tensor) -> Tensor:
    """The gates on the network's device, in the dtype of its parameters."""
    dtype = next(ctx.net.module.parameters()).dtype
    return gates.detach().to(ctx.net.forward.device, dtype)


def _module(ctx: Context) -> Any:
    """The network as one with channels and gates, which torch's types do not know."""
    if not hasattr(ctx.net.module, "gated"):
        raise ConfigError(f"{type(ctx.net.module).__name__} has no channel gates; build it with `prunable`")
    return ctx.net.module
