"""The in-batch contrastive loss in numbers."""

import math

import pytest
import torch
from torch.nn import functional as F

from fedloom.core.batches import Batch
from fedloom.local.terms.in_batch import InBatchContrast


def loss(logits, y):
    y = torch.tensor(y)
    return InBatchContrast()({}, {"logits": logits}, Batch(None, y, y), {}, {})


@pytest.mark.parametrize(("batch", "gap"), [(2, 0.01), (4, 0.02), (16, 0.05), (32, 0.0)])
def test_distinct_classes_at_one_cosine_gap(batch, gap):
    """B distinct classes, own cosine higher by s: log(1 + (B - 1) e^{-100 s})."""
    logits = 100 * (0.2 + gap * torch.eye(batch, dtype=torch.float64))
    expected = math.log(1 + (batch - 1) * math.exp(-100 * gap))
    assert loss(logits, list(range(batch))).item() == pytest.approx(expected, rel=1e-12)


def test_it_is_the_mean_of_both_directions():
    logits, y = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)), [5, 0, 6]
    scores, own = logits[:, y], torch.arange(3)
    expected = (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
    assert torch.allclose(loss(logits, y), expected)
    assert not torch.allclose(F.cross_entropy(scores, own), F.cross_entropy(scores.T, own))


def test_two_equal_rows_of_a_class_cost_log_two():
    assert loss(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), [0, 0]).item() == pytest.approx(math.log(2))


def test_one_picture_alone_costs_nothing_and_moves_nothing():
    logits = torch.randn(1, 4, requires_grad=True)
    value = loss(logits, [2])
    value.backward()
    assert value.item() == 0 and not logits.grad.any()


def test_classes_outside_the_batch_may_be_minus_infinity():
    logits = torch.tensor([[1.0, 0.0, -math.inf], [0.0, 1.0, -math.inf]], requires_grad=True)
    loss(logits, [0, 1]).backward()
    assert torch.isfinite(logits.grad).all() and not logits.grad[:, 2].any()
