"""Gates on channels: what they scale, their gradients of first and second order, and that they leave no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.core import ConfigError
from fedloom.models.gates import gated
from toys.pruned import SMALL, inputs, network, some


def loss_of(module: Any, gates: Tensor, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    with module.gated(gates):
        return F.cross_entropy(module(x)["logits"], y, reduction=reduction)


def ones(module: Any, *batch: int) -> Tensor:
    return torch.ones(*batch, module.channels.total, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", SMALL)
def test_gates_of_one_change_no_bit_and_leave_no_hook(name: str) -> None:
    module, (x, _) = network(name).eval(), inputs(name)
    plain = module(x)["logits"]
    with module.gated(ones(module)):
        assert torch.equal(module(x)["logits"], plain)
    with module.gated(torch.zeros(module.channels.total)):
        assert not torch.equal(module(x)["logits"], plain)
    with pytest.raises(RuntimeError, match="inside"), module.gated(torch.zeros(module.channels.total)):
        raise RuntimeError("inside")
    assert torch.equal(module(x)["logits"], plain)
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in module.modules())


def test_with_all_channels_off_the_scores_are_the_heads_bias() -> None:
    module, (x, _) = network("resnet8").eval(), inputs("resnet8")
    with module.gated(torch.zeros(module.channels.total)):
        assert torch.equal(module(x)["logits"], module.head.bias.expand(4, -1))


@pytest.mark.parametrize("name", ["resnet8", "basic"])
def test_inside_a_block_the_gradient_at_one_is_that_of_scaling_the_norm(name: str) -> None:
    """d loss / d z_j = gamma_j d loss / d gamma_j + beta_j d loss / d beta_j, as ReLU is positively homogeneous."""
    module, (x, y) = network(name), inputs(name)
    gates = ones(module)
    loss_of(module, gates, x, y).backward()
    checked = 0
    for group, found in zip(module.channels.groups, module.channels.split(gates.grad), strict=True):
        if len(group.norms) == 1:
            norm = module.get_submodule(group.norms[0])
            expected = norm.weight * norm.weight.grad + norm.bias * norm.bias.grad
            torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-11)
            assert found.abs().max() > 1e-4
            checked += 1
    assert checked == {"resnet8": 3, "basic": 4}[name]


@pytest.mark.parametrize("name", SMALL)
def test_the_gradient_at_one_is_the_sum_over_the_taps(name: str) -> None:
    """d loss / d z_j = sum over taps of <d loss / d h_j, h_j>, with h the activation that leaves the tap."""
    module, (x, y) = network(name).eval(), inputs(name)
    gates, seen = ones(module), []

    def watch(part: Any, args: Any, output: Any = None) -> None:
        activation = args[0] if output is None else output
        activation.retain_grad()
        seen.append(activation)

    with module.gated(gates):
        hooks = []
        for group in module.channels.groups:
            for tap in group.taps:
                part = module.get_submodule(tap.module)
                watched = part.register_forward_pre_hook if tap.side == "input" else part.register_forward_hook
                hooks.append((group.name, watched(lambda *a, group=group.name: watch(*a) or seen.append(group))))
        F.cross_entropy(module(x)["logits"], y).backward()
        for _, hook in hooks:
            hook.remove()
    total = {g.name: torch.zeros(g.size, dtype=torch.float64) for g in module.channels.groups}
    for activation, group in zip(seen[::2], seen[1::2], strict=True):
        by_channel = (activation.grad * activation).detach().sum(0)
        total[group] += by_channel.flatten(1).sum(1) if by_channel.dim() > 1 else by_channel
    torch.testing.assert_close(gates.grad, torch.cat(list(total.values())), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", SMALL)
def test_one_pass_with_gates_per_example_equals_one_pass_per_example(name: str) -> None:
    module, (x, y) = network(name).eval(), inputs(name, batch=5)
    gates = ones(module, 5)
    (found,) = torch.autograd.grad(loss_of(module, gates, x, y, "sum"), gates)
    for k in range(5):
        alone = ones(module)
        (expected,) = torch.autograd.grad(loss_of(module, alone, x[k : k + 1], y[k : k + 1]), alone)
        torch.testing.assert_close(found[k], expected, rtol=1e-9, atol=1e-12)


def test_a_channel_that_is_off_has_the_gradient_of_coming_back() -> None:
    """A gate between norm and ReLU, rather than after the ReLU, has none at 0, since ReLU has none there."""
    module, (x, y) = network("resnet8").eval(), inputs("resnet8", batch=16)
    mask = some(module.channels)
    gates = mask.double().requires_grad_()
    loss_of(module, gates, x, y).backward()
    alive = (gates.grad != 0)[~mask].double().mean()
    assert float(alive) > 0.6
    early = torch.zeros(16, dtype=torch.float64, requires_grad=True)
    hook = module.backbone.blocks[0].norm1.register_forward_hook(lambda m, args, out: out * early[:, None, None])
    F.cross_entropy(module(x)["logits"], y).backward()
    hook.remove()
    assert not early.grad.any()
    step, off = 1e-6, int((gates.grad.abs() * ~mask).argmax())
    ends = [loss_of(module, mask.double().index_fill(0, torch.tensor(off), d), x, y) for d in (step, 0.0)]
    assert float((ends[0] - ends[1]).detach() / step) == pytest.approx(float(gates.grad[off]), rel=1e-3)


@pytest.mark.parametrize("per_example", [False, True])
@pytest.mark.parametrize("name", ["toy", "digits_cnn", "resnet8"])
def test_gradients_of_the_gate_gradients_are_those_of_finite_differences(name: str, per_example: bool) -> None:
    module, (x, y) = network(name).eval(), inputs(name)
    weight = module.head.weight

    def squares() -> Tensor:
        gates = ones(module, 4) if per_example else ones(module)
        (grad,) = torch.autograd.grad(loss_of(module, gates, x, y, "sum"), gates, create_graph=True)
        return grad.square().sum()

    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (grad,) = torch.autograd.grad(squares(), weight)
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * 1e-5 * direction
        ends.append(float(squares().detach()))
        with torch.no_grad():
            weight -= sign * 1e-5 * direction
    assert float((grad * direction).sum()) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5)
    assert float((grad * direction).sum().abs()) > 1e-6


def test_recomputed_activations_are_kept_while_gated() -> None:
    """The backward pass may come when the gates are gone; a recomputation would then miss them."""
    plain, module, (x, y) = network("resnet8"), network("resnet8"), inputs("resnet8")
    module.set_grad_checkpointing(True)
    gates = [ones(plain), ones(module)]
    for net, z in zip((plain, module), gates, strict=True):
        loss_of(net, z, x, y).backward()
    assert torch.equal(gates[0].grad, gates[1].grad)
    for a, b in zip(plain.parameters(), module.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert all("forward" in block.__dict__ for block in module.backbone.blocks)


def test_activations_keep_their_type_and_gates_their_precision() -> None:
    module, (x, y) = network("resnet8", torch.float32), inputs("resnet8", dtype=torch.float32)
    gates = torch.ones(module.channels.total, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = module.eval()(x)["logits"]
        with module.gated(gates):
            out = module(x)["logits"]
    assert torch.equal(out, plain) and out.dtype == torch.bfloat16
    F.cross_entropy(out.float(), y).backward()
    assert gates.grad.dtype == torch.float32 and torch.isfinite(gates.grad).all()


def test_gates_of_another_number_are_refused() -> None:
    module = network("resnet8")
    total = module.channels.total
    for shape in ((total + 1,), (2, 3, total), ()):
        message = rf"gates must be \[{total}\] or \[batch, {total}\], got \[{', '.join(map(str, shape))}\]"
        with pytest.raises(ConfigError, match=message), gated(module, module.channels, torch.ones(shape)):
            pass
