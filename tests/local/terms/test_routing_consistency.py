"""The pull of a class's pictures and its text to the same experts: the specification's numbers and loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedloom.core import ConfigError
from fedloom.local.terms.routing_consistency import FORMS, RoutingConsistency
from fedloom.local.terms.routing_stability import js
from local.routed_towers import batch, drawn, out

LABELS = [1, 4, 1, 2, 1, 2]  # of five shown classes, 0 and 3 without a picture


def loss(outputs, labels: list[int], form: str = "contrastive", **options: float) -> Tensor:
    return RoutingConsistency(form, **{"weight": 1.0, **options})({}, outputs, batch(labels), {}, {})


def one_hot(count: int) -> Tensor:
    return (1000.0 * torch.eye(count)).unsqueeze(0).requires_grad_()


def expected(image: Tensor, text: Tensor, labels: list[int], tau: float) -> Tensor:
    """One layer, written out; image [B, E], text [S, E] of unit length or not."""
    classes = sorted(set(labels))
    to_text = to_image = 0
    for b, y in enumerate(labels):
        scores = torch.stack([image[b] @ text[c] / tau for c in classes])
        to_text = to_text - scores.log_softmax(0)[classes.index(y)] / len(labels)
    for c in classes:
        scores = (image @ text[c] / tau).log_softmax(0)
        own = [b for b, y in enumerate(labels) if y == c]
        to_image = to_image - sum(scores[b] for b in own) / len(own) / len(classes)
    return (to_text + to_image) / 2


def test_the_numbers_of_the_specification():
    labels = list(range(16))
    for form in ("contrastive", "batch", "dot"):
        assert loss(out(one_hot(16), one_hot(16)), labels, form).item() == pytest.approx(6.81e-4, rel=1e-3)
        constant = out(drawn(1, 1, 8).expand(1, 16, 8), drawn(1, 1, 8, seed=1).expand(1, 16, 8))
        assert loss(constant, labels, form).item() == pytest.approx(math.log(16), abs=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_routers_of_zero_have_no_gradient(form: str):
    weights = [torch.zeros(4, width, requires_grad=True) for width in (6, 5)]
    states = [drawn(count, width).float().detach() for count, width in ((6, 6), (5, 5))]
    image, text = ((h @ w.T).unsqueeze(0) for h, w in zip(states, weights, strict=True))
    loss(out(image, text), LABELS, form).backward()
    for weight in weights:
        assert (weight.grad == 0).all()


@pytest.mark.parametrize(("form", "unit"), [("contrastive", True), ("dot", False)])
def test_classes_are_columns_and_the_pictures_of_a_class_its_targets(form: str, unit: bool):
    image, text = drawn(2, 6, 4), drawn(2, 5, 4, seed=1)
    p, q = image.softmax(2), text.softmax(2)
    if unit:
        p, q = (v / v.norm(dim=2, keepdim=True) for v in (p, q))
    layers = [expected(p[k], q[k], LABELS, 0.1) for k in range(2)]
    torch.testing.assert_close(loss(out(image, text), LABELS, form, weight=0.3), 0.3 * sum(layers) / 2)


def test_the_temperature_divides_the_similarity():
    image, text = drawn(1, 6, 4), drawn(1, 5, 4, seed=1)
    p, q = (v.softmax(2)[0] / v.softmax(2)[0].norm(dim=1, keepdim=True) for v in (image, text))
    torch.testing.assert_close(loss(out(image, text), LABELS, tau=0.5), expected(p, q, LABELS, 0.5))


def test_two_pictures_of_a_class_are_negatives_in_the_square_form_alone():
    outputs = out(one_hot(8)[:, [0, 0]].detach().requires_grad_(), one_hot(8))
    assert loss(outputs, [0, 0], "batch").item() == pytest.approx(math.log(2), abs=1e-6)
    # one class: nothing to tell apart, and both pictures share the target
    assert loss(outputs, [0, 0]).item() == pytest.approx(math.log(2) / 2, abs=1e-6)
    image, text = drawn(1, 6, 4), drawn(1, 5, 4, seed=1)
    p, q = (v.softmax(2)[0] / v.softmax(2)[0].norm(dim=1, keepdim=True) for v in (image, text))
    scores, y = p @ q[LABELS].T / 0.1, torch.arange(6)
    both = [torch.nn.functional.cross_entropy(s, y) for s in (scores, scores.T)]
    torch.testing.assert_close(loss(out(image, text), LABELS, "batch"), sum(both) / 2)


def test_the_forms_of_means():
    image, text = drawn(2, 6, 4), drawn(2, 5, 4, seed=1)
    a, b = image.softmax(2).mean(1), text.softmax(2).mean(1)
    cosines = [1 - (a[k] @ b[k]) / a[k].norm() / b[k].norm() for k in range(2)]
    torch.testing.assert_close(loss(out(image, text), LABELS, "cosine_of_means"), sum(cosines) / 2)
    torch.testing.assert_close(loss(out(image, text), LABELS, "js"), js(a, b).mean())


def test_labels_are_found_among_the_shown_classes():
    image, text = drawn(1, 3, 4), drawn(1, 2, 4, seed=1)
    outputs = out(image, text)
    named = loss({**outputs, "shown": torch.tensor([3, 7])}, [7, 3, 7])
    torch.testing.assert_close(named, loss(outputs, [1, 0, 1]))


@pytest.mark.parametrize("form", FORMS)
def test_the_layers_of_a_longer_tower_that_have_no_partner_do_not_count(form: str):
    image, text = drawn(3, 6, 4), drawn(2, 5, 4, seed=1)
    torch.testing.assert_close(loss(out(image, text), LABELS, form), loss(out(image[:2], text), LABELS, form))


@pytest.mark.parametrize("form", FORMS)
def test_extreme_logits_and_a_single_picture_give_finite_gradients(form: str):
    image = torch.tensor([[[300.0, 0.0, -300.0]]], requires_grad=True)
    text = torch.tensor([[[-300.0, 0.0, 300.0], [0.0, 0.0, 0.0]]], requires_grad=True)
    found = loss(out(image, text), [1], form)
    found.backward()
    assert found.isfinite() and image.grad.isfinite().all() and text.grad.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_one_expert_leaves_nothing_to_align(form: str):
    image = drawn(1, 6, 1)
    loss(out(image, drawn(1, 5, 1)), LABELS, form).backward()
    assert image.grad.abs().max() < 1e-12


def test_a_tower_without_adapters_and_routers_that_are_held_still_cost_nothing():
    image, text = drawn(1, 6, 4), drawn(1, 5, 4)
    for outputs in (out(image), out(text=text), out(image.detach(), text.detach()), out()):
        found = loss(outputs, LABELS)
        assert found.item() == 0 and not found.requires_grad


def test_what_no_loss_can_be_is_refused_in_words():
    with pytest.raises(ConfigError, match=r"unknown consistency 'cosine'"):
        RoutingConsistency("cosine", 1.0)
    with pytest.raises(ConfigError, match=r"eta must be a finite number of at least 0, got -0\.5"):
        RoutingConsistency("dot", -0.5)
    with pytest.raises(ConfigError, match="tau of the routing's consistency must be above 0, got 0"):
        RoutingConsistency("dot", 1.0, 0.0)
