"""FedLwF: its loss by hand, and where it is FedAvg."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedloom.core import Net
from fedloom.core.payload import digest
from fedloom.local import SGD
from fedloom.methods.fedavg import fedavg
from fedloom.methods.fedlwf import fedlwf
from fedloom.methods.teachers import as_teacher
from toys.federation import BlobSpec, experiment, local
from toys.running import rows, start

LWF, AVG = "fedloom.methods.fedlwf:fedlwf", "fedloom.methods.fedavg:fedavg"
CURRENT = {"label_scope": "current"}


def at_stage(stage=1, norm=False, **changes):
    """A context at a later stage, where classes 0 and 1 are old and 2 and 3 new, and the data of a client."""
    whole = experiment(LWF, spec=BlobSpec(norm=norm), **changes)
    return whole.context(whole.net(), stage, round=0, client=0), whole.plan.train(0, stage, 0, "train")


def one_step(lr=0.5):
    return local(optimizer=SGD(lr=lr), epochs=1, batch_size=1000)


def other_model(seed):
    state = Net(BlobSpec(seed=seed, norm=False).classifier).fresh()
    return {"params": {name: 2 * tensor for name, tensor in state["params"].items()}, "buffers": {}}


@pytest.mark.parametrize("scope", ["current", "seen"])
def test_one_step_follows_the_gradient_of_the_loss_written_by_hand(scope):
    ctx, data = at_stage()
    model, old = other_model(1), other_model(2)
    method = fedlwf(local=one_step(), weight=3.0, temperature=2.0, label_scope=scope)
    end = method.client_update({**model, **as_teacher(old)}, {}, data, ctx).up["params"]
    x, y = data.stored(torch.arange(len(data)))
    params = {name: tensor.clone().requires_grad_() for name, tensor in model["params"].items()}
    module = BlobSpec(norm=False).classifier()
    z = torch.func.functional_call(module, params, x)["logits"]
    t = torch.func.functional_call(module, old["params"], x)["logits"]
    new = [2, 3] if scope == "current" else [0, 1, 2, 3]
    cross_entropy = -(z[:, new].log_softmax(1)[torch.arange(len(y)), y - new[0]]).mean()
    taught = -((t[:, :2] / 2).softmax(1) * (z[:, :2] / 2).log_softmax(1)).sum(1).mean()
    (cross_entropy + 3.0 * taught).backward()
    for name, tensor in params.items():
        torch.testing.assert_close(end[name], (tensor - 0.5 * tensor.grad).detach(), msg=name)


def test_the_reported_loss_lacks_the_teacher_s_entropy_and_nothing_else():
    ctx, data = at_stage()
    model = other_model(1)
    update = fedlwf(local=one_step()).client_update({**model, **as_teacher(model)}, {}, data, ctx)
    plain = fedavg(local=one_step(), **CURRENT).client_update(model, {}, data, ctx)
    assert update.metrics["loss"] == pytest.approx(plain.metrics["loss"], abs=1e-6)


def test_at_the_initialisation_of_a_stage_the_teacher_pulls_nowhere():
    ctx, data = at_stage()
    model = other_model(1)
    taught, plain = (fedlwf(local=one_step(), weight=weight) for weight in (1000.0, 0.0))
    a, b = (method.client_update(model, {}, data, ctx).up["params"] for method in (taught, plain))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-5)
    more = fedlwf(local=local(optimizer=SGD(lr=0.5), epochs=2, batch_size=1000), weight=1.0)
    less = fedlwf(local=local(optimizer=SGD(lr=0.5), epochs=2, batch_size=1000), weight=0.0)
    a, b = (method.client_update(model, {}, data, ctx).up["params"] for method in (more, less))
    assert not torch.allclose(a["head.weight"], b["head.weight"], atol=1e-4), "from the second step on it does"


def test_the_teacher_holds_the_old_answers():
    """Trained long enough on new data, the old classes' soft labels stay nearer to the teacher's than without it."""
    ctx, data = at_stage()
    model = other_model(1)
    x, _ = data.stored(torch.arange(len(data)))

    def drift(weight):
        method = fedlwf(local=local(optimizer=SGD(lr=0.1), epochs=40), weight=weight, label_scope="seen")
        end = method.client_update(model, {}, data, ctx).up
        ctx.bind(model["params"])
        before = ctx.scores(x)[:, :2].softmax(1)
        ctx.bind(end["params"])
        return float((ctx.scores(x)[:, :2].softmax(1) - before).abs().mean())

    assert drift(3.0) < 0.3 * drift(0.0)


def test_the_first_stage_is_fedavg_bit_for_bit(tmp_path: Path):
    ours = start(tmp_path / "ours", experiment(LWF, num_stages=1))
    theirs = start(tmp_path / "theirs", experiment(AVG, num_stages=1, options=CURRENT))
    assert ours["params_sha256"] == theirs["params_sha256"] and rows(tmp_path / "ours") == rows(tmp_path / "theirs")


def test_without_weight_it_is_fedavg_in_bits_and_bytes(tmp_path: Path):
    ours = start(tmp_path / "ours", experiment(LWF, options={"weight": 0.0}))
    theirs = start(tmp_path / "theirs", experiment(AVG, options=CURRENT))
    some = start(tmp_path / "some", experiment(LWF))
    assert ours["params_sha256"] == theirs["params_sha256"] != some["params_sha256"]
    assert rows(tmp_path / "ours") == rows(tmp_path / "theirs") and ours["bytes_down"] < some["bytes_down"]


def test_the_teacher_is_in_evaluation_mode():
    ctx, data = at_stage(norm=True)
    method = fedlwf(local=one_step())
    server = method.init_server(ctx)
    before = digest({"b": server["teacher_buffers"]})
    state = method.client_update(method.send(server, 0, ctx), {}, data, ctx).state
    assert digest({"b": state["teacher_buffers"]}) == before and server["teacher_buffers"]
