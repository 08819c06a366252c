"""FedProx: FedAvg with a proximal term that holds clients near the downloaded model.

Source: Li et al., "Federated Optimization in Heterogeneous Networks" (MLSys 2020), eq. (2). The norm is squared,
so the gradient is mu * (w - w_anchor). With mu = 0 this is FedAvg, bit for bit. The paper's tolerance for partial
work (gamma-inexactness) is not modelled: every client runs its full local epochs.

`scope`, for networks with mixture-of-experts layers: what is held, "all" parameters, the gates, the experts, or what
all tokens share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge

from fedloom.core import Context, Payload
from fedloom.core.moe import expert_names, gate_names, moe_layers
from fedloom.local import LocalSGD
from fedloom.local.terms import CrossEntropy, Proximal
from fedloom.methods.fedavg import FedAvg

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg whose term `Proximal` holds the parameters of `scope`."""

    scope: str = "all"

    @property
    def needs_experts(self) -> bool:  # type: ignore[override]  # of the class unless an option chooses it
        """Where the scope is a part of mixture-of-experts layers."""
        return self.scope != "all"

    def reference(self, down: Payload, ctx: Context) -> Mapping[str, Any]:
        """The part of the downloaded parameters that is held."""
        params, layers = down["params"], moe_layers(ctx.net.module)
        gates, experts = gate_names(layers), expert_names(layers)
        parts = {"all": params.keys(), "gate": gates, "experts": experts, "shared": params.keys() - gates - experts}
        return {"anchor": {name: tensor for name, tensor in params.items() if name in parts[self.scope]}}


def fedprox(
    *,
    local: LocalSGD,
    mu: Annotated[float, Ge(0)] = 0.01,
    scope: Literal["all", "gate", "experts", "shared"] = "all",
    label_scope: Literal["seen", "current"] = "seen",
    uniform: bool = False,
    buffers: Literal["mean", "pooled", "frozen"] = "mean",
) -> FedProx:
    """Assemble FedProx; the options that are not named here are FedAvg's.

    mu: weight of the proximal term; 0 is FedAvg.
    scope: what is held near the downloaded model: `all` parameters, or of networks with mixture-of-experts layers the
        `gate`, the `experts` or what all tokens share (`shared`).
    """
    return FedProx(replace(local, terms=(CrossEntropy(label_scope), Proximal(mu))), uniform, buffers, scope)
