"""From scores to counts: who was classified correctly, with and without the task being known.

Evaluation is split into chunks over processes, so the unit is a `Counts` that can be added; accuracies are
taken once, from the sums. Nothing here computes a loss: a label may name a class that the scores have no
column for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Counts:
    """Counts over test examples of seen classes; int64 arrays [classes], plus two numbers of examples.

    total: examples per class. correct: class-incremental, the argmax over all seen classes is the label.
    correct_within_task: task-incremental, the argmax over the classes of the label's own task is the label.
    unseen: examples whose class has not been seen; they are in no other count.
    nan: examples of seen classes whose scores hold NaN; they count as wrong.
    """

    total: np.ndarray
    correct: np.ndarray
    correct_within_task: np.ndarray
    unseen: int = 0
    nan: int = 0

    @classmethod
    def zero(cls, num_classes: int) -> Counts:
        """Counts of no examples, the neutral element of addition."""
        return cls(np.zeros(num_classes, np.int64), np.zeros(num_classes, np.int64), np.zeros(num_classes, np.int64))

    def __add__(self, other: Counts) -> Counts:
        """Counts of both sets of examples."""
        if self.total.shape != other.total.shape:
            raise ValueError(f"counts over {len(self.total)} and {len(other.total)} classes cannot be added")
        return Counts(
            self.total + other.total,
            self.correct + other.correct,
            self.correct_within_task + other.correct_within_task,
            self.unseen + other.unseen,
            self.nan + other.nan,
        )

    def __eq__(self, other: object) -> bool:
        """Equal in every count."""
        if not isinstance(other, Counts):
            return NotImplemented
        numbers = (self.unseen, self.nan) == (other.unseen, other.nan)
        return numbers and all(np.array_equal(a, b) for a, b in zip(self._arrays(), other._arrays(), strict=True))

    __hash__ = None  # type: ignore[assignment]

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self.total, self.correct, self.correct_within_task

    @property
    def num_examples(self) -> int:
        """Examples of seen classes."""
        return int(self.total.sum())

    def accuracy(self, classes: Iterable[int] | None = None) -> float | None:
        """Class-incremental accuracy over the seen classes, or over some of them; None without examples."""
        return _ratio(self.correct, self.total, classes)

    def accuracy_within_task(self, classes: Iterable[int] | None = None) -> float | None:
        """Task-incremental accuracy over the seen classes, or over some of them; None without examples."""
        return _ratio(self.correct_within_task, self.total, classes)

    def accuracy_with_unseen(self) -> float | None:
        """Class-incremental accuracy over all examples; those of unseen classes count as wrong."""
        total = self.num_examples + self.unseen
        return int(self.correct.sum()) / total if total else None

    def class_accuracy(self) -> np.ndarray:
        """Class-incremental accuracy per class, float64 [classes]; NaN where a class has no examples."""
        accuracy: np.ndarray = np.full(len(self.total), np.nan)
        np.divide(self.correct, self.total, out=accuracy, where=self.total > 0)
        return accuracy


def _ratio(hits: np.ndarray, total: np.ndarray, classes: Iterable[int] | None) -> float | None:
    if classes is not None:
        index = np.fromiter(classes, np.int64)
        hits, total = hits[index], total[index]
    count = int(total.sum())
    return int(hits.sum()) / count if count else None


def count_correct(
    scores: Tensor,
    labels: Tensor,
    tasks: Sequence[Collection[int]],
    *,
    seen: Collection[int] | None = None,
    num_classes: int | None = None,
) -> Counts:
    """Count correct predictions of one batch, class- and task-incremental.

    scores: floating, [batch, choices], one column per class id; classes past the last column are never predicted.
    labels: class ids [batch], any integers. tasks: the classes of each task; a class listed twice belongs to
    the first task that lists it, one listed nowhere is compared with all seen classes.
    seen: classes that have arrived (None: every column). Columns of other classes are ignored.
    num_classes: length of the counts (None: enough for the columns, the tasks and the seen classes).
    An example whose scores are NaN in a seen column, or -inf in all of them, is wrong; ties go to the lowest
    class id. On any device; the counts come back on the CPU.
    """
    width = scores.shape[1]
    known = sorted(range(width) if seen is None else seen)
    if num_classes is None:
        num_classes = max(width, *(c + 1 for task in tasks for c in task), *(c + 1 for c in known), 0)
    device = scores.device
    labels = labels.to(device)
    is_seen = _flags(known, num_classes, device)
    slot = labels.clamp(0, max(num_classes - 1, 0))
    counted = (labels >= 0) & (labels < num_classes) & is_seen[slot]
    scores, y = scores.detach()[counted], labels[counted]

    columns = is_seen[:width] if num_classes >= width else _flags(known, width, device)
    nan = scores.isnan().logical_and(columns).any(dim=1)
    scores = scores.masked_fill(~columns, -torch.inf)
    right = _hits(scores, y) & ~nan
    groups, group_of = _task_columns(tasks, num_classes, width)
    outside = ~groups.to(device)[group_of.to(device)[y]]
    right_within = _hits(scores.masked_fill_(outside, -torch.inf), y) & ~nan

    total, correct, within = (
        torch.bincount(classes, minlength=num_classes).cpu().numpy() for classes in (y, y[right], y[right_within])
    )
    return Counts(total, correct, within, unseen=len(labels) - len(y), nan=int(nan.sum()))


def _flags(members: Iterable[int], size: int, device: torch.device) -> Tensor:
    flags = torch.zeros(size, dtype=torch.bool)
    flags[[c for c in members if 0 <= c < size]] = True
    return flags.to(device)


def _hits(scores: Tensor, labels: Tensor) -> Tensor:
    """Rows whose best column is the label; a row of -inf predicts nothing."""
    if scores.shape[1] == 0:
        return torch.zeros_like(labels, dtype=torch.bool)
    best, predicted = scores.max(dim=1)
    return (predicted == labels) & (best > -torch.inf)


def _task_columns(tasks: Sequence[Collection[int]], num_classes: int, width: int) -> tuple[Tensor, Tensor]:
    """Columns of each task, bool [tasks + 1, width], the last for "no task"; and each class's row in it."""
    columns = torch.ones(len(tasks) + 1, width, dtype=torch.bool)
    group_of = torch.full((num_classes,), len(tasks), dtype=torch.long)
    for task in reversed(range(len(tasks))):
        columns[task] = _flags(tasks[task], width, columns.device)
        group_of[[c for c in tasks[task] if 0 <= c < num_classes]] = task
    return columns, group_of
