from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedloom.core import ConfigError, Context, Forward, Net, PayloadError, Stage
from fedloom.core.context import state_buffers
from fedloom.core.payload import digest
from fedloom.core.seeds import generator, seeded
from toys.federation import BlobSpec
from toys.slim import SlimNet

X = torch.randn(5, 2, generator=generator("x"))


def context(net: Net | None = None, seen=(0, 1, 2), classes=(2,), **given) -> Context:
    stage = Stage(1, 3, 2, classes, seen, tuple(c for c in seen if c not in classes))
    return Context(net=net or Net(BlobSpec().classifier), stage=stage, num_classes=6, **given)


class Partly(nn.Module):
    """A frozen body with batch normalisation and dropout, a parameter of its own, a trainable head."""

    def __init__(self):
        super().__init__()
        with seeded("partly"):
            self.body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).requires_grad_(False)
            self.token = nn.Parameter(torch.zeros(4), requires_grad=False)
            self.head = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))

    def forward(self, x):
        return self.head(self.body(x) + self.token)


def test_handed_out_tensors_are_never_written_again():
    net = Net(BlobSpec().classifier)
    state = net.fresh()
    live = net.bind(state["params"], state["buffers"])
    net(X)["logits"].sum().backward()
    with torch.no_grad():
        for p in live.values():
            p.add_(1)
    params, buffers = net.take()
    before = digest({"params": params, "buffers": buffers})
    net.bind(state["params"], state["buffers"])
    net.train(True)
    net(X)
    with torch.no_grad():
        next(iter(live.values())).mul_(3)
    assert digest({"params": params, "buffers": buffers}) == before
    assert digest(state) == digest(net.fresh()), "binding changed what was bound"
    assert all(p.grad is None for p in net.bind(state["params"], state["buffers"]).values())


def test_bind_without_take_reuses_the_memory():
    net = Net(BlobSpec().classifier)
    state = net.fresh()
    one = {n: p.data_ptr() for n, p in net.bind(state["params"], state["buffers"]).items()}
    assert one == {n: p.data_ptr() for n, p in net.bind(state["params"], state["buffers"]).items()}


def test_values_that_do_not_fit_are_refused_by_name():
    net = Net(BlobSpec().classifier)
    state = net.fresh()
    wrong = {**state["params"], "head.bias": torch.zeros(2)}
    with pytest.raises(PayloadError, match=r"'params/head.bias' has shape \(2,\), the network needs \(6,\)"):
        net.bind(wrong, state["buffers"])
    with pytest.raises(PayloadError, match=r"'buffers' do not fit the network: missing \['body.layers.1"):
        net.bind(state["params"])
    with pytest.raises(PayloadError, match=r"unknown \['surprise'\]"):
        net.bind({**state["params"], "surprise": torch.zeros(1)}, state["buffers"])


def test_only_trainable_tensors_and_their_buffers_travel():
    net = Net(Partly)
    state = net.fresh()
    assert set(state["params"]) == {"head.0.weight", "head.0.bias", "head.1.weight", "head.1.bias"}
    assert set(state["buffers"]) == {"head.0.running_mean", "head.0.running_var", "head.0.num_batches_tracked"}
    net.bind(state["params"], state["buffers"])
    net.train(True)
    assert not any(m.training for m in net.module.body), "frozen parts draw no dropout and keep their statistics"
    assert all(m.training for m in net.module.head), "a frozen parameter at the top does not freeze what is below"
    frozen = {k: v.clone() for k, v in net.module.body.state_dict().items()}
    net(X)
    assert all(torch.equal(v, frozen[k]) for k, v in net.module.body.state_dict().items())


def test_a_phase_that_holds_parameters_does_not_freeze_their_batch_normalisation():
    net = Net(BlobSpec().classifier)
    for p in net.module.body.parameters():
        p.requires_grad_(False)
    net.train(True)
    assert net.module.body.layers[1].training


def test_non_persistent_buffers_stay_at_home():
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    assert set(state_buffers(module)) == {"kept"}


def test_masks_and_unseen():
    ctx = context()
    inf = float("inf")
    assert ctx.class_mask("seen").tolist() == [0, 0, 0, -inf, -inf, -inf]
    assert ctx.class_mask("current").tolist() == [-inf, -inf, 0, -inf, -inf, -inf]
    assert ctx.class_mask("all") is None and ctx.unseen.tolist() == [3, 4, 5]
    assert context(seen=tuple(range(6))).class_mask("seen") is None
    assert ctx.class_mask("old").tolist() == [0, 0, -inf, -inf, -inf, -inf]
    with pytest.raises(ConfigError, match="label scope must be seen, old, current or all, got 'new'"):
        ctx.class_mask("new")
    later = replace(ctx, stage=Stage(2, 3, 2, (3,), (0, 1, 2, 3)))
    assert later.class_mask("seen").tolist() == [0, 0, 0, 0, -inf, -inf], "a copied context keeps no old mask"


def test_scores_run_in_evaluation_mode_without_gradient_and_put_the_mode_back():
    ctx = context()
    state = ctx.init_state()
    ctx.bind(state["params"], state["buffers"])
    ctx.net.train(True)
    scores = ctx.scores(X)
    assert not scores.requires_grad and torch.isneginf(scores[:, 3:]).all() and torch.isfinite(scores[:, :3]).all()
    assert ctx.net.module.training
    assert digest({"b": ctx.net.take()[1]}) == digest({"b": state["buffers"]}), "scores changed running statistics"


def test_rounds_count_from_the_start_of_the_run():
    assert context(round=1).global_round == 3 and context(round=None).global_round == 2
    assert context().total_rounds == 6


def test_teacher_is_a_second_network():
    ctx = context()
    state = ctx.init_state()
    ctx.bind(state["params"], state["buffers"])
    zero = {n: torch.zeros_like(t) for n, t in state["params"].items()}
    teacher = ctx.teacher(zero, state["buffers"])
    assert not teacher(X)["logits"].any() and not teacher(X)["logits"].requires_grad
    assert ctx.apply(X)["logits"].any(), "the student kept its values"


def test_rebuild_gives_other_shapes_and_is_kept():
    ctx = context(Net(lambda: SlimNet(8, 6, 0)))
    small = ctx.rebuild(3)
    assert small.init_state()["params"]["body.bias"].shape == (3,)
    assert ctx.rebuild(3).net is small.net and small.stage == ctx.stage
    assert digest(small.init_state()) == digest(ctx.rebuild(3).init_state())
    with pytest.raises(ConfigError, match=r"Headed has no rebuild\(spec\)"):
        context().rebuild(3)


def test_forward_refuses_unknown_precision_and_absent_checkpointing():
    with pytest.raises(ConfigError, match="must be fp32 or bf16, got 'fp16'"):
        Forward(precision="fp16")
    with pytest.raises(ConfigError, match="Headed has no set_grad_checkpointing; set it to false"):
        Net(BlobSpec().classifier, Forward(grad_checkpointing=True))


def test_bf16_forward_gives_fp32_outputs_close_to_fp32():
    exact, rough = Net(BlobSpec().classifier), Net(BlobSpec().classifier, Forward(precision="bf16"))
    a, b = exact(X)["logits"], rough(X)["logits"]
    assert b.dtype == torch.float32 and not torch.equal(a, b)
    assert torch.allclose(a, b, atol=0.1)
    assert {p.dtype for p in rough.module.parameters()} == {torch.float32}


def test_seeds_differ_by_purpose_and_place():
    base = {"seed": 1, "round": 0, "client": 2}
    ctxs = [context(**base), context(**{**base, "client": 3}), context(**{**base, "round": 1})]
    assert len({c.seed_for("mask") for c in ctxs} | {ctxs[0].seed_for("other"), ctxs[0].seed_for("mask", 1)}) == 5
