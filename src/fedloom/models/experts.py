"""A shared backbone with a pool of experts and a gate.

Parameters of all experts are stacked along a leading dimension, so the pool runs as a few batched products and
merges can treat each expert on its own. Source of the structure: FedFMX (Yuan et al., arXiv 2606.28835, section
3.1): expert k is a body and a linear head of its own, the gate is linear on the backbone's features. The paper does
not give the body; its parameter totals force a bottleneck, which the default is (14.54 M parameters with ResNet-18
on 100 classes).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.core.moe import MoELayer, Slice
from fedloom.core.seeds import seeded
from fedloom.core.tree import Tensors

Mix = Callable[[Tensor, Tensor], Tensor]
Widths = str | Sequence[int]


class StackedLinear(nn.Module):
    """One linear layer per expert: weight [experts, out, in], bias [experts, out].

    layers: one `nn.Linear` per expert, all of one shape; their values are copied.
    """

    def __init__(self, layers: Sequence[nn.Linear]):
        super().__init__()
        self.weight = nn.Parameter(torch.stack([layer.weight.detach() for layer in layers]))
        self.bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers]))

    def forward(self, x: Tensor) -> Tensor:
        """[experts, batch, in] -> [experts, batch, out]."""
        return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.mT)


class ExpertPool(nn.Module):
    """`backbone` [batch, ...] -> [batch, num_features], `experts` bodies and heads, and a gate.

    body: "mlp" (two layers of 7/4 and 3/4 of `num_features`: 512 -> 896 -> 384), a list of widths, or "identity".
    Every layer of a body ends in ReLU. temperature: of the gate, above 0. mix: joins the experts' logits by the
    router logits, to one set [batch, classes]; None takes all experts, weighted by the gate.
    chosen: experts of the gate that count as its choice for an example, which is one token; the pool is then a layer as
    in `fedloom.core.moe` and tells its routing. None tells none.
    seed: of the initial values. Experts are drawn under different keys: equal experts would be chosen by index
    for ever. Head 0 is the one that the default classifier of the same seed has.
    """

    class_rows: Mapping[str, int] = {"heads.weight": 1, "heads.bias": 1}

    def __init__(
        self,
        backbone: nn.Module,
        num_classes: int,
        experts: int = 4,
        body: Widths = "mlp",
        *,
        temperature: float = 1.0,
        mix: Mix | None = None,
        chosen: int | None = None,
        seed: int = 0,
    ):
        super().__init__()
        self.chosen, self.records_inputs = chosen, False
        if num_classes < 1 or experts < 1:
            raise ConfigError(f"num_classes and experts must be at least 1, got {num_classes} and {experts}")
        if not (math.isfinite(temperature) and temperature > 0):
            raise ConfigError(f"the gate's temperature must be a finite number above 0, got {temperature}")
        num_features: int = backbone.num_features  # type: ignore[assignment]  # any backbone has it
        self.backbone, self.mix, self.temperature = backbone, mix, temperature
        self.num_features, self.num_classes, self.experts = num_features, num_classes, experts
        widths = (self.num_features, *body_widths(body, self.num_features))
        self.dim = widths[-1]
        self.bodies = nn.ModuleList(StackedLinear(layers) for layers in _bodies(widths, experts, seed))
        self.heads = StackedLinear([_head(self.dim, num_classes, seed, k) for k in range(experts)])
        with seeded(seed, "gate"):
            self.gate = nn.Linear(self.num_features, experts)

    @property
    def feature_readers(self) -> Mapping[str, int]:
        """Names of the parameters that read the backbone's features -> the dimension along which they do."""
        return {"gate.weight": 1, "bodies.0.weight" if len(self.bodies) else "heads.weight": 2}

    @property
    def memory_format(self) -> str:
        """The layout in which the backbone is fastest: "contiguous" or "channels_last"."""
        return getattr(self.backbone, "memory_format", "contiguous")

    @property
    def moe_layers(self) -> tuple[MoELayer, ...]:
        """The pool where it tells its routing, else none."""
        params = dict(self.named_parameters())
        return () if self.chosen is None else (pool_layer(params, self.chosen),)

    @property
    def active_parameters(self) -> int:
        """Parameters that one example uses when deployed: backbone, gate and the experts that `mix` keeps."""
        own = sum(p.numel() for p in self.parameters())
        stacked = sum(p.numel() for p in (*self.bodies.parameters(), *self.heads.parameters()))
        kept = min(getattr(self.mix, "top", self.experts), self.experts)
        return own - stacked + stacked // self.experts * kept

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Outputs of all experts.

        "logits" [batch, classes]: mixed by the gate. "feats" [batch, num_features]: of the backbone. "features"
        [experts, batch, dim]: inputs of the heads. "expert_logits" [experts, batch, classes]. "router_logits"
        [batch, experts]: already divided by the temperature.
        """
        feats = self.backbone(x)
        router_logits = self.gate(feats) / self.temperature
        features = feats.expand(self.experts, -1, -1)
        for layer in self.bodies:
            features = F.relu(layer(features))
        expert_logits = self.heads(features)
        return {
            "logits": self._mixed(expert_logits, router_logits),
            "feats": feats,
            "features": features,
            "expert_logits": expert_logits,
            "router_logits": router_logits,
            **({} if self.chosen is None else self._routing(feats, router_logits, self.chosen)),
        }

    def _routing(self, feats: Tensor, router_logits: Tensor, chosen: int) -> dict[str, Tensor]:
        top = router_logits.topk(min(chosen, self.experts), 1).indices
        selected = torch.zeros_like(router_logits, dtype=torch.bool).scatter(1, top, True)[None]
        found = {
            "routing": F.log_softmax(router_logits.float(), 1)[None],
            "selected": selected,
            "dispatched": selected,
            "token_mask": torch.ones_like(router_logits[:, 0], dtype=torch.bool),  # len() would fix an export's batch
        }
        return {**found, "expert_inputs": feats.detach()[None]} if self.records_inputs else found

    def _mixed(self, expert_logits: Tensor, router_logits: Tensor) -> Tensor:
        if self.mix is not None:
            return self.mix(expert_logits, router_logits)
        return torch.einsum("kbc,bk->bc", expert_logits, router_logits.softmax(1))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of the backbone's blocks in the backward pass."""
        switch = getattr(self.backbone, "set_grad_checkpointing", None)
        if switch is None:
            raise ConfigError(
                f"training.grad_checkpointing: {type(self.backbone).__name__} has no set_grad_checkpointing; "
                "set it to false"
            )
        switch(enable)


def pool_layer(params: Tensors, chosen: int) -> MoELayer:
    """A pool's parameters as a mixture-of-experts layer: bodies and heads are the experts."""
    experts, hidden = params["gate.weight"].shape
    stacked = [name for name in params if name.startswith(("bodies.", "heads."))]
    slices = tuple(tuple(Slice(name, (slice(e, e + 1),)) for name in stacked) for e in range(experts))
    return MoELayer("pool", slices, ("gate.weight", "gate.bias"), min(chosen, experts), hidden)


def body_widths(body: Widths, num_features: int) -> tuple[int, ...]:
    """Widths of the layers of a body; raises `ConfigError` for an unknown name or a width below 1."""
    if body == "mlp":
        return max(1, 7 * num_features // 4), max(1, 3 * num_features // 4)
    if body == "identity":
        return ()
    if isinstance(body, str) or not body or any(not isinstance(w, int) or w < 1 for w in body):
        raise ConfigError(f"body must be mlp, identity or a list of widths of at least 1, got {body!r}")
    return tuple(body)


def _bodies(widths: Sequence[int], experts: int, seed: int) -> list[list[nn.Linear]]:
    drawn = []
    for k in range(experts):
        with seeded(seed, "expert", k):
            drawn.append([nn.Linear(a, b) for a, b in pairwise(widths)])
    return [list(layer) for layer in zip(*drawn, strict=True)]


def _head(dim: int, num_classes: int, seed: int, expert: int) -> nn.Linear:
    with seeded(*((seed, "head") if expert == 0 else (seed, "head", expert))):
        return nn.Linear(dim, num_classes)
