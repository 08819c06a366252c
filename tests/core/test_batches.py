from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core import Batches, ConfigError
from fedloom.core.batches import take


def make(count: int, *, key=(0, "b"), prepare=lambda x, rng: x) -> Batches:
    x = torch.arange(2 * count, dtype=torch.float32).reshape(count, 2)
    return Batches(x, torch.arange(count) % 3, torch.arange(count), key=key, prepare=prepare)


@given(count=st.integers(0, 60), size=st.integers(1, 20), shuffle=st.booleans())
def test_an_epoch_visits_every_example_once(count: int, size: int, shuffle: bool):
    data = make(count)
    batches = list(data.epoch(0, size, shuffle=shuffle))
    assert len(batches) == data.steps(size)
    index = torch.cat([b.index for b in batches]) if batches else torch.zeros(0, dtype=torch.long)
    assert sorted(index.tolist()) == list(range(count))
    for batch in batches:
        assert torch.equal(batch.x[:, 0], 2.0 * batch.index) and torch.equal(batch.y, batch.index % 3)
    if size > 1 and count > 1:
        assert all(len(b.y) > 1 for b in batches), "batch normalisation has no variance over one value"


def test_a_last_single_example_joins_the_batch_before():
    assert [len(b.y) for b in make(9).epoch(0, 4)] == [4, 5]
    assert [len(b.y) for b in make(1).epoch(0, 4)] == [1]
    assert [len(b.y) for b in make(3).epoch(0, 1)] == [1, 1, 1]
    assert list(make(0).epoch()) == []


def test_order_is_a_function_of_key_purpose_and_epoch():
    def order(key=(0, "b"), epoch=0, purpose="train"):
        return torch.cat([b.index for b in make(20, key=key).epoch(epoch, 5, purpose=purpose)]).tolist()

    assert order() == order()
    assert len({tuple(o) for o in (order(), order(key=(1, "b")), order(epoch=1), order(purpose="fisher"))}) == 4
    data = make(20)
    first = next(iter(data.epoch(0, 5)))
    list(data.epoch(0, 5, purpose="fisher"))
    assert torch.equal(next(iter(data.epoch(0, 5))).index, first.index), "another pass changed what training sees"


def test_no_shuffle_keeps_the_order_and_draws_no_augmentation():
    given_rngs = []

    def prepare(x, rng):
        given_rngs.append(rng)
        return x

    data = make(6, prepare=prepare)
    assert torch.cat([b.index for b in data.epoch(shuffle=False, batch_size=4)]).tolist() == list(range(6))
    assert given_rngs == [None, None]
    list(data.epoch())
    assert isinstance(given_rngs[-1], torch.Generator)


def test_part_labels_and_classes():
    data = Batches(
        torch.zeros(5, 1), torch.tensor([4, 2, 2, 0, 4]), torch.tensor([4, 1, 2]), key=(0,), prepare=lambda x, r: x
    )
    assert data.num_examples == len(data) == 3
    assert data.labels.tolist() == [4, 2, 2] and data.classes == (2, 4)
    assert data.part(1, 3).labels.tolist() == [2, 2] and data.part(2, 9).num_examples == 1


def test_mappings_are_taken_row_by_row():
    x = {"ids": torch.arange(6).reshape(3, 2), "mask": torch.ones(3)}
    assert take(x, torch.tensor([2]))["ids"].tolist() == [[4, 5]]
    batch = next(
        iter(Batches(x, torch.zeros(3, dtype=torch.long), torch.arange(3), key=(), prepare=lambda x, r: x).epoch())
    )
    assert set(batch.x) == {"ids", "mask"}


def test_a_batch_size_below_one_is_refused():
    with pytest.raises(ConfigError, match="batch_size must be at least 1, got 0"):
        next(make(3).epoch(batch_size=0))
