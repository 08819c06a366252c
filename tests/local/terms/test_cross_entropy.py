from __future__ import annotations

import math

import pytest
import torch

from fedloom.core import Batch, ConfigError
from fedloom.local.terms import CrossEntropy

LOGITS = torch.tensor([[1.0, -2.0, 0.5, 3.0], [0.0, 4.0, -1.0, 2.0]])
BATCH = Batch(torch.zeros(2, 1), torch.tensor([0, 1]), torch.arange(2))
INF = float("inf")
REF = {"all": None, "seen": torch.tensor([0, 0, 0, -INF]), "current": torch.tensor([0, 0, -INF, -INF])}


@pytest.mark.parametrize(("scope", "width"), [("all", 4), ("seen", 3), ("current", 2)])
def test_the_softmax_is_over_the_classes_of_the_scope(scope: str, width: int):
    by_hand = 0.0
    for row, label in zip(LOGITS[:, :width].tolist(), [0, 1], strict=True):
        by_hand -= math.log(math.exp(row[label]) / sum(math.exp(v) for v in row)) / 2
    loss = CrossEntropy(scope)({}, {"logits": LOGITS}, BATCH, REF, {})
    assert loss.item() == pytest.approx(by_hand, rel=1e-6)
    assert CrossEntropy(scope, weight=0.3)({}, {"logits": LOGITS}, BATCH, REF, {}).item() == pytest.approx(
        0.3 * by_hand
    )


def test_classes_outside_get_no_gradient():
    logits = LOGITS.clone().requires_grad_()
    CrossEntropy("current")({}, {"logits": logits}, BATCH, REF, {}).backward()
    inside = torch.softmax(LOGITS[:, :2], 1) - torch.eye(2)
    torch.testing.assert_close(logits.grad[:, :2], inside / 2)
    assert not logits.grad[:, 2:].any()


def test_an_unknown_scope_is_refused():
    with pytest.raises(ConfigError, match="label scope must be one of seen, current, all, got 'task'"):
        CrossEntropy("task")
