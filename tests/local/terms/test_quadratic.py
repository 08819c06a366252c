from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core import ConfigError
from fedloom.local.terms.quadratic import QuadraticPenalty

P, CENTRE = torch.tensor([1.0, -2.0, 0.0]), torch.tensor([0.5, 1.0, 0.0])
FISHER = torch.tensor([2.0, 0.25, 7.0])


def value(term: QuadraticPenalty, p: torch.Tensor, **ref: torch.Tensor) -> torch.Tensor:
    trees = {"fisher": FISHER, "centre": CENTRE, **ref}
    return term({"w": p}, {}, None, {name: {"w": tensor} for name, tensor in trees.items()}, {})


def test_value_and_gradient_by_hand_on_both_signs():
    p = P.clone().requires_grad_()
    loss = value(QuadraticPenalty(3.0), p)
    assert loss.item() == pytest.approx(0.5 * 3.0 * (2.0 * 0.25 + 0.25 * 9.0))
    loss.backward()
    assert torch.equal(p.grad, 3.0 * FISHER * (P - CENTRE))


def test_it_is_zero_at_the_centre_with_zero_gradient():
    p = CENTRE.clone().requires_grad_()
    loss = value(QuadraticPenalty(1000.0), p)
    loss.backward()
    assert loss.item() == 0.0 and not p.grad.any()


@given(weight=st.floats(0, 100), seed=st.integers(0, 100))
def test_it_is_what_autograd_makes_of_the_formula_and_adds_to_other_losses(weight: float, seed: int):
    rng = torch.Generator().manual_seed(seed)
    p, q, centre, fisher = (torch.randn(3, 2, generator=rng, dtype=torch.float64) for _ in range(4))
    p, q, fisher = p.requires_grad_(), p.detach().clone().requires_grad_(), fisher.square()
    ours = p.sin().sum() + value(QuadraticPenalty(weight), p, centre=centre, fisher=fisher)
    plain = q.sin().sum() + weight / 2 * (fisher * (q - centre) ** 2).sum()
    (0.3 * ours).backward()
    (0.3 * plain).backward()
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(p.grad, q.grad)


def test_parameters_that_a_tree_does_not_name_are_free():
    params = {name: torch.ones(2, requires_grad=True) for name in ("both", "no_fisher", "no_centre")}
    trees = {
        "importance": {"both": torch.ones(2), "no_centre": torch.ones(2), "gone": torch.ones(5)},
        "old": {"both": torch.zeros(2), "no_fisher": torch.zeros(2)},
    }
    term = QuadraticPenalty(4.0, importance="importance", centre="old")
    assert term.needs == ("importance", "old")
    loss = term(params, {}, None, trees, {})
    loss.backward()
    assert loss.item() == 4.0
    assert torch.equal(params["both"].grad, torch.full((2,), 4.0))
    assert params["no_fisher"].grad is params["no_centre"].grad is None


def test_without_any_tree_it_is_zero_and_leaves_a_loss_as_it_is():
    p = P.clone().requires_grad_()
    loss = QuadraticPenalty(1.0)({"w": p}, {}, None, {"fisher": {}, "centre": {}}, {})
    assert loss.item() == 0.0 and torch.equal(P.sum() + loss, P.sum())


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf")])
def test_a_bad_weight_is_refused(weight: float):
    with pytest.raises(ConfigError, match="weight of a penalty must be a finite number of at least 0"):
        QuadraticPenalty(weight)
