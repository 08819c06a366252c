"""Quantity-based label imbalance (QLI), in its three published meanings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedloom.core import ConfigError
from fedloom.core.errors import closest
from fedloom.data.parts import Listed, Parts
from fedloom.data.ranges import at_least

MODES = ("niid_bench", "pilora_shards", "glfc_classes")
SHARDS = 10  # single-class shards per class, PILoRA (ECCV 2024)


@dataclass(frozen=True)
class QuantityLabel:
    """Every client holds `alpha_q` labels (or shards) of a task.

    qli_mode "niid_bench" ("#C=k", arXiv 2102.02079): a client owns k distinct labels, the first being the
    (i mod C)-th of the task, the others random; the examples of a label are split equally among its owners.
    "pilora_shards": a fraction `shard_fraction` of every class is cut into 10 single-class shards; a client draws
    k shards without repetition, clients overlap. Differs: drawn once per task, where the code draws anew for every
    participant and round. "glfc_classes" (CVPR 2022): a client draws k classes and sees all their examples.
    """

    alpha_q: int = 2
    qli_mode: str = "niid_bench"
    shard_fraction: float = 0.8

    def __post_init__(self) -> None:
        at_least("partition.alpha_q", self.alpha_q, 1)
        if self.qli_mode not in MODES:
            raise ConfigError(
                f"partition.qli_mode must be one of {', '.join(MODES)}, got '{self.qli_mode}'."
                f"{closest(self.qli_mode, MODES)}"
            )
        if not 0 < self.shard_fraction <= 1:
            raise ConfigError(f"partition.shard_fraction must be in (0, 1], got {self.shard_fraction}")

    @property
    def overlaps(self) -> bool:
        """True where an example may be held by several clients."""
        return self.qli_mode != "niid_bench"

    def split(self, y: np.ndarray, clients: int, seed: int) -> tuple[Parts, list[str]]:
        """See `fedloom.data.partition.Partition.split`."""
        rng = np.random.default_rng(seed)
        groups = [rng.permutation(np.flatnonzero(y == label)) for label in np.unique(y)]
        if not groups:
            return Listed.of([np.empty(0, np.int64)] * clients), []
        if self.qli_mode == "pilora_shards":
            groups = [shard for group in groups for shard in _shards(group, self.shard_fraction)]
        k = min(self.alpha_q, len(groups))
        notes = [self._clamped(k)] if k < self.alpha_q else []
        if self.qli_mode == "niid_bench":
            owned = _owned_labels(len(groups), k, clients, rng)
            rows, unowned = _split_among_owners(groups, owned)
            return Listed.of(rows), notes + ([_unowned(unowned)] if unowned else [])
        chosen = [rng.permutation(len(groups))[:k] for _ in range(clients)]
        return Listed.of([np.concatenate([groups[g] for g in mine]) for mine in chosen]), notes

    def _clamped(self, k: int) -> str:
        what = "shards" if self.qli_mode == "pilora_shards" else "classes"
        return f"partition.alpha_q {self.alpha_q} was lowered to the {k} {what} of the task"


def _unowned(labels: int) -> str:
    return f"{labels} classes have no owner and are not used: partition.alpha_q * partition.clients is too small"


def _shards(group: np.ndarray, fraction: float) -> list[np.ndarray]:
    kept = group[: max(1, round(fraction * len(group)))]
    return [shard for shard in np.array_split(kept, SHARDS) if len(shard)]


def _owned_labels(labels: int, k: int, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    owned = []
    for client in range(clients):
        first = client % labels
        others = rng.permutation(np.delete(np.arange(labels), first))[: k - 1]
        owned.append(np.concatenate([[first], others]))
    return owned


def _split_among_owners(groups: list[np.ndarray], owned: list[np.ndarray]) -> tuple[list[np.ndarray], int]:
    rows: list[list[np.ndarray]] = [[] for _ in owned]
    unowned = 0
    for label, group in enumerate(groups):
        owners = [client for client, mine in enumerate(owned) if label in mine]
        unowned += not owners
        for client, part in zip(owners, np.array_split(group, max(1, len(owners))), strict=False):
            rows[client].append(part)
    return [np.concatenate(parts) if parts else np.empty(0, np.int64) for parts in rows], unowned
