import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.evaluate.predict import Counts, count_correct

TASKS = ((0, 1), (2, 3))


def test_class_and_task_incremental_differ():
    counts = count_correct(torch.tensor([[0.1, 0.9, 2.0, 0.0]]), torch.tensor([1]), TASKS)
    assert counts.accuracy() == 0.0
    assert counts.accuracy_within_task() == 1.0


def test_unseen_labels_are_counted_apart_and_never_an_index_error():
    scores = torch.eye(5)[[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]]
    counts = count_correct(scores, torch.arange(10), [range(5), range(5, 10)], seen=range(5))
    assert counts.unseen == 5
    assert counts.num_examples == 5
    assert counts.accuracy() == 1.0
    assert counts.accuracy_with_unseen() == 0.5
    assert counts.total.tolist() == [1] * 5 + [0] * 5


def test_labels_outside_every_range():
    counts = count_correct(torch.zeros(3, 2), torch.tensor([-100, 7, 0]), [(0, 1)])
    assert (counts.unseen, counts.num_examples, counts.accuracy()) == (2, 1, 1.0)


def test_seen_class_without_a_column_is_wrong():
    counts = count_correct(torch.ones(1, 2), torch.tensor([3]), TASKS, seen=range(4))
    assert counts.total.tolist() == [0, 0, 0, 1]
    assert counts.accuracy() == counts.accuracy_within_task() == 0.0


def test_columns_of_unseen_classes_are_ignored():
    counts = count_correct(torch.tensor([[0.0, 1.0, 9.0, torch.nan]]), torch.tensor([1]), TASKS, seen=(0, 1))
    assert counts.accuracy() == 1.0
    assert counts.nan == 0


def test_nan_and_minus_infinity_are_wrong():
    scores = torch.tensor([[torch.nan, 1.0, 0.0, 0.0], [-torch.inf] * 4, [torch.inf, 0.0, 0.0, 0.0]])
    counts = count_correct(scores, torch.tensor([1, 0, 0]), TASKS)
    assert counts.nan == 1
    assert counts.correct.tolist() == [1, 0, 0, 0]
    assert counts.correct_within_task.tolist() == [1, 0, 0, 0]


def test_class_in_no_task_is_compared_with_all_and_first_task_wins():
    scores = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
    counts = count_correct(scores, torch.tensor([2, 0]), [(0,), (0, 1)])
    assert counts.correct_within_task.tolist() == [1, 0, 0]


def test_per_class_and_per_task():
    scores = torch.eye(4)[[0, 0, 2, 3, 3]]
    counts = count_correct(scores, torch.tensor([0, 1, 2, 2, 3]), TASKS)
    assert counts.total.tolist() == [1, 1, 2, 1]
    assert counts.correct.tolist() == [1, 0, 1, 1]
    assert [counts.accuracy(classes) for classes in TASKS] == [0.5, 2 / 3]
    np.testing.assert_array_equal(counts.class_accuracy(), [1.0, 0.0, 0.5, 1.0])


def test_no_examples():
    counts = Counts.zero(4)
    assert counts.accuracy() is counts.accuracy_within_task() is counts.accuracy_with_unseen() is None
    assert [counts.accuracy(classes) for classes in TASKS] == [None, None]
    assert np.isnan(counts.class_accuracy()).all()
    assert count_correct(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), TASKS) == counts


def test_inputs_are_left_alone_and_gradients_do_not_matter():
    scores = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    before = scores.detach().clone()
    count_correct(scores, torch.tensor([0, 1, 2, 3, 0, 1]), TASKS, seen=(0, 1))
    assert torch.equal(scores, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_floating_dtype(dtype):
    assert count_correct(torch.eye(4, dtype=dtype), torch.arange(4), TASKS).accuracy() == 1.0


def test_float64_is_not_rounded():
    assert count_correct(torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64), torch.tensor([1]), []).accuracy() == 1


def test_adding_other_classes_is_refused():
    with pytest.raises(ValueError, match="4 and 5 classes"):
        Counts.zero(4) + Counts.zero(5)
    assert Counts.zero(4) != 3


@given(seed=st.integers(0, 10_000), n=st.integers(0, 40), cut=st.integers(0, 40))
def test_chunks_add_up_and_match_a_loop(seed, n, cut):
    rng = np.random.default_rng(seed)
    scores = torch.from_numpy(rng.integers(-2, 3, (n, 4)).astype(np.float32))
    labels = torch.from_numpy(rng.integers(-1, 6, n))
    seen = (0, 1, 2)
    whole = count_correct(scores, labels, TASKS, seen=seen)
    parts = [count_correct(scores[s], labels[s], TASKS, seen=seen) for s in (slice(cut), slice(cut, None))]
    assert sum(pickle.loads(pickle.dumps(parts)), start=Counts.zero(4)) == whole

    want, within = [0] * 4, [0] * 4
    for row, label in zip(scores.tolist(), labels.tolist(), strict=True):
        if label in seen:
            want[label] += max(seen, key=lambda c: (row[c], -c)) == label
            task = [c for c in TASKS[label // 2] if c in seen]
            within[label] += max(task, key=lambda c: (row[c], -c)) == label
    assert whole.correct.tolist() == want
    assert whole.correct_within_task.tolist() == within
    assert (whole.correct <= whole.correct_within_task).all()
    assert whole.unseen + whole.num_examples == n
