"""A contrastive term that pulls the channel scores of a client's domains towards the domains' prototypes.

Source: Lin et al., "Domain Sensitive Federated Learning with Fisher-Informed Pruning" (FEDFIP, CVPR 2026), the domain
structure regulariser

    L_con = - sum_k log( exp(cos(V_k, p_k)) / sum_k' exp(cos(V_k, p_k')) )

with V_k the scores F of domain k over the shared channels, scaled to sum to 1, and p_k' the prototypes. F holds squared
first derivatives, so the gradient of the term needs second ones; the paper claims to compute none, and with V as a
stored number the term would not move any weight. `FORMS` holds what is made of this: "exact" takes the second
derivatives, "norm" and "bn" are first-order surrogates that equal V at the current weights, "detach" is the constant.
A cosine does not depend on the scale of V, so F takes its place here.
Every summand lies in [log(1 + (K - 1) / e), log(1 + (K - 1) e)] for K prototypes: [0.7437, 2.2143] for 4. The term
never reaches 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fedloom.core.batches import Batch, Batches
from fedloom.core.context import Context, Outputs
from fedloom.core.errors import ConfigError
from fedloom.core.seeds import generator
from fedloom.core.tree import Tensors
from fedloom.local.gate_fisher import gate_gradients, summed_loss
from fedloom.local.parts import Carried, Ref
from fedloom.local.terms.cross_entropy import SCOPES

LEAST = 8
Form = Callable[[Context, Batch, str], Tensor]


def contrastive(signatures: Sequence[Tensor], prototypes: Tensor, valid: Tensor, own: Sequence[int]) -> Tensor:
    """- sum_k log softmax over k' of cos(V_k, p_k') at k' = k, over the prototypes that exist.

    signatures: V_k [channels] of the domains `own`, in that order; their scale does not matter, and a vector of zeros
    has the cosine 0 with all. prototypes: [domains, channels]; valid: bool [domains], which of them exist. A domain
    of `own` without a prototype has no summand. 0 where fewer than 2 prototypes exist.
    """
    used = [(v, k) for v, k in zip(signatures, own, strict=True) if bool(valid[k])]
    if not used or int(valid.sum()) < 2:
        return prototypes.new_zeros(())
    place = valid.cumsum(0)[[k for _, k in used]] - 1
    cosines = _unit(torch.stack([v for v, _ in used])) @ _unit(prototypes[valid].to(used[0][0])).T
    return -cosines.log_softmax(1).gather(1, place.to(cosines.device)[:, None]).sum()


def exact(ctx: Context, batch: Batch, scope: str) -> Tensor:
    """(d CE / d z)^2 per example and gate, [batch, channels], differentiable by the parameters (double backward)."""
    return _squares(ctx, batch, scope, create_graph=True)


def detach(ctx: Context, batch: Batch, scope: str) -> Tensor:
    """The same as a constant: the term then has a value but moves no weight."""
    return _squares(ctx, batch, scope)


def norm(ctx: Context, batch: Batch, scope: str) -> Tensor:
    """The constant times ||W_j||^2 / sg(||W_j||^2), with W_j all weights that make channel j and sg the constant."""
    module: Any = ctx.net.module
    weights = [
        torch.stack([module.get_parameter(name).flatten(1).square().sum(1) for name in group.writers]).sum(0)
        for group in module.channels.groups
    ]
    return _squares(ctx, batch, scope) * _one(torch.cat(weights)).double()


def bn(ctx: Context, batch: Batch, scope: str) -> Tensor:
    """gamma_j^2 sg((d CE / d gamma_j)^2) per example, summed over the norms of a channel: [batch, channels].

    gamma is the weight of batch normalisation. Raises `ConfigError` for channel groups without any.
    """
    module: Any = ctx.net.module
    groups = module.channels.groups
    if bare := [group.name for group in groups if not group.norms]:
        raise ConfigError(
            f"contrast_mode 'bn' needs batch normalisation of every channel, which {bare[0]} has not; take norm"
        )
    names = [name for group in groups for name in group.norms]
    scaled = _scaled_gradients(ctx, batch, names, scope)
    ratio = {name: _one(module.get_parameter(f"{name}.weight").square()).double() for name in names}
    return torch.cat([torch.stack([scaled[n].square() * ratio[n] for n in g.norms]).sum(0) for g in groups], 1)


FORMS: dict[str, Form] = {"exact": exact, "norm": norm, "bn": bn, "detach": detach}


@dataclass
class DomainProbe:
    """What the term needs of one client update, as `ref["structure"]`; made anew for every call of local training.

    ctx: around the network that is trained. data: the client's, with domains. prototypes: [K, C] over all channels;
    valid: bool [K]. mask: bool [C], the shared channels M; kept: bool [C], those that the network has, M among them
    (all of them where it is dense). batch: examples per domain and step. Domains with fewer than 8 examples are left
    out: so few say nothing about a domain.
    """

    ctx: Context
    data: Batches
    prototypes: Tensor
    valid: Tensor
    mask: Tensor
    kept: Tensor
    batch: int = 16
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"contrast_batch must be at least 1, got {self.batch}")
        if bool((self.mask & ~self.kept).any()):
            raise ConfigError("a shared channel is missing in the network: the mask must be part of what is kept")
        width, module = int(self.kept.sum()), cast(Any, self.ctx.net.module)
        if (have := module.channels.total) != width:
            raise ConfigError(f"{width} channels are kept but the network has {have}")
        device = self.ctx.net.forward.device
        self.targets = self.prototypes[:, self.mask].to(device, torch.float64)
        self.shared = self.mask[self.kept].nonzero().flatten().to(device)
        self._rng = generator(self.ctx.seed_for("structure"))
        domains = self.data.domains
        ids = [] if domains is None or int(self.valid.sum()) < 2 else self.valid.nonzero().flatten().tolist()
        places = {k: (domains == k).nonzero().flatten() for k in ids if domains is not None}
        self.places = {k: index for k, index in places.items() if len(index) >= LEAST}

    def draw(self) -> tuple[Batch, list[int]]:
        """The next sub-batches, one domain after the other as one batch, and how many examples each has.

        Without augmentation, and from a stream of their own.
        """
        index = [at[torch.randperm(len(at), generator=self._rng)[: self.batch]] for at in self.places.values()]
        part = self.data.subset(torch.cat(index))
        (batch,) = part.epoch(batch_size=len(part), purpose="structure", shuffle=False)
        return batch, [len(at) for at in index]


@dataclass(frozen=True)
class StructureContrast:
    """weight * L_con over sub-batches of the client's domains, which `ref["structure"]`, a `DomainProbe`, draws.

    form: of F, one of `FORMS`. every: the term acts in every so many steps, from the first on, with `every` times its
    weight. scope: classes of the softmax behind F. The pass runs in evaluation mode and with gates of 1, changes no
    buffer, keeps all activations (no checkpointing), and visits examples like any other pass.
    """

    weight: float
    form: Form = exact
    every: int = 1
    scope: str = "seen"
    needs: ClassVar[tuple[str, ...]] = ("structure",)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ConfigError(f"contrast_weight must be a finite number of at least 0, got {self.weight}")
        if self.every < 1:
            raise ConfigError(f"contrast_every must be at least 1 step, got {self.every}")
        if self.scope not in SCOPES:
            raise ConfigError(f"label scope must be one of {', '.join(SCOPES)}, got '{self.scope}'")

    def __call__(self, params: Tensors, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Tensor:
        """Return the scalar; it depends on the parameters and on sub-batches of the probe's own, not on the batch."""
        probe: DomainProbe = ref["structure"]
        acts = self.weight > 0 and bool(probe.places) and probe.steps % self.every == 0
        probe.steps += 1
        if not acts:
            return out["logits"].new_zeros(())
        drawn, counts = probe.draw()
        with probe.ctx.evaluating(), torch.enable_grad():
            scores = self.form(probe.ctx, drawn, self.scope).index_select(1, probe.shared)
        signatures = [part.mean(0) for part in torch.split(scores, counts)]
        value = contrastive(signatures, probe.targets, probe.valid, list(probe.places))
        return (self.weight * self.every * value).to(out["logits"].dtype)


def _squares(ctx: Context, batch: Batch, scope: str, create_graph: bool = False) -> Tensor:
    """Squared gate gradients [batch, channels] in float64 at gates of 1."""
    module: Any = ctx.net.module
    gates = torch.ones(module.channels.total)
    return gate_gradients(ctx, batch, gates, scope=scope, create_graph=create_graph).double().square()


def _scaled_gradients(ctx: Context, batch: Batch, names: Sequence[str], scope: str) -> dict[str, Tensor]:
    """gamma_j d CE / d gamma_j of every example, per norm [batch, c] in float64, without a graph.

    A norm puts out h = gamma u + beta; this is the gradient by a factor r = 1 of its first summand.
    """
    factors: dict[str, Tensor] = {}

    def scaled(name: str, module: nn.Module, inputs: Any, h: Tensor) -> Tensor:
        tail = (1,) * (h.dim() - 2)
        beta = module.get_parameter("bias").detach().view(-1, *tail)
        factors[name] = h.new_ones(h.shape[:2]).requires_grad_()
        return beta + (h - beta) * factors[name].view(*h.shape[:2], *tail)

    module: Any = ctx.net.module
    handles = [module.get_submodule(name).register_forward_hook(partial(scaled, name)) for name in names]
    try:
        # Inside gates nothing is recomputed during the backward pass, when the hooks are gone.
        with module.gated(torch.ones(module.channels.total)):
            loss = summed_loss(ctx, batch, scope)
    finally:
        for handle in handles:
            handle.remove()
    grads = torch.autograd.grad(loss, [factors[name] for name in names])
    return {name: grad.double() for name, grad in zip(names, grads, strict=True)}


def _one(values: Tensor) -> Tensor:
    """1 with the gradient of values / sg(values); a constant 1 where the value is 0."""
    still = values.detach()
    return torch.where(still > 0, values / torch.where(still > 0, still, 1), 1)


def _unit(rows: Tensor) -> Tensor:
    """Rows of length 1; rows of zeros stay so, with a gradient of 0."""
    lengths = rows.square().sum(-1, keepdim=True)
    return rows * torch.where(lengths > 0, torch.where(lengths > 0, lengths, 1).rsqrt(), 0)
