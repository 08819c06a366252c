from __future__ import annotations

import math

import pytest
import torch

from fedloom.core import Batch, ConfigError
from fedloom.local.terms import Distillation, TeacherLogits

STUDENT = torch.tensor([[1.0, -2.0, 0.5], [0.0, 4.0, -1.0]])
TEACHER = torch.tensor([[0.5, 1.0, -3.0], [2.0, -1.0, 0.0]])
INF = float("inf")
REF = {"seen": None, "all": None, "old": torch.tensor([0.0, 0.0, -INF])}


def by_hand(temperature: float, width: int = 3) -> float:
    def soft(row):
        e = [math.exp(v / temperature) for v in row[:width]]
        return [v / sum(e) for v in e]

    total = 0.0
    for s, t in zip(STUDENT.tolist(), TEACHER.tolist(), strict=True):
        total += sum(p * math.log(p / q) for p, q in zip(soft(t), soft(s), strict=True))
    return total / 2


def value(term: Distillation, student=STUDENT, teacher=TEACHER) -> torch.Tensor:
    return term({}, {"logits": student, "teacher": teacher}, None, REF, {})


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 4.0])
def test_closed_form_with_and_without_the_squared_temperature(temperature: float):
    plain = value(Distillation(temperature, scale=False)).item()
    assert plain == pytest.approx(by_hand(temperature), rel=1e-5)
    assert value(Distillation(temperature)).item() == pytest.approx(temperature**2 * plain, rel=1e-6)
    assert value(Distillation(temperature, weight=0.3)).item() == pytest.approx(0.3 * temperature**2 * plain, rel=1e-6)


def test_the_gradient_is_the_difference_of_the_soft_labels_times_t():
    student, teacher, t = STUDENT.clone().requires_grad_(), TEACHER.clone().requires_grad_(), 2.0
    value(Distillation(t), student, teacher).backward()
    expected = t * (torch.softmax(STUDENT / t, 1) - torch.softmax(TEACHER / t, 1)) / 2
    torch.testing.assert_close(student.grad, expected)
    assert teacher.grad is None, "the teacher gets no gradient"


def test_the_scope_cuts_classes_out_before_the_softmax():
    term = Distillation(2.0, scope="old", scale=False)
    student = STUDENT.clone().requires_grad_()
    loss = value(term, student)
    assert term.needs == ("old",) and loss.item() == pytest.approx(by_hand(2.0, 2), rel=1e-5)
    loss.backward()
    assert torch.isfinite(student.grad).all() and not student.grad[:, 2].any()


def test_it_is_zero_for_equal_logits():
    assert value(Distillation(), STUDENT, STUDENT).item() == pytest.approx(0.0, abs=1e-7)


def test_the_decision_asks_the_other_network():
    decide = TeacherLogits(lambda x: {"logits": 2 * x}, name="old_model")
    batch = Batch(torch.ones(2, 3), torch.zeros(2, dtype=torch.long), torch.arange(2))
    assert torch.equal(decide({}, batch, {}, {})["old_model"], torch.full((2, 3), 2.0))


@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"temperature": float("nan")}, {"weight": -1.0}])
def test_bad_options_are_refused(given: dict):
    with pytest.raises(ConfigError, match="must be a finite number"):
        Distillation(**given)
