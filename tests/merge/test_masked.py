"""Means over the clients that own an entry."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core import PayloadError
from fedloom.merge.masked import masked_mean
from fedloom.merge.mean import weighted_mean

A = torch.tensor([[1.0, 2.0], [3.0, 4.0], [float("nan"), 6.0]])
B = torch.tensor([[float("inf"), 8.0], [7.0, 0.0], [5.0, 5.0]])
OLD = {"head": torch.full((3, 2), 9.0)}


def test_head_rows_by_global_class_id() -> None:
    masks = [{"head": torch.tensor([True, True, False])}, {"head": torch.tensor([False, True, True])}]
    merged = masked_mean([{"head": A}, {"head": B}], masks, [1, 3], OLD)["head"]
    assert torch.equal(merged[0], A[0])
    assert torch.equal(merged[1], (A[1] + 3 * B[1]) / 4)
    assert torch.equal(merged[2], B[2])


def test_unowned_rows_keep_the_old_value_and_unowned_tensors_the_object() -> None:
    masks = [{"head": torch.tensor([True, False, False])}] * 2
    merged = masked_mean([{"head": A}, {"head": A}], masks, [1, 3], OLD)["head"]
    assert torch.equal(merged, torch.tensor([[1.0, 2.0], [9.0, 9.0], [9.0, 9.0]]))
    nobody = [{"head": torch.zeros(3, dtype=torch.bool)}]
    assert masked_mean([{"head": A}], nobody, [1], OLD)["head"] is OLD["head"]
    assert masked_mean([{}], [{}], [1], OLD)["head"] is OLD["head"]
    assert masked_mean([{"head": A}], [{}], [0], OLD)["head"] is OLD["head"]


def test_output_and_input_channel_masks_and_full_masks() -> None:
    x, y = torch.ones(2, 3), torch.full((2, 3), 5.0)
    columns = torch.tensor([[True, False, True]])
    full = torch.tensor([[False, True, False], [True, False, False]])
    old = {"w": torch.zeros(2, 3)}
    merged = masked_mean([{"w": x}, {"w": y}], [{"w": columns}, {"w": full}], [1, 1], old)["w"]
    assert torch.equal(merged, torch.tensor([[1.0, 5.0, 1.0], [3.0, 0.0, 1.0]]))


def test_no_mask_means_owned_whole() -> None:
    rng = torch.Generator().manual_seed(0)
    trees = [{"w": torch.randn(4, 3, 2, generator=rng), "n": torch.tensor(i)} for i in range(3)]
    old = {"w": torch.zeros(4, 3, 2), "n": torch.tensor(0)}
    plain = weighted_mean(trees, [1, 2, 5], old)
    ones = [{"w": torch.ones(4, dtype=torch.bool)}] * 3
    for masks in ([{}] * 3, ones):
        merged = masked_mean(trees, masks, [1, 2, 5], old)
        assert torch.equal(merged["w"], plain["w"]) and torch.equal(merged["n"], plain["n"])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5))
def test_against_brute_force(seed: int, count: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    values = [torch.randn(4, 3, generator=rng) for _ in range(count)]
    masks = [torch.rand(4, 3, generator=rng) < 0.5 for _ in range(count)]
    weights = [float(n) for n in torch.randint(0, 5, (count,), generator=rng)]
    old = torch.randn(4, 3, generator=rng)
    merged = masked_mean([{"w": v} for v in values], [{"w": m} for m in masks], weights, {"w": old})["w"]
    for i in range(4):
        for j in range(3):
            owners = [(n, float(v[i, j])) for n, v, m in zip(weights, values, masks, strict=True) if m[i, j] and n]
            mean = sum(n * v for n, v in owners) / sum(n for n, _ in owners) if owners else float(old[i, j])
            assert float(merged[i, j]) == pytest.approx(mean, rel=1e-6, abs=1e-7)


def test_refusals_name_client_and_tensor() -> None:
    tree = {"head": torch.zeros(3, 2)}
    with pytest.raises(PayloadError, match="client 8: the mask of 'head' must be boolean"):
        masked_mean([tree], [{"head": torch.ones(3)}], [1], OLD, who=[8])
    for shape in ((2,), (1,), (3, 3), (3, 2, 1)):
        with pytest.raises(PayloadError, match="client 8: the mask of 'head' has shape"):
            masked_mean([tree], [{"head": torch.ones(shape, dtype=torch.bool)}], [1], OLD, who=[8])
    with pytest.raises(PayloadError, match="1 trees but 0 maps of masks"):
        masked_mean([tree], [], [1], OLD)
    with pytest.raises(PayloadError, match="client at position 0: 'head' has shape"):
        masked_mean([{"head": torch.zeros(2, 2)}], [{}], [1], OLD)
    with pytest.raises(PayloadError, match="client 8: 'head' holds NaN"):
        masked_mean([{"head": A}], [{}], [1], OLD, who=[8])
