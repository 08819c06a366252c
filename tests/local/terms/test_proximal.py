from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core import ConfigError
from fedloom.local.terms import Proximal

P, ANCHOR = torch.tensor([1.0, -2.0, 0.0]), torch.tensor([0.5, 1.0, 0.0])


def test_value_and_gradient_by_hand_on_both_signs():
    p = P.clone().requires_grad_()
    value = Proximal(3.0)({"w": p}, {}, None, {"anchor": {"w": ANCHOR}}, {})
    assert value.item() == pytest.approx(0.5 * 3.0 * (0.25 + 9.0))
    value.backward()
    assert torch.equal(p.grad, 3.0 * (P - ANCHOR)), "an un-squared norm or |p - a| fails here"


def test_it_is_zero_at_the_anchor_with_zero_gradient():
    p = ANCHOR.clone().requires_grad_()
    value = Proximal(0.7)({"w": p}, {}, None, {"anchor": {"w": ANCHOR}}, {})
    value.backward()
    assert value.item() == 0.0 and not p.grad.any(), "a square root would give NaN here"


@given(mu=st.floats(0, 10), a=st.floats(-5, 5), b=st.floats(-5, 5))
def test_it_adds_over_the_tree(mu: float, a: float, b: float):
    params = {"a": torch.tensor([a]), "b": torch.tensor(b)}
    zero = {n: torch.zeros_like(t) for n, t in params.items()}
    value = Proximal(mu)(params, {}, None, {"anchor": zero}, {})
    assert value.item() == pytest.approx(0.5 * mu * (a * a + b * b), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf")])
def test_a_bad_mu_is_refused(mu: float):
    with pytest.raises(ConfigError, match="mu must be a finite number of at least 0"):
        Proximal(mu)
