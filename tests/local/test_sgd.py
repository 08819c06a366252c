from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from fedloom.core import Batches, ConfigError, Forward, PayloadError, Stage
from fedloom.core.payload import digest
from fedloom.core.seeds import seeded
from fedloom.local import SGD, AdamW, LocalSGD, Phase, Schedule
from fedloom.local.sgd import Group, clip
from fedloom.local.terms import CrossEntropy
from fedloom.models.checkpointing import set_checkpointing
from local.blobs import context, data, plain_loop
from toys.federation import BlobSpec


def run(loop: LocalSGD, ctx=None, batches=None, **given):
    ctx = context() if ctx is None else ctx
    return loop(ctx.init_state(), data() if batches is None else batches, ctx, **given)


def same(a, b) -> bool:
    return digest({"p": a.params, "b": a.buffers}) == digest({"p": b.params, "b": b.buffers})


def test_training_is_pure_and_repeatable():
    ctx, batches, loop = context(), data(), LocalSGD(SGD(lr=0.1, momentum=0.9), epochs=2, batch_size=4)
    down = ctx.init_state()
    before = digest(down)
    first = loop(down, batches, ctx)
    kept = digest({"p": first.params})
    second = loop(down, batches, ctx)
    assert same(first, second), "optimiser state must not outlive the call"
    assert digest(down) == before and digest({"p": first.params}) == kept
    assert first.metrics["loss"] > 0


def test_loss_is_the_mean_over_examples_of_all_steps():
    ctx, batches = context(), data(10)
    end = run(LocalSGD(SGD(lr=1e-30), batch_size=4), ctx, batches)
    losses = []
    state = ctx.init_state()
    for batch in batches.epoch(0, 4):
        ctx.bind(state["params"], state["buffers"])
        ctx.net.train(True)
        loss = nn.functional.cross_entropy(ctx.apply(batch.x)["logits"] + ctx.class_mask("seen"), batch.y)
        losses += [loss.item()] * len(batch.y)
    assert end.metrics["loss"] == pytest.approx(sum(losses) / 10, rel=1e-6)


def test_nothing_to_do_returns_what_came():
    ctx = context()
    for end in (run(LocalSGD(epochs=0), ctx), run(LocalSGD(), ctx, data(0))):
        assert end.steps == 0 and end.metrics == {}
        assert digest({"params": end.params, "buffers": end.buffers}) == digest(ctx.init_state())


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e6])
def test_clip_is_torchs_clip(max_norm: float):
    grads = [torch.tensor([3.0, -4.0]), torch.tensor(12.0)]
    params = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
    assert norm.item() == 13.0
    clip(grads, max_norm)
    for p, g in zip(params, grads, strict=True):
        torch.testing.assert_close(g, p.grad)


@dataclass(frozen=True)
class L2:
    """A term that reaches every row of the head, arrived or not."""

    weight: float = 0.1

    def __call__(self, params, out, batch, ref, carry):
        return self.weight * sum(p.square().sum() for p in params.values())


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), SGD(lr=0.1, momentum=0.9, weight_decay=0.1), AdamW(lr=0.1)])
@pytest.mark.parametrize("terms", [(CrossEntropy("all"),), (CrossEntropy("seen"), L2()), (CrossEntropy("current"),)])
def test_rows_that_have_not_arrived_do_not_move_whatever_the_terms(optimizer, terms):
    ctx = context(seen=(0, 1, 2), classes=(1, 2))
    batches = data() if terms[0].scope != "current" else _without_class(0)
    end = run(LocalSGD(optimizer, terms=terms, epochs=2, batch_size=8, clip_norm=1.0), ctx, batches)
    start = ctx.init_state()["params"]
    for name in ("head.weight", "head.bias"):
        assert torch.equal(end.params[name][3:], start[name][3:])
    assert not torch.equal(end.params["head.weight"][2], start["head.weight"][2])


def _without_class(c: int):
    whole = data(40)
    rows = (whole.labels != c).nonzero().flatten()
    return Batches(whole._x, whole._y, rows, key=("local",), prepare=lambda x, rng: x)


def test_unseen_rows_do_not_count_in_the_clipping_norm():
    ctx = context(seen=(0, 1, 2))
    small = context(lambda: _cut(BlobSpec().classifier(), 3), seen=(0, 1, 2), num_classes=3)
    loop = LocalSGD(SGD(lr=0.5), terms=(CrossEntropy(), L2(1.0)), batch_size=32, clip_norm=0.01)
    wide, narrow = run(loop, ctx), run(loop, small)
    torch.testing.assert_close(wide.params["head.weight"][:3], narrow.params["head.weight"])
    torch.testing.assert_close(wide.params["body.layers.0.weight"], narrow.params["body.layers.0.weight"])


def _cut(module: nn.Module, classes: int) -> nn.Module:
    head = nn.Linear(module.head.in_features, classes)
    with torch.no_grad():
        head.weight.copy_(module.head.weight[:classes])
        head.bias.copy_(module.head.bias[:classes])
    module.head = head
    return module


def test_phases_move_only_what_they_name_and_count_epochs_on():
    ctx, start = context(), context().init_state()["params"]
    head = run(LocalSGD(SGD(lr=0.1, weight_decay=0.1), phases=(Phase(("head.*",)),), batch_size=8), ctx)
    for name in start:
        assert torch.equal(head.params[name], start[name]) != name.startswith("head."), name
    assert all(p.requires_grad for p in ctx.net.module.parameters()), "the network is left as it was found"
    orders: list[list[int]] = []
    seeing = _Recorder(orders)
    two = LocalSGD(
        SGD(lr=0.1),
        terms=(CrossEntropy(), seeing),
        batch_size=50,
        phases=(Phase(("head.*",), epochs=2), Phase(("body.*",))),
    )
    assert run(two, ctx).steps == 3
    assert len({tuple(order) for order in orders}) == 3, "no two phases see the same order"
    slow = LocalSGD(SGD(lr=0.1), phases=(Phase(optimizer=SGD(lr=1e-30)),))
    assert torch.equal(run(slow, ctx).params["head.bias"], start["head.bias"])
    with pytest.raises(ConfigError, match=r"no parameter matches .*\('nothing',\)"):
        run(LocalSGD(phases=(Phase(("nothing",)),)), ctx)


def test_one_phase_over_all_is_no_phase():
    assert same(run(LocalSGD(phases=(Phase(),))), run(LocalSGD()))


def test_two_groups_in_the_same_steps_are_two_optimisers_of_torch():
    ctx, batches = context(), data(20)
    head = Group(("head.*",), SGD(lr=0.05, weight_decay=0.1))
    loop = LocalSGD(
        SGD(lr=0.2, momentum=0.9), Schedule("cosine", per="step"), epochs=2, batch_size=8, clip_norm=0.5, groups=(head,)
    )
    end = run(loop, ctx, batches)
    module = BlobSpec().classifier()
    body = torch.optim.SGD(module.body.parameters(), lr=0.2, momentum=0.9)
    slow = torch.optim.SGD(module.head.parameters(), lr=0.05, weight_decay=0.1)

    class Both:
        taken = 0

        def zero_grad(self):
            module.zero_grad()

        def step(self):
            body.param_groups[0]["lr"] = 0.2 * loop.schedule.factor(ctx, self.taken, 6)
            body.step()
            slow.step()
            self.taken += 1

    def loss_of(module, batch):
        logits = module(batch.x)["logits"]
        return nn.functional.cross_entropy(logits + ctx.class_mask("seen"), batch.y)

    frozen = ctx.init_state()["params"]
    plain_loop(module, batches, Both(), loss_of, epochs=2, clip=0.5)
    for name, tensor in module.named_parameters():
        wanted = torch.cat([tensor[:3], frozen[name][3:]]) if name.startswith("head.") else tensor
        torch.testing.assert_close(end.params[name], wanted.detach(), rtol=1e-5, atol=1e-6)


def test_the_first_group_that_names_a_parameter_moves_it():
    still, fast = SGD(lr=1e-30), SGD(lr=0.1)
    start = context().init_state()["params"]
    groups = (Group(("head.bias",), fast), Group(("head.*", "body.*"), still))
    end = run(LocalSGD(still, groups=groups))
    assert [n for n in start if not torch.allclose(end.params[n], start[n], rtol=0, atol=1e-12)] == ["head.bias"]


def test_a_group_of_all_is_no_group_and_one_that_rests_in_a_phase_is_no_error():
    schedule = Schedule("cosine", per="step")
    assert same(
        run(LocalSGD(AdamW(), groups=(Group(("*",), SGD(lr=0.1), schedule),))), run(LocalSGD(SGD(0.1), schedule))
    )
    grouped = LocalSGD(SGD(lr=0.1), phases=(Phase(("body.*",)),), groups=(Group(("head.*",), AdamW()),))
    assert same(run(grouped), run(replace(grouped, groups=())))


def test_weight_decay_of_a_group_moves_no_row_that_has_not_arrived():
    ctx, start = context(seen=(0, 1)), context().init_state()["params"]
    end = run(LocalSGD(SGD(), groups=(Group(("head.*",), AdamW(lr=0.1, weight_decay=0.5)),)), ctx, data(classes=2))
    assert torch.equal(end.params["head.weight"][2:], start["head.weight"][2:])
    assert not torch.equal(end.params["head.weight"][:2], start["head.weight"][:2])


def test_a_group_that_names_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"no parameter matches the names \('fusion\.\*',\) of a group"):
        run(LocalSGD(groups=(Group(("fusion.*",), SGD()),)))


@dataclass(frozen=True)
class _Recorder:
    """A term that is zero and remembers the order of the examples."""

    orders: list = field(default_factory=list)

    def __call__(self, params, out, batch, ref, carry):
        self.orders.append(batch.index.tolist())
        return 0.0 * out["logits"].sum()


@dataclass(frozen=True)
class Doubling:
    """Transform: twice the gradient, plus what the method passes."""

    needs: ClassVar[tuple[str, ...]] = ("drift",)

    def __call__(self, grads, params, ref):
        return {n: 2 * g + ref["drift"] for n, g in grads.items()}


def test_transforms_change_gradients_before_clipping_and_hold_unseen_rows():
    ctx = context()
    state = ctx.init_state()["params"]
    plain = run(LocalSGD(SGD(lr=0.1), batch_size=32), ctx)
    twice = run(LocalSGD(SGD(lr=0.1), batch_size=32, transforms=(Doubling(),)), ctx, ref={"drift": 0.0})
    for n in state:
        torch.testing.assert_close(twice.params[n] - state[n], 2 * (plain.params[n] - state[n]), rtol=1e-4, atol=1e-6)
    drifting = run(LocalSGD(SGD(lr=0.1), batch_size=32, transforms=(Doubling(),)), ctx, ref={"drift": 1.0})
    assert torch.equal(drifting.params["head.bias"][3:], state["head.bias"][3:])
    clipped = run(
        LocalSGD(SGD(lr=1.0), batch_size=32, clip_norm=0.01, transforms=(Doubling(),)), ctx, ref={"drift": 0.0}
    )
    moved = torch.stack([(clipped.params[n] - state[n]).square().sum() for n in state]).sum().sqrt()
    assert moved.item() == pytest.approx(0.01, rel=1e-3)


@dataclass(frozen=True)
class CountCarry:
    """Carry: batches and epochs so far."""

    def init(self, ref, ctx):
        return {"n": torch.zeros(()), "epochs": torch.zeros(())}

    def update(self, value, out, batch, ref):
        assert not out["logits"].requires_grad
        return {**value, "n": value["n"] + len(batch.y)}

    def close_epoch(self, value):
        return {**value, "epochs": value["epochs"] + 1}

    def close(self, value):
        return {**value, "closed": torch.ones(())}


@dataclass(frozen=True)
class CarryReader:
    """A term that records the carry that it is given."""

    read: list = field(default_factory=list)

    def __call__(self, params, out, batch, ref, carry):
        self.read.append((carry["count"]["n"].item(), carry["count"]["epochs"].item()))
        return 0.0 * out["logits"].sum()


def test_a_term_sees_the_carry_from_before_its_batch():
    reader = CarryReader()
    loop = LocalSGD(terms=(CrossEntropy(), reader), carries={"count": CountCarry()}, epochs=2, batch_size=8)
    end = run(loop, batches=data(20))
    assert reader.read == [(0, 0), (8, 0), (16, 0), (20, 1), (28, 1), (36, 1)]
    assert {n: t.item() for n, t in end.carry["count"].items()} == {"n": 40, "epochs": 2, "closed": 1}


def test_carries_and_decisions_do_not_change_training():
    plain = run(LocalSGD(epochs=2, batch_size=8))
    watched = LocalSGD(epochs=2, batch_size=8, carries={"count": CountCarry()}, decisions=(_Decide(),))
    assert same(run(watched), plain)


@dataclass(frozen=True)
class _Decide:
    def __call__(self, out, batch, ref, carry):
        assert not torch.is_grad_enabled() and not out["logits"].requires_grad
        return {"gates": torch.ones(len(batch.y))}


def test_the_result_of_a_decision_reaches_the_terms():
    @dataclass(frozen=True)
    class Reads:
        def __call__(self, params, out, batch, ref, carry):
            return 0.0 * out["gates"].sum() + out["logits"].sum() * 0

    run(LocalSGD(terms=(Reads(),), decisions=(_Decide(),)))
    with pytest.raises(KeyError, match="gates"):
        run(LocalSGD(terms=(Reads(),)))


class Blocks(nn.Module):
    """Three blocks with batch normalisation; activation checkpointing per block."""

    class_rows = {"head.weight": 0, "head.bias": 0}

    def __init__(self):
        super().__init__()
        with seeded("blocks"):
            widths = (2, 8, 8, 8)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()) for a, b in itertools.pairwise(widths)
            )
            self.head = nn.Linear(8, 6)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        set_checkpointing(self.blocks, enable)


def test_activation_checkpointing_changes_no_gradient_and_no_buffer():
    loop = LocalSGD(SGD(lr=0.1, momentum=0.9), epochs=2, batch_size=8)
    plain = run(loop, context(Blocks))
    saved = run(loop, context(Blocks, forward=Forward(grad_checkpointing=True)))
    assert same(plain, saved)


def test_bf16_trains_with_fp32_master_weights():
    loop = LocalSGD(SGD(lr=0.1, momentum=0.9), epochs=4, batch_size=8)
    exact, rough = run(loop), run(loop, context(forward=Forward(precision="bf16")))
    assert {t.dtype for t in rough.params.values()} == {torch.float32}
    assert not same(exact, rough)
    assert rough.metrics["loss"] == pytest.approx(exact.metrics["loss"], rel=0.05)
    for name, tensor in exact.params.items():
        torch.testing.assert_close(rough.params[name], tensor, rtol=0.2, atol=0.1)


def test_float64_networks_stay_float64():
    ctx = context(lambda: BlobSpec().classifier().double())
    end = run(LocalSGD(epochs=1), ctx, data(dtype=torch.float64))
    assert {t.dtype for n, t in end.params.items()} == {torch.float64}


def test_nan_is_handed_on_not_hidden():
    ctx = context()
    state = ctx.init_state()
    state["params"]["head.weight"] = torch.full_like(state["params"]["head.weight"], float("nan"))
    end = LocalSGD()(state, data(), ctx)
    assert end.metrics["loss"] != end.metrics["loss"] and end.params["body.layers.0.weight"].isnan().any()


def test_bad_options_and_missing_references_are_refused():
    for given, words in [
        ({"terms": ()}, "terms is empty"),
        ({"epochs": -1}, "epochs >= 0"),
        ({"batch_size": 0}, "batch_size >= 1"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0 or null, got 0.0"),
        ({"clip_norm": float("nan")}, "clip_norm"),
    ]:
        with pytest.raises(ConfigError, match=words):
            LocalSGD(**given)
    with pytest.raises(ConfigError, match=r"needs ref \['drift'\], which the method does not pass"):
        run(LocalSGD(transforms=(Doubling(),)))
    ctx = context()
    with pytest.raises(PayloadError, match="do not fit the network"):
        LocalSGD()({"params": {}}, data(), ctx)


def test_the_anchor_is_the_download():
    seen: list = []

    @dataclass(frozen=True)
    class Anchored:
        needs: ClassVar[tuple[str, ...]] = ("anchor",)

        def __call__(self, params, out, batch, ref, carry):
            seen.append({n: t.clone() for n, t in ref["anchor"].items()})
            return out["logits"].sum() * 0.01

    ctx = context()
    state = ctx.init_state()
    replace(LocalSGD(epochs=2, batch_size=8), terms=(Anchored(),))(state, data(), ctx)
    assert len(seen) == 6 and all(torch.equal(s[n], t) for s in seen for n, t in state["params"].items())


def test_every_class_scope_has_a_mask_in_ref():
    """None where every class is inside; "old" has no class at all in the first stage."""
    seen: list = []

    def spy(params, out, batch, ref, carry):
        seen.append({scope: ref[scope] for scope in ("seen", "old", "current", "all")})
        return out["logits"].sum()

    loop = LocalSGD(terms=(spy,), batch_size=20)
    for stage in (Stage(0, 2, 1, (0, 1), (0, 1)), Stage(1, 2, 1, (1, 2), (0, 1, 2), (0, 1))):
        ctx = context(stage=stage, num_classes=3)
        loop(ctx.init_state(), data(classes=2), ctx)
    inf = torch.inf
    first, second = ({k: v if v is None else v.tolist() for k, v in masks.items()} for masks in seen)
    assert first == {"seen": [0, 0, -inf], "old": [-inf] * 3, "current": [0, 0, -inf], "all": None}
    assert second == {"seen": None, "old": [0, 0, -inf], "current": [-inf, 0, 0], "all": None}
