"""Class prototypes over clients."""

from __future__ import annotations

import pytest
import torch

from fedloom.core import PayloadError
from fedloom.merge.prototypes import merge_prototypes


def test_equals_the_mean_of_all_features_together() -> None:
    rng = torch.Generator().manual_seed(0)
    feats, labels = torch.randn(30, 4, generator=rng), torch.randint(0, 3, (30,), generator=rng)
    old = torch.full((5, 4), 9.0)
    sums, counts = [], []
    for part, y in zip(feats.split(10), labels.split(10), strict=True):
        sums.append(torch.zeros(5, 4).index_add_(0, y, part))
        counts.append(torch.bincount(y, minlength=5))
    proto, count = merge_prototypes(sums, counts, old)
    for c in range(3):
        torch.testing.assert_close(proto[c], feats[labels == c].mean(0))
    assert torch.equal(proto[3:], old[3:]) and proto.dtype == torch.float32
    assert count.tolist() == torch.bincount(labels, minlength=5).tolist()


def test_sums_without_examples_are_ignored() -> None:
    sums = [torch.tensor([[float("nan")], [4.0]])]
    proto, _ = merge_prototypes(sums, [torch.tensor([0, 2])], torch.tensor([[7.0], [7.0]]))
    assert proto.flatten().tolist() == [7.0, 2.0]
    assert merge_prototypes([], [], torch.tensor([[7.0]]))[0].item() == 7.0


@pytest.mark.parametrize(
    ("value", "count", "message"),
    [
        (torch.zeros(2, 2), torch.ones(2), r"prototype sums \(2, 2\) and counts \(2,\)"),
        (torch.zeros(2, 1), torch.ones(3), "do not fit"),
        (torch.zeros(2, 1), torch.tensor([1.0, -1.0]), "counts must be finite and not negative"),
        (torch.zeros(2, 1), torch.tensor([1.0, torch.nan]), "counts must be finite"),
        (torch.full((2, 1), torch.inf), torch.ones(2), "sums hold NaN or infinite"),
    ],
)
def test_refusals(value: torch.Tensor, count: torch.Tensor, message: str) -> None:
    with pytest.raises(PayloadError, match=f"client 5: .*{message}"):
        merge_prototypes([value], [count], torch.zeros(2, 1), who=[5])


def test_lengths() -> None:
    with pytest.raises(PayloadError, match="1 sums of features but 0 counts"):
        merge_prototypes([torch.zeros(1, 1)], [], torch.zeros(1, 1))
