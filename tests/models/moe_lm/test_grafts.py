"""Grafted experts: what they add, what is frozen, and experts of every make."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedloom.core import ConfigError, Net
from fedloom.core.moe import moe_layers
from fedloom.models.moe_lm.grafts import blocks_watched, expert_tensors, experts_frozen, grafted
from fedloom.models.moe_lm.layers import find_layers
from fedloom.models.moe_lm.routed import routed
from toys.federation import BlobSpec, expert_spec
from toys.language_models import text_spec


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def toy() -> nn.Module:
    return grafted(expert_spec(top_k=2).classifier(), "flex").eval()


def params_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in net.named_parameters()}


class Around(nn.Module):
    """One block of another library between two identities."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block, self.head = block, nn.Linear(8, 3)

    @property
    def moe_layers(self):
        return find_layers(self)

    def forward(self, x):
        out = self.block(x)
        return {"logits": self.head((out if isinstance(out, torch.Tensor) else out[0]).mean(1))}


def switch() -> nn.Module:
    models = pytest.importorskip("transformers.models.switch_transformers.modeling_switch_transformers")
    config = models.SwitchTransformersConfig(d_model=8, d_ff=12, num_experts=4, expert_capacity=50, dropout_rate=0.0)
    return models.SwitchTransformersSparseMLP(config)


def mixtral() -> nn.Module:
    models = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = models.MixtralConfig(hidden_size=8, intermediate_size=12, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    block = models.MixtralSparseMoeBlock(config)
    for k, p in enumerate(block.parameters()):
        nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(k))
    return block


def test_grafts_are_of_no_effect_at_first():
    x, plain = drawn(9, 2), expert_spec(top_k=2).classifier().eval()
    assert torch.equal(toy()(x)["logits"], plain(x)["logits"])
    assert all(not p.any() for p in toy().grafts.parameters())


def test_a_graft_adds_its_expert_behind_its_gate():
    net, x = toy(), drawn(9, 2)
    for k, p in enumerate(net.grafts[1].parameters()):
        nn.init.normal_(p, generator=torch.Generator().manual_seed(k))
    own, h, y = params_of(net.grafts[1]), [], []
    with blocks_watched(net) as seen:
        net(x)
        (_, _), (h, y) = seen
    plain = expert_spec(top_k=2).classifier().eval()
    with blocks_watched(plain) as seen:
        plain(x)
        (_, _), (before, base) = seen
    assert torch.equal(h, before)
    inner = (h @ own["up"].T + own["up_bias"]).clamp(min=0)
    share = torch.sigmoid(h @ own["gate_weight"] + own["gate_bias"])
    torch.testing.assert_close(y, base + share[:, None] * (inner @ own["down"].T + own["down_bias"]))
    assert (share > 0.5).any() and (share < 0.5).any()


def test_a_gate_that_is_shut_gives_the_base_model_bit_for_bit():
    net, x = toy(), drawn(9, 2)
    for graft in net.grafts:
        nn.init.normal_(graft.down, generator=torch.Generator().manual_seed(1))
        nn.init.constant_(graft.gate_bias, -200.0)
    assert torch.equal(net(x)["logits"], expert_spec(top_k=2).classifier().eval()(x)["logits"])


def test_experts_are_frozen_and_never_travel():
    net = Net(lambda: grafted(expert_spec().classifier(), "flex"))
    names = {name for layer in moe_layers(net.module) for name in layer.expert_names}
    assert len(names) == 8 and not names & set(net.trainable)
    assert {n for n, p in net.module.named_parameters() if not p.requires_grad} == names
    grafts = {n for n in net.trainable if n.startswith("grafts.")}
    rest = {n for n, _ in expert_spec().classifier().named_parameters()} - names
    assert set(net.trainable) == grafts | rest and len(grafts) == 2 * 6
    assert net.module.class_rows == {"head.weight": 0, "head.bias": 0}


def test_stacked_experts_are_told_apart_by_their_slices():
    net = toy()
    layer = moe_layers(net)[0]
    found = expert_tensors(layer, 2, params_of(net))
    experts = net.backbone.blocks[0].experts
    assert torch.equal(found["up"], experts.up[2]) and torch.equal(found["down_bias"], experts.down_bias[2])


@pytest.mark.parametrize("make", [switch, mixtral])
def test_an_expert_computed_from_its_tensors_is_that_of_the_other_library(make):
    net = routed(grafted(Around(make()), "flex")).eval()
    layer, params, h = moe_layers(net)[0], params_of(net), drawn(1, 7, 8)
    with blocks_watched(net) as seen, torch.no_grad():
        out = net(h)
    hidden, y = seen[0]
    assert torch.equal(hidden, h[0])
    shares = out["routing"][0].exp() * out["selected"][0]
    if make is mixtral:
        shares = shares / shares.sum(1, keepdim=True)
    whole = [net.grafts[0].whole(hidden, expert_tensors(layer, e, params)) for e in range(4)]
    torch.testing.assert_close(y, sum(shares[:, e, None] * whole[e] for e in range(4)))
    assert y.abs().max() > 1e-4


@pytest.mark.parametrize("make", [switch, mixtral])
def test_a_graft_on_another_library_learns_and_its_experts_do_not(make):
    net = grafted(Around(make()), "flex")
    nn.init.normal_(net.grafts[0].down, generator=torch.Generator().manual_seed(1))
    nn.init.normal_(net.grafts[0].up, generator=torch.Generator().manual_seed(2))
    net(drawn(2, 7, 8))["logits"].square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in net.grafts.parameters())
    assert all(p.grad is None for n, p in net.named_parameters() if ".experts." in n)


def test_a_gated_expert_multiplies_by_its_gate():
    net = grafted(Around(mixtral()), "flex")
    found = expert_tensors(moe_layers(net)[0], 1, params_of(net))
    h = drawn(5, 8)
    gate, up = found["up"][:12], found["up"][12:]
    torch.testing.assert_close(net.grafts[0].whole(h, found), (F.silu(h @ gate.T) * (h @ up.T)) @ found["down"].T)


class Odd(nn.Module):
    def __init__(self, name: str = "kernel", act: bool = True):
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.Module()
        self.experts.act = F.relu if act else None
        self.experts.register_parameter(name, nn.Parameter(torch.zeros(2, 5, 8)))
        self.experts.register_parameter("down", nn.Parameter(torch.zeros(2, 8, 5)))

    def forward(self, x):
        return x


def test_networks_that_cannot_be_grafted_are_refused_in_words():
    with pytest.raises(ConfigError, match="'flex' needs a network with mixture-of-experts layers"):
        grafted(BlobSpec().classifier(), "flex")
    with pytest.raises(ConfigError, match=r"'block' are block.experts.kernel, block.experts.down, which are not two"):
        grafted(Around(Odd()), "flex")
    with pytest.raises(ConfigError, match="'block' name no activation"):
        grafted(Around(Odd("up", act=False)), "flex")


def test_experts_can_be_frozen_without_a_graft():
    net = experts_frozen(expert_spec().classifier(), "flex")
    assert not hasattr(net, "grafts")
    frozen = {n for n, p in net.named_parameters() if not p.requires_grad}
    assert frozen == {name for layer in moe_layers(net) for name in layer.expert_names}


@pytest.mark.parametrize("targets", [("experts",), ("attention",)])
def test_experts_with_adapters_are_refused_in_words(targets: tuple[str, ...]):
    pytest.importorskip("peft")
    made = text_spec("mixtral", lora={"targets": targets}).classifier()
    with pytest.raises(ConfigError, match=r"leave model.options.lora out, or set method.graft to none"):
        grafted(made, "flex")
