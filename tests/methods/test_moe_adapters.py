"""MoE-Adapters: the published block, FedAvg of it, local routers, and experts that later tasks leave alone."""

from dataclasses import replace

import pytest
import torch

from fedloom.core import Reply
from fedloom.core.seeds import seeded
from fedloom.engine.checkpoint import newest
from fedloom.engine.files import load_payload
from fedloom.local import AdamW
from fedloom.local.terms import CrossEntropy
from fedloom.methods.clip_based import ClipMethod
from fedloom.methods.moe_adapters import moe_adapters
from fedloom.models.clip.network import ClipNetwork
from fedloom.models.clip.words import fixed
from toys.clip import ClipSpec, toy_clip
from toys.federation import experiment, local
from toys.running import start

NAME = "fedloom.methods.moe_adapters:moe_adapters"
X = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
TOWERS = ("image", "text")


def network(**options):
    return moe_adapters(local=local(), **options).build(toy_clip())


def trained(**options):
    """With random values in all adapters and routers."""
    net, rng = network(**options), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=rng))
    return net.eval()


@torch.no_grad()
def test_at_the_start_it_is_zero_shot_clip():
    clip = toy_clip()
    plain = ClipNetwork(clip, fixed(clip.words, "a bad photo of a {}.", 24)).eval()(X)
    out = network().eval()(X)
    for name in ("feats", "texts", "logits"):
        assert torch.equal(out[name], plain[name])


@torch.no_grad()
def test_with_k_equal_to_e_gates_are_the_softmax_of_all_logits():
    out = trained()(X)
    for tower in TOWERS:
        assert torch.allclose(out[f"{tower}_gates"], out[f"{tower}_routing"].softmax(-1), atol=1e-6)
    sparse = trained(experts=3)(X)["image_gates"]
    assert ((sparse > 0).sum(-1) == 2).all()


@torch.no_grad()
def test_permuting_experts_with_their_router_changes_nothing():
    net, order = trained(experts=3), torch.tensor([2, 0, 1])
    before = net(X)["logits"]
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            assert ".local." in name or ".router." in name
            parameter.copy_(parameter[order])
    assert torch.allclose(net(X)["logits"], before, atol=1e-4)


def test_the_published_sizes_give_4027392_parameters():
    one_block = moe_adapters(local=local()).build(toy_clip(width=768, text_width=512, layers=1))
    assert 12 * sum(p.numel() for p in one_block.parameters() if p.requires_grad) == 4_027_392


@torch.no_grad()
def test_evaluation_is_deterministic_and_training_is_not():
    net = trained()
    assert torch.equal(net(X)["logits"], net(X)["logits"])
    net.train()
    assert not torch.equal(net(X)["logits"], net(X)["logits"])


@torch.no_grad()
@pytest.mark.parametrize("token", ["sot", "eot"])
def test_the_router_of_a_text_sees_the_sentence_at_eot_alone(token):
    routing = trained(token=token)(X)["text_routing"]
    assert ((routing - routing[:, :1]).abs().amax() > 1e-3) == (token == "eot")


def test_one_client_and_one_round_is_central_training(tmp_path):
    plan = {"num_clients": 1, "num_stages": 1, "rounds": 1, "cohort": 1}
    whole = experiment(NAME, **plan)
    start(tmp_path / "run", whole)
    ctx = whole.context(whole.net(), 0, round=0, client=0)
    ctx.net.module.show(ctx.stage.classes)
    with seeded(whole.seed, "work", 0, 0, "train", 0):
        end = whole.method.local(ctx.init_state(), whole.plan.train(0, 0, 0, "train"), ctx)
    ours = newest(tmp_path / "run")[0]["params"]
    assert ours.keys() == end.params.keys() and all(torch.equal(ours[name], end.params[name]) for name in ours)


def test_a_run_of_several_clients_is_fedavg(tmp_path):
    whole = experiment(NAME, num_stages=2)
    method = ClipMethod(replace(local(), terms=(CrossEntropy("current"),)), build=whole.method.build)
    theirs = start(tmp_path / "avg", replace(whole, method=method, rebuild=None))
    assert start(tmp_path / "ours", whole)["params_sha256"] == theirs["params_sha256"]


def moved(a, b, part):
    return {name for name in a if part in name and not torch.equal(a[name], b[name])}


def test_local_routers_stay_with_the_client_and_are_restored():
    whole = experiment(NAME, options={"routers": "local"})
    method, ctx = whole.method, whole.context(whole.net(), 0, round=0, client=0)
    server, state, data = method.init_server(ctx), method.init_client(ctx), whole.plan.train(0, 0, 0, "train")
    down = method.send(server, 0, ctx)
    assert not any(".router." in name for name in down["params"])
    update = method.client_update(down, state, data, ctx)
    assert not any(".router." in name for name in update.up["params"])
    assert moved(update.state["kept"], state["kept"], "router")
    again = method.client_update(down, update.state, data, ctx)
    assert moved(again.state["kept"], update.state["kept"], "router")
    new = method.server_update(server, [Reply(0, 1.0, update.up, {})], ctx)
    assert not moved(new["params"], server["params"], "router") and moved(new["params"], server["params"], "local")
    own = method.deployed(method.send(new, 0, ctx), update.state, ctx).net.module
    assert all(torch.equal(dict(own.named_parameters())[name], t) for name, t in update.state["kept"].items())
    assert method.personal and not moe_adapters(local=local()).personal


def test_the_most_used_experts_of_past_tasks_do_not_move(tmp_path):
    training = {"optimizer": AdamW(lr=0.01, weight_decay=0.1), "epochs": 1}
    options = {"experts": 3, "freeze": 1, "training": training}
    whole = experiment(NAME, options=options, num_stages=3, rounds=2, cohort=1.0)
    start(tmp_path / "run", whole, checkpoint_keep=100)
    points = sorted((tmp_path / "run" / "checkpoints").iterdir())
    servers = [load_payload(point / "server.safetensors") for point in points]
    ends = {int(server["task"]["stage"]): server for server in servers}
    assert not ends[0]["frozen"]["image"].any()
    for stage in (1, 2):
        before, after = ends[stage - 1], ends[stage]
        for tower in TOWERS:
            frozen = after["frozen"][tower]
            assert frozen.sum(1).tolist() == [stage] * 2
            free = before["usage"][tower].masked_fill(before["frozen"][tower], -1)
            assert frozen.gather(1, free.argmax(1, keepdim=True)).all()
            for block, row in enumerate(frozen):
                for part in ("up_weight", "down_weight", "up_bias", "down_bias"):
                    a, b = (s["params"][f"{tower}_adapters.{block}.local.{part}"] for s in (before, after))
                    assert torch.equal(a[row], b[row])
                    assert part.startswith("down") or not torch.equal(a[~row], b[~row])


def test_usage_is_the_sum_of_gates_over_all_clients_of_the_task(tmp_path):
    whole = experiment(NAME, options={"freeze": 1}, num_stages=1, rounds=2, cohort=1.0)
    summary = start(tmp_path / "run", whole)
    server = newest(tmp_path / "run")[0]
    assert torch.allclose(server["usage"]["image"].sum(1), torch.tensor(float(summary["sample_visits"])))


def test_the_sentences_are_an_option():
    net = moe_adapters(local=local(), template="the {}.").module(ClipSpec())
    assert torch.equal(net.phrases.ids, fixed(toy_clip().words, "the {}.", 24).ids)
