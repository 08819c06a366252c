"""Joint training: FedAvg on one client that holds all data of the stages seen so far; an upper reference.

Source: the reference that class-incremental papers call "joint" or "centralised" (fully supervised training on the
union of all tasks). No federation can carry it out: it needs everybody's data, old ones included, in one place.

Decisions: the model goes on from stage to stage instead of starting anew. Sample visits per round equal those that the
round's cohort would make (`fedloom.engine.views.PooledCumulative`), so the budget is that of the other methods, spread
over ever more data; it takes its steps one after the other, where a cohort takes them side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fedloom.local import LocalSGD
from fedloom.local.terms import CrossEntropy
from fedloom.methods.fedavg import FedAvg

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}


@dataclass(frozen=True)
class Joint(FedAvg):
    """FedAvg that asks for a pooled view of the data."""

    data_view: ClassVar[str] = "pooled_cumulative"


def joint(*, local: LocalSGD) -> Joint:
    """Assemble joint training; the loss is over every class seen so far."""
    return Joint(replace(local, terms=(CrossEntropy("seen"),)))
