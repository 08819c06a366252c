"""Routed cross-entropy: value, gradients, scopes, and experts that nobody uses."""

import pytest
import torch
import torch.nn.functional as F

from fedloom.core import Batch, ConfigError
from fedloom.local.terms.routed import RoutedCrossEntropy

LABELS = torch.tensor([0, 1, 2, 0])


def case(experts=3, seed=0):
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(experts, 4, 3, generator=rng, dtype=torch.float64, requires_grad=True)
    return logits, torch.rand(4, experts, generator=rng, dtype=torch.float64)


def loss_of(logits, weights, mask=None, scope="seen"):
    out = {"expert_logits": logits, "weights": weights}
    return RoutedCrossEntropy(scope)({}, out, Batch(torch.empty(0), LABELS, LABELS), {scope: mask}, {})


def test_weighted_mean_of_losses():
    logits, weights = case()
    want = sum(weights[b, k] * F.cross_entropy(logits[k, b], LABELS[b]) for b in range(4) for k in range(3)) / 4
    assert torch.allclose(loss_of(logits, weights), want)


def test_gradient_is_weight_times_residual():
    logits, weights = case()
    loss_of(logits, weights).backward()
    residual = logits.detach().softmax(-1) - F.one_hot(LABELS, 3)
    assert torch.allclose(logits.grad, weights.T.unsqueeze(-1) * residual / 4)


def test_weights_are_constants():
    logits, weights = case()
    weights.requires_grad_()
    loss_of(logits, weights).backward()
    assert weights.grad is None


def test_unused_expert_gets_exactly_no_gradient():
    logits, weights = case()
    weights[:, 1] = 0
    loss_of(logits, weights).backward()
    assert (logits.grad[1] == 0).all() and (logits.grad[0] != 0).any()


def test_masked_classes_take_no_part():
    logits, weights = case()
    mask = torch.tensor([0.0, 0.0, -torch.inf], dtype=torch.float64)
    out = {"expert_logits": logits[:, [0, 1, 3]], "weights": weights[[0, 1, 3]]}
    batch = Batch(torch.empty(0), LABELS[[0, 1, 3]], LABELS)
    loss = RoutedCrossEntropy("current")({}, out, batch, {"current": mask}, {})
    loss.backward()
    narrow = RoutedCrossEntropy()(
        {}, {**out, "expert_logits": out["expert_logits"][..., :2]}, batch, {"seen": None}, {}
    )
    assert torch.allclose(loss, narrow)
    assert (logits.grad[..., 2] == 0).all()


def test_never_below_the_loss_of_the_mixture():
    logits, weights = case()
    weights = weights / weights.sum(1, keepdim=True)
    logits = logits.detach()
    mixed_logits = torch.einsum("kbc,bk->bc", logits, weights)
    mixed_probs = torch.einsum("kbc,bk->bc", logits.softmax(-1), weights)
    trained = loss_of(logits, weights)
    assert trained >= F.cross_entropy(mixed_logits, LABELS)
    assert trained >= F.nll_loss(mixed_probs.log(), LABELS)


def test_one_expert_of_weight_one_is_plain_cross_entropy():
    logits, _ = case(1)
    assert torch.allclose(loss_of(logits, torch.ones(4, 1, dtype=torch.float64)), F.cross_entropy(logits[0], LABELS))


def test_unknown_scope():
    with pytest.raises(ConfigError, match="label scope must be one of seen, current, all, got 'past'"):
        RoutedCrossEntropy("past")
