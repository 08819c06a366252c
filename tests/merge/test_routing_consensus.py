"""The consensus on routing: the specification's golden example, its invariants, and every named choice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedloom.core.seeds import generator
from fedloom.merge.routing import (
    COMBINES,
    OVERLAPS,
    REFERENCES,
    STRENGTHS,
    Agreement,
    Known,
    RoutingConsensus,
    normalized_product,
    product,
    strengths,
)

SIZES = torch.tensor([100.0, 50.0, 50.0])
MEANS = torch.tensor([[[0.6, 0.3, 0.1]], [[0.5, 0.3, 0.2]], [[0.1, 0.2, 0.7]]])
MARGINS = torch.tensor([[[0.4, 0.2, 0.0]], [[0.3, 0.2, 0.1]], [[0.0, 0.1, 0.6]]])


def golden(**options) -> Agreement:
    return RoutingConsensus(**options)(MEANS, MARGINS, SIZES)


def close(found: Tensor, expected: object, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found.squeeze(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


def drawn(clients: int = 5, layers: int = 2, experts: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    means = torch.randn(clients, layers, experts, generator=generator("means"), dtype=torch.float64).softmax(2)
    margins = torch.rand(clients, layers, experts, generator=generator("margins"), dtype=torch.float64)
    return means, margins, 1.0 + torch.arange(clients)


def test_the_golden_example():
    found = golden()
    close(found.overlap, [[0.96, 0.996226, 0.642336], [0.994475, 0.996226, 0.951351], [0.423529, 0.951351, 0.680663]])
    close(found.weights, [[0.562767, 0.403636, 0], [0.437233, 0.403636, 0.188935], [0, 0.192727, 0.811065]])
    close((found.weights * MEANS).sum((0, 2)), 1.442536)
    close(found.routing, [0.385624, 0.194607, 0.419769])
    close(found.clients, [0.295567, 0.326467, 0.377966])
    known = Known(MEANS.double(), found.weights, torch.full((3,), 3.0))
    alpha = strengths(STRENGTHS["overlap"], 0.05, known, found.routing, normalized_product)
    close(alpha, [[0.909659, 0.913134, 0.450865], [0.967189, 0.913134, 0.776609], [0.485961, 0.999626, 0.882125]])


def test_the_golden_example_with_the_literal_product():
    close(
        golden(overlap=product).weights,
        [[0.615385, 0.428571, 0], [0.384615, 0.428571, 0.045455], [0, 0.142857, 0.954545]],
    )


def test_overlaps_of_the_specification():
    a, b, zero = (torch.tensor(value, dtype=torch.float64) for value in (0.2, 0.4, 0.0))
    assert normalized_product(a, b).item() == pytest.approx(0.8) and normalized_product(b, b) == 1
    assert normalized_product(a, zero) == normalized_product(zero, zero) == 0
    assert OVERLAPS["min"](a, b) == a and product(a, b).item() == pytest.approx(0.08)


def test_with_the_literal_product_a_common_reference_cancels():
    """The trap that the normalised product and `leave_one_out` avoid."""
    means, margins, sizes = drawn()
    other = torch.rand(2, 4, generator=generator("other"), dtype=torch.float64) + 0.1

    def weights(overlap, scale):
        reference = RoutingConsensus(overlap=overlap, reference=lambda m, n, old, pool: scale * m.mean(0))
        return reference(means, margins, sizes).weights

    torch.testing.assert_close(weights(product, other), weights(product, torch.ones_like(other)))
    assert (weights(normalized_product, other) - weights(normalized_product, torch.ones_like(other))).abs().max() > 0.01


@pytest.mark.parametrize("combine", list(COMBINES))
@pytest.mark.parametrize("reference", list(REFERENCES))
@pytest.mark.parametrize("softmax", [False, True])
def test_weights_sum_to_one_whatever_is_chosen(combine: str, reference: str, softmax: bool):
    means, margins, sizes = drawn()
    consensus = RoutingConsensus(reference=REFERENCES[reference], combine=COMBINES[combine], softmax=softmax)
    found = consensus(means, margins, sizes, means[0])
    close(found.weights.sum(0), torch.ones(2, 4).tolist(), 1e-12)
    close(found.clients.sum(0), [1.0, 1.0], 1e-12)
    close(found.routing.sum(1), [1.0, 1.0], 1e-12)
    assert (found.weights >= 0).all() and (found.routing >= 1e-7).all()


def test_identical_clients_agree_on_their_own_distribution():
    means, margins, sizes = drawn()
    same = RoutingConsensus()(means[:1].expand(4, -1, -1), margins[:1].expand(4, -1, -1), sizes[:4])
    torch.testing.assert_close(same.routing, means[0])
    torch.testing.assert_close(same.overlap, torch.ones_like(same.overlap))
    torch.testing.assert_close(same.weights, torch.full_like(same.weights, 0.25))
    known = Known(means[:1].expand(4, -1, -1), same.weights, torch.full((4,), 4.0))
    for form in STRENGTHS.values():
        alpha = strengths(form, 0.05, known, same.routing, normalized_product)
        torch.testing.assert_close(alpha, torch.ones_like(alpha))


def test_one_client_is_its_own_consensus():
    means, margins, sizes = drawn()
    for reference in REFERENCES.values():
        found = RoutingConsensus(reference=reference)(means[:1], margins[:1], sizes[:1])
        torch.testing.assert_close(found.routing, means[0])
        assert (found.weights == 1).all() and (found.clients == 1).all()


def test_where_nobody_has_a_score_clients_count_by_their_size():
    margins = MARGINS.clone()
    margins[:, :, 1] = 0
    found = RoutingConsensus()(MEANS, margins, SIZES)
    close(found.weights[:, 0, 1], [0.5, 0.25, 0.25])


def test_an_expert_that_nobody_uses_keeps_the_floor():
    means = torch.tensor([[[0.5, 0.5, 0.0]]])
    found = RoutingConsensus()(means, torch.ones(1, 1, 3), SIZES[:1])
    assert found.routing[0, 2].item() == pytest.approx(1e-6, rel=1e-5)
    close(found.routing.sum(), 1.0, 1e-12)


def test_references_by_name():
    means, sizes = MEANS.double(), SIZES.double()
    same = REFERENCES["current_mean"](means, sizes, None, lambda q: q)
    close(same, [0.45, 0.275, 0.275])
    old = torch.tensor([[0.2, 0.2, 0.6]], dtype=torch.float64)
    assert REFERENCES["prev_global"](means, sizes, old, lambda q: q) is old
    assert torch.equal(REFERENCES["prev_global"](means, sizes, None, lambda q: q), same)
    others = REFERENCES["leave_one_out"](means, sizes, None, lambda q: q)
    close(others[0], [0.3, 0.25, 0.45])
    close(others[1], ((100 * means[0] + 50 * means[2]) / 150).squeeze().tolist())


def test_the_fixed_point_is_its_own_consensus():
    consensus = RoutingConsensus(reference=REFERENCES["fixed_point"])
    means, margins, sizes = drawn()
    found = consensus(means, margins, sizes).routing
    again = RoutingConsensus(reference=lambda m, n, old, pool: found)(means, margins, sizes).routing
    one_step = RoutingConsensus()(means, margins, sizes).routing
    assert (found - again).abs().max() < 2e-4 < 1e-3 < (found - one_step).abs().max()


def test_the_size_of_a_client_counts_by_its_power():
    plain, sized = golden(), golden(size_power=1.0)
    ratio = sized.weights[0, 0, 0] / sized.weights[1, 0, 0]
    assert ratio.item() == pytest.approx(2 * (plain.weights[0, 0, 0] / plain.weights[1, 0, 0]).item())


def test_a_softmax_over_experts_comes_before_the_clients_share():
    found = golden(softmax=True)
    score = (golden().overlap * MARGINS).softmax(2)
    torch.testing.assert_close(found.weights, score / score.sum(0))


def test_without_renormalisation_the_sum_stays_and_weights_of_clients_still_sum_to_one():
    found = golden(renormalised=False)
    close(found.routing.sum(), 1.442536)
    close(found.clients, [0.295567, 0.326467, 0.377966])


def test_an_earlier_consensus_fades():
    old = torch.tensor([[0.2, 0.2, 0.6]])
    found = RoutingConsensus(ema=0.75)(MEANS, MARGINS, SIZES, old)
    torch.testing.assert_close(found.routing, 0.75 * old.double() + 0.25 * golden().routing)
    torch.testing.assert_close(RoutingConsensus(ema=0.75)(MEANS, MARGINS, SIZES).routing, golden().routing)


def test_overlaps_that_clients_measured_take_the_place_of_the_servers():
    measured = torch.rand(3, 1, 3, generator=generator("measured"))
    found = RoutingConsensus()(MEANS, MARGINS, SIZES, None, measured)
    score = measured.double() * MARGINS.double()
    torch.testing.assert_close(found.weights, score / score.sum(0))


def test_strengths_by_name():
    found = golden()
    known = Known(MEANS.double(), found.weights, torch.full((3,), 3.0))
    alphas = {n: strengths(f, 0.05, known, found.routing, normalized_product) for n, f in STRENGTHS.items()}
    assert (alphas["const"] == 1).all()
    close(alphas["omega"], (3 * found.weights).clamp(0.05, 1).squeeze().tolist())
    spread = 1 - MEANS.double().std(0, correction=0) / MEANS.double().mean(0)
    close(alphas["consistency"], spread.clamp(0.05, 1).expand(3, 1, 3).squeeze().tolist())


def test_a_weight_is_taken_by_the_size_of_the_cohort_that_it_is_of():
    weights = torch.tensor([[[0.5]], [[0.25]]], dtype=torch.float64)
    known = Known(torch.ones(2, 1, 1), weights, torch.tensor([2.0, 4.0]))
    alpha = strengths(STRENGTHS["omega"], 0.05, known, torch.ones(1, 1), normalized_product)
    assert alpha.flatten().tolist() == [1.0, 1.0], "each counted as much as the others of its round"
