"""FRES against per-sample autograd, the worked example, the maps and the rows of classes not seen."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core import ConfigError
from fedloom.select.fisher import SCALES, SQUASHES, FisherMap, fres, head_gradients, shares


def noise(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def problem(experts=3, batch=5, classes=4, dim=6, dtype=torch.float64, seed=0):
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=rng, dtype=dtype)

    features, weight, bias = draw(experts, batch, dim), draw(experts, classes, dim), draw(experts, classes)
    labels = torch.randint(0, classes, (batch,), generator=rng)
    return features, weight, bias, labels, draw(experts, classes, dim + 1).square()


def head_gradient(feature, weight, bias, label, mask=None):
    """Autograd of one sample's loss by [weight, bias], [classes, dim + 1]."""
    head = torch.cat([weight, bias.unsqueeze(-1)], -1).requires_grad_()
    logits = head @ torch.cat([feature, feature.new_ones(1)])
    logits = logits if mask is None else logits + mask
    return torch.autograd.grad(F.cross_entropy(logits[None], label[None]), head)[0]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_closed_form_equals_autograd(dtype, tolerance):
    features, weight, bias, labels, fisher = problem()
    logits = features @ weight.mT + bias[:, None]
    cost, gain = fres(features.to(dtype), logits.to(dtype), labels, fisher.to(dtype))
    assert cost.dtype == gain.dtype == dtype and cost.shape == gain.shape == (5, 3)
    for k in range(3):
        for b in range(5):
            g = head_gradient(features[k, b], weight[k], bias[k], labels[b])
            unit = g / g.norm()
            assert cost[b, k] == pytest.approx(float(0.5 * (fisher[k].sqrt() * unit).square().sum()), rel=tolerance)
            assert gain[b, k] == pytest.approx(float(g.square().sum() / (fisher[k].sum() + 1e-8)), rel=tolerance)


def test_masked_classes_get_no_gradient():
    features, weight, bias, labels, fisher = problem()
    mask = torch.tensor([0.0, 0.0, -torch.inf, 0.0], dtype=torch.float64)
    labels = labels.where(labels != 2, 0)
    logits = features @ weight.mT + bias[:, None] + mask
    cost, gain = fres(features, logits, labels, fisher)
    assert (head_gradients(logits, labels)[1][..., 2] == 0).all()
    g = head_gradient(features[1, 2], weight[1], bias[1], labels[2], mask)
    assert gain[2, 1] == pytest.approx(float(g.square().sum() / (fisher[1].sum() + 1e-8)), rel=1e-12)
    assert cost.isfinite().all()


def test_worked_example():
    logits, labels = torch.tensor([[[1.0, 0.0, -1.0]]]).double(), torch.tensor([0])
    feature = torch.tensor([[[1.0, 2.0]]]).double()
    fisher = torch.arange(1.0, 10.0, dtype=torch.float64).view(1, 3, 3) / 10
    loss, delta_sq = head_gradients(logits, labels)
    assert delta_sq.flatten().sqrt().tolist() == pytest.approx([1 - 0.665241, 0.244728, 0.090031], abs=1e-6)
    assert float(delta_sq.sum() * (feature.square().sum() + 1)) == pytest.approx(1.080367, abs=1e-6)
    cost, gain = fres(feature, logits, labels, fisher)
    assert cost.item() == pytest.approx(0.163398, abs=1e-6)
    assert gain.item() == pytest.approx(0.240082, abs=1e-6)
    assert loss.item() == pytest.approx(0.407606, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), low=st.floats(0, 1), width=st.floats(0, 2))
def test_cost_is_half_an_average_of_the_fisher(seed, low, width):
    features, weight, bias, labels, fisher = problem(seed=seed)
    fisher = low + width * fisher / fisher.max()
    cost, _ = fres(features, features @ weight.mT + bias[:, None], labels, fisher)
    assert (cost >= low / 2 - 1e-12).all() and (cost <= (low + width) / 2 + 1e-12).all()


def test_blank_fisher_gives_a_quarter():
    features, weight, bias, labels, fisher = problem()
    mapped = FisherMap()(torch.zeros_like(fisher))
    assert (mapped == 0.5).all()
    logits = features @ weight.mT + bias[:, None]
    cost, gain = fres(features, logits, labels, mapped)
    assert torch.allclose(cost, torch.full_like(cost, 0.25), atol=1e-15, rtol=0)
    norm_sq = head_gradients(logits, labels)[1].sum(-1) * (features.square().sum(-1) + 1)
    assert torch.allclose(gain[:, 0] / gain[:, 1], norm_sq[0] / norm_sq[1])


@pytest.mark.parametrize("margin", [1e3, 1e4])
def test_perfect_prediction_gives_zeros(margin):
    logits = torch.tensor([[[margin, 0.0, 0.0]]])
    cost, gain = fres(torch.ones(1, 1, 2), logits, torch.tensor([0]), torch.ones(1, 3, 3))
    assert cost.item() == 0 and gain.item() == 0


def test_confident_predictions_keep_their_gradient():
    logits = torch.tensor([[[18.0, 0.0]]])  # in fp32 p rounds to 1, but 1 - p is 1.5e-8
    loss, delta_sq = head_gradients(logits, torch.tensor([0]))
    assert delta_sq.sqrt().flatten().tolist() == pytest.approx([1.523e-8, 1.523e-8], rel=1e-3)
    assert loss.shape == (1, 1)


def test_shares_sum_to_one():
    gain = torch.tensor([[1.0, 3.0], [0.0, 0.0], [1e-38, 3e-38]])
    assert shares(gain).tolist() == [pytest.approx([0.25, 0.75]), [0.5, 0.5], pytest.approx([0.25, 0.75], rel=1e-4)]


@pytest.mark.parametrize("scale", ["experts", "per_expert", "pooled"])
def test_equal_entries_have_no_score(scale):
    fisher = torch.full((3, 2, 4), 0.3)
    assert (SCALES[scale](fisher) == 0).all()


def test_scales_by_hand():
    fisher = torch.tensor([[[1.0, 2.0]], [[3.0, 6.0]]])
    assert SCALES["experts"](fisher).flatten().tolist() == pytest.approx([-1, -1, 1, 1])
    assert SCALES["per_expert"](fisher).flatten().tolist() == pytest.approx([-1, 1, -1, 1])
    deviation = (14 / 4) ** 0.5
    assert SCALES["pooled"](fisher).flatten().tolist() == pytest.approx([v / deviation for v in (-2, -1, 0, 3)])
    assert SCALES["trace"](fisher).flatten().tolist() == pytest.approx([2 / 3, 4 / 3] * 2)
    assert torch.equal(SCALES["none"](fisher), fisher)
    assert (SCALES["trace"](torch.zeros(1, 2, 3)) == 0).all()


def test_squashes_are_not_negative():
    z = torch.tensor([-5.0, -0.5, 0.0, 2.0])
    assert SQUASHES["sigmoid"](z)[2] == 0.5
    assert SQUASHES["softplus"](z)[2] == pytest.approx(0.693147, abs=1e-6)
    assert SQUASHES["relu"](z).tolist() == [0.0, 0.5, 1.0, 3.0]
    assert torch.equal(SQUASHES["identity"](z), z)


def test_one_expert_has_no_score_across_experts():
    mapped = FisherMap()(noise(1, 3, 4))
    assert (mapped == 0.5).all()


@pytest.mark.parametrize("scale", list(SCALES))
@pytest.mark.parametrize("squash", ["sigmoid", "softplus", "relu"])
def test_rows_of_unseen_classes_count_for_nothing(scale, squash):
    fisher = noise(3, 5, 4)
    fisher[:, [1, 4]] = 0
    rows = torch.tensor([0, 2, 3])
    mapping = FisherMap(SCALES[scale], SQUASHES[squash])
    wide, grown = mapping(fisher, rows), mapping(fisher[:, rows])
    assert torch.equal(wide[:, rows], grown)
    assert (wide[:, [1, 4]] == 0).all()
    assert torch.allclose(wide.sum((1, 2)), grown.sum((1, 2)))


def test_identity_needs_a_scale_without_negative_values():
    FisherMap(SCALES["trace"], SQUASHES["identity"])
    with pytest.raises(ConfigError, match="fisher_squash 'identity' needs fisher_scale 'trace' or 'none'"):
        FisherMap(SCALES["experts"], SQUASHES["identity"])


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ConfigError, match=r"fres needs features .* got \(1, 2, 3\)"):
        fres(torch.zeros(1, 2, 3), torch.zeros(1, 2, 5), torch.zeros(2, dtype=torch.long), torch.zeros(1, 5, 3))
