"""The model-contrastive term: the specification's figures, the formula by autograd, and vectors without direction."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core import ConfigError
from fedloom.local.terms.contrastive import FrozenFeats, ModelContrast


def value(z, near, far, *, mu=1.0, tau=0.5):
    out = {"feats": z, "global_feats": near, "previous_feats": far}
    return ModelContrast(mu, tau)({}, out, None, {}, {})


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_near_the_one_and_opposite_to_the_other_is_0_01815():
    z = rows([3.0, 0.0])
    assert value(z, rows([0.5, 0.0]), rows([-2.0, 0.0])).item() == pytest.approx(0.01815, abs=5e-6)
    assert value(z, rows([-2.0, 0.0]), rows([0.5, 0.0])).item() == pytest.approx(4.01815, abs=5e-6)


def test_equal_cosines_give_log_2_and_no_gradient():
    z = rows([1.0, -2.0], [0.3, 0.4]).requires_grad_()
    same = rows([0.5, 1.0], [-1.0, 2.0])
    loss = value(z, same, same.clone(), mu=7.0)
    loss.backward()
    assert loss.item() == pytest.approx(7 * 0.69315, abs=5e-5) and not z.grad.any()


@given(seed=st.integers(0, 200), mu=st.floats(0, 10), tau=st.floats(0.1, 3), batch=st.integers(1, 5))
def test_it_is_what_autograd_makes_of_the_formula(seed: int, mu: float, tau: float, batch: int):
    rng = torch.Generator().manual_seed(seed)
    a, near, far = (torch.randn(batch, 3, generator=rng, dtype=torch.float64) for _ in range(3))
    a, b = a.requires_grad_(), a.detach().clone().requires_grad_()
    ours = value(a, near, far, mu=mu, tau=tau)
    losses = []
    for z, g, p in zip(b, near, far, strict=True):
        up = torch.exp(z @ g / (z.norm() * g.norm()) / tau)
        down = torch.exp(z @ p / (z.norm() * p.norm()) / tau)
        losses.append(-torch.log(up / (up + down)))
    plain = mu * sum(losses) / batch
    ours.backward()
    plain.backward()
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(a.grad, b.grad)


def test_a_step_down_the_gradient_turns_to_the_global_and_off_the_previous_features():
    z, near, far = rows([1.0, 0.0]).requires_grad_(), rows([0.0, 1.0]), rows([0.0, -1.0])
    value(z, near, far).backward()
    assert z.grad[0, 1] < 0 and z.grad[0, 0] == 0, "cosines do not depend on the length"


def test_no_gradient_reaches_the_other_models():
    z, near, far = (torch.randn(4, 3).requires_grad_() for _ in range(3))
    value(z, near, far).backward()
    assert z.grad.any() and near.grad is far.grad is None


def test_a_tiny_temperature_does_not_overflow():
    z = torch.tensor([[1.0, 0.0]])
    loss = value(z, -z, z, tau=1e-3)
    assert loss.item() == pytest.approx(2000.0) and value(z, z, -z, tau=1e-3).item() == 0.0


def test_a_zero_vector_has_cosine_0_and_no_gradient():
    """As features after a ReLU may be; torch's own gradient there is that of a vector of length 1e-8."""
    z = torch.tensor([[0.0, 0.0], [0.6, 0.8]], requires_grad=True)
    loss = value(z, torch.tensor([[1.0, 0.0]] * 2), torch.tensor([[0.0, 1.0]] * 2))
    loss.backward()
    assert loss.item() == pytest.approx((math.log(2) + math.log1p(math.exp((0.8 - 0.6) / 0.5))) / 2)
    assert not z.grad[0].any() and z.grad[1].any()


def test_the_decision_gives_the_features_of_the_other_model():
    feats, batch = torch.ones(2, 3), type("Batch", (), {"x": torch.zeros(2, 1)})
    forward = {id(batch.x): {"logits": torch.zeros(2, 4), "feats": feats}}
    out = FrozenFeats(lambda x: forward[id(x)], "previous_feats")({}, batch, {}, {})
    assert out.keys() == {"previous_feats"} and out["previous_feats"] is feats


def test_a_network_without_features_is_refused():
    with pytest.raises(ConfigError, match="needs features"):
        ModelContrast()({}, {"logits": torch.zeros(2, 3)}, None, {}, {})


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
def test_bad_values_are_refused(bad: float):
    with pytest.raises(ConfigError, match="mu must be a finite number of at least 0"):
        ModelContrast(mu=bad)
    with pytest.raises(ConfigError, match="tau must be a finite number above 0"):
        ModelContrast(tau=bad)
    with pytest.raises(ConfigError, match="tau must be a finite number above 0, got 0"):
        ModelContrast(tau=0.0)
