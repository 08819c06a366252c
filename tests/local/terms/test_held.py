"""The masked cross-entropy: two fills that differ, and rows that get no gradient."""

import math

import pytest
import torch

from fedloom.core.batches import Batch
from fedloom.local.terms import CrossEntropy
from fedloom.local.terms.held import HeldCrossEntropy

LOGITS = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
HELD = torch.tensor([True, True, False, False])


def value(term, logits=LOGITS, held=HELD, seen=None, y=1):
    batch = Batch(torch.zeros(1, 1), torch.tensor([y]), torch.tensor([0]))
    return term({}, {"logits": logits}, batch, {"held": held, "seen": seen}, {})


def test_a_logit_of_zero_stays_in_the_softmax_and_minus_infinity_does_not():
    e = math.e
    assert value(HeldCrossEntropy(0.0)).item() == pytest.approx(math.log(e + e**2 + 2) - 2)
    assert value(HeldCrossEntropy(-math.inf)).item() == pytest.approx(math.log(e + e**2) - 2)


def test_classes_that_have_not_arrived_are_never_in_the_softmax():
    seen = torch.tensor([0.0, 0.0, 0.0, -math.inf], dtype=torch.float64)
    assert value(HeldCrossEntropy(0.0), seen=seen).item() == pytest.approx(math.log(math.e + math.e**2 + 1) - 2)


@pytest.mark.parametrize("fill", [0.0, -math.inf])
def test_classes_that_are_not_held_get_no_gradient(fill: float):
    logits = LOGITS.clone().requires_grad_()
    value(HeldCrossEntropy(fill), logits).backward()
    assert logits.grad[0, 2:].tolist() == [0.0, 0.0]
    shares = torch.softmax(LOGITS.masked_fill(~HELD, fill), 1)[0, :2] - torch.tensor([0.0, 1.0])
    torch.testing.assert_close(logits.grad[0, :2], shares)


@pytest.mark.parametrize("fill", [0.0, -math.inf])
def test_with_every_class_it_is_the_cross_entropy(fill: float):
    every = torch.ones(4, dtype=torch.bool)
    assert value(HeldCrossEntropy(fill), held=every).item() == value(CrossEntropy()).item()
