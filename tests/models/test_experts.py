"""Expert pools: stacked parameters against separate modules, initial values, sizes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedloom.core import ConfigError
from fedloom.core.seeds import seeded
from fedloom.models.experts import ExpertPool, body_widths
from fedloom.models.heads import Classifier
from fedloom.models.resnet import ResNet
from fedloom.select.routing import MixLogits


class Flat(nn.Module):
    num_features = 8

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 8)

    def forward(self, x):
        return self.layer(x).relu()


def backbone():
    with seeded(0, "backbone"):
        return Flat()


def test_stacked_experts_equal_separate_ones():
    pool = ExpertPool(backbone(), 5, experts=3, body=[7, 6], temperature=2.0)
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    out = pool(x)
    feats = pool.backbone(x)
    for k in range(3):
        hidden = feats
        for layer in pool.bodies:
            hidden = F.relu(F.linear(hidden, layer.weight[k], layer.bias[k]))
        assert torch.allclose(out["features"][k], hidden, atol=1e-6)
        logits = F.linear(hidden, pool.heads.weight[k], pool.heads.bias[k])
        assert torch.allclose(out["expert_logits"][k], logits, atol=1e-6)
    assert torch.allclose(out["router_logits"], pool.gate(feats) / 2.0)
    mixed = torch.einsum("kbc,bk->bc", out["expert_logits"], out["router_logits"].softmax(1))
    assert torch.allclose(out["logits"], mixed)
    assert {name: tuple(t.shape) for name, t in out.items()} == {
        "logits": (4, 5),
        "feats": (4, 8),
        "features": (3, 4, 6),
        "expert_logits": (3, 4, 5),
        "router_logits": (4, 3),
    }


def test_experts_start_different_and_repeatable():
    a, b = (ExpertPool(backbone(), 5, experts=4, seed=3) for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    for stacked in (a.bodies[0].weight, a.bodies[1].bias, a.heads.weight):
        assert all(not torch.equal(stacked[i], stacked[j]) for i in range(4) for j in range(i))


def test_a_larger_pool_begins_with_the_smaller_one():
    small, large = ExpertPool(backbone(), 5, experts=2), ExpertPool(backbone(), 5, experts=4)
    assert torch.equal(large.heads.weight[:2], small.heads.weight)
    assert torch.equal(large.bodies[0].weight[:2], small.bodies[0].weight)


def test_one_identity_expert_starts_as_the_classifier():
    with seeded(7, "head"):
        plain = Classifier(backbone(), 5)
    with seeded(7, "head"):
        plain = Classifier(plain.backbone, 5)
    pool = ExpertPool(backbone(), 5, experts=1, body="identity", seed=7)
    assert torch.equal(pool.heads.weight[0], plain.head.weight)
    x = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(pool(x)["logits"], plain(x)["logits"], atol=1e-6)


def test_published_size_with_resnet18():
    with seeded(0):
        body = ResNet((3, 32, 32), (2, 2, 2, 2), (64, 128, 256, 512), groups=None)
    pool = ExpertPool(body, 100)
    assert sum(p.numel() for p in pool.parameters()) / 1e6 == pytest.approx(14.54, abs=0.01)


@pytest.mark.parametrize(("body", "widths"), [("mlp", (896, 384)), ("identity", ()), ([512], (512,)), ((9, 4), (9, 4))])
def test_body_widths(body, widths):
    assert body_widths(body, 512) == widths


@pytest.mark.parametrize("body", ["mpl", [], [0], [3.5], [8, -1]])
def test_bad_bodies(body):
    with pytest.raises(ConfigError, match="body must be mlp, identity or a list of widths"):
        ExpertPool(backbone(), 5, body=body)


@pytest.mark.parametrize(("experts", "classes"), [(0, 5), (4, 0)])
def test_bad_counts(experts, classes):
    with pytest.raises(ConfigError, match="num_classes and experts must be at least 1"):
        ExpertPool(backbone(), classes, experts=experts)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf")])
def test_bad_temperature(temperature):
    with pytest.raises(ConfigError, match="temperature must be a finite number above 0"):
        ExpertPool(backbone(), 5, temperature=temperature)


def test_class_rows_are_the_second_dimension():
    pool = ExpertPool(backbone(), 5)
    shapes = dict(pool.named_parameters())
    assert all(shapes[name].shape[dim] == 5 for name, dim in pool.class_rows.items())


def test_active_parameters_count_the_experts_that_are_mixed():
    pool = ExpertPool(backbone(), 5, experts=4, body=[6], mix=MixLogits(2))
    expert = (8 * 6 + 6) + (6 * 5 + 5)
    assert pool.active_parameters == (12 * 8 + 8) + (8 * 4 + 4) + 2 * expert
    assert ExpertPool(backbone(), 5, body=[6]).active_parameters == (12 * 8 + 8) + (8 * 4 + 4) + 4 * expert


def test_gradient_checkpointing_goes_to_the_backbone():
    body = backbone()
    with pytest.raises(ConfigError, match="Flat has no set_grad_checkpointing"):
        ExpertPool(body, 5).set_grad_checkpointing()
    calls = []
    body.set_grad_checkpointing = calls.append
    ExpertPool(body, 5).set_grad_checkpointing(True)
    assert calls == [True]
