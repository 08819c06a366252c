"""Partitions over domains: which clients hold a domain, and how its examples are dealt out to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedloom.core import ConfigError, DataError
from fedloom.core.seeds import seed_for
from fedloom.data.dirichlet import from_owners
from fedloom.data.parts import Listed, Parts
from fedloom.data.ranges import at_least, positive

COVER = 5  # holders of every domain, where clients and domains_max allow it
EXACT = 1e-9  # what a product of floats may miss of a whole number


@dataclass(frozen=True)
class ByDomain(ABC):
    """Base of the rules in which a client claims domains; each domain is dealt out to its claimants, disjointly.

    Claims are a function of the seed alone, the same in every task; which examples, of seed and task. share: a client
    gets at most that share of a domain's examples of a task, and at least one; all clients' parts shrink alike until
    the largest fits, so their proportions stay, and what is left over is not used. label_alpha: the label mix of a
    client inside a domain ~ Dir(label_alpha), independently of how many examples it gets; None for the domain's own
    mix. Either way a client gets an example of every class first, where a domain has enough.
    min_size: examples that every client holds in a task, from the domains that it claims most; one that is short takes
    from the largest. With the default of 1 a client may stay empty where the domains are too small; above 1 that is
    refused. In a task without these domains a client may hold nothing.
    """

    share: float = 1.0
    label_alpha: float | None = None
    min_size: int = 1
    overlaps = False

    def __post_init__(self) -> None:
        number = isinstance(self.share, int | float) and not isinstance(self.share, bool)
        if not number or not 0 < self.share <= 1:
            raise ConfigError(f"partition.share must be in (0, 1], got {self.share}")
        if self.label_alpha is not None:
            positive("partition.label_alpha", self.label_alpha)
        at_least("partition.min_size", self.min_size, 0)

    @abstractmethod
    def claims(self, clients: int, names: Sequence[str], seed: int) -> tuple[np.ndarray, list[str]]:
        """float64 [clients, domains]: a domain is dealt out in proportion to its column; and notes.

        Every column has a positive entry, else `ConfigError`.
        """


@dataclass(frozen=True)
class KDomains(ByDomain):
    """Client i holds K_i domains, K_i uniform in domains_min .. domains_max (None: all); holders share a domain alike.

    cover: every domain is held by at least that many clients, by default 5 or as many as can be. Clients draw their
    domains at random; then, while a domain has too few holders, a client of the most held domain takes it instead.
    Where all K_i together are too few places, some are raised.
    """

    domains_min: int = 2
    domains_max: int | None = None
    cover: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("partition.domains_min", self.domains_min, 1)
        if self.domains_max is not None:
            at_least("partition.domains_max", self.domains_max, 1)
            if self.domains_max < self.domains_min:
                raise ConfigError(
                    f"partition.domains_max {self.domains_max} is below partition.domains_min {self.domains_min}; "
                    "raise one or lower the other"
                )
        if self.cover is not None:
            at_least("partition.cover", self.cover, 1)

    def claims(self, clients: int, names: Sequence[str], seed: int) -> tuple[np.ndarray, list[str]]:
        """See `ByDomain.claims`: 1 for a domain that the client holds, else 0."""
        count, most = len(names), len(names) if self.domains_max is None else self.domains_max
        for option, value in (("domains_min", self.domains_min), ("domains_max", most)):
            if value > count:
                raise ConfigError(
                    f"partition.{option} is {value} but the number of domains with training examples is {count}; "
                    f"use at most {count}"
                )
        cover = self._cover(clients, count, most)
        rng = np.random.default_rng(seed_for(seed, "partition", "domains"))
        drawn = rng.integers(self.domains_min, most + 1, clients)
        sizes = _raised(drawn, cover * count, most, rng)
        notes = []
        if cover < (wanted := min(COVER, clients)) and self.cover is None:
            notes.append(
                f"partition.cover is {cover}, not {wanted}: with at most {most} domains each, {clients} clients "
                "have no more places"
            )
        if (raised := int((sizes - drawn).sum())) > 0:
            notes.append(f"partition.cover {cover} gave {raised} more places for domains than were drawn")
        if sizes.min() == count > 1 and self.domains_min < count:
            notes.append(
                "every client holds every domain, so clients do not differ in domains; lower partition.cover or "
                "partition.domains_max, or take more clients"
            )
        held = np.zeros((clients, count))
        for client, size in enumerate(sizes):
            held[client, rng.permutation(count)[:size]] = 1
        return _covered(held, cover, rng), notes

    def _cover(self, clients: int, domains: int, most: int) -> int:
        fits = min(clients, clients * most // domains)
        cover = min(COVER, fits) if self.cover is None else self.cover
        if cover > fits or not fits:
            raise ConfigError(
                f"partition.cover {max(1, cover)}: {clients} clients with at most {most} of the {domains} domains "
                f"cannot give each {max(1, cover)} holders; lower partition.cover, or raise partition.domains_max or "
                "partition.clients"
            )
        return cover


def _raised(sizes: np.ndarray, places: int, most: int, rng: np.random.Generator) -> np.ndarray:
    """Sizes that sum to at least `places`, none above `most`: random ones are raised by one, again and again."""
    sizes = sizes.copy()
    while (short := places - int(sizes.sum())) > 0:
        sizes[rng.permutation(np.flatnonzero(sizes < most))[:short]] += 1
    return sizes


def _covered(held: np.ndarray, cover: int, rng: np.random.Generator) -> np.ndarray:
    """Every domain with at least `cover` holders; clients keep their number of domains.

    While one has fewer, another has more, and so a holder that lacks the first: that client trades.
    """
    held = held.copy()
    while (holders := held.sum(0)).min() < cover:
        scarce, common = int(holders.argmin()), int(holders.argmax())
        client = rng.choice(np.flatnonzero((held[:, common] > 0) & (held[:, scarce] == 0)))
        held[client, [scarce, common]] = 1, 0
    return held


@dataclass(frozen=True)
class DirichletDomain(ByDomain):
    """Every client's proportions over domains ~ Dir(alpha); a domain is dealt out in proportion to them."""

    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("partition.alpha", self.alpha)

    def claims(self, clients: int, names: Sequence[str], seed: int) -> tuple[np.ndarray, list[str]]:
        """See `ByDomain.claims`; rows sum to 1."""
        rng = np.random.default_rng(seed_for(seed, "partition", "domains"))
        shares = rng.dirichlet(np.full(len(names), self.alpha), clients)
        for domain in np.flatnonzero(shares.sum(0) == 0):  # tiny alpha: all of its entries are below any float
            shares[rng.integers(clients), domain] = np.finfo(np.float64).tiny
        return shares, []


@dataclass(frozen=True)
class Single(ByDomain):
    """One domain per client; domains have equally many clients, or one more."""

    def claims(self, clients: int, names: Sequence[str], seed: int) -> tuple[np.ndarray, list[str]]:
        """See `ByDomain.claims`: 1 for the client's domain, else 0."""
        if clients < len(names):
            raise ConfigError(
                f"partition.clients is {clients}, so some of the {len(names)} domains would be held by no client of "
                f"the kind 'single'; give at least {len(names)} clients, or take partition.kind: k_domains"
            )
        rng = np.random.default_rng(seed_for(seed, "partition", "domains"))
        held = np.zeros((clients, len(names)))
        held[rng.permutation(clients), rng.permutation(len(names))[np.arange(clients) % len(names)]] = 1
        return held, []


@dataclass(frozen=True, eq=False)
class Claimed:
    """A rule with its claims, for the examples of one task: a `fedloom.data.partition.Partition`.

    claims: as `ByDomain.claims` gives them. domains: domain of every example, int64 [examples].
    """

    rule: ByDomain
    claims: np.ndarray
    domains: np.ndarray
    overlaps = False

    def split(self, y: np.ndarray, clients: int, seed: int) -> tuple[Parts, list[str]]:
        """See `fedloom.data.partition.Partition.split`."""
        rng = np.random.default_rng(seed)
        examples = np.bincount(self.domains, minlength=self.claims.shape[1])
        most = np.maximum(1, np.floor(self.rule.share * examples + EXACT)).astype(np.int64)
        sizes = np.stack([_sizes(*column, rng) for column in zip(examples, self.claims.T, most, strict=True)], 1)
        sizes = _at_least(sizes, self.claims, examples, most, self.rule.min_size)
        owners = np.full(len(y), -1)
        for domain in np.flatnonzero(examples):
            rows = np.flatnonzero(self.domains == domain)
            owners[rows] = _dealt(y[rows], sizes[:, domain], self.rule.label_alpha, rng)
        held = np.flatnonzero(owners >= 0)
        part = from_owners(owners[held], clients)
        small = int(((examples > 0) & (self.rule.share * examples < 1 - EXACT)).sum())
        note = f"partition.share {self.rule.share:g} is less than one example of {small} domains: a client gets one"
        return Listed(held[part.order], part.bounds), [note] if small else []


def _sizes(examples: int, claims: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """Examples of a domain for each client, int64 [clients]: in proportion to `claims`, none above `most`."""
    quota = examples * (claims / (claims.sum() or 1.0))
    return _apportioned(quota * min(1.0, most / max(1.0, quota.max())), rng)


def _apportioned(quota: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Whole numbers that sum to the rounded sum of `quota`, each rounded down or up; ties at random."""
    whole = np.floor(quota + EXACT).astype(np.int64)
    turn = rng.permutation(len(quota))
    order = turn[np.argsort(whole[turn] - quota[turn], kind="stable")]
    whole[order[: max(0, round(float(quota.sum())) - int(whole.sum()))]] += 1
    return whole


def _at_least(
    sizes: np.ndarray, claims: np.ndarray, examples: np.ndarray, most: np.ndarray, min_size: int
) -> np.ndarray:
    """Sizes [clients, domains] with at least `min_size` in every row, where the domains claimed most allow it.

    Raises `DataError` for a row that stays short of a `min_size` above 1.
    """
    sizes = sizes.copy()
    main = (claims == claims.max(1, keepdims=True)) & (examples > 0)
    for client in np.flatnonzero((sizes.sum(1) < min_size) & main.any(1)):
        while (held := int(sizes[client].sum())) < min_size:
            open_ = np.flatnonzero(main[client] & (sizes[client] < most))
            if not _give(sizes, int(client), open_, examples, min_size):
                break
        if held < min_size and min_size > 1:
            raise DataError(
                f"partition.min_size {min_size}: client {client} can get only {held} examples of the domains that it "
                "holds; lower partition.min_size or partition.clients, or raise partition.share"
            )
    return sizes


def _give(sizes: np.ndarray, client: int, domains: np.ndarray, examples: np.ndarray, min_size: int) -> bool:
    """Give a client one more example of one of the domains: an unused one, or of the largest client; False if none."""
    unused = domains[sizes[:, domains].sum(0) < examples[domains]]
    if len(unused):
        sizes[client, unused[0]] += 1
        return True
    totals = sizes.sum(1)
    able = (sizes[:, domains] > 0) & (totals > min_size)[:, None]
    able[client] = False
    if not able.any():
        return False
    donor, which = np.unravel_index(np.where(able, totals[:, None], -1).argmax(), able.shape)
    sizes[donor, domains[which]] -= 1
    sizes[client, domains[which]] += 1
    return True


def _dealt(y: np.ndarray, sizes: np.ndarray, label_alpha: float | None, rng: np.random.Generator) -> np.ndarray:
    """Client of every example of a domain, int64 [examples], -1 for none. y: their classes; sizes: per client."""
    classes, counts = np.unique(y, return_counts=True)
    clients = rng.permutation(np.flatnonzero(sizes))
    parts, left = np.zeros((len(clients), len(classes)), np.int64), counts.copy()
    for part, size in zip(parts, sizes[clients], strict=True):  # one of every class first
        part[rng.permutation(np.flatnonzero(left))[:size]] = 1
        left -= part
    for part, size in zip(parts, sizes[clients], strict=True):
        own = counts / counts.sum() if label_alpha is None else rng.dirichlet(np.full(len(classes), label_alpha))
        more = _taken(size - part.sum(), np.maximum(size * own - part, 0), left, rng)
        part += more
        left -= more
    owners = np.full(len(y), -1)
    for label, column in zip(classes, parts.T, strict=True):
        rows = rng.permutation(np.flatnonzero(y == label))
        owners[rows[: column.sum()]] = np.repeat(clients, column)
    return owners


def _taken(need: int, want: np.ndarray, left: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`need` examples over classes, in proportion to `want` while there are any left of a class, int64 [classes]."""
    taken = np.zeros_like(left)
    while (short := int(need - taken.sum())) > 0:
        free = left - taken
        weight = np.where(free > 0, want, 0.0)
        weight = weight if weight.sum() > 0 else free / free.sum()
        taken += np.minimum(_apportioned(short * (weight / weight.sum()), rng), free)
    return taken
