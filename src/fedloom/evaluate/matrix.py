"""The accuracy matrix of a stream and what is read off it.

R[t][j] is the accuracy on the test set of task j after stage t, a fraction. Stages and tasks are counted from
0 here and from 1 in the formulas. In a synchronous stream task j arrives at stage j; where clients have orders
of their own it may arrive earlier, so the formulas' "l >= j" reads "from the stage at which task j arrived".
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fedloom.core.errors import DataError

Row = tuple[float | None, ...]


@dataclass(frozen=True)
class AccuracyMatrix:
    """R[t][j], with the number of test examples per task.

    rows: one per stage, one entry per task; None where task j has not arrived or was not evaluated.
    examples: test examples per task, the weights of A_t.
    arrival: stage at which each task arrived; None takes the first stage that evaluated it. Entries before
    the arrival are kept but enter no formula.
    """

    rows: tuple[Row, ...] = ()
    examples: tuple[int, ...] = ()
    arrival: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        tasks = len(self.examples)
        if any(len(row) != tasks for row in self.rows):
            raise ValueError(f"every row of an accuracy matrix over {tasks} tasks needs {tasks} entries")
        for value in (v for row in self.rows for v in row if v is not None):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"accuracies are fractions in [0, 1], got {value}")
        if self.arrival is not None and len(self.arrival) != tasks:
            raise ValueError(f"arrival needs one stage per task: {tasks} tasks, got {len(self.arrival)}")

    @classmethod
    def from_lists(
        cls,
        rows: Iterable[Iterable[float | None]],
        examples: Sequence[int] | None = None,
        arrival: Sequence[int] | None = None,
    ) -> AccuracyMatrix:
        """From nested lists; short rows are filled with None, NaN becomes None, no `examples`: one per task."""
        listed = [[_or_none(v) for v in row] for row in rows]
        tasks = max([len(row) for row in listed] + [len(examples or ())])
        padded = tuple(tuple(row + [None] * (tasks - len(row))) for row in listed)
        weights = tuple(int(n) for n in examples) if examples is not None else (1,) * tasks
        return cls(padded, weights, None if arrival is None else tuple(arrival))

    def to_lists(self) -> list[list[float | None]]:
        """Nested lists for JSON, None where there is no value."""
        return [list(row) for row in self.rows]

    def with_row(self, accuracies: Iterable[float | None]) -> AccuracyMatrix:
        """The matrix after one more stage."""
        return replace(self, rows=(*self.rows, tuple(_or_none(a) for a in accuracies)))

    @property
    def num_stages(self) -> int:
        """Number of rows."""
        return len(self.rows)

    @property
    def num_tasks(self) -> int:
        """Number of columns."""
        return len(self.examples)

    def seen_accuracy(self, stage: int) -> float | None:
        """A_t: accuracy over all tasks that have arrived by a stage, weighted by their test examples."""
        pairs = [(value, self.examples[j]) for j, value in enumerate(self.rows[stage]) if self._arrived(j, stage)]
        known = [(value, n) for value, n in pairs if value is not None and n > 0]
        total = sum(n for _, n in known)
        return math.fsum(value * n for value, n in known) / total if total else None

    def curve(self) -> list[float | None]:
        """A_t for every stage."""
        return [self.seen_accuracy(t) for t in range(self.num_stages)]

    @property
    def final_accuracy(self) -> float | None:
        """A_T, over all classes seen at the last stage; None without a stage."""
        return self.seen_accuracy(-1 % self.num_stages) if self.rows else None

    @property
    def average_incremental_accuracy(self) -> float | None:
        """AIA = mean over stages of A_t; stages without an evaluation are left out."""
        return _mean([a for a in self.curve() if a is not None])

    @property
    def forgetting(self) -> float | None:
        """F = 1/(T-1) sum_{j<T} ( max_{j<=l<T} R[l,j] - R[T,j] ); None for a single stage."""
        return _mean([max(before) - last for before, last in self._old_tasks()])

    @property
    def backward_transfer(self) -> float | None:
        """BWT = 1/(T-1) sum_{j<T} ( R[T,j] - R[j,j] ); None for a single stage. F >= -BWT."""
        return _mean([last - before[0] for before, last in self._old_tasks()])

    def arrived_at(self, task: int) -> int | None:
        """Stage at which a task arrived, None when it has not."""
        if self.arrival is not None:
            return self.arrival[task]
        return next((t for t, row in enumerate(self.rows) if row[task] is not None), None)

    def _arrived(self, task: int, stage: int) -> bool:
        start = self.arrived_at(task)
        return start is not None and start <= stage

    def _old_tasks(self) -> list[tuple[list[float], float]]:
        """Per task that arrived before the last stage: its accuracies until then, and the one at the end."""
        found = []
        for task in range(self.num_tasks):
            start, last = self.arrived_at(task), self.rows[-1][task] if self.rows else None
            if start is None or last is None:
                continue
            before = [row[task] for row in self.rows[start:-1]]
            known = [value for value in before if value is not None]
            if known:
                found.append((known, last))
        return found

    def to_csv(self) -> str:
        """CSV text: columns stage, task_0.., examples_0..; one row per stage; empty where there is no value."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        tasks = range(self.num_tasks)
        writer.writerow(["stage", *(f"task_{j}" for j in tasks), *(f"examples_{j}" for j in tasks)])
        for stage, row in enumerate(self.rows):
            writer.writerow([stage, *("" if v is None else repr(float(v)) for v in row), *self.examples])
        return out.getvalue()

    @classmethod
    def from_csv(cls, text: str) -> AccuracyMatrix:
        """Read what `to_csv` wrote, to the last bit. Raises `DataError` for other text."""
        lines = list(csv.reader(io.StringIO(text)))
        if not lines or not lines[0] or lines[0][0] != "stage" or len(lines[0]) % 2 == 0:
            raise DataError("the accuracy matrix is not readable: its first line must be 'stage,task_0,...,examples_0'")
        tasks = len(lines[0]) // 2
        try:
            rows = [[float(v) if v else None for v in line[1 : tasks + 1]] for line in lines[1:]]
            examples = [int(v) for v in lines[1][tasks + 1 :]] if len(lines) > 1 else [0] * tasks
            return cls.from_lists(rows, examples)
        except ValueError as error:
            raise DataError(f"the accuracy matrix is not readable: {error}") from error


def forgetting_lander_compat(matrix: AccuracyMatrix) -> float | None:
    """Forgetting as LANDER's script computes it, for comparison with its tables only.

    1/T sum_j ( max_i R[j,i] - R[T,j] ): the maximum runs over the tasks of row j instead of over time, and
    the last task is included. May be negative where nothing was gained. Needs as many stages as tasks.
    """
    if not _is_square(matrix):
        return None
    last = matrix.rows[-1]
    best = [max((v for v in row if v is not None), default=0.0) for row in matrix.rows]
    return _mean([best[j] - (last[j] or 0.0) for j in range(matrix.num_tasks)])


def forgetting_mfcl_compat(matrix: AccuracyMatrix) -> float | None:
    """Forgetting as MFCL's script computes it, for comparison with its tables only.

    1/T sum_j ( max_l R[l,j] - R[T,j] ), with the first task's maximum a fraction among percentages, hence
    divided by 100 here, and the last task included. The script prints 100 times this. Needs as many stages
    as tasks.
    """
    if not _is_square(matrix):
        return None
    last = matrix.rows[-1]
    best = [max((row[j] or 0.0 for row in matrix.rows[j:]), default=0.0) for j in range(matrix.num_tasks)]
    best[0] /= 100
    return _mean([best[j] - (last[j] or 0.0) for j in range(matrix.num_tasks)])


def _is_square(matrix: AccuracyMatrix) -> bool:
    return matrix.num_stages == matrix.num_tasks >= 2


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _or_none(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(value)
