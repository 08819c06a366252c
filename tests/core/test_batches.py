from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core import Batches, ConfigError
from fedloom.core.batches import pooled, take


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


def visited(data: Batches, epochs: int, size: int = 4, **given) -> list[list[int]]:
    """Positions that each epoch hands out, in order."""
    return [[i for b in data.epoch(e, size, **given) for i in b.index.tolist()] for e in range(epochs)]


@given(count=st.integers(1, 25), quota=st.integers(1, 60), size=st.integers(1, 9))
def test_whole_passes_visit_every_example_equally_often(count: int, quota: int, size: int):
    """Epochs of `quota` examples cut one endless row of passes, each of which has every example once."""
    data = make(count).with_quota(quota)
    epochs = visited(data, count, size)  # count epochs of quota examples are quota passes
    assert all(len(epoch) == quota for epoch in epochs)
    assert Counter(i for epoch in epochs for i in epoch) == dict.fromkeys(range(count), quota)
    row = [i for epoch in epochs for i in epoch]
    for start in range(0, len(row), count):
        assert sorted(row[start : start + count]) == list(range(count)), "an example came back within a pass"
    assert data.visits.count == count * quota
    for epoch in range(min(count, 3)):
        assert len(list(data.epoch(epoch, size))) == data.steps(size)


def test_passes_are_shuffled_anew_and_do_not_depend_on_the_quota():
    def row(key=(0, "b"), purpose="train", quota=30) -> list[int]:
        epochs = visited(make(20, key=key).with_quota(quota), 60 // quota, purpose=purpose)
        return [i for epoch in epochs for i in epoch]

    assert row() == row(quota=5) == row(quota=60), "the quota only says where an epoch ends"
    assert row()[:20] != row()[20:40] != row()[40:]
    assert row() != row(key=(1, "b")) and row() != row(purpose="fisher")


def test_a_quota_takes_the_batches_of_a_last_single_example_too():
    data = make(20).with_quota(9)
    assert [len(b.y) for b in data.epoch(3, 4)] == [4, 5] and data.steps(4) == 2
    assert data.num_examples == 20 and data.labels.shape == (20,)


def test_no_quota_and_a_quota_of_nothing():
    assert visited(make(6).with_quota(3).with_quota(None), 2) == visited(make(6), 2)
    nothing = make(6).with_quota(0)
    assert visited(nothing, 2) == [[], []] and nothing.steps(4) == 0 and nothing.visits.count == 0
    assert visited(make(0).with_quota(5), 2) == [[], []] and make(0).with_quota(5).steps(2) == 0
    with pytest.raises(ConfigError, match="quota must be at least 0 examples, got -1"):
        make(6).with_quota(-1)


def test_a_pass_without_shuffling_takes_every_example_once_whatever_the_quota():
    assert visited(make(6).with_quota(4), 2, shuffle=False) == [list(range(6))] * 2


def bytes_of(count: int, prepare=lambda x, rng: x.float() / 255) -> Batches:
    """Rows 5, 4, 3, ... of 8-bit inputs whose value is their row."""
    x = torch.arange(6, dtype=torch.uint8).reshape(6, 1)
    return Batches(x, torch.arange(6) + 10, torch.arange(6).flip(0)[:count], key=(0,), prepare=prepare)


def test_what_is_stored_is_raw():
    x, y = bytes_of(3).stored(torch.tensor([2, 0]))
    assert x.dtype == torch.uint8 and x.tolist() == [[3], [5]] and y.tolist() == [13, 15]
    assert bytes_of(3).visits.count == 0
    words = {"ids": torch.arange(6).reshape(3, 2), "mask": torch.ones(3)}
    ids, _ = Batches(words, torch.zeros(3), torch.tensor([2, 1]), key=(), prepare=dict).stored(torch.tensor([1]))
    assert ids["ids"].tolist() == [[2, 3]] and ids["mask"].tolist() == [1.0]


def test_joined_examples_follow_and_are_prepared_like_the_own_ones():
    generators = []

    def prepare(x, rng):
        generators.append(rng)
        noise = 0.0 if rng is None else 0.1 * torch.rand(len(x), 1, generator=rng)
        return x.float() / 100 + noise

    data = bytes_of(2, prepare)
    both = data.joined(*bytes_of(6).stored(torch.tensor([5, 0])))
    assert both.labels.tolist() == [15, 14, 10, 15] and both.classes == (10, 14, 15) and len(both) == 4
    plain = torch.cat([b.x for b in both.epoch(shuffle=False, batch_size=2)]).flatten()
    assert plain.tolist() == pytest.approx([0.05, 0.04, 0.0, 0.05]) and generators == [None, None]
    (batch,) = both.epoch()
    assert sorted(batch.index.tolist()) == [0, 1, 2, 3] and isinstance(generators[-1], torch.Generator)
    clean = torch.tensor([5.0, 4.0, 0.0, 5.0])[batch.index] / 100
    added = batch.x.flatten() - clean
    assert ((added > 0) & (added < 0.1)).all() and len(set(added.tolist())) == 4
    assert batch.y.tolist() == both.labels[batch.index].tolist()
    assert data.labels.tolist() == [15, 14], "the own examples stay as they were"


def test_joined_examples_share_quota_and_stream():
    data = make(5)
    x, y = data.stored(torch.tensor([1, 1, 3]))
    assert visited(data.joined(x, y), 2) == visited(make(8), 2), "the streams go by the key, not by what is joined"
    assert visited(data.joined(x, y, quota=5), 8) == visited(make(8).with_quota(5), 8)
    assert visited(data.joined(x[:0], y[:0]), 1) == visited(make(5), 1)


def test_mappings_are_joined_row_by_row():
    def words(count: int) -> Batches:
        x = {"ids": torch.arange(2 * count).reshape(count, 2), "mask": torch.ones(count)}
        return Batches(x, torch.arange(count), torch.arange(count), key=(0,), prepare=lambda x, rng: x)

    both = words(3).joined(*words(5).stored(torch.tensor([4])))
    (batch,) = both.epoch(shuffle=False)
    assert batch.x["ids"].tolist() == [[0, 1], [2, 3], [4, 5], [8, 9]] and batch.x["mask"].shape == (4,)
    assert batch.y.tolist() == [0, 1, 2, 4]


def test_only_what_is_stored_alike_is_joined():
    y = torch.zeros(1, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"as they are stored \(torch.uint8\), got torch.float32; keep those"):
        bytes_of(2).joined(torch.zeros(1, 1), y)
    with pytest.raises(ConfigError, match=r"\(torch.uint8\), got a mapping of \['ids'\]"):
        bytes_of(2).joined({"ids": torch.zeros(1, 1)}, y)


def test_visits_are_counted_exactly_and_shared_by_what_is_made_of_the_data():
    data = make(10)
    assert data.visits.count == 0
    list(data.epoch(0, 4))
    list(data.epoch(0, 3, purpose="fisher"))
    list(data.epoch(batch_size=7, shuffle=False))
    assert (data.visits.count, data.visits.passes) == (20, 10), "a pass that trains nothing is counted apart"
    next(iter(data.epoch(1, 4)))
    assert data.visits.count == 24, "a pass that ends early has visited what it was given"
    list(data.part(2, 5).epoch())
    list(data.with_quota(6).epoch())
    list(data.joined(*data.stored(torch.tensor([0, 1])), quota=5).epoch())
    assert data.visits.count == 24 + 3 + 6 + 5
    other = data.keyed("other")
    list(other.epoch())
    assert (data.visits.count, other.visits.count, other.visits.passes) == (38, 10, 0)


def test_keys_tell_streams_of_the_same_examples_apart():
    data = make(20)
    first, second = visited(data.keyed("a", 1), 1), visited(data.keyed("a", 2), 1)
    assert first != second != visited(data, 1) != first
    assert first == visited(make(20).keyed("a", 1), 1) and torch.equal(data.keyed("a").labels, data.labels)


def test_a_pool_has_every_example_once():
    x, y = torch.arange(8.0).reshape(8, 1), torch.arange(8) + 20

    def part(*rows: int, name="c") -> Batches:
        return Batches(x, y, torch.tensor(rows, dtype=torch.long), key=(name,), prepare=lambda x, rng: x)

    pool = pooled([part(5, 1), part(), part(1, 2, 7)])
    assert pool.labels.tolist() == [21, 22, 25, 27]
    assert [b.x.flatten().tolist() for b in pool.epoch(shuffle=False)] == [[1.0, 2.0, 5.0, 7.0]]
    assert visited(pool, 1) == visited(part(1, 2, 5, 7), 1), "the streams are those of the first"
    assert visited(pooled([part(*range(8)), part(0, name="d")]), 1) != visited(part(*range(8), name="d"), 1)
    assert len(pooled([part(), part()])) == 0
    list(pooled([first := part(1, 2)]).epoch())
    assert first.visits.count == 0, "a pool counts for itself"
    for other in (
        Batches(x.clone(), y, torch.arange(2), key=(), prepare=lambda x, rng: x),
        Batches(x, y.clone(), torch.arange(2), key=(), prepare=lambda x, rng: x),
    ):
        with pytest.raises(ConfigError, match="only where they are rows of one data set"):
            pooled([part(0), other])
