"""Routed adapters: gates, sums and gradients against loops, what stays still, and the numbers of the specification."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.core import ConfigError
from fedloom.core.moe import expert_parts
from fedloom.models.clip.adapters import AdapterLayer, Adapters, Bottlenecks, adapter_layers
from fedloom.models.clip.network import ClipNetwork
from fedloom.models.clip.towers import Towers
from fedloom.models.clip.words import fixed
from toys.clip import LENGTH, toy_clip

WIDTH, SAMPLES, POSITIONS = 12, 10, 5
SMALL = Adapters(experts=4, bottleneck=3, dropout=0.0)


def layer(options: Adapters = SMALL, seed: int = 0, *, drawn: bool = True) -> AdapterLayer:
    """A layer in double precision; drawn: with random values everywhere."""
    torch.manual_seed(seed)
    made = AdapterLayer(WIDTH, options).double()
    if drawn:
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return made


def inputs(seed: int = 1) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, POSITIONS, WIDTH, generator=rng, dtype=torch.float64)
    return x, torch.randn(SAMPLES, WIDTH, generator=rng, dtype=torch.float64)


def one(part: Bottlenecks, e: int, x: Tensor) -> Tensor:
    """Adapter e of a stack, by its equation."""
    hidden = torch.relu(x @ part.down_weight[e].T + part.down_bias[e])
    return part.scale * (hidden @ part.up_weight[e].T + part.up_bias[e])


def by_hand(made: AdapterLayer, x: Tensor, token: Tensor, top_k: int) -> Tensor:
    """The layer sample by sample."""
    rows = []
    for sample, h in zip(x, token, strict=True):
        logits = made.router.weight @ h
        kept = sorted(range(len(logits)), key=lambda e: (-logits[e].item(), e))[:top_k]
        gates = torch.stack([logits[e] for e in kept]).softmax(0)
        row = sum(g * one(made.local, e, sample) for g, e in zip(gates, kept, strict=True))
        if made.shared is not None:
            count = len(made.shared.down_weight)
            row = row + sum(one(made.shared, s, sample) for s in range(count)) / count
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("changes", [{}, {"top_k": 1}, {"top_k": 4}, {"shared": 0}, {"shared": 3, "shared_width": 2}],
                         ids=str)  # fmt: skip
def test_outputs_and_gradients_are_those_of_a_loop_over_samples(changes: dict[str, Any]):
    options = replace(SMALL, **changes)
    made, (x, token) = layer(options).eval(), inputs()
    x.requires_grad_()
    token.requires_grad_()
    wanted = [x, token, *(p for n, p in made.named_parameters() if n != "router.noise")]
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found, expected = made(x, token)[0], by_hand(made, x, token, options.top_k)
    torch.testing.assert_close(found, expected)
    pairs = zip(*(torch.autograd.grad((y * weights).sum(), wanted) for y in (found, expected)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b)


def test_gates_sum_to_one_over_at_most_k_experts_and_are_halves_for_equal_logits():
    made, (x, token) = layer().eval(), inputs()
    _, routing = made(x, token)
    torch.testing.assert_close(routing.gates.sum(1), torch.ones(SAMPLES, dtype=torch.float64))
    assert (routing.gates > 0).sum(1).tolist() == [2] * SAMPLES
    torch.testing.assert_close(routing.logits, token @ made.router.weight.T)
    with torch.no_grad():
        made.router.weight.zero_()
    assert made(x, token)[1].gates.tolist() == [[0.5, 0.5, 0, 0]] * SAMPLES


def test_a_softmax_over_all_experts_loses_what_was_not_chosen():
    made, (x, token) = layer(replace(SMALL, gate_norm="masked")).eval(), inputs()
    _, routing = made(x, token)
    full = routing.logits.softmax(1)
    torch.testing.assert_close(routing.gates, full.where(routing.gates > 0, 0.0))
    assert (routing.gates.sum(1) < 1).all() and (routing.gates > 0).sum(1).tolist() == [2] * SAMPLES
    renormalised = routing.gates / routing.gates.sum(1, keepdim=True)
    torch.testing.assert_close(renormalised, layer().eval()(x, token)[1].gates)


def test_all_experts_together_are_gated_by_the_plain_softmax():
    made, (x, token) = layer(replace(SMALL, top_k=9)).eval(), inputs()  # clamped to the number of experts
    _, routing = made(x, token)
    torch.testing.assert_close(routing.gates, routing.logits.softmax(1))


def test_one_expert_is_always_chosen():
    made, (x, token) = layer(replace(SMALL, experts=1, shared=0)).eval(), inputs()
    added, routing = made(x, token)
    assert routing.gates.tolist() == [[1.0]] * SAMPLES
    torch.testing.assert_close(added, one(made.local, 0, x))


def test_permuting_the_experts_with_the_rows_of_the_router_changes_nothing():
    made, (x, token) = layer().eval(), inputs()
    before, order = made(x, token)[0], torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        for parameter in (*made.local.parameters(), *made.router.parameters()):
            parameter.copy_(parameter[order].clone())
    torch.testing.assert_close(made(x, token)[0], before)


def test_noise_and_dropout_act_only_on_what_is_trained():
    made, (x, token) = layer(replace(SMALL, dropout=0.5)), inputs()
    quiet = made.eval()(x, token)
    made.train()

    def draws() -> tuple[bool, bool]:
        """Whether gates, and whether outputs differ from one pass to the next."""
        first, second = made(x, token), made(x, token)
        return not torch.equal(first[1].gates, second[1].gates), not torch.equal(first[0], second[0])

    assert draws() == (True, True)
    torch.testing.assert_close(made(x, token)[1].logits, quiet[1].logits)  # what is told has no noise
    made.router.requires_grad_(False)
    assert draws() == (False, True)
    made.local.requires_grad_(False)
    made.shared.requires_grad_(False)
    assert draws() == (False, False)
    assert torch.equal(made(x, token)[0], quiet[0])


def test_a_router_that_is_held_still_tells_its_routing_without_gradient():
    made, (x, token) = layer(), inputs()
    token.requires_grad_()
    assert all(told.requires_grad for told in made(x, token)[1])
    made.router.requires_grad_(False)
    added, routing = made(x, token)
    assert not any(told.requires_grad for told in routing)
    assert torch.autograd.grad(added.sum(), token)[0].any()  # the way through the gates stays open


def test_the_noise_has_its_own_scale_per_expert():
    options = replace(SMALL, experts=2, top_k=2, shared=0)
    made = layer(options, drawn=False).train()
    token = torch.ones(20_000, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        made.router.weight.zero_()
        made.router.noise[1] = 0.1
    clean, noisy = made.router(token)
    assert not clean.any()
    expected = torch.nn.functional.softplus(torch.tensor([0.0, 0.1 * WIDTH])) + 0.01
    torch.testing.assert_close(noisy.std(0), expected.double(), rtol=0.03, atol=0)
    assert layer(replace(options, noise=False)).train().router.noise is None


def test_only_chosen_experts_have_a_gradient():
    made, (x, token) = layer().eval(), inputs()
    with torch.no_grad():
        made.router.weight[2] = 0.0
        made.router.weight[:2] = 1.0  # both or none lead, as the sum of the token says
        made.router.weight[3] = -1.0
    token = token.abs()
    made(x, token)[0].square().sum().backward()
    for parameter in made.local.parameters():
        assert [bool(parameter.grad[e].any()) for e in range(4)] == [True, True, False, False]


def test_logits_that_are_not_a_number_give_outputs_that_are_none_and_no_error():
    made, (x, token) = layer(), inputs()
    token[3] = torch.nan
    added, routing = made(x, token)
    assert added[3].isnan().all() and routing.logits[3].isnan().all()
    assert added[:3].isfinite().all() and added[4:].isfinite().all()


def test_in_half_precision_the_router_stays_in_full():
    made, (x, token) = layer().float(), inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        added, routing = made.eval()(x.float(), token.float())
    assert added.dtype == torch.float32 and routing.logits.dtype == torch.float32
    torch.testing.assert_close(routing.logits, token.float() @ made.router.weight.T)
    torch.testing.assert_close(added, made(x.float(), token.float())[0], atol=0.1, rtol=0.05)


def test_initial_values():
    made = layer(Adapters(router_std=0.0), drawn=False)
    zero = {name for name, p in made.named_parameters() if not p.any()}
    whole = {f"{part}.{name}" for part in ("local", "shared") for name in ("down_bias", "up_weight", "up_bias")}
    assert zero == whole | {"router.weight", "router.noise"}
    drawn = made.local.down_weight
    assert drawn.abs().max() <= WIDTH**-0.5 and drawn.std().item() == pytest.approx((WIDTH * 3) ** -0.5, rel=0.05)
    assert not torch.equal(drawn[0], drawn[1])
    assert layer(Adapters(), drawn=False).router.weight.std().item() == pytest.approx(0.02, rel=0.3)
    assert made.shared.down_weight.shape == (1, 512, WIDTH)
    assert AdapterLayer(WIDTH, Adapters(shared_width=64)).shared.down_weight.shape == (1, 64, WIDTH)


@torch.no_grad()  # torch computes attention by another kernel where something wants a gradient
def test_the_adapted_towers_equal_clip_at_the_start():
    clip = toy_clip()
    towers, phrases = clip.towers, fixed(clip.words, "a photo of a {}.", LENGTH)
    layers = adapter_layers(towers, Adapters(), 0)
    tokens = towers.image_start(torch.randn(9, 2))
    plain, adapted = (towers.image_through(tokens, each)[0] for each in ([None, None], layers[0]))
    assert torch.equal(plain, adapted)
    embedded = towers.embedded(phrases)
    assert torch.equal(*(towers.text(embedded, phrases.eot, each)[0] for each in ((), layers[1])))


@pytest.mark.parametrize(("token", "same"), [("eot", False), ("sot", True)])
def test_texts_are_routed_by_class_at_the_end_and_all_alike_at_the_start(token: str, same: bool):
    clip = toy_clip()
    image, text = adapter_layers(clip.towers, Adapters(), 0)
    phrases = fixed(clip.words, "a photo of a {}.", LENGTH)
    net = ClipNetwork(clip, phrases, image_layers=image, text_layers=text, token=token).eval()
    routing = net(torch.randn(4, 2))["text_routing"]
    assert routing.shape == (2, 6, 8)
    spread = (routing - routing[:, :1]).abs().amax((1, 2))
    assert (spread == 0).all() if same else (spread > 1e-3).all()


def test_layers_stand_where_they_are_asked_for_and_are_drawn_on_their_own():
    towers = toy_clip().towers

    def there(**place: Any) -> list[list[bool]]:
        return [[one is not None for one in stack] for stack in adapter_layers(towers, SMALL, 0, **place)]

    assert there() == [[True, True], [True, True]]
    assert there(where="vision") == [[True, True], [False, False]]
    assert there(where="text", last=1) == [[False, False], [False, True]]
    assert there(last=5) == there(last=0) == there()
    whole, again, last = (adapter_layers(towers, SMALL, 3, last=k)[1] for k in (0, 0, 1))
    for other in (again, last):
        assert torch.equal(whole[1].local.down_weight, other[1].local.down_weight)
    assert not torch.equal(whole[0].local.down_weight, whole[1].local.down_weight)
    assert not torch.equal(whole[0].router.weight, adapter_layers(towers, SMALL, 4)[1][0].router.weight)


def test_a_network_names_the_slices_of_its_experts():
    clip = toy_clip()
    image, text = adapter_layers(clip.towers, SMALL, 0, last=1)
    net = ClipNetwork(clip, fixed(clip.words, "a {}.", LENGTH), image_layers=image, text_layers=text)
    found, tree = expert_parts(net), dict(net.named_parameters())
    assert len(found) == 2 * SMALL.experts
    names = ("down_weight", "down_bias", "up_weight", "up_bias")
    assert [part.name for part in found[5]] == [f"text_adapters.1.local.{name}" for name in names]
    assert torch.equal(found[5][0].of(tree)[0], text[1].local.down_weight[1])


def vit_b_16() -> Towers:
    import open_clip

    with torch.device("meta"):
        return Towers(open_clip.CLIP(**open_clip.get_model_config("ViT-B-16")))


def test_parameter_counts_of_vit_b_16():
    towers = vit_b_16()
    assert (towers.image_width, towers.text_width, towers.width) == (768, 512, 512)

    def count(pattern: str, options: Adapters) -> int:
        with torch.device("meta"):
            stacks = adapter_layers(towers, options, 0)
        parts = [p for stack in stacks for made in stack for n, p in made.named_parameters() if n.startswith(pattern)]
        return sum(p.numel() for p in parts)

    whole = Adapters()
    assert count("shared", whole) == 15_756_288
    assert count("router", whole) == 245_760
    assert count("local", whole) == 15_863_808
    assert count("shared", replace(whole, shared_width=64)) == 1_982_976
    assert count("", Adapters(experts=2, shared=0)) == 4_027_392  # MoE-Adapters
    assert sum(p.numel() for p in towers.parameters()) == 149_620_737


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"experts": 0}, "experts must be at least 1, got 0"),
        ({"shared": -1}, "shared must be at least 0, got -1"),
        ({"shared_width": 0}, "shared_width must be at least 1, got 0"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"router_std": float("nan")}, "router_std must be a finite number of at least 0, got nan"),
        ({"gate_norm": "selectd"}, "unknown gate_norm 'selectd'. Did you mean 'selected'?"),
    ],
)
def test_options_that_no_layer_can_have_are_refused_in_words(options: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        Adapters(**options)


def test_a_place_that_does_not_exist_is_refused_in_words():
    with pytest.raises(ConfigError, match=r"unknown towers with adapters 'image'\. .*both, text, vision"):
        adapter_layers(toy_clip().towers, SMALL, 0, where="image")
    with pytest.raises(ConfigError, match="at least 0, which means all, got -1"):
        adapter_layers(toy_clip().towers, SMALL, 0, last=-1)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_in_a_graph_that_is_exported_every_expert_computes_and_the_sum_is_the_same(top_k, monkeypatch):
    made, (x, token) = layer(replace(SMALL, top_k=top_k)).eval(), inputs()
    added, routing = made(x, token)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    monkeypatch.setattr(Tensor, "argsort", None)
    same, told = made(x, token)
    torch.testing.assert_close(same, added)
    assert torch.equal(told.gates, routing.gates)
