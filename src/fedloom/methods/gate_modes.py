"""What becomes of the gates of a mixture of experts in a federation: where they live and how they are merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from fedloom.core import Payload
from fedloom.core.moe import MoELayer
from fedloom.merge.gates import distilled_gates, pooled_gates, row_weighted_gates
from fedloom.methods.alignment import ROUTING, Agreed

MODEL = ("params", "buffers")

Merged = dict[str, dict[str, Tensor]]  # MODEL's fields of the gates
GateMerge = Callable[[Payload, Agreed, Sequence[MoELayer]], Merged]


def kept(server: Payload, agreed: Agreed, layers: Sequence[MoELayer]) -> Merged:
    """Nothing new: the server keeps its gates."""
    return {"params": {}, "buffers": {}}


def pooled(server: Payload, agreed: Agreed, layers: Sequence[MoELayer]) -> Merged:
    """One weight per client and layer; see `pooled_gates`."""
    who = [reply.client for reply in agreed.replies]
    return {
        name: pooled_gates(
            [reply.up[name] for reply in agreed.replies], agreed.found.clients, server[name], layers, who=who
        )
        for name in MODEL
    }


def row_weighted(server: Payload, agreed: Agreed, layers: Sequence[MoELayer]) -> Merged:
    """One weight per client and expert; see `row_weighted_gates`."""
    who = [reply.client for reply in agreed.replies]
    return {
        name: row_weighted_gates(
            [reply.up[name] for reply in agreed.replies],
            agreed.found.weights,
            agreed.sizes,
            server[name],
            layers,
            who=who,
        )
        for name in MODEL
    }


def distilled(server: Payload, agreed: Agreed, layers: Sequence[MoELayer]) -> Merged:
    """Fitted to the clients' mixture, from the pooled gates on; see `distilled_gates`."""
    merged = pooled(server, agreed, layers)
    trees = [reply.up["params"] for reply in agreed.replies]
    statistics = [reply.up[ROUTING] for reply in agreed.replies]
    merged["params"] |= distilled_gates(trees, agreed.found.weights, statistics, merged["params"], layers)
    return merged


class GateMode(NamedTuple):
    """merge: of the gates, None where they are averaged like the rest of the model. local: they stay with the clients.
    trained: by the clients."""

    merge: GateMerge | None
    local: bool = False
    trained: bool = True

    @property
    def travels(self) -> bool:
        """Whether clients upload their gates."""
        return self.trained and not self.local


GATE_MODES = {
    "pooled": GateMode(pooled),
    "row_weighted": GateMode(row_weighted),
    "local": GateMode(kept, local=True),
    "fedavg": GateMode(None),
    "frozen": GateMode(kept, trained=False),
    "distill": GateMode(distilled),
}
