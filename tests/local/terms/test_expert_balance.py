"""Load balance over two towers: the specification's numbers, and sums written out."""

from __future__ import annotations

import math

import pytest
import torch

from fedloom.core import ConfigError
from fedloom.local.terms.expert_balance import FORMS, ExpertBalance, cv, entropy, squared_cv, switch
from local.routed_towers import batch, drawn, out


def loss(form: str, outputs, weight: float = 1.0) -> torch.Tensor:
    return ExpertBalance(form, weight)({}, outputs, batch([]), {}, {})


def collapsed(experts: int, chosen: int = 0) -> torch.Tensor:
    return 1000.0 * torch.eye(experts)[chosen].expand(1, 16, experts)


def uniform(experts: int) -> torch.Tensor:
    """Each expert is everything to as many samples."""
    return 1000.0 * torch.eye(experts)[torch.arange(16) % experts].unsqueeze(0)


def test_the_switch_form_is_1_when_uniform_and_the_number_of_experts_when_collapsed():
    for experts in (2, 8):
        for logits, expected in ((uniform(experts), 1.0), (collapsed(experts), float(experts))):
            outputs = out(logits.clone().requires_grad_(), top_k=1)
            assert loss("switch", outputs).item() == pytest.approx(expected, abs=1e-6)
    undecided = out(torch.zeros(1, 16, 8, requires_grad=True))
    assert loss("switch", undecided).item() == pytest.approx(1.0)


def test_all_choices_count_in_the_switch_form():
    logits = drawn(3, 6, 5)
    found = switch(logits.softmax(2), out(logits)["image_gates"])
    for layer, value in zip(logits, found, strict=True):
        counts, probs = [0] * 5, layer.softmax(1).mean(0)
        for row in layer:
            for e in row.topk(2).indices.tolist():
                counts[e] += 1
        assert value.item() == pytest.approx(5 * sum(c / 12 * p for c, p in zip(counts, probs.tolist(), strict=True)))


def test_the_squared_variation_is_the_number_of_experts_when_collapsed_and_0_when_uniform():
    assert squared_cv(torch.tensor([7.0, 0, 0, 0])).item() == pytest.approx(4.0)
    assert squared_cv(torch.tensor([3.0, 3, 3])).item() == 0
    gates = torch.tensor([[[1.0, 0], [1.0, 0]]])
    assert cv(gates, gates).item() == pytest.approx(4.0)  # importance and load


def test_the_form_of_the_release_is_the_difference_of_two_entropies_and_the_importance():
    logits = drawn(1, 6, 4)
    p, gates = logits.softmax(2), out(logits)["image_gates"]
    mean = p.mean(1)
    each = -(p * p.log()).sum(2).mean(1)
    whole = -(mean * mean.log()).sum(1)
    torch.testing.assert_close(entropy(p, gates), whole - each + squared_cv(gates.sum(1)))


@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_mean_over_the_layers_of_both_towers(form: str):
    image, text = drawn(2, 6, 4), drawn(1, 3, 4, seed=1)
    outputs = out(image, text)
    parts = [
        *FORMS[form](image.softmax(2), outputs["image_gates"]),
        *FORMS[form](text.softmax(2), outputs["text_gates"]),
    ]
    assert loss(form, outputs, 0.25).item() == pytest.approx(0.25 * sum(parts).item() / 3)
    alone = loss(form, out(text=text))
    assert alone.item() == pytest.approx(parts[2].item())


@pytest.mark.parametrize("form", FORMS)
def test_one_expert_is_balanced(form: str):
    found = loss(form, out(drawn(2, 6, 1)))
    found.backward()
    assert found.item() == pytest.approx(1.0 if form == "switch" else 0.0)


@pytest.mark.parametrize("form", FORMS)
def test_extreme_logits_give_finite_gradients(form: str):
    logits = torch.tensor([[[300.0, 0.0, -300.0], [0.0, 0.0, 0.0]]], requires_grad=True)
    loss(form, out(logits)).backward()
    assert logits.grad.isfinite().all()


def test_a_step_against_the_gradient_balances():
    logits = torch.tensor([[[1.0, 0.0, 0.0]] * 4], requires_grad=True)
    found = loss("switch", out(logits, top_k=1))
    (gradient,) = torch.autograd.grad(found, logits)
    assert loss("switch", out((logits - gradient).detach().requires_grad_(), top_k=1)) < found


def test_routers_that_are_held_still_or_absent_cost_nothing():
    for outputs in (out(drawn(2, 6, 4).detach()), out()):
        found = loss("switch", outputs)
        assert found.item() == 0 and not found.requires_grad


def test_what_no_loss_can_be_is_refused_in_words():
    with pytest.raises(ConfigError, match=r"unknown balance 'swich'\. Did you mean 'switch'"):
        ExpertBalance("swich", 1.0)
    with pytest.raises(ConfigError, match="alpha must be a finite number of at least 0, got -1"):
        ExpertBalance("switch", -1.0)
    assert math.isfinite(ExpertBalance("cv", 0.0).weight)
