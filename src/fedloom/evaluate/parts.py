"""Counts per part of a test set, and what is read off them: accuracies per task, per domain and overall."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fedloom.evaluate.measures import Sums
from fedloom.evaluate.predict import Counts


class Part(NamedTuple):
    """The test examples of one task, and where the data have domains of one of these; None without."""

    task: int
    domain: int | None = None


@dataclass(frozen=True)
class PartCounts:
    """Counts of the parts that were evaluated, of one view.

    num_classes: length of the counts. measures: the network's own, summed over all parts.
    """

    num_classes: int
    parts: Mapping[Part, Counts]
    measures: Sums = field(default_factory=dict)

    def total(self, *, task: int | None = None, domains: Collection[int] | None = None) -> Counts:
        """Counts over all parts, or over those of one task and of some domains."""
        chosen = (
            counts
            for part, counts in self.parts.items()
            if (task is None or part.task == task) and (domains is None or part.domain in domains)
        )
        return sum(chosen, Counts.zero(self.num_classes))

    def task_accuracies(self, tasks: int) -> list[float | None]:
        """A row of the accuracy matrix: one accuracy per task, None where none of its examples was evaluated."""
        return [self.total(task=task).accuracy() for task in range(tasks)]

    def domain_accuracies(self, domains: int) -> list[float | None]:
        """One accuracy per domain, None where none of its examples was evaluated; empty without domains."""
        return [self.total(domains=(domain,)).accuracy() for domain in range(domains)]

    def cell_accuracy(self, domains: int) -> np.ndarray:
        """Accuracy per domain and class, float64 [domains, classes], one row without domains; NaN without examples."""
        rows = [self.total(domains=(domain,)) for domain in range(domains)] or [self.total()]
        return np.stack([row.class_accuracy() for row in rows])
