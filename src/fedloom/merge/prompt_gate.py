"""The server's gate over a pool of prompts: which of the K prompts suit a client, by its mean feature.

Source: Guo, Chen and Cui, "Fed-Duet" (ICLR 2026). g = Linear(d, 512), ReLU, dropout 0.2, Linear(512, K) on the summary
f~_c [d]; one step of Adam per round on L = mean_c w_c mean_k BCE(g(f~_c)_k, y_ck) with w_c = 1 / (loss_c + 1e-6),
divided by the mean of all w.
Decisions: d is the joint width, not that of the text tower (they differ in some models). Dropout acts in the step
alone; the public code leaves it on when it dispatches. A client counts in the rounds it took part in, unless its loss
or summary is not finite; losses below 0 count as 0.

Which entries of y count (`OVER`) matters: over all K, what was not sent is a 0 and the gate confirms its own choices,
whatever the target; over what was sent, "attention" and "better" learn what suits whom, and "dispatched" has nothing
but ones to learn from.

The gate and Adam's moments are trees, so a run that is resumed goes on with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.seeds import seeded
from fedloom.core.tree import Tensors

BETAS, EPS = (0.9, 0.999), 1e-8
FIRST, SECOND, STEP = "exp_avg.", "exp_avg_sq.", "step"


def initial(width: int, pool: int, *, hidden: int = 512, seed: int = 0) -> dict[str, Tensor]:
    """The gate before the first round, with torch's own start of linear layers: four tensors by name.

    width: d of the summaries. pool: K.
    """
    with seeded(seed, "prompt gate"):
        net = nn.ModuleDict({"hidden": nn.Linear(width, hidden), "out": nn.Linear(hidden, pool)})
    return {name: tensor.detach() for name, tensor in net.state_dict().items()}


def initial_optimizer(tree: Tensors) -> dict[str, Tensor]:
    """Adam's state before the first step: zeros, and the number of steps as a 0-d tensor."""
    moments = {kind + name: torch.zeros_like(value) for kind in (FIRST, SECOND) for name, value in tree.items()}
    return {**moments, STEP: torch.zeros(())}


@torch.no_grad()
def scores(tree: Tensors, summaries: Tensor) -> Tensor:
    """How well the prompts suit clients, [N, K], from summaries [N, d]; without dropout."""
    return _forward(tree, summaries, 0.0, None)


def client_weights(losses: Tensor) -> Tensor:
    """w [N] of losses [N]: 1 / (loss + 1e-6), scaled to mean 1. Losses (0.5, 1, 2) give (1.714, 0.857, 0.429)."""
    inverse = 1 / (losses.double().clamp(min=0) + 1e-6)
    return (inverse / inverse.mean()).to(losses.dtype)


def gate_loss(logits: Tensor, targets: Tensor, losses: Tensor, mask: Tensor | None = None) -> Tensor:
    """mean_c w_c mean_k BCE(logits_ck, targets_ck), a scalar. logits, targets: [N, K]; losses: [N].

    mask: bool [N, K], the entries that the mean over k is taken of; None for all. A client without any adds 0.
    """
    each = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    mean = each.mean(1) if mask is None else (each * mask).sum(1) / mask.sum(1).clamp(min=1)
    return (client_weights(losses) * mean).mean()


def step(
    tree: Tensors,
    optimizer: Tensors,
    summaries: Tensor,
    targets: Tensor,
    losses: Tensor,
    mask: Tensor | None = None,
    *,
    rng: torch.Generator,
    lr: float = 1e-3,
    dropout: float = 0.2,
) -> tuple[dict[str, Tensor], dict[str, Tensor], float | None]:
    """One step of Adam on the clients of a round: the new gate, the new state of Adam, and L before the step.

    summaries: [N, d]. targets: [N, K], in [0, 1]. losses: [N], each client's mean training loss. mask: see `gate_loss`.
    rng: draws the dropout. With no client that has finite numbers both trees are as they were, and L is None.
    """
    usable = summaries.isfinite().all(1) & targets.isfinite().all(1) & losses.isfinite()
    if not bool(usable.any()):
        return dict(tree), dict(optimizer), None
    params = {name: tensor.detach().clone().requires_grad_() for name, tensor in tree.items()}
    with torch.enable_grad():
        logits = _forward(params, summaries[usable], dropout, rng)
        loss = gate_loss(logits, targets[usable], losses[usable], None if mask is None else mask[usable])
        grads = torch.autograd.grad(loss, list(params.values()))
    new, state = _adam(tree, dict(zip(tree, grads, strict=True)), optimizer, lr)
    return new, state, loss.item()


def _forward(tree: Tensors, x: Tensor, dropout: float, rng: torch.Generator | None) -> Tensor:
    hidden = F.linear(x, tree["hidden.weight"], tree["hidden.bias"]).relu()
    if dropout:
        kept = torch.rand(hidden.shape, generator=rng) >= dropout
        hidden = hidden * kept / (1 - dropout)
    return F.linear(hidden, tree["out.weight"], tree["out.bias"])


def _adam(tree: Tensors, grads: Tensors, state: Tensors, lr: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Kingma and Ba, "Adam" (ICLR 2015), algorithm 1. Written here: importing torch's optimisers takes seconds."""
    count = state[STEP] + 1
    (beta1, beta2), steps = BETAS, count.item()
    new: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {STEP: count}
    for name, value in tree.items():
        first = beta1 * state[FIRST + name] + (1 - beta1) * grads[name]
        second = beta2 * state[SECOND + name] + (1 - beta2) * grads[name].square()
        scale = (second / (1 - beta2**steps)).sqrt() + EPS
        new[name] = value - lr / (1 - beta1**steps) * first / scale
        kept[FIRST + name], kept[SECOND + name] = first, second
    return new, kept


@dataclass(frozen=True)
class Feedback:
    """What a round told about the prompts of its N clients.

    dispatched: bool [N, K], what each held. losses: [N], mean training losses. usual: [N], running means of each one's
    losses before this round, 0 for the first. attention: [N, K], mass that a client's fusion gave to each shared
    prompt, 0 where it held none; None where no client told.
    """

    dispatched: Tensor
    losses: Tensor
    usual: Tensor
    attention: Tensor | None = None


def was_dispatched(round_: Feedback) -> Tensor:
    """1 for what a client held, whatever came of it: the gate learns its own choices, weighted by their loss."""
    return round_.dispatched.float()


def had_attention(round_: Feedback) -> Tensor:
    """How much a client's fusion looked at each prompt, in [0, 1]."""
    if round_.attention is None:
        raise ValueError("the target 'attention' needs the clients' attention masses")
    return round_.attention.float().clamp(0, 1)


def did_better(round_: Feedback) -> Tensor:
    """1 for what a client held in a round with a loss below its usual one, or in its first round."""
    better = (round_.usual == 0) | (round_.losses < round_.usual)
    return (round_.dispatched & better[:, None]).float()


TARGETS: dict[str, Callable[[Feedback], Tensor]] = {
    "dispatched": was_dispatched,
    "attention": had_attention,
    "better": did_better,
}

OVER: dict[str, Callable[[Tensor], Tensor | None]] = {"all": lambda dispatched: None, "dispatched": Tensor.bool}


def running_loss(usual: Tensor, losses: Tensor, rate: float = 0.5) -> Tensor:
    """[N]: (1 - rate) usual + rate loss, the loss itself after a first round; usual where a loss is not finite."""
    mixed = torch.where(usual == 0, losses, (1 - rate) * usual + rate * losses)
    return torch.where(losses.isfinite(), mixed, usual)


def spread(index: Tensor, pool: int, values: Tensor | None = None) -> Tensor:
    """[N, K]: values [N, n] at the prompts that index [N, n] names and 0 elsewhere; bool without values."""
    if values is None:
        return torch.zeros(len(index), pool, dtype=torch.bool).scatter_(1, index, True)
    return values.new_zeros(len(index), pool).scatter_(1, index, values)
