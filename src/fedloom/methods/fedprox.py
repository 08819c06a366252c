"""FedProx: FedAvg with a proximal term that holds clients near the downloaded model.

Source: Li et al., "Federated Optimization in Heterogeneous Networks" (MLSys 2020), eq. (2). The norm is squared,
so the gradient is mu * (w - w_anchor). With mu = 0 this is FedAvg, bit for bit. The paper's tolerance for partial
work (gamma-inexactness) is not modelled: every client runs its full local epochs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from annotated_types import Ge

from fedloom.local import LocalSGD
from fedloom.local.terms import CrossEntropy, Proximal
from fedloom.methods.fedavg import FedAvg

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}


def fedprox(
    *,
    local: LocalSGD,
    mu: Annotated[float, Ge(0)] = 0.01,
    label_scope: Literal["seen", "current"] = "seen",
    uniform: bool = False,
    buffers: Literal["mean", "pooled", "frozen"] = "mean",
) -> FedAvg:
    """Assemble FedProx. mu: weight of the proximal term; the other options are FedAvg's."""
    return FedAvg(replace(local, terms=(CrossEntropy(label_scope), Proximal(mu))), uniform, buffers)
