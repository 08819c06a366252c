"""Class prototypes over clients."""

from __future__ import annotations

import pytest
import torch

from fedloom.core import PayloadError
from fedloom.merge.prototypes import ema, merge_prototypes, merge_signatures


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


def test_signatures_are_weighed_by_examples_and_enter_by_a_moving_mean() -> None:
    """Domain 0 has a prototype, domain 1 starts, domain 2 is sent by nobody; (1, 0) and (0, 1) give halves."""
    old = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.3, 0.7]])
    nan = float("nan")
    first = torch.tensor([[0.0, 1.0], [0.25, 0.75], [nan, nan]])
    second = torch.tensor([[0.0, 1.0], [0.75, 0.25], [nan, nan]])
    counts = [torch.tensor([30, 30, 0]), torch.tensor([5, 10, 0])]
    valid = torch.tensor([True, False, True])
    proto, known = merge_signatures([first, second], counts, old, valid, 0.5)
    torch.testing.assert_close(proto, torch.tensor([[0.5, 0.5], [0.375, 0.625], [0.3, 0.7]]))
    assert known.tolist() == [True, True, True] and proto.dtype == old.dtype
    untouched, known = merge_signatures([], [], old, valid, 0.5)
    assert torch.equal(untouched, old) and torch.equal(known, valid)


def test_prototypes_stay_on_the_simplex() -> None:
    rng = torch.Generator().manual_seed(1)
    parts = [torch.rand(3, 6, generator=rng, dtype=torch.float64) for _ in range(4)]
    old, *sent = [part / part.sum(1, keepdim=True) for part in parts]
    counts = [torch.tensor([3, 0, 8]), torch.tensor([1, 2, 0]), torch.tensor([7, 7, 0])]
    for mu in (0.0, 0.4, 1.0):
        proto, _ = merge_signatures(sent, counts, old, torch.tensor([True, True, False]), mu)
        torch.testing.assert_close(proto.sum(1), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-15)
        if mu == 1.0:
            assert torch.equal(proto[:2], old[:2])


def test_a_moving_mean_is_exact_at_both_ends() -> None:
    old, new = torch.tensor([0.1, 0.7]), torch.tensor([0.3, 1e-9])
    assert torch.equal(ema(old, new, 0.0), new) and torch.equal(ema(old, new, 1.0), old)
    torch.testing.assert_close(ema(old, new, 0.25), 0.25 * old + 0.75 * new)


def test_a_signature_that_does_not_fit_is_blamed_on_its_client() -> None:
    old, valid = torch.zeros(2, 3), torch.ones(2, dtype=torch.bool)
    with pytest.raises(PayloadError, match=r"client 4: prototype sums \(2, 2\)"):
        merge_signatures([torch.ones(2, 2)], [torch.ones(2)], old, valid, 0.5, who=[4])
    with pytest.raises(PayloadError, match="client 4: prototype sums hold NaN"):
        merge_signatures([torch.full((2, 3), torch.nan)], [torch.ones(2)], old, valid, 0.5, who=[4])
