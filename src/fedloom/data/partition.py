"""Partitions: the labels of one task -> which client holds which example. One frozen dataclass per rule.

Rules over domains are in `fedloom.data.domains`; all others ignore the domains of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from fedloom.core import ConfigError, DataError
from fedloom.core.errors import closest, unknown
from fedloom.core.seeds import seed_for
from fedloom.data.dirichlet import Dirichlet, from_owners, repair
from fedloom.data.domains import ByDomain, Claimed, DirichletDomain, KDomains, Single
from fedloom.data.flower_partition import FlowerPartition
from fedloom.data.parts import Listed, Parts, Windows
from fedloom.data.quantity_label import QuantityLabel
from fedloom.data.ranges import at_least, feasible, positive


class Partition(Protocol):
    """A rule. `overlaps`: an example may be held by several clients."""

    overlaps: bool

    def split(self, y: np.ndarray, clients: int, seed: int) -> tuple[Parts, list[str]]:
        """Positions in `y` (int64 class ids of one task) per client, and notes on what was clamped or missed."""
        ...


@dataclass(frozen=True)
class Iid:
    """Equal shares of a random order; sizes differ by at most one."""

    overlaps = False

    def split(self, y: np.ndarray, clients: int, seed: int) -> tuple[Parts, list[str]]:
        """See `Partition.split`."""
        order = np.random.default_rng(seed).permutation(len(y))
        return Listed.of(np.array_split(order, clients)), []


@dataclass(frozen=True)
class QuantitySkew:
    """Sizes drawn from Dir(alpha), labels alike on all clients (NIID-Bench "q ~ Dir(beta)").

    min_size: examples that every client gets; the largest clients give, so it always ends.
    """

    alpha: float = 0.5
    min_size: int = 0
    overlaps = False

    def __post_init__(self) -> None:
        positive("partition.alpha", self.alpha)
        at_least("partition.min_size", self.min_size, 0)

    def split(self, y: np.ndarray, clients: int, seed: int) -> tuple[Parts, list[str]]:
        """See `Partition.split`."""
        feasible(len(y), clients, self.min_size)
        rng = np.random.default_rng(seed)
        shares = rng.dirichlet(np.full(clients, self.alpha))
        cuts = np.concatenate([[0], np.floor(np.cumsum(shares)[:-1] * len(y)), [len(y)]]).astype(np.int64)
        owners = np.empty(len(y), np.int64)
        owners[rng.permutation(len(y))] = np.repeat(np.arange(clients), np.diff(cuts))
        return from_owners(repair(owners, clients, self.min_size, rng), clients), []


@dataclass(frozen=True)
class Shared:
    """Client i reads `per_client` examples by index, with overlap; costs the same for any number of clients."""

    per_client: int = 50
    overlaps = True

    def __post_init__(self) -> None:
        at_least("partition.per_client", self.per_client, 1)

    def split(self, y: np.ndarray, clients: int, seed: int) -> tuple[Parts, list[str]]:
        """See `Partition.split`."""
        width = min(self.per_client, len(y))
        notes = []
        if width < self.per_client:
            notes.append(f"partition.per_client {self.per_client} was lowered to the {width} examples of the task")
        return Windows(np.random.default_rng(seed).permutation(len(y)), clients, width), notes


KINDS: Mapping[str, type[Any]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "quantity_label": QuantityLabel,
    "quantity_skew": QuantitySkew,
    "shared": Shared,
    "k_domains": KDomains,
    "dirichlet_domain": DirichletDomain,
    "single": Single,
}
FLOWER = "flwr:"


Rule = Partition | ByDomain
OfTask = Callable[[np.ndarray], Partition]


def make_partition(kind: str, options: Mapping[str, Any]) -> tuple[Rule, list[str]]:
    """The rule of that name with its options (None: default), and notes on options that it does not use.

    Raises `ConfigError` for an unknown kind, an option that no kind knows, and values out of range.
    """
    if isinstance(kind, str) and kind.startswith(FLOWER):
        extra = sorted(k for k, v in options.items() if v is not None and k != "options")
        return FlowerPartition(kind.removeprefix(FLOWER), dict(options.get("options") or {})), _unused(kind, extra)
    if kind not in KINDS:
        raise ConfigError(unknown("partition.kind", kind, [*KINDS, "flwr:PartitionerClass"]))
    known = {f.name for f in fields(KINDS[kind])}
    given = {k: v for k, v in options.items() if v is not None}
    return KINDS[kind](**{k: v for k, v in given.items() if k in known}), _unused(kind, sorted(given.keys() - known))


def _unused(kind: str, names: list[str]) -> list[str]:
    anywhere = {f.name for k in KINDS.values() for f in fields(k)} | {"options"}
    for name in names:
        if name not in anywhere:
            raise ConfigError(f"unknown option 'partition.{name}'.{closest(name, anywhere)} Known: {sorted(anywhere)}")
    return [f"partition.{name} is not used by the kind '{kind}'" for name in names]


def on_domains(
    rule: Rule, domains: np.ndarray | None, names: Sequence[str], clients: int, seed: int
) -> tuple[OfTask, list[str]]:
    """Rows of a task -> the rule for it, and notes; what rules over domains draw once for all tasks is drawn here.

    domains: domain of every training example, int64, with their names. Raises `DataError` where a rule needs them and
    there are none.
    """
    per_domain = isinstance(rule, Dirichlet) and rule.by == "domain"
    if not isinstance(rule, ByDomain) and not per_domain:
        return lambda rows: rule, []
    if domains is None or not names:
        kind = next(name for name, known in KINDS.items() if isinstance(rule, known))
        what = f"'{kind}'{' by domain' if per_domain else ''}"
        raise DataError(
            f"partition.kind {what} deals out domains, but the data have no domain labels; name their column with "
            "data.domain (folders domain/class: data.domain=folders), or take a kind without domains, such as dirichlet"
        )
    if not isinstance(rule, ByDomain):
        return lambda rows: Grouped(rule, domains[rows]), []
    held = np.bincount(domains, minlength=len(names)) > 0
    claims = np.zeros((clients, len(names)))
    claims[:, held], notes = rule.claims(clients, [names[k] for k in np.flatnonzero(held)], seed)
    for name in (names[k] for k in np.flatnonzero(~held)):
        notes.append(f"domain '{name}' has no training examples, so no client holds it; it is only evaluated")
    return lambda rows: Claimed(rule, claims, domains[rows]), notes


@dataclass(frozen=True, eq=False)
class Grouped:
    """A rule over classes that is given the domains of a task's examples, int64 [examples], in their place."""

    rule: Partition
    domains: np.ndarray
    overlaps = False

    def split(self, y: np.ndarray, clients: int, seed: int) -> tuple[Parts, list[str]]:
        """See `Partition.split`."""
        return self.rule.split(self.domains, clients, seed)


def partition_task(
    rule: Partition, labels: np.ndarray, rows: np.ndarray, clients: int, *, seed: int, task: int
) -> tuple[Parts, list[str]]:
    """Apply a rule to the examples of one task: `rows` of a source with their `labels`.

    The draw is a function of (seed, task); every task has one of its own.
    """
    parts, notes = rule.split(labels, clients, seed_for(seed, "partition", task))
    if isinstance(parts, Windows):
        return Windows(rows[parts.order], parts.clients, parts.width), notes
    assert isinstance(parts, Listed)
    return Listed(rows[parts.order], parts.bounds), notes


def check_clients(rule: Rule, clients: int, examples: int) -> None:
    """Raise unless there are clients, and at least one example for each where examples are not shared."""
    at_least("partition.clients", clients, 1)
    if clients > examples and not rule.overlaps:
        raise DataError(
            f"partition.clients is {clients} but there are only {examples} training examples; use at most "
            f"{examples} clients, or partition.kind: shared"
        )
