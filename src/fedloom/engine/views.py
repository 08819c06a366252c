"""How a method sees the data plan: as it is, or pooled. Methods declare it as `data_view`; no engine asks for names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from fedloom.core import Batches, ClientId, DataPlan, Stage
from fedloom.core.batches import pooled
from fedloom.core.errors import ConfigError, unknown

Cohort = Callable[[Sequence[ClientId], int, int | None], Sequence[ClientId]]
# What does not depend on who holds the data, or tells who holds them in the stream.
SHARED = (
    "num_classes", "num_stages", "rounds", "tasks", "task_domains", "domains", "test",
    "fingerprint", "describe", "draw",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class PooledCumulative:
    """One client that holds the data of all clients and of all stages seen so far: an upper reference.

    Budget: an epoch of a round visits as many examples as an epoch of that round's cohort under `plan` would, drawn
    from the whole pool, so sample visits equal those of methods that see the stream. Where nobody would work, nobody
    does. cohort: `(participants, stage, round)` -> who that would be. equal False: an epoch visits the whole pool.
    """

    plan: DataPlan
    cohort: Cohort
    equal: bool = True
    _pools: list[Batches] = field(default_factory=list, init=False, repr=False)

    num_clients = 1

    def __getattr__(self, name: str) -> Any:
        if name not in SHARED:
            raise AttributeError(name)
        return getattr(self.plan, name)

    @property
    def notes(self) -> tuple[str, ...]:
        """The plan's sentences for the user, and one about the view."""
        clients = f"{self.plan.num_clients} client{'s' * (self.plan.num_clients != 1)}"
        view = f"the method pools the data: one client holds what the {clients} have held up to each stage"
        return (*getattr(self.plan, "notes", ()), view)

    def stage(self, index: int, client: ClientId | None = None) -> Stage:
        """The stage; to the one client every class and every domain seen so far is current."""
        stage = self.plan.stage(index)
        return stage if client is None else replace(stage, classes=stage.seen, domains=stage.seen_domains)

    def participants(self, stage: int) -> Sequence[ClientId]:
        """The one client, where the plan has any."""
        return range(min(1, len(self.plan.participants(stage))))

    def size(self, client: ClientId, stage: int) -> int:
        """Examples in the pool."""
        return len(self._pool(stage))

    def train(self, client: ClientId, stage: int, round: int | None, exchange: str) -> Batches:
        """The pool; with the quota of the round, where there is one."""
        pool = self._pool(stage).keyed("pooled", stage, round, exchange)
        if round is None or not self.equal:
            return pool
        clients = self.cohort(self.plan.participants(stage), stage, round)
        return pool.with_quota(sum(self.plan.size(c, stage) for c in clients))

    def label_counts(self, client: ClientId, stage: int) -> Tensor:
        """int64 [classes]: examples per class in the pool."""
        return self._pool(stage).labels.bincount(minlength=self.plan.num_classes)

    def domain_counts(self, client: ClientId, stage: int) -> Tensor:
        """int64 [domains, classes]: examples per domain and class in the pool; one row without domains."""
        pool, (rows, columns) = self._pool(stage), (max(1, len(self.plan.domains)), self.plan.num_classes)
        cells = pool.labels if pool.domains is None else pool.domains * columns + pool.labels
        return cells.bincount(minlength=rows * columns).reshape(rows, columns)

    def _pool(self, stage: int) -> Batches:
        for s in range(len(self._pools), stage + 1):
            here = [self.plan.train(c, s, None, "train") for c in self.plan.participants(s)]
            # Somebody's data, though there be none: they say which data set the rows belong to.
            before = self._pools[-1] if self._pools else self.plan.train(0, 0, None, "train")
            self._pools.append(pooled([before, *here]))
        return self._pools[stage]


VIEWS: Mapping[str, Callable[[DataPlan, Cohort], DataPlan]] = {
    "stream": lambda plan, cohort: plan,
    "pooled_cumulative": PooledCumulative,  # type: ignore[dict-item]  # the rest of the protocol is the plan's own
    "pooled_cumulative_all": partial(PooledCumulative, equal=False),  # type: ignore[dict-item]
}


def viewed(plan: DataPlan, view: str, cohort: Cohort) -> DataPlan:
    """The plan as a method sees it; of a plan that is a view already, another view of what lies under it."""
    if view not in VIEWS:
        raise ConfigError(unknown("data view of the method", view, VIEWS))
    return VIEWS[view](stream_of(plan), cohort)


def stream_of(plan: DataPlan) -> DataPlan:
    """The plan under a view; any other plan itself."""
    return plan.plan if isinstance(plan, PooledCumulative) else plan
