"""Stop rules, weights, empty-set values, mixtures and the decision that joins them."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedloom.core import Batch, ConfigError
from fedloom.select.fisher import FisherMap, fres, shares
from fedloom.select.routing import (
    FALLBACKS,
    WEIGHINGS,
    AdaptiveStop,
    ChanceValue,
    ExclusiveStop,
    FisherShapley,
    MagnitudeStop,
    MixLogits,
    MixProbabilities,
    RoutingWeights,
    TopExperts,
    UniformWeights,
    empty_rule,
    stop_rule,
    top_gates,
)
from fedloom.select.shapley import marginals, select_experts, shapley_values
from fedloom.select.utility import FisherUtility, LossUtility

GAIN = torch.tensor([[-0.5, -1.0, -2.0, -4.0]])
COST = 0.6 * torch.tensor([[0.4, 0.1, 0.2, 0.05]])
PHI = shapley_values(GAIN, COST)  # dv = -.74, -.31, -.5367, ...
ABOVE = -math.log(10)
PHI_ABOVE = shapley_values(GAIN, COST, ABOVE)  # dv_1 = 1.5626


def noise(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def draw(batch=200, experts=5, seed=0):
    rng = torch.Generator().manual_seed(seed)
    gain = torch.randn(batch, experts, generator=rng, dtype=torch.float64)
    return gain, torch.rand(batch, experts, generator=rng, dtype=torch.float64)


def test_literal_rule_is_select_experts():
    assert torch.equal(AdaptiveStop(0.5)(PHI, GAIN, COST, 0.0), select_experts(PHI, GAIN, COST, 0.5))


def test_trigger_left_out():
    assert ExclusiveStop(0.0)(PHI, GAIN, COST, 0.0).tolist() == [[True, False, False, False]]
    assert ExclusiveStop(0.5)(PHI, GAIN, COST, 0.0).tolist() == [[True, True, False, False]]
    gain, cost = draw()
    phi = shapley_values(gain, cost)
    sizes = AdaptiveStop(0.5)(phi, gain, cost, 0.0).sum(1) - ExclusiveStop(0.5)(phi, gain, cost, 0.0).sum(1)
    assert set(sizes.tolist()) <= {0, 1}  # 0 where nothing triggered


def test_magnitude_rule_stops_earlier_with_larger_mu_for_either_sign():
    # mean before the second place -.74: thresholds -1.48, -1.11, -.74; dv_2 = -.31
    assert MagnitudeStop(0.0)(PHI, GAIN, COST, 0.0).sum() == 4
    assert MagnitudeStop(1.0)(PHI, GAIN, COST, 0.0).sum() == 3  # dv_3 = -.5367 <= mean(-.74, -.31) = -.525
    for empty in (0.0, ABOVE):
        gain, cost = draw()
        phi = shapley_values(gain, cost, empty)
        sizes = [MagnitudeStop(mu)(phi, gain, cost, empty).sum(1) for mu in (0.0, 0.5, 1.0)]
        assert (sizes[0] >= sizes[1]).all() and (sizes[1] >= sizes[2]).all()


def test_marginals_by_hand():
    order, dv, before = marginals(PHI, GAIN, COST)
    assert order.tolist() == [[0, 1, 2, 3]]
    assert dv[0, :3].tolist() == pytest.approx([-0.74, -0.31, -0.536667], abs=1e-6)
    assert before[0, :3].tolist() == pytest.approx([0, -0.74, -0.525], abs=1e-6)
    chance = marginals(PHI, GAIN, COST, -math.log(10))[1]
    assert chance[0, 0].item() == pytest.approx(1.562585, abs=1e-6)
    assert torch.equal(chance[0, 1:], dv[0, 1:])


def simulated(low: float, high: float, empty: float = 0.0, count: int = 4000):
    """phi, gain and cost of four experts: uniform losses, Dirichlet shares, costs around the start; alpha = 0.6."""
    rng = np.random.default_rng(0)
    loss, share = rng.uniform(low, high, (count, 4)), rng.dirichlet(np.ones(4), count)
    gain = torch.from_numpy(0.4 * share - loss)
    cost = torch.from_numpy(0.6 * rng.uniform(0.05, 0.45, (count, 4)))
    return shapley_values(gain, cost, empty), gain, cost


@pytest.mark.parametrize(("low", "high", "share"), [(1.8, 2.8, 1.0), (0.3, 2.0, 0.73), (0.0, 0.1, 0.78)])
def test_no_positive_value_is_the_normal_case(low: float, high: float, share: float):
    phi, _, _ = simulated(low, high)
    assert (phi <= 0).all(1).double().mean().item() == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(
    ("low", "high", "empty", "mu", "size", "share"),
    [
        (1.8, 2.8, 0.0, 0.0, 2, 1.0),
        (1.8, 2.8, 0.0, 0.5, 4, 0.998),
        (1.8, 2.8, 0.0, 1.0, 4, 0.998),
        (0.3, 2.0, 0.0, 0.5, 2, 0.46),
        (0.3, 2.0, 0.0, 0.5, 4, 0.24),
        (1.8, 2.8, -math.log(10), 0.5, 2, 0.978),
    ],
)
def test_how_many_experts_the_literal_rule_keeps(low, high, empty, mu, size, share):
    """Early in training two or all, by mu; in the middle anything from two to four; two with v(empty) = -ln C."""
    phi, gain, cost = simulated(low, high, empty)
    kept = select_experts(phi, gain, cost, mu, empty).sum(1)
    found = (kept == size).double().mean().item()
    assert found == pytest.approx(share, abs=0.03) if share < 0.9 else found >= share


def test_top_experts():
    phi = torch.tensor([[0.0, 2.0, 1.0], [1.0, 1.0, 1.0]])
    assert TopExperts(1)(phi, phi, phi, 0.0).tolist() == [[False, True, False], [True, False, False]]
    assert TopExperts(2)(phi, phi, phi, 0.0).sum(1).tolist() == [2, 2]
    assert TopExperts(9)(phi, phi, phi, 0.0).all()


def test_rules_by_name():
    assert stop_rule("literal", 0.25) == AdaptiveStop(0.25)
    assert stop_rule("exclude_trigger", 0.25) == ExclusiveStop(0.25)
    assert stop_rule("abs", 0.25) == MagnitudeStop(0.25)
    assert stop_rule(2, 0.25) == TopExperts(2)
    assert stop_rule("all", 0.25)(PHI, GAIN, COST, 0.0).all()
    with pytest.raises(ConfigError, match=r"unknown stop rule 'litteral'\. Did you mean 'literal'"):
        stop_rule("litteral", 0.5)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        stop_rule(0, 0.5)
    for rule in ("literal", "exclude_trigger", "abs"):
        with pytest.raises(ConfigError, match="mu must be in"):
            stop_rule(rule, 1.5)


def test_empty_values():
    mask = torch.tensor([0.0, -torch.inf, 0.0])
    assert empty_rule(-1)(mask, 3) == -1.0
    assert float(empty_rule("chance")(mask, 3)) == pytest.approx(-math.log(2))
    assert ChanceValue()(None, 10) == pytest.approx(-math.log(10))
    for bad in ("chances", float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="empty_value must be a finite number or chance"):
            empty_rule(bad)


def test_positive_values_are_normalised():
    active = torch.tensor([[True, True, False, False]])
    weights, fallback = RoutingWeights()(PHI_ABOVE, active)
    assert weights[0].tolist() == pytest.approx([0.707174 / 1.288792, 0.581618 / 1.288792, 0, 0], abs=1e-6)
    assert not fallback.any()


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("softmax", [0.0, 1 / (1 + math.e), math.e / (1 + math.e)]),
        ("uniform", [0.0, 0.5, 0.5]),
        ("top1", [0.0, 0.0, 1.0]),
        ("skip", [0.0, 0.0, 0.0]),
    ],
)
def test_fallbacks(name, want):
    phi, active = torch.tensor([[5.0, -2.0, -1.0]]), torch.tensor([[False, True, True]])
    weights, fallback = RoutingWeights(FALLBACKS[name](1.0))(phi, active)
    assert weights[0].tolist() == pytest.approx(want)
    assert fallback.all()


def test_softmax_fallback_has_the_teacher_temperature():
    phi, active = torch.tensor([[-2.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    weights, _ = RoutingWeights(FALLBACKS["softmax"](0.5))(phi, active)
    assert torch.allclose(weights, (phi / 0.5).softmax(1))


@pytest.mark.parametrize("name", ["softmax", "uniform", "top1"])
@pytest.mark.parametrize("shift", [-5.0, 0.0, 5.0])
def test_weights_sum_to_one_inside_the_set(name, shift):
    gain, cost = draw()
    phi = shapley_values(gain + shift, cost)
    active = select_experts(phi, gain + shift, cost, 0.5)
    weights, _ = RoutingWeights(FALLBACKS[name](1.0))(phi, active)
    assert torch.allclose(weights.sum(1), torch.ones(200, dtype=torch.float64))
    assert (weights[~active] == 0).all() and (weights >= 0).all()


def outputs(experts=3, batch=6, classes=4, dim=5, seed=1):
    rng = torch.Generator().manual_seed(seed)
    return {
        "features": torch.randn(experts, batch, dim, generator=rng, dtype=torch.float64),
        "expert_logits": torch.randn(experts, batch, classes, generator=rng, dtype=torch.float64),
    }


def decide(decision, out, labels, fisher, mask=None, rows=None):
    batch = Batch(torch.empty(0), labels, torch.arange(len(labels)))
    ref = {"seen": mask, "current": mask, "fisher_rows": rows}
    return decision(out, batch, ref, {"fisher": {"experts": fisher}})


def routing(alpha, stop, **more):
    return FisherShapley(FisherUtility(alpha), stop, **more)


def test_decision_by_hand():
    out, labels = outputs(), torch.tensor([0, 1, 2, 3, 0, 1])
    fisher = noise(3, 4, 6)
    got = decide(routing(0.6, AdaptiveStop(0.5), tau=2.0), out, labels, fisher)
    stability, plasticity = fres(out["features"], out["expert_logits"], labels, FisherMap()(fisher))
    loss = torch.stack([F.cross_entropy(z, labels, reduction="none") for z in out["expert_logits"]], 1)
    gain, cost = 0.4 * shares(plasticity) - loss, 0.6 * stability
    phi = shapley_values(gain, cost)
    assert torch.allclose(got["phi"], phi)
    assert torch.equal(got["active"], select_experts(phi, gain, cost, 0.5))
    assert torch.allclose(got["teacher_gates"], (phi / 2).softmax(1))
    assert torch.allclose(got["weights"], RoutingWeights()(phi, got["active"])[0])


def test_alpha_one_ignores_plasticity_and_alpha_zero_stability():
    out, labels = outputs(), torch.zeros(6, dtype=torch.long)
    fishers = [noise(3, 4, 6), torch.zeros(3, 4, 6, dtype=torch.float64)]
    pair = [decide(routing(0.0, TopExperts(2)), out, labels, 7 * torch.ones_like(f)) for f in fishers]
    assert torch.equal(pair[0]["phi"], pair[1]["phi"])
    stability, _ = fres(out["features"], out["expert_logits"], labels, FisherMap()(fishers[0]))
    blank = decide(routing(1.0, TopExperts(2)), out, labels, fishers[1])["phi"]
    assert torch.allclose(decide(routing(1.0, TopExperts(2)), out, labels, fishers[0])["phi"], blank + 0.25 - stability)


def game(value, experts):
    """Shapley values of any game, by its definition: the mean of v(S + k) - v(S) over all orders."""
    phi = torch.zeros(experts, dtype=torch.float64)
    orders = list(itertools.permutations(range(experts)))
    for order in orders:
        for place, expert in enumerate(order):
            phi[expert] += value(order[: place + 1]) - value(order[:place])
    return phi / len(orders)


def test_without_fres_the_game_is_that_of_the_losses():
    """v(S) is the mean of -loss over S: the phi of the closed form are those of brute force."""
    out, labels = outputs(experts=4), torch.tensor([0, 1, 2, 3, 0, 1])
    loss = torch.stack([F.cross_entropy(z, labels, reduction="none") for z in out["expert_logits"]], 1)
    got = [decide(FisherShapley(LossUtility(), TopExperts(2)), out, labels, noise(4, 4, 6) * s) for s in (1, 9)]
    for sample in range(6):
        phi = game(lambda found, n=sample: float(-loss[n, list(found)].mean()) if found else 0.0, 4)
        assert torch.allclose(got[0]["phi"][sample], phi, atol=1e-12)
    assert torch.equal(got[0]["phi"], got[1]["phi"]), "the Fisher plays no part"
    gain, cost = LossUtility()(loss, out["features"], loss, noise(4, 4, 6), None)
    assert torch.equal(gain, -loss) and (cost == 0).all() and cost.shape == loss.shape


def test_the_fisher_counts_for_the_utility_that_reads_it():
    out, labels, fisher = outputs(), torch.tensor([0, 1, 2, 3, 0, 1]), noise(3, 4, 6)
    fres_phi, loss_phi = (
        decide(FisherShapley(utility, TopExperts(2)), out, labels, fisher)["phi"]
        for utility in (FisherUtility(0.6), LossUtility())
    )
    assert not torch.allclose(fres_phi, loss_phi)


def test_uniform_weights_forget_the_values():
    active = torch.tensor([[True, True, False, False], [True, True, True, True], [False, False, False, True]])
    phi = torch.cat([PHI, PHI_ABOVE, -PHI_ABOVE])
    weights, fallback = UniformWeights()(phi, active)
    assert weights.tolist() == [[0.5, 0.5, 0, 0], [0.25] * 4, [0, 0, 0, 1]]
    assert fallback.dtype == torch.bool and fallback.tolist() == [False] * 3
    for name, want in (("uniform", UniformWeights()), ("shapley", RoutingWeights(FALLBACKS["top1"](1.0)))):
        assert WEIGHINGS[name](FALLBACKS["top1"](1.0)) == want


@pytest.mark.parametrize("empty", ["chance", 0.0])
def test_masked_head_equals_a_grown_head(empty):
    out, labels, seen = outputs(classes=6), torch.tensor([0, 2, 5, 0, 2, 5]), torch.tensor([0, 2, 5])
    fisher = torch.zeros(3, 6, 6, dtype=torch.float64)
    fisher[:, seen] = noise(3, 3, 6)
    mask = torch.full((6,), -torch.inf, dtype=torch.float64)
    mask[seen] = 0
    decision = routing(0.6, AdaptiveStop(0.5), empty_value=empty_rule(empty))
    wide = decide(decision, out, labels, fisher, mask, seen)
    narrow_out = {**out, "expert_logits": out["expert_logits"][..., seen]}
    grown = decide(decision, narrow_out, torch.searchsorted(seen, labels), fisher[:, seen])
    for name in ("phi", "weights", "teacher_gates"):
        assert torch.allclose(wide[name], grown[name], atol=1e-12)
    assert torch.equal(wide["active"], grown["active"])
    assert torch.equal(wide["delta_sq"][..., seen], grown["delta_sq"])
    assert (wide["delta_sq"][..., [1, 3, 4]] == 0).all()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("experts", [1, 2, 4])
def test_small_and_perfect_batches_give_no_nan(batch, experts):
    out = outputs(experts, batch)
    out["expert_logits"] = 1e4 * F.one_hot(torch.zeros(experts, batch, dtype=torch.long), 4).double()
    fisher = torch.zeros(experts, 4, 6, dtype=torch.float64)
    got = decide(routing(0.6, AdaptiveStop(0.5)), out, torch.zeros(batch, dtype=torch.long), fisher)
    assert all(tensor.isfinite().all() for tensor in got.values())
    assert torch.allclose(got["weights"].sum(1), torch.ones(batch, dtype=torch.float64))


@pytest.mark.parametrize(("field", "value"), [("alpha", 1.5), ("alpha", -0.1), ("tau_r", 0.0), ("tau_r", float("nan"))])
def test_bad_numbers(field, value):
    given = {"alpha": 0.5, "tau_r": 1.0, field: value}
    with pytest.raises(ConfigError, match=field):
        routing(given["alpha"], TopExperts(1), tau=given["tau_r"])


ROUTER = torch.tensor([[2.0, 1.0, -3.0]])
LOGITS = torch.tensor([[[1.0, 0.0]], [[0.0, 3.0]], [[9.0, 9.0]]])


def test_top_gates_are_renormalised():
    share = 1 / (1 + math.exp(-1))
    assert top_gates(ROUTER, 2)[0].tolist() == pytest.approx([share, 1 - share, 0])
    assert torch.allclose(top_gates(ROUTER, 5), ROUTER.softmax(1))
    assert top_gates(torch.zeros(1, 3), 2).tolist() == [[0.5, 0.5, 0.0]]


def test_mixed_logits():
    share = 1 / (1 + math.exp(-1))
    assert MixLogits(2)(LOGITS, ROUTER)[0].tolist() == pytest.approx([share, 3 * (1 - share)])
    assert MixLogits(1)(LOGITS, ROUTER)[0].tolist() == [1.0, 0.0]


def test_mixed_probabilities():
    share = 1 / (1 + math.exp(-1))
    want = share * LOGITS[0, 0].softmax(0) + (1 - share) * LOGITS[1, 0].softmax(0)
    assert torch.allclose(MixProbabilities(2)(LOGITS, ROUTER)[0].exp(), want)


@pytest.mark.parametrize("mix", [MixLogits(2), MixProbabilities(2), MixLogits(1), MixProbabilities(9)])
def test_masked_classes_are_minus_infinity_and_nothing_is_nan(mix):
    mask = torch.tensor([0.0, -torch.inf, 0.0])
    logits = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(0))
    router = torch.tensor([[200.0, 0.0, -200.0]]).expand(4, 3)  # gates that underflow to 0
    scores = mix(logits, router, mask)
    assert (scores[:, 1] == -torch.inf).all() and scores[:, [0, 2]].isfinite().all()


def test_probabilities_are_taken_inside_the_mask():
    mask = torch.tensor([0.0, -torch.inf])
    assert MixProbabilities(3)(LOGITS, ROUTER, mask)[0, 0].item() == pytest.approx(0.0, abs=1e-6)


def test_mixing_fewer_than_one_expert():
    with pytest.raises(ConfigError, match="inference_experts must be at least 1, got 0"):
        MixLogits(0)
    with pytest.raises(ConfigError, match="inference_experts"):
        MixProbabilities(0)
