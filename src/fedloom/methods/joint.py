"""Joint training: FedAvg on one client that holds all data of the stages seen so far; an upper reference.

Source: the reference that class-incremental papers call "joint" or "centralised" (fully supervised training on the
union of all tasks). No federation can carry it out: it needs everybody's data, old ones included, in one place.

Decisions: the model goes on from stage to stage instead of starting anew; it takes its steps one after the other, where
a cohort takes them side by side. By default sample visits per round equal those that the round's cohort would make
(`fedloom.engine.views.PooledCumulative`), so the budget is that of the other methods, spread over ever more data: where
it is scarce, methods that train on new data alone may come near. With `visits="all"` an epoch visits the whole pool, as
the papers' upper references do, at a cost that grows with every stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from fedloom.core.errors import pick
from fedloom.local import LocalSGD
from fedloom.local.terms import CrossEntropy
from fedloom.methods.fedavg import FedAvg

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}
VIEWS = {"equal": "pooled_cumulative", "all": "pooled_cumulative_all"}


@dataclass(frozen=True)
class Joint(FedAvg):
    """FedAvg that asks for a pooled view of the data. visits: "equal" to the stream's, or "all" of the pool."""

    visits: str = "equal"

    @property
    def data_view(self) -> str:  # type: ignore[override]  # of the class in methods that have but one
        """The view that goes with `visits`."""
        return pick("visits", self.visits, VIEWS)


def joint(*, local: LocalSGD, visits: Literal["equal", "all"] = "equal") -> Joint:
    """Assemble joint training; the loss is over every class seen so far.

    visits: examples of a round: as many as its cohort would visit (`equal`), or `all` of the pool in each epoch.
    """
    return Joint(replace(local, terms=(CrossEntropy("seen"),)), visits=visits)
