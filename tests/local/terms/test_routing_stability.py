"""The pull to the routing of the task before: the specification's numbers and closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from fedloom.core import ConfigError
from fedloom.local.terms.routing_stability import DIVERGENCES, RoutingStability, js, kl, reverse_kl, weighted_l2
from local.routed_towers import batch, drawn, out

P, Q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])


def loss(outputs, target, form: str = "kl", weight: float = 1.0) -> torch.Tensor:
    return RoutingStability(form, weight)({}, outputs, batch([]), {"routing_target": target}, {})


def test_the_divergence_of_the_specification():
    assert kl(P, Q).item() == pytest.approx(0.085123, abs=5e-7)
    assert reverse_kl(P, Q).item() == pytest.approx(kl(Q, P).item())
    assert kl(P, Q).item() != pytest.approx(kl(Q, P).item(), abs=1e-3)


def test_the_other_forms_written_out():
    m = (P + Q) / 2
    expected = 0.5 * sum((p * (p / m).log()).sum() for p in (P, Q))
    assert js(P, Q).item() == pytest.approx(expected.item(), abs=1e-7)
    assert js(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).item() == pytest.approx(math.log(2), abs=1e-6)
    assert weighted_l2(P, Q).item() == pytest.approx(0.7 * 0.04 + 0.3 * 0.01 + 0.2 * 0.01)


def test_the_weight_of_the_squared_difference_is_a_constant():
    p = P.clone().requires_grad_()
    weighted_l2(p, Q).backward()
    torch.testing.assert_close(p.grad, 2 * torch.tensor([0.7, 0.3, 0.2]) * (P - Q))


@pytest.mark.parametrize("form", DIVERGENCES)
def test_it_is_never_negative_and_0_for_an_unchanged_router(form: str):
    rng = torch.Generator().manual_seed(0)
    p, q = (torch.randn(500, 8, generator=rng).mul(4).softmax(1) for _ in range(2))
    assert (DIVERGENCES[form](p, q) >= 0).all() and (DIVERGENCES[form](p, p) == 0).all()
    logits = drawn(2, 6, 4)
    found = loss(out(logits), {"image": logits.softmax(2).mean(1).detach()}, form)
    found.backward()
    assert found.item() == 0 and logits.grad.abs().max() < 1e-12


def test_it_compares_batch_means_and_is_the_mean_over_the_layers_of_both_towers():
    image, text = drawn(2, 6, 3), drawn(1, 4, 3, seed=1)
    target = {"image": torch.stack([P, Q]).double(), "text": P.double()[None]}
    pairs = [(image[0], P), (image[1], Q), (text[0], P)]
    means = [(rows.softmax(1).mean(0), goal.double()) for rows, goal in pairs]
    expected = sum((p * (p / q).log()).sum() for p, q in means) / 3
    torch.testing.assert_close(loss(out(image, text), target, weight=0.5), 0.5 * expected)
    torch.testing.assert_close(loss(out(image), target), sum((p * (p / q).log()).sum() for p, q in means[:2]) / 2)


def test_the_gradient_is_that_of_the_plain_divergence():
    logits = drawn(1, 6, 3)
    (found,) = torch.autograd.grad(loss(out(logits), {"image": Q.double()[None]}), logits)
    mean = logits.softmax(2).mean(1)
    (expected,) = torch.autograd.grad((mean * (mean / Q).log()).sum(), logits)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("form", DIVERGENCES)
def test_experts_that_nobody_chooses_any_more_give_finite_gradients(form: str):
    logits = torch.tensor([[[200.0, 0.0, -200.0]]], requires_grad=True)
    found = loss(out(logits), {"image": torch.tensor([[0.0, 0.5, 0.5]])}, form)
    found.backward()
    assert found.isfinite() and found > 0 and logits.grad.isfinite().all()


def test_the_first_task_and_routers_that_are_held_still_cost_nothing():
    logits = drawn(1, 6, 3)
    target = {"image": Q.double()[None]}
    for outputs, goal in (
        (out(logits), {}),
        (out(logits.detach()), target),
        (out(), target),
        (out(logits), {"text": Q}),
    ):
        found = loss(outputs, goal)
        assert found.item() == 0 and not found.requires_grad


def test_what_no_loss_can_be_is_refused_in_words():
    with pytest.raises(ConfigError, match=r"unknown stability 'k1'"):
        RoutingStability("k1", 1.0)
    with pytest.raises(ConfigError, match="gamma must be a finite number of at least 0, got nan"):
        RoutingStability("kl", float("nan"))
