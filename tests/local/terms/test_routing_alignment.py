"""The regulariser against the specification's numbers, closed forms and autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.core import Batch, ConfigError
from fedloom.local.terms.routing_alignment import (
    DIRECTIONS,
    FORMS,
    LEVELS,
    RoutingAlignment,
    bernoulli,
    forward,
    generalized,
    js,
    largest,
    pointwise,
    reverse,
)

BATCH = Batch(torch.empty(0), torch.empty(0), torch.empty(0))
GOAL = torch.tensor([[0.385624, 0.194607, 0.419769]])
ALPHA = torch.tensor([[0.909659, 0.913134, 0.450865]])
TOKEN = torch.tensor([[[0.7, 0.2, 0.1]]])


def loss(
    probs: Tensor, top_k: int = 1, goal: Tensor = GOAL, alpha: Tensor = ALPHA, mask: Any = None, **options: Any
) -> Tensor:
    """The term for probabilities [L, T, E]."""
    selected = torch.zeros(probs.shape, dtype=torch.bool).scatter_(2, probs.detach().topk(top_k, 2).indices, True)
    real = torch.ones(probs.shape[1], dtype=torch.bool) if mask is None else torch.tensor(mask)
    out = {"routing": probs.log(), "selected": selected, "token_mask": real}
    term = RoutingAlignment(**{"weight": 1.0, **options})
    return term({}, out, BATCH, {"consensus": {"routing": goal, "alpha": alpha}}, {})


def between(divergence, a: float, b: float) -> float:
    return divergence(torch.tensor(a, dtype=torch.float64).log(), torch.tensor(b, dtype=torch.float64).log()).item()


def test_numbers_of_the_specification():
    assert between(generalized, 0.5, 0.25) == pytest.approx(0.0965736, abs=1e-7)
    assert between(generalized, 0.3, 0.3) == 0
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    assert generalized(p, q).sum().item() == pytest.approx(0.1438410, abs=1e-6)


@pytest.mark.parametrize(("top_k", "expected"), [(1, 0.0936732), (2, 0.0937409)])
def test_the_golden_example(top_k: int, expected: float):
    assert loss(TOKEN, top_k).item() == pytest.approx(expected, abs=2e-7)


def test_the_literal_form_may_be_negative_and_the_others_may_not():
    assert between(pointwise, 0.3, 0.7) < 0
    a = torch.linspace(0.01, 0.98, 50).log()
    for divergence in (generalized, bernoulli):
        for direction in (forward, reverse, js):
            assert (direction(divergence, a[:, None], a) >= -1e-6).all()
            assert direction(divergence, a, a).abs().max() < 1e-6
    assert between(bernoulli, 0.5, 0.25) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))


def test_directions():
    a, b = torch.tensor(0.2).log(), torch.tensor(0.6).log()
    m = torch.tensor(0.4).log()
    assert forward(pointwise, a, b) == pointwise(a, b) and reverse(pointwise, a, b) == pointwise(b, a)
    assert js(pointwise, a, b).item() == pytest.approx(0.5 * (pointwise(a, m) + pointwise(b, m)).item(), abs=1e-6)


def test_with_all_experts_and_weights_of_one_it_is_the_divergence():
    probs = torch.rand(2, 5, 3, generator=torch.Generator().manual_seed(0)).softmax(2)
    goal = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])
    kl = (probs * (probs.log() - goal.log().unsqueeze(1))).sum(2).mean()
    for form in ("generalized", "renorm_topk"):
        found = loss(probs, goal=goal, alpha=torch.ones(2, 3), form=FORMS[form], top=0)
        assert found.item() == pytest.approx(kl.item(), abs=1e-6)
    assert loss(probs, goal=goal, alpha=torch.ones(2, 3), top=0, layers="sum").item() == pytest.approx(2 * kl.item())


def test_renormalised_over_one_expert_it_vanishes_and_over_two_it_is_their_divergence():
    form = FORMS["renorm_topk"]
    assert loss(TOKEN, 1, form=form).item() == pytest.approx(0, abs=1e-6)
    p, q = torch.tensor([7 / 9, 2 / 9]), GOAL[0, :2] / GOAL[0, :2].sum()
    expected = (p * (p / q).log()).sum().item()
    assert loss(TOKEN, 2, alpha=torch.ones(1, 3), form=form).item() == pytest.approx(expected, abs=1e-6)


def test_masks():
    divergence = generalized(TOKEN[0, 0].log(), GOAL[0].log()) * ALPHA[0]
    for mask, top, experts in [
        ("local", None, [0]), ("local", 2, [0, 1]), ("global", None, [2]), ("global", 2, [0, 2]),
        ("union", None, [0, 2]), ("local", 0, [0, 1, 2]),
    ]:  # fmt: skip
        out = {"routing": TOKEN.log(), "selected": torch.tensor([[[True, False, False]]]), "token_mask": torch.ones(1)}
        term = RoutingAlignment(1.0, mask=mask, top=top)
        found = term({}, out, BATCH, {"consensus": {"routing": GOAL, "alpha": ALPHA}}, {})
        assert found.item() == pytest.approx(divergence[experts].sum().item(), abs=1e-7), (mask, top)


def test_padding_does_not_count_at_either_level():
    probs = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(1)).softmax(2)
    goal = GOAL.expand(2, 3)
    for level in LEVELS.values():
        alone = loss(probs[:, :2], goal=goal, alpha=goal, level=level)
        padded = loss(probs, goal=goal, alpha=goal, level=level, mask=[True, True, False, False])
        assert padded.item() == pytest.approx(alone.item(), abs=1e-7)
        assert loss(probs, goal=goal, alpha=goal, level=level, mask=[False] * 4).item() == 0


def test_the_batch_level_leaves_tokens_alone_whose_mean_is_the_consensus():
    probs = torch.tensor([[[0.9, 0.1], [0.1, 0.9]]])
    goal, alpha = torch.full((1, 2), 0.5), torch.ones(1, 2)
    assert loss(probs, goal=goal, alpha=alpha, level=LEVELS["batch"], top=0).item() == pytest.approx(0, abs=1e-7)
    assert loss(probs, goal=goal, alpha=alpha, top=0).item() > 0.3


def test_the_gradient_is_alpha_ln_ratio_over_the_mask_alone():
    log_probs = TOKEN.log().requires_grad_()
    out = {"routing": log_probs, "selected": torch.tensor([[[True, True, False]]]), "token_mask": torch.ones(1)}
    RoutingAlignment(0.3)({}, out, BATCH, {"consensus": {"routing": GOAL, "alpha": ALPHA}}, {}).backward()
    p = TOKEN[0, 0]
    expected = 0.3 * ALPHA[0] * p * (p / GOAL[0]).log() * torch.tensor([1.0, 1.0, 0.0])  # d/dln p
    torch.testing.assert_close(log_probs.grad[0, 0], expected)


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("direction", list(DIRECTIONS))
def test_an_expert_of_probability_zero_gives_finite_gradients(form: str, direction: str):
    logits = torch.tensor([[[200.0, 0.0, -200.0]]], requires_grad=True)
    out = {"routing": logits.log_softmax(2), "selected": torch.ones(1, 1, 3, dtype=torch.bool)}
    ref = {"consensus": {"routing": GOAL, "alpha": ALPHA}}
    term = RoutingAlignment(1.0, FORMS[form], DIRECTIONS[direction])
    found = term({}, {**out, "token_mask": torch.ones(1)}, BATCH, ref, {})
    found.backward()
    assert found.isfinite() and logits.grad.isfinite().all()


def test_ties_go_to_the_lower_index():
    assert largest(torch.zeros(1, 1, 3), 2).tolist() == [[[True, True, False]]]


def test_a_negative_weight_is_refused():
    with pytest.raises(ConfigError, match=r"the weight of the routing alignment must be finite .* got -0.1"):
        RoutingAlignment(-0.1)
