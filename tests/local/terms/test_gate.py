"""Gate terms against hand-computed values, bounds and gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core import Batch, ConfigError
from fedloom.local.terms.gate import (
    BALANCES,
    GateBalance,
    GateDistillation,
    batch_balance,
    sample_balance,
    switch_balance,
)

BATCH = Batch(torch.empty(0), torch.empty(0), torch.empty(0))


def call(term, **out):
    return term({}, out, BATCH, {}, {})


@pytest.mark.parametrize("form", [sample_balance, batch_balance])
def test_entropy_forms_of_one_sample(form):
    assert form(torch.zeros(1, 4)).item() == pytest.approx(-1.386294, abs=1e-6)
    assert form(torch.tensor([[0.7, 0.1, 0.1, 0.1]]).log()).item() == pytest.approx(-0.940448, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(experts=st.integers(1, 8), scale=st.floats(0, 100), seed=st.integers(0, 99))
def test_entropy_forms_are_bounded(experts, scale, seed):
    logits = scale * torch.randn(5, experts, generator=torch.Generator().manual_seed(seed))
    for form in (sample_balance, batch_balance):
        assert -math.log(experts) - 1e-5 <= form(logits).item() <= 1e-5


def test_per_sample_form_does_not_see_the_batch_and_the_batch_form_does():
    certain = torch.tensor([[50.0, 0.0], [0.0, 50.0]])
    assert sample_balance(certain).item() == pytest.approx(0, abs=1e-6)
    assert batch_balance(certain).item() == pytest.approx(-math.log(2), abs=1e-6)


def test_switch_loss():
    even = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert switch_balance(even).item() == pytest.approx(1.0)
    collapsed = torch.tensor([[4.0, 0.0, 0.0, 0.0]]).repeat(8, 1).requires_grad_()
    loss = switch_balance(collapsed)
    assert loss.item() == pytest.approx(4 * float(torch.tensor([4.0, 0, 0, 0]).softmax(0)[0]))
    loss.backward()
    assert (collapsed.grad[:, 0] > 0).all()  # descent lowers the gate of the crowded expert


@pytest.mark.parametrize("name", list(BALANCES))
def test_every_form_pulls_towards_balance(name):
    logits = torch.tensor([[2.0, 0.0, 0.0]]).repeat(4, 1).requires_grad_()
    call(GateBalance(0.5, BALANCES[name]), router_logits=logits).backward()
    assert (logits.grad[:, 0] > 0).all() and (logits.grad[:, 1:] < 0).all()


def test_balance_scales_with_its_weight():
    assert call(GateBalance(0.05), router_logits=torch.zeros(3, 4)).item() == pytest.approx(-0.05 * math.log(4))


def test_distillation_value():
    teacher = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).softmax(1)
    loss = call(GateDistillation(1.0), router_logits=torch.zeros(1, 4), teacher_gates=teacher)
    assert loss.item() == pytest.approx(0.117993, abs=1e-6)
    twice = call(GateDistillation(2.0), router_logits=torch.zeros(3, 4), teacher_gates=teacher.repeat(3, 1))
    assert twice.item() == pytest.approx(2 * 0.117993, abs=1e-6)


def test_distillation_gradient_is_student_minus_teacher():
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    teacher = torch.tensor([[0.1, 0.2, 0.3, 0.4], [1.0, 0.0, 0.0, 0.0], [0.25] * 4]).requires_grad_()
    call(GateDistillation(0.6), router_logits=logits, teacher_gates=teacher).backward()
    assert torch.allclose(logits.grad, 0.6 * (logits.detach().softmax(1) - teacher.detach()) / 3, atol=1e-6)
    assert teacher.grad is None


def test_joint_optimum_is_barely_softened():
    teacher, gates = torch.tensor([[0.4, 0.3, 0.2, 0.1]]), torch.tensor([[0.3887, 0.2979, 0.2050, 0.1084]])
    logits = gates.log().requires_grad_()
    loss = call(GateBalance(0.05), router_logits=logits) + call(
        GateDistillation(0.6), router_logits=logits, teacher_gates=teacher
    )
    loss.backward()
    assert logits.grad.abs().max() < 1e-4


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf")])
def test_bad_weights(weight):
    with pytest.raises(ConfigError, match="beta must be a finite number of at least 0"):
        GateBalance(weight)
    with pytest.raises(ConfigError, match="gamma must be a finite number of at least 0"):
        GateDistillation(weight)
