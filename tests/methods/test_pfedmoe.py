"""pFedMoE: what travels, what stays, and that without the shared extractor it is training alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedloom.core import Net, Payload, Reply
from fedloom.core.payload import nbytes
from fedloom.engine.checkpoint import newest
from fedloom.engine.files import load_payload
from fedloom.engine.store import ClientStore
from fedloom.local import SGD
from fedloom.methods.pfedmoe import PFedMoE, joined, parted, pfedmoe
from fedloom.models import NetworkSpec
from toys.federation import BlobSpec, experiment, local
from toys.running import rows, start

PFED = "fedloom.methods.pfedmoe:pfedmoe"
SHARED = {"shared.layer.weight", "shared.layer.bias"}


@dataclass(frozen=True)
class Noted(PFedMoE):
    """Notes every message and every state."""

    calls: list[tuple[int, Payload, Payload, Payload, Payload]] = field(default_factory=list, compare=False)

    def client_update(self, down, state, data, ctx):
        update = super().client_update(down, state, data, ctx)
        self.calls.append((ctx.client, down, state, update.state, update.up))
        return update


def names(payload: Payload) -> set[str]:
    return {name for tree in payload.values() for name in tree}


def noted(path: Path, **plan):
    given = pfedmoe(local=local())
    parts = {f.name: getattr(given, f.name) for f in dataclasses.fields(given)}
    whole = dataclasses.replace(experiment(PFED, **plan), method=Noted(**parts), rebuild=None)
    return start(path, whole), whole.method, whole


def at_work(training=None, spec=None, **options):
    method = pfedmoe(local=local(**(training or {})), **options)
    whole = dataclasses.replace(experiment(PFED, spec=spec, num_stages=1), method=method, rebuild=None)
    ctx = whole.context(whole.net(), 0, round=0, client=0)
    return method, ctx, whole.plan.train(0, 0, 0, "train")


def test_only_the_small_extractor_travels_and_the_bytes_are_its_size(tmp_path: Path):
    summary, method, _ = noted(tmp_path / "run")
    size = (64 * 2 + 64) * 4
    for _, down, state, new, up in method.calls:
        assert names(down) == names(up) == SHARED and nbytes(up) == nbytes(down) == size
        assert not names(new) & SHARED and names(new) == names(state) and "head.weight" in names(new)
        assert "private.layers.1.running_mean" in new["buffers"]
    visits = sum(row["clients"] for row in rows(tmp_path / "run"))
    assert summary["bytes_up"] == summary["bytes_down"] == visits * size
    assert len(method.calls) == visits > 6
    server = load_payload(tmp_path / "run" / "checkpoints" / "stage0003-trip00000" / "server.safetensors")
    assert names(server) == SHARED


def test_a_client_goes_on_with_its_private_parts(tmp_path: Path):
    _, method, whole = noted(tmp_path / "run")
    first = method.init_client(whole.context(whole.net(), 0))
    last: dict[int, Payload] = {}
    for client, _, state, new, _ in method.calls:
        before = last.get(client, first)
        assert all(torch.equal(tensor, before[f][n]) for f, tree in state.items() for n, tensor in tree.items())
        last[client] = new
    stored = ClientStore(tmp_path / "run" / "clients").load(0, newest(tmp_path / "run")[1].versions[0])
    assert torch.equal(stored["params"]["gate.0.weight"], last[0]["params"]["gate.0.weight"])
    assert not torch.equal(stored["params"]["gate.0.weight"], first["params"]["gate.0.weight"])


def test_with_the_gate_shut_to_the_shared_extractor_it_is_training_alone():
    training = {"optimizer": SGD(lr=0.1, momentum=0.5)}
    method, ctx, data = at_work(training)
    down, state = method.init_server(ctx), method.init_client(ctx)
    private = dict(state["params"])
    for name in ("gate.0.weight", "gate.0.bias", "gate.2.weight"):
        private[name] = torch.zeros_like(private[name])
    private["gate.2.bias"] = torch.tensor([100.0, -100.0])
    update = method.client_update(down, {**state, "params": private}, data, ctx)
    assert update.metrics["gate_shared"] == 0.0
    assert all(torch.equal(down["params"][name], tensor) for name, tensor in update.up["params"].items())
    alone = experiment("fedloom.methods.fedavg:fedavg", num_stages=1)
    own = alone.context(alone.net(), 0, round=0, client=0)
    end = local(**training)(own.init_state(), data, own)
    for field_, values in (("params", end.params), ("buffers", end.buffers)):
        for name, tensor in values.items():
            assert torch.equal(update.state[field_][name.replace("body.", "private.")], tensor), name


def test_the_metric_is_the_mean_weight_of_the_shared_extractor():
    method, ctx, data = at_work({"epochs": 1, "batch_size": 1000})
    down, state = method.init_server(ctx), method.init_client(ctx)
    found = method.client_update(down, state, data, ctx).metrics["gate_shared"]
    x, _ = data.stored(torch.arange(len(data)))
    model = joined(down, state)
    ctx.bind(model["params"], model["buffers"])
    ctx.net.train(True)
    gates = ctx.apply(x)["gates"].detach()
    torch.testing.assert_close(gates.sum(1), torch.ones(len(data)))
    assert abs(found - float(gates[:, 1].mean())) < 1e-6 and 0.05 < found < 0.95


def test_all_parts_train_together():
    method, ctx, data = at_work()
    down, state = method.init_server(ctx), method.init_client(ctx)
    update = method.client_update(down, state, data, ctx)
    for before, after in ((down, update.up), (state, update.state)):
        assert all(not torch.equal(tensor, after["params"][name]) for name, tensor in before["params"].items())


def test_private_extractors_of_any_size_share_one_small_one():
    sizes, ups = [(), ((6,)), ((50, 9))], []
    server = None
    for client, hidden in enumerate(sizes):
        options = (("hidden", hidden),) if hidden else ()
        spec = NetworkSpec("mlp", 6, (2,), options=options)
        method, ctx, data = at_work(spec=spec, shared_width=5)
        server = server or method.init_server(ctx)
        up = method.client_update(server, method.init_client(ctx), data.part(0, 10 * (client + 1)), ctx).up
        ups.append(Reply(client, 10.0 * (client + 1), up, {}))
    merged = method.server_update(server, ups, ctx)
    for name, tensor in merged["params"].items():
        mean = sum(r.weight * r.up["params"][name].double() for r in ups) / 60
        torch.testing.assert_close(tensor.double(), mean, atol=1e-7, rtol=1e-6)
    assert names(merged) == SHARED


def test_the_global_view_is_the_shared_extractor_with_the_initial_private_parts(tmp_path: Path):
    summary, method, whole = noted(tmp_path / "run", num_stages=1, cohort=1.0)
    server = load_payload(tmp_path / "run" / "checkpoints" / "stage0001-trip00000" / "server.safetensors")
    ctx = whole.context(whole.net(), 0)
    x, _ = whole.plan.test(0).stored(torch.arange(30))
    found = method.predict({**server, "buffers": {}}, method.init_client(ctx), x, ctx)
    net = Net(lambda: method.module(BlobSpec()))
    model = net.fresh()
    net.bind({**model["params"], **server["params"]}, model["buffers"])
    net.train(False)
    with torch.no_grad():
        assert torch.equal(found, net(x)["logits"])
    assert summary["per_client_accuracy_mean"] > summary["accuracy_matrix"][0][0]


def test_parts_are_told_apart_by_name_and_lose_nothing():
    model = Net(lambda: pfedmoe(local=local()).module(BlobSpec())).fresh()
    shared, own = parted(model, shared=True), parted(model, shared=False)
    assert names(shared) == SHARED and not names(shared) & names(own)
    assert names(joined(shared, own)) == names(model)
