"""What holds for every supported architecture, on tiny random networks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.core import ConfigError, Net
from fedloom.core.context import state_buffers
from fedloom.core.moe import ROUTING, inputs_recorded
from toys.language_models import ARCHITECTURES, DECODERS, choice_spec, permuted, questions, text_spec, texts

EVERY = pytest.mark.parametrize("architecture", ARCHITECTURES)


def network(architecture: str, **options: Any) -> Any:
    return text_spec(architecture, **options).classifier().eval()


def tensors(module: Any) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **state_buffers(module)}


def block_outputs(module: Any, index: int, x: Any) -> Tensor:
    """What one mixture-of-experts layer adds to the network, [T, H]."""
    kept = []
    block = module.get_submodule(module.moe_layers[index].name)
    handle = block.register_forward_hook(lambda m, args, out: kept.append(out))
    with torch.no_grad():
        module(x)
    handle.remove()
    return kept[0].reshape(-1, kept[0].shape[-1])


@EVERY
def test_logits_are_the_same_with_and_without_recording(architecture: str) -> None:
    spec = text_spec(architecture)
    module, x = spec.classifier().eval(), texts()
    bare = spec.backbone().eval()
    with torch.no_grad():
        out = module(x)
        assert torch.equal(module.head(bare(x)), out["logits"])
        with inputs_recorded(module):
            recorded = module(x)
    assert torch.equal(recorded["logits"], out["logits"])
    assert recorded.keys() - out.keys() == {"expert_inputs"} and set(ROUTING) <= out.keys()
    assert recorded["expert_inputs"].shape == (2, 36, 16) and out["routing"].shape == (2, 36, 4)
    assert torch.equal(out["token_mask"], x["attention_mask"].flatten())
    assert not any(tensor.requires_grad for tensor in recorded.values())


@EVERY
def test_routing_is_that_of_the_gate_on_the_recorded_inputs(architecture: str) -> None:
    module, x = network(architecture), texts()
    with torch.no_grad(), inputs_recorded(module):
        out = module(x)
    for index, layer in enumerate(module.moe_layers):
        weight = dict(module.named_parameters())[layer.gate[0]]
        logits = F.linear(out["expert_inputs"][index], weight)
        p = logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True) if layer.score == "sigmoid" else logits.softmax(1)
        torch.testing.assert_close(out["routing"][index].exp(), p, atol=1e-6, rtol=1e-5)
        chosen = F.one_hot(p.topk(layer.top_k).indices, 4).sum(1).bool()
        assert torch.equal(out["selected"][index], chosen)
    assert torch.equal(out["dispatched"], out["selected"])  # no text is long enough to fill an expert


@EVERY
def test_recomputed_activations_give_the_same_gradients_and_routing(architecture: str) -> None:
    options = {"dropout": 0.0, "jitter": 0.0} if architecture == "switch_encoder" else {}
    plain, recomputing = (text_spec(architecture, aux=0.1, **options).classifier().train() for _ in range(2))
    recomputing.set_grad_checkpointing(True)
    for module in (plain, recomputing):
        out = module(texts())
        spread = (out["routing"].exp() * torch.linspace(0, 1, 4)).sum()
        (F.cross_entropy(out["logits"], torch.tensor([0, 1, 2])) + spread + out["aux_loss"]).backward()
    for (name, a), b in zip(plain.named_parameters(), recomputing.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, atol=1e-7, rtol=1e-5)


@EVERY
def test_gates_experts_and_the_rest_are_all_tensors_once(architecture: str) -> None:
    module = network(architecture)
    gates = [name for layer in module.moe_layers for name in layer.gate]
    experts = [name for layer in module.moe_layers for name in layer.expert_names]
    everything = tensors(module)
    assert len(set(gates + experts)) == len(gates) + len(experts)
    assert set(gates + experts) <= everything.keys()
    rest = everything.keys() - set(gates) - set(experts)
    assert any("attn" in name or "Attention" in name for name in rest)
    for name in gates:
        assert len(everything[name]) == 4
    for layer in module.moe_layers:
        assert layer.num_experts == 4 and layer.hidden == 16
        assert layer.top_k == (1 if architecture == "switch_encoder" else 2)
        own = [sum(part.of(everything).numel() for part in expert) for expert in layer.experts]
        whole = sum(everything[name].numel() for name in layer.expert_names)
        assert sum(own) == whole and len(set(own)) == 1
    assert not any("shared_expert" in name for name in gates + experts)


@EVERY
def test_an_experts_slices_change_only_the_tokens_dispatched_to_it(architecture: str) -> None:
    module, x = network(architecture), texts()
    for index, layer in enumerate(module.moe_layers):
        with torch.no_grad():
            dispatched = module(x)["dispatched"][index]
        for expert in range(4):
            before = block_outputs(module, index, x)
            parts = [part.of(dict(module.named_parameters())) for part in layer.experts[expert]]
            kept = [part.detach().clone() for part in parts]
            with torch.no_grad():
                for part in parts:
                    part.add_(torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))
            moved = ~torch.isclose(block_outputs(module, index, x), before, atol=1e-6).all(1)
            assert torch.equal(moved, dispatched[:, expert])
            with torch.no_grad():
                for part, value in zip(parts, kept, strict=True):
                    part.copy_(value)


@EVERY
def test_experts_in_another_order_with_their_gate_rows_are_the_same_function(architecture: str) -> None:
    module, other, x = network(architecture), network(architecture), texts()
    if architecture == "deepseek_v3":
        for layer in module.moe_layers:
            tensors(module)[layer.gate[1]].copy_(torch.tensor([0.0, 0.3, -0.2, 0.1]))
    orders = torch.tensor([[2, 0, 3, 1], [1, 3, 0, 2]])
    with torch.no_grad():
        moved = permuted(tensors(module), module.moe_layers, orders)
    with torch.no_grad():
        for name, tensor in tensors(other).items():
            tensor.copy_(moved[name])
        before, after = module(x), other(x)
    torch.testing.assert_close(after["logits"], before["logits"], atol=1e-6, rtol=1e-5)
    for name in ("selected", "dispatched"):
        for index in range(2):
            assert torch.equal(after[name][index], before[name][index][:, orders[index]])
    if architecture == "deepseek_v3":
        assert not torch.equal(before["selected"], network(architecture)(x)["selected"])


@EVERY
def test_restricted_sends_no_token_outside_the_allowed_experts(architecture: str) -> None:
    module, x = network(architecture), texts()
    if architecture == "deepseek_v3":
        for layer in module.moe_layers:
            tensors(module)[layer.gate[1]].copy_(torch.tensor([0.0, 50.0, 0.0, 0.0]))
    allowed = torch.tensor([[True, False, True, True], [False, False, True, False]])
    with torch.no_grad():
        before = module(x)
        with module.restricted(allowed):
            out = module(x)
        after = module(x)
    probabilities = out["routing"].exp()
    torch.testing.assert_close(probabilities.sum(2), torch.ones(2, 36))
    outside = ~allowed[:, None].expand(2, 36, 4)
    assert not probabilities[outside].any() and not out["dispatched"][outside].any()
    top_k = module.moe_layers[0].top_k
    assert (out["dispatched"][0].sum(1) == top_k).all()
    assert (out["dispatched"][1].sum(1) == 1).all()  # also where the router wants two
    assert torch.isfinite(out["logits"]).all()
    assert all(torch.equal(before[name], after[name]) for name in before)


@EVERY
def test_longer_padding_changes_nothing_that_is_recorded_of_tokens(architecture: str) -> None:
    spec = text_spec(architecture, shape=(20,))
    module = spec.classifier().eval()
    found = []
    for width in (12, 20):
        with torch.no_grad(), inputs_recorded(module):
            out = module(texts(width=width))
        found.append({n: out[n][:, out["token_mask"]] for n in (*ROUTING[:3], "expert_inputs")} | {"l": out["logits"]})
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, atol=1e-6, rtol=1e-5)


@EVERY
def test_values_are_drawn_from_the_seed_alone(architecture: str) -> None:
    spec = text_spec(architecture)
    before = torch.random.get_rng_state()
    first = spec.classifier().state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(3)
    assert all(torch.equal(first[name], value) for name, value in spec.classifier().state_dict().items())
    backbone = spec.backbone().state_dict()
    assert all(torch.equal(first[f"backbone.{name}"], value) for name, value in backbone.items())


@EVERY
def test_tied_embeddings_travel_once_and_buffers_with_them(architecture: str) -> None:
    net = Net(choice_spec(architecture).classifier)
    state = net.fresh()
    embeddings = [name for name, tensor in state["params"].items() if tuple(tensor.shape) == (50, 16)]
    assert len(embeddings) == 1
    aliases = [name for name, tensor in net.module.state_dict().items() if tuple(tensor.shape) == (50, 16)]
    assert len(aliases) == 2
    bias = [name for name in state["buffers"] if name.endswith("e_score_correction_bias")]
    assert len(bias) == (2 if architecture == "deepseek_v3" else 0) and len(state["buffers"]) == len(bias)
    assert all(any(name in layer.gate for layer in net.module.moe_layers) for name in bias)


@EVERY
def test_half_precision_trains_and_routes_in_single_precision(architecture: str) -> None:
    module = text_spec(architecture, dtype="bfloat16", aux=0.1).classifier()
    kinds = {p.dtype for p in module.backbone.parameters()}
    assert torch.bfloat16 in kinds
    before = {name: p.dtype for name, p in module.named_parameters()}
    out = module(texts())
    assert out["logits"].dtype == out["routing"].dtype == torch.float32
    F.cross_entropy(out["logits"], torch.tensor([0, 1, 2])).add(out["aux_loss"]).backward()
    assert {name: p.dtype for name, p in module.named_parameters()} == before
    gate = dict(module.named_parameters())[module.moe_layers[0].gate[0]]
    assert torch.isfinite(gate.grad).all() and gate.grad.abs().sum() > 0
    full = text_spec(architecture).classifier()
    for (name, half), whole in zip(module.named_parameters(), full.parameters(), strict=True):
        assert torch.equal(half, whole.to(half.dtype)), name


@EVERY
def test_a_router_that_gives_nan_makes_the_logits_nan(architecture: str) -> None:
    module = network(architecture)
    with torch.no_grad():
        dict(module.named_parameters())[module.moe_layers[0].gate[0]][1] = torch.nan
        out = module(texts())
    assert out["logits"].isnan().all() and out["routing"][0].isnan().any()


def test_a_full_expert_of_the_switch_encoder_drops_tokens() -> None:
    module = network("switch_encoder", capacity=2)
    x = texts()
    with torch.no_grad():
        out = module(x)
    selected, dispatched = (out[name].view(2, 3, 12, 4) for name in ("selected", "dispatched"))
    assert torch.equal(dispatched, selected & (selected.cumsum(2) <= 2))
    assert not torch.equal(dispatched, selected)
    dropped = ~out["dispatched"][0].any(1)
    assert not block_outputs(module, 0, x)[dropped].any()


def test_the_layers_of_the_switch_encoder_follow_its_step() -> None:
    for step, where in ((1, [0, 1, 2, 3]), (2, [1, 3]), (3, [1])):
        module = network("switch_encoder", sparse_step=step)
        assert [int(layer.name.split("block.")[1].split(".")[0]) for layer in module.moe_layers] == where
    sure = network("switch_encoder")(texts())["routing"].exp().amax(2).mean()
    unsure = network("switch_encoder", gate_std=0.1)(texts())["routing"].exp().amax(2).mean()
    assert unsure < 0.35 < sure


def test_dropout_and_jitter_act_in_training_alone() -> None:
    x = texts()
    for option in ("dropout", "jitter"):
        module = network("switch_encoder", **{"dropout": 0.0, "jitter": 0.0, option: 0.3})
        quiet = network("switch_encoder")
        with torch.no_grad():
            assert torch.equal(module(x)["logits"], quiet(x)["logits"])
            assert not torch.equal(module.train()(x)["logits"], quiet(x)["logits"])
    module = network("mixtral", dropout=0.3)
    with torch.no_grad():
        assert not torch.equal(module.train()(x)["logits"], module.eval()(x)["logits"])


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("switch_encoder", {"heads": 3}, "heads of switch_encoder must divide hidden, 16, got 3"),
        ("switch_encoder", {"layers": 1}, "sparse_step 2 of switch_encoder leaves no mixture of experts"),
        ("switch_encoder", {"experts": 0}, "model.options.experts of switch_encoder: .*greater than or equal to 1"),
        ("switch_encoder", {"dropout": 1.0}, "model.options.dropout of switch_encoder: .*less than 1"),
        ("switch_encoder", {"hidden": "16"}, "model.options.hidden of switch_encoder: .*valid integer, got '16'"),
        ("switch_encoder", {"top_k": 2}, "unknown option of model switch_encoder 'top_k'"),
        ("mixtral", {"top_k": 5}, "top_k of moe_decoder is 5 of 4 experts"),
        ("mixtral", {"heads": 16}, "needs an even hidden / heads"),
        ("mixtral", {"dtype": "float16"}, "model.options.dtype of moe_decoder: .*'float32' or 'bfloat16'"),
        ("mixtral", {"lora": 3}, "model.options.lora of moe_decoder must be a mapping"),
        ("mixtral", {"lora": {"rnk": 3}}, "unknown option of model.options.lora 'rnk'.*'rank'"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_words(architecture: str, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        text_spec(architecture, **options).classifier()


@pytest.mark.parametrize("architecture", DECODERS)
def test_questions_are_routed_token_by_token(architecture: str) -> None:
    module, x = choice_spec(architecture, aux=0.1).classifier(), questions()
    out = module(x)
    assert out["logits"].shape == (3, 4) and out["routing"].shape == (2, 3 * 4 * 12, 4)
    assert torch.equal(out["token_mask"], x["attention_mask"].flatten())
    F.cross_entropy(out["logits"], torch.tensor([0, 3, 1])).backward()
    assert all(torch.isfinite(p.grad).all() for p in module.parameters())
