"""The float64 accumulator."""

from __future__ import annotations

import torch

from fedloom.merge.accumulate import Accumulator


def test_memory_is_used_again_and_starts_clean() -> None:
    total = Accumulator()
    for size in (5, 3, 8, 0, 1):
        like = torch.zeros(size)
        total.start(like)
        assert torch.equal(total.view(like), torch.zeros(size, dtype=torch.float64))
        total.start(like)
        total.add(torch.full((size,), 2.0), 3.0)
        total.add(torch.full((size,), 4.0), 1.0)
        assert torch.equal(total.mean(4.0, like), torch.full((size,), 2.5))


def test_kinds_may_follow_each_other() -> None:
    total = Accumulator()
    for like in (torch.zeros(2), torch.zeros(2, dtype=torch.complex64), torch.zeros(3, dtype=torch.int32)):
        values = [torch.ones_like(like), torch.ones_like(like) * 4]
        merged = total.mean_of(values, [2.0, 1.0], like)
        assert merged.dtype == like.dtype and torch.equal(merged, torch.ones_like(like) * 2)


def test_ratio_keeps_the_old_value_where_nothing_was_added() -> None:
    total, old = Accumulator(), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    total.start(old)
    total.add(torch.tensor([[6.0, 0.0], [0.0, 0.0]]), 1.0)
    assert torch.equal(
        total.ratio(torch.tensor([[2.0], [0.0]], dtype=torch.float64), old), torch.tensor([[3.0, 0.0], [3.0, 4.0]])
    )
