"""Counts per part of the test set, by hand."""

import numpy as np

from fedloom.evaluate.parts import Part, PartCounts
from fedloom.evaluate.predict import Counts


def counts(total: list[int], correct: list[int], unseen: int = 0) -> Counts:
    arrays = [np.array(values, np.int64) for values in (total, correct, correct)]
    return Counts(*arrays, unseen=unseen)


STREAM = PartCounts(
    3,
    {
        Part(0, 0): counts([4, 0, 0], [3, 0, 0]),
        Part(0, 1): counts([2, 0, 0], [0, 0, 0]),
        Part(1, 0): counts([0, 1, 5], [0, 1, 2], unseen=7),
    },
)


def test_parts_are_summed_over_tasks_and_over_domains():
    assert STREAM.total() == counts([6, 1, 5], [3, 1, 2], unseen=7)
    assert STREAM.total(task=0) == counts([6, 0, 0], [3, 0, 0])
    assert STREAM.total(domains=(0,)) == counts([4, 1, 5], [3, 1, 2], unseen=7)
    assert STREAM.total(task=1, domains=(1,)) == STREAM.total(domains=()) == Counts.zero(3)
    assert STREAM.task_accuracies(3) == [3 / 6, 3 / 6, None]
    assert STREAM.domain_accuracies(3) == [6 / 10, 0.0, None]


def test_cells_are_accuracies_per_domain_and_class():
    np.testing.assert_array_equal(STREAM.cell_accuracy(2), [[3 / 4, 1.0, 2 / 5], [0.0, np.nan, np.nan]])


def test_without_domains_there_is_one_row_over_everything():
    plain = PartCounts(2, {Part(0): counts([4, 0], [1, 0]), Part(1): counts([0, 2], [0, 2])})
    assert plain.total() == counts([4, 2], [1, 2])
    assert plain.task_accuracies(2) == [1 / 4, 1.0] and plain.domain_accuracies(0) == []
    np.testing.assert_array_equal(plain.cell_accuracy(0), [[1 / 4, 1.0]])


def test_where_nothing_was_evaluated_there_are_no_accuracies():
    empty = PartCounts(2, {})
    assert empty.total().accuracy() is None and empty.task_accuracies(1) == [None]
    assert empty.domain_accuracies(2) == [None, None] and np.isnan(empty.cell_accuracy(2)).all()
