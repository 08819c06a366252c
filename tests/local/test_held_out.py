"""Setting examples aside: how many, which, and when other ones."""

from __future__ import annotations

import pytest
import torch

from fedloom.core import Batches
from fedloom.local.held_out import held_out


def batches(count: int) -> Batches:
    return Batches(torch.arange(count), torch.arange(count), torch.arange(count), key=(0,), prepare=lambda x, rng: x)


@pytest.mark.parametrize(("count", "aside"), [(0, 0), (1, 0), (3, 0), (4, 1), (7, 1), (8, 2), (101, 25)])
def test_a_quarter_rounded_down_is_set_aside_and_every_example_is_in_one_part(count: int, aside: int):
    kept, out = held_out(batches(count), 4, seed=1)
    assert (len(kept), len(out)) == (count - aside, aside)
    assert sorted([*kept.labels.tolist(), *out.labels.tolist()]) == list(range(count))


def test_the_draw_depends_on_the_seed_alone():
    first, second, other = (held_out(batches(40), 4, seed)[1].labels.tolist() for seed in (1, 1, 2))
    assert first == second != other and first != sorted(first)
