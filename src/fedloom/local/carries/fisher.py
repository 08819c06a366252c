"""The running Fisher of expert heads: what is averaged, how often, and where it lives between rounds.

F_k <- rho F_k + (1 - rho) G_k, with G_k the mean of per-sample squared gradients of head k over some samples
(FedFMX, arXiv 2606.28835, eq. 2, whose per-batch cadence forgets within one task: 0.95^100 = 0.006). Squared
gradients are outer products, so G_k needs two batched products and no backward pass. An expert that no sample
counted for keeps its F_k.

Values are trees: "experts" [experts, classes, dim + 1], bias last, and what a cadence adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.context import Context, Outputs
from fedloom.core.errors import ConfigError
from fedloom.core.payload import Payload
from fedloom.core.tree import Tensors
from fedloom.local.parts import Ref

Samples = Callable[[Outputs], Tensor]


def active_samples(out: Outputs) -> Tensor:
    """Samples count for the experts that they train."""
    return out["active"].to(out["delta_sq"].dtype)


def all_samples(out: Outputs) -> Tensor:
    """Every sample counts for every expert, as eq. (2) is printed."""
    return torch.ones_like(out["active"], dtype=out["delta_sq"].dtype)


def weighted_samples(out: Outputs) -> Tensor:
    """Samples count by their routing weight."""
    return out["weights"].to(out["delta_sq"].dtype)


SAMPLES: dict[str, Samples] = {"active": active_samples, "all": all_samples, "weighted": weighted_samples}


def fisher_sums(features: Tensor, delta_sq: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of m * g^2 over the batch [experts, classes, dim + 1] and sum of m [experts].

    features [experts, batch, dim]; delta_sq [experts, batch, classes]: squared gradients by the logits;
    mask m [batch, experts].
    """
    counted = mask.T.unsqueeze(-1) * delta_sq
    inputs = F.pad(features.square(), (0, 1), value=1.0)
    return torch.bmm(counted.mT, inputs), mask.sum(0)


def fold(fisher: Tensor, sums: Tensor, counts: Tensor, rho: float) -> Tensor:
    """rho F + (1 - rho) sums / counts, per expert; F itself where the count is 0."""
    used = counts > 0
    mean = sums / counts.where(used, 1.0)[:, None, None]
    return torch.lerp(fisher, mean, torch.where(used, 1 - rho, 0.0).to(fisher.dtype)[:, None, None])


@dataclass(frozen=True)
class BatchFisher:
    """The average moves after every batch; `samples` says which ones count. The cadence that the paper prints."""

    rho: float
    samples: Samples = active_samples
    needs: ClassVar[tuple[str, ...]] = ("fisher",)
    class_rows: ClassVar[tuple[str, ...]] = ("experts",)  # tensors whose dimension 1 is classes

    def __post_init__(self) -> None:
        if not 0 <= self.rho < 1:
            raise ConfigError(f"rho must be in [0, 1), got {self.rho}")

    def blank(self, heads: Tensor) -> Tensors:
        """Zeros for head weights [experts, classes, dim]."""
        experts, classes, dim = heads.shape
        return {"experts": torch.zeros(experts, classes, dim + 1, dtype=heads.dtype)}

    def init(self, ref: Ref, ctx: Context) -> Tensors:
        """Start from `ref["fisher"]`."""
        return dict(ref["fisher"])

    def update(self, value: Tensors, out: Outputs, batch: Batch, ref: Ref) -> Tensors:
        """Fold in the batch."""
        sums, counts = fisher_sums(out["features"], out["delta_sq"], self.samples(out))
        return {"experts": fold(value["experts"], sums, counts, self.rho)}

    def close_epoch(self, value: Tensors) -> Tensors:
        """Nothing is pending."""
        return value

    def close(self, value: Tensors) -> Tensors:
        """Nothing is pending."""
        return value


@dataclass(frozen=True)
class RoundFisher(BatchFisher):
    """The average moves once per client update, by the mean over all its batches."""

    def init(self, ref: Ref, ctx: Context) -> Tensors:
        """Start from `ref["fisher"]` with empty sums."""
        return _emptied(super().init(ref, ctx))

    def update(self, value: Tensors, out: Outputs, batch: Batch, ref: Ref) -> Tensors:
        """Add the batch to the sums; F stays."""
        sums, counts = fisher_sums(out["features"], out["delta_sq"], self.samples(out))
        return {**value, "new_sums": value["new_sums"] + sums, "new_counts": value["new_counts"] + counts}

    def close(self, value: Tensors) -> Tensors:
        """Fold in the sums."""
        return {"experts": fold(value["experts"], value["new_sums"], value["new_counts"], self.rho)}


@dataclass(frozen=True)
class EpochFisher(RoundFisher):
    """The average moves once per local epoch."""

    def close_epoch(self, value: Tensors) -> Tensors:
        """Fold in the sums and empty them."""
        return _emptied(self.close(value))


@dataclass(frozen=True)
class StageFisher(RoundFisher):
    """The average moves once per stage (task), by the mean over all rounds: the memory that spans tasks.

    The tree also holds the statistics of stage "stage" that are not folded in yet: "sums" and "counts", per
    example visited, so that the mean over clients by number of examples is that over their examples. The first
    work of a later stage folds them in.
    """

    class_rows: ClassVar[tuple[str, ...]] = ("experts", "sums")

    def blank(self, heads: Tensor) -> Tensors:
        """Zeros for head weights [experts, classes, dim]."""
        fisher = super().blank(heads)["experts"]
        counts = torch.zeros(len(fisher), dtype=fisher.dtype)
        return {
            "experts": fisher,
            "sums": torch.zeros_like(fisher),
            "counts": counts,
            "stage": torch.zeros(1, dtype=torch.int64),
        }

    def init(self, ref: Ref, ctx: Context) -> Tensors:
        """Start from `ref["fisher"]`; statistics of an earlier stage are folded in."""
        value = super().init(ref, ctx)
        value = {**value, "visits": torch.zeros_like(value["counts"][0])}
        if int(ref["fisher"]["stage"]) == ctx.stage.index:
            return value
        return {
            **value,
            "experts": fold(value["experts"], value["sums"], value["counts"], self.rho),
            "sums": torch.zeros_like(value["sums"]),
            "counts": torch.zeros_like(value["counts"]),
            "stage": torch.full_like(value["stage"], ctx.stage.index),
        }

    def update(self, value: Tensors, out: Outputs, batch: Batch, ref: Ref) -> Tensors:
        """Add the batch to the sums; F stays."""
        return {**super().update(value, out, batch, ref), "visits": value["visits"] + len(batch.y)}

    def close(self, value: Tensors) -> Tensors:
        """Add this work's statistics, per example visited, to those of the stage."""
        visits = value["visits"].clamp(min=1)
        return {
            "experts": value["experts"],
            "sums": value["sums"] + value["new_sums"] / visits,
            "counts": value["counts"] + value["new_counts"] / visits,
            "stage": value["stage"],
        }


CADENCES: dict[str, Callable[[float, Samples], BatchFisher]] = {
    "batch": BatchFisher,
    "epoch": EpochFisher,
    "round": RoundFisher,
    "task": StageFisher,
}


class Home(Protocol):
    """Where the Fisher lives between two rounds of a client."""

    def on_server(self, blank: Tensors) -> Payload:
        """Fields that the server holds."""
        ...

    def start(self, down: Payload, state: Payload, blank: Tensors) -> Tensors:
        """The value that a client starts from."""
        ...

    def finish(self, value: Tensors) -> tuple[Payload, Payload]:
        """What a client keeps and what it uploads."""
        ...


@dataclass(frozen=True)
class ServerHome:
    """Travels with the model: clients upload it and the server averages it by number of examples."""

    def on_server(self, blank: Tensors) -> Payload:
        """The field "fisher"."""
        return {"fisher": blank}

    def start(self, down: Payload, state: Payload, blank: Tensors) -> Tensors:
        """The server's."""
        return down["fisher"]

    def finish(self, value: Tensors) -> tuple[Payload, Payload]:
        """Nothing is kept, all is uploaded."""
        return {}, {"fisher": value}


@dataclass(frozen=True)
class ClientHome:
    """Each client keeps its own from one participation to the next; it is never sent."""

    def on_server(self, blank: Tensors) -> Payload:
        """Nothing."""
        return {}

    def start(self, down: Payload, state: Payload, blank: Tensors) -> Tensors:
        """What the client kept, or zeros when it takes part for the first time."""
        return state.get("fisher", blank)

    def finish(self, value: Tensors) -> tuple[Payload, Payload]:
        """All is kept, nothing is uploaded."""
        return {"fisher": value}, {}


@dataclass(frozen=True)
class NoHome:
    """Begins at zero in every round."""

    def on_server(self, blank: Tensors) -> Payload:
        """Nothing."""
        return {}

    def start(self, down: Payload, state: Payload, blank: Tensors) -> Tensors:
        """Zeros."""
        return blank

    def finish(self, value: Tensors) -> tuple[Payload, Payload]:
        """Nothing is kept or uploaded."""
        return {}, {}


HOMES: dict[str, Callable[[], Home]] = {"server": ServerHome, "client": ClientHome, "reset": NoHome}


def _emptied(value: Tensors) -> dict[str, Tensor]:
    fisher = value["experts"]
    return {**value, "new_sums": torch.zeros_like(fisher), "new_counts": torch.zeros_like(fisher[:, 0, 0])}
