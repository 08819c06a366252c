"""Networks of different shapes, merged by index."""

from __future__ import annotations

import pytest
import torch

from fedloom.core import PayloadError
from fedloom.merge.by_index import indexed_mean, take_part
from fedloom.merge.mean import weighted_mean


def test_head_rows_of_different_classes() -> None:
    a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[7.0, 0.0], [5.0, 5.0]])
    rows = [{"head": (torch.tensor([0, 1]),)}, {"head": (torch.tensor([1, 2]),)}]
    old = {"head": torch.full((4, 2), 9.0)}
    merged = indexed_mean([{"head": a}, {"head": b}], rows, [1, 3], old)["head"]
    assert torch.equal(merged, torch.stack([a[0], (a[1] + 3 * b[0]) / 4, b[1], torch.tensor([9.0, 9.0])]))


def test_shared_block_of_a_layer() -> None:
    """Hand-computed: weights .75 and .25, shared rows and columns {0, 1}; the other entries stay."""
    first = torch.arange(9.0).reshape(3, 3)
    shared = torch.tensor([0, 1])
    index = {"w": (shared, shared)}
    parts = [{"w": take_part(first, index["w"])}, {"w": take_part(first + 10, index["w"])}]
    merged = indexed_mean(parts, [index, index], [0.75, 0.25], {"w": first})["w"]
    expected = first.clone()
    expected[:2, :2] = torch.tensor([[2.5, 3.5], [5.5, 6.5]])
    assert torch.equal(merged, expected)


def test_leading_slices_of_narrower_networks() -> None:
    old = {"w": torch.zeros(3, 2), "b": torch.tensor([1.0, 1.0, 1.0]), "n": torch.tensor(5)}
    narrow = {"w": torch.full((1, 2), 2.0), "b": torch.tensor([3.0]), "n": torch.tensor(6)}
    middle = {"w": torch.full((2, 1), 6.0), "b": torch.tensor([5.0, 7.0]), "n": torch.tensor(8)}
    merged = indexed_mean([narrow, middle], None, [1, 3], old)
    assert torch.equal(merged["w"], torch.tensor([[5.0, 2.0], [6.0, 0.0], [0.0, 0.0]]))
    assert torch.equal(merged["b"], torch.tensor([4.5, 7.0, 1.0]))
    assert merged["n"].item() == 8 and merged["n"].dtype == torch.int64  # (6 + 24) / 4 = 7.5, half to even


def test_order_of_positions_is_respected_and_whole_networks_equal_the_mean() -> None:
    rng = torch.Generator().manual_seed(0)
    old = {"w": torch.randn(4, 3, 2, generator=rng)}
    index = {"w": (torch.tensor([3, 0]), None, torch.tensor([1]))}
    part = take_part(old["w"], index["w"])
    assert part.shape == (2, 3, 1) and torch.equal(part[0, :, 0], old["w"][3, :, 1])
    assert torch.equal(indexed_mean([{"w": part}], [index], [2], old)["w"], old["w"])
    trees = [{"w": torch.randn(4, 3, 2, generator=rng)} for _ in range(3)]
    for indices in (None, [{}] * 3, [{"w": ()}] * 3, [{"w": (torch.arange(4), None, None)}] * 3):
        merged = indexed_mean(trees, indices, [1, 2, 5], old)["w"]
        torch.testing.assert_close(merged, weighted_mean(trees, [1, 2, 5], old)["w"], rtol=2e-7, atol=0)


def test_nobody_and_zero_weight_keep_the_old_object() -> None:
    old = {"w": torch.ones(2)}
    assert indexed_mean([{}], None, [1], old)["w"] is old["w"]
    assert indexed_mean([{"w": torch.zeros(2)}], None, [0], old)["w"] is old["w"]


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        ((torch.tensor([0, 2]),), torch.zeros(2, 2), r"must lie in \[0, 2\)"),
        ((torch.tensor([-1]),), torch.zeros(1, 2), r"must lie in \[0, 2\)"),
        ((torch.tensor([1, 1]),), torch.zeros(2, 2), "names a position twice"),
        ((torch.tensor([0.0]),), torch.zeros(1, 2), "must be an int64 vector"),
        ((torch.tensor([[0]]),), torch.zeros(1, 2), "must be an int64 vector"),
        ((torch.tensor([0]),), torch.zeros(2, 2), r"'w' has shape \(2, 2\), its index names \(1, 2\)"),
        ((None, None, None), torch.zeros(2, 2), "has 3 dimensions, not 2"),
        ((None,), torch.zeros(2, 2, dtype=torch.float64), "dtype"),
        (None, torch.zeros(3, 2), "which is no part of"),
        (None, torch.zeros(2), "which is no part of"),
        (None, torch.full((2, 2), torch.nan), "holds NaN"),
    ],
)
def test_refusals(index, value: torch.Tensor, message: str) -> None:
    indices = None if index is None else [{"w": index}]
    with pytest.raises(PayloadError, match=f"client 6.*{message}"):
        indexed_mean([{"w": value}], indices, [1], {"w": torch.zeros(2, 2)}, who=[6])


def test_count_of_indices() -> None:
    with pytest.raises(PayloadError, match="1 trees but 0 maps of indices"):
        indexed_mean([{"w": torch.zeros(1)}], [], [1], {"w": torch.zeros(1)})
