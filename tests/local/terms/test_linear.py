from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.local.terms.linear import LinearTerm

P, ANCHOR, SLOPE = torch.tensor([1.0, -2.0, 0.0]), torch.tensor([0.5, 1.0, 0.0]), torch.tensor([2.0, -0.25, 7.0])


def value(p: torch.Tensor, slope: torch.Tensor = SLOPE, anchor: torch.Tensor = ANCHOR) -> torch.Tensor:
    return LinearTerm("slope")({"w": p}, {}, None, {"slope": {"w": slope}, "anchor": {"w": anchor}}, {})


def test_value_and_gradient_by_hand_on_both_signs():
    p = P.clone().requires_grad_()
    loss = value(p)
    assert loss.item() == pytest.approx(-(2.0 * 0.5 + 0.25 * 3.0))
    loss.backward()
    assert torch.equal(p.grad, -SLOPE)


@given(seed=st.integers(0, 100))
def test_it_is_the_paper_s_inner_product_up_to_a_constant(seed: int):
    rng = torch.Generator().manual_seed(seed)
    p, q, slope, anchor = (torch.randn(3, 2, generator=rng, dtype=torch.float64) for _ in range(4))
    moved = value(p, slope, anchor) - value(q, slope, anchor)
    torch.testing.assert_close(moved, -(slope * p).sum() + (slope * q).sum())


def test_it_is_zero_at_the_anchor_and_adds_over_the_tree():
    assert value(ANCHOR.clone()).item() == 0.0
    trees = {"anchor": {"a": torch.zeros(2), "b": torch.zeros(())}, "slope": {"a": torch.ones(2), "b": torch.ones(())}}
    assert LinearTerm("slope")({"a": torch.ones(2), "b": torch.tensor(3.0)}, {}, None, trees, {}).item() == -5.0


def test_it_says_what_it_reads():
    assert LinearTerm().needs == ("gradient", "anchor") and LinearTerm("other").needs == ("other", "anchor")
