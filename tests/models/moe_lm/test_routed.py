"""The load balance against that of `transformers`, and layers of an unknown make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedloom.core import ConfigError
from fedloom.core.moe import need_moe_layers
from fedloom.models import Classifier, NetworkSpec
from fedloom.models.moe_lm.layers import find_layers
from fedloom.models.moe_lm.routed import load_balance, routed
from toys.language_models import text_spec, texts


def test_the_load_balance_is_that_of_transformers_layer_by_layer() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    module, x = text_spec("mixtral", aux=0.5).classifier(), texts()
    out = module(x)
    theirs = [
        load_balancing_loss_func((log_p,), num_experts=4, top_k=2, attention_mask=x["attention_mask"].long())
        for log_p in out["routing"]  # the softmax of log p is p
    ]
    torch.testing.assert_close(out["aux_loss"], 0.5 * torch.stack(theirs).mean())


def test_the_load_balance_is_top_k_where_experts_share_alike() -> None:
    p = torch.full((2, 8, 4), 0.25)
    selected = torch.eye(4, dtype=torch.bool).repeat(2, 2, 1)
    assert load_balance(p.log(), selected, torch.ones(8, dtype=torch.bool)).item() == pytest.approx(1.0)
    both = selected | selected.roll(1, 2)
    assert load_balance(p.log(), both, torch.ones(8, dtype=torch.bool)).item() == pytest.approx(2.0)
    one = torch.zeros(2, 8, 4)
    one[:, :, 0] = 1
    assert load_balance(one.log(), one.bool(), torch.ones(8, dtype=torch.bool)).item() == pytest.approx(4.0)


def test_padding_and_an_empty_batch_do_not_count_in_the_load_balance() -> None:
    log_p = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)).log_softmax(2)
    selected = nn.functional.one_hot(log_p.argmax(2), 4).bool()
    mask = torch.tensor([True, True, False, True, False, False])
    whole = load_balance(log_p[:, mask], selected[:, mask], torch.ones(3, dtype=torch.bool))
    torch.testing.assert_close(load_balance(log_p, selected, mask), whole)
    assert load_balance(log_p, selected, torch.zeros(6, dtype=torch.bool)).item() == 0


def test_the_load_balance_moves_probability_to_unused_experts() -> None:
    logits = torch.zeros(1, 6, 4, requires_grad=True)
    selected = torch.zeros(1, 6, 4, dtype=torch.bool)
    selected[:, :, 0] = True
    load_balance(logits.log_softmax(2), selected, torch.ones(6, dtype=torch.bool)).backward()
    assert (logits.grad[:, :, 0] > 0).all() and (logits.grad[:, :, 1:] < 0).all()


class Unknown(nn.Module):
    num_features = 4

    def __init__(self, experts: nn.Module, gate: nn.Module):
        super().__init__()
        self.experts, self.gate = experts, gate

    def forward(self, x: Any) -> Any:
        return x


class Bare(nn.Module):
    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))


@pytest.mark.parametrize(
    ("experts", "gate", "message"),
    [
        (
            nn.ModuleList([nn.Linear(4, 4)] * 3),
            nn.Linear(4, 2),
            "neither 2 modules nor tensors stacked along 2 experts",
        ),
        (Bare(3, 4, 4), nn.Linear(4, 2), "neither 2 modules nor tensors stacked along 2 experts"),
        (Bare(2, 4, 4), Bare(2), "a gate .Bare. without a weight"),
        (Bare(), nn.Linear(4, 2), "neither 2 modules nor tensors stacked"),
    ],
)
def test_layers_of_an_unknown_make_are_refused_in_words(experts: nn.Module, gate: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_layers(nn.Sequential(nn.Linear(4, 4), Unknown(experts, gate)))


def test_a_router_of_an_unknown_form_is_refused_in_words() -> None:
    module = Unknown(Bare(2, 4, 4), nn.Linear(4, 2))
    module.moe_layers = find_layers(module)
    module.forward = lambda x: {"logits": module.gate(x)}
    with pytest.raises(ConfigError, match="the router of '' returns values of an unknown form"):
        routed(module)(torch.zeros(3, 4))


def test_a_network_without_experts_is_refused_by_methods_that_need_them() -> None:
    module = NetworkSpec("mlp", 3, (4,)).classifier()
    assert isinstance(module, Classifier) and find_layers(module) == ()
    with pytest.raises(ConfigError, match="method 'fedmoe' needs a network with mixture-of-experts layers"):
        need_moe_layers(module, "fedmoe")
