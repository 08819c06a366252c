"""Stacked experts, each averaged over the clients that used it."""

from __future__ import annotations

import pytest
import torch

from fedloom.core import PayloadError
from fedloom.merge.experts import expertwise_mean
from fedloom.merge.mean import weighted_mean

OLD = {"experts.w": torch.tensor([[7.0, 7.0], [7.0, 7.0], [7.0, 7.0]])}
A = {"experts.w": torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])}
B = {"experts.w": torch.tensor([[5.0, 5.0], [6.0, 6.0], [float("nan"), 8.0]])}


def test_weight_is_usage_per_expert() -> None:
    usage = [torch.tensor([3, 0, 0]), torch.tensor([1, 10, 0])]
    merged = expertwise_mean([A, B], usage, OLD)["experts.w"]
    assert torch.equal(merged, torch.tensor([[2.0, 2.0], [6.0, 6.0], [7.0, 7.0]]))


def test_nobody_used_any_expert() -> None:
    assert expertwise_mean([A], [torch.zeros(3)], OLD)["experts.w"] is OLD["experts.w"]
    assert expertwise_mean([{}], [torch.ones(3)], OLD)["experts.w"] is OLD["experts.w"]
    assert expertwise_mean([], [], OLD)["experts.w"] is OLD["experts.w"]


def test_one_expert_equals_the_weighted_mean() -> None:
    rng = torch.Generator().manual_seed(0)
    trees = [{"w": torch.randn(1, 5, 4, generator=rng)} for _ in range(3)]
    old = {"w": torch.zeros(1, 5, 4)}
    usage = [torch.tensor([n]) for n in (3.0, 1.5, 7.0)]
    assert torch.equal(expertwise_mean(trees, usage, old)["w"], weighted_mean(trees, [3.0, 1.5, 7.0], old)["w"])


def test_permuting_experts_permutes_the_result() -> None:
    order = torch.tensor([2, 0, 1])
    a, b = {"w": torch.randn(3, 2, generator=torch.Generator().manual_seed(1))}, {"w": torch.ones(3, 2)}
    usage = [torch.tensor([1.0, 2.0, 0.0]), torch.tensor([4.0, 0.0, 0.0])]
    old = {"w": torch.full((3, 2), -1.0)}
    merged = expertwise_mean([a, b], usage, old)["w"]
    permuted = [{"w": t["w"][order]} for t in (a, b)]
    assert torch.equal(expertwise_mean(permuted, [u[order] for u in usage], old)["w"], merged[order])


@pytest.mark.parametrize(
    ("usage", "message"),
    [
        (torch.tensor([1.0, -1.0, 0.0]), "client 3: usage must be finite and not negative"),
        (torch.tensor([1.0, float("nan"), 0.0]), "client 3: usage must be finite"),
        (torch.ones(3, 1), "client 3: usage must be a vector"),
        (torch.ones(3, dtype=torch.bool), "client 3: usage must be a vector of numbers"),
        (torch.ones(2), r"client 3: usage of 2 experts does not fit 'experts.w' of shape \(3, 2\)"),
    ],
)
def test_bad_usage(usage: torch.Tensor, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        expertwise_mean([A], [usage], OLD, who=[3])


def test_other_refusals() -> None:
    with pytest.raises(PayloadError, match="1 trees but 0 usage vectors"):
        expertwise_mean([A], [], OLD)
    with pytest.raises(PayloadError, match=r"client 3: 'experts\.w' holds NaN"):
        expertwise_mean([B], [torch.ones(3)], OLD, who=[3])
    with pytest.raises(PayloadError, match="does not fit 's'"):
        expertwise_mean([{"s": torch.tensor(1.0)}], [torch.ones(3)], {"s": torch.tensor(1.0)})
