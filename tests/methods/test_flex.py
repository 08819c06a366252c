"""FLEx: what is frozen, what travels, what is grafted, and where it is FedAvg."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from fedloom.core import ConfigError, Payload, Reply
from fedloom.core.moe import moe_layers
from fedloom.core.payload import nbytes
from fedloom.engine.checkpoint import newest
from fedloom.engine.files import load_payload
from fedloom.engine.store import ClientStore
from fedloom.methods.fedavg import fedavg
from fedloom.methods.flex import FLEx, flex
from toys.federation import BlobSpec, experiment, expert_spec, local
from toys.running import rows, start

FLEX, AVG = "fedloom.methods.flex:flex", "fedloom.methods.fedavg:fedavg"
GRAFT = {f"grafts.{k}.{n}" for k in (0, 1) for n in ("up", "up_bias", "down", "down_bias", "gate_weight", "gate_bias")}


@dataclass(frozen=True)
class Noted(FLEx):
    """Notes every message, every state and the frozen experts after each visit."""

    calls: list[tuple[int, Payload, Payload, Payload, Payload]] = field(default_factory=list, compare=False)
    experts: list[dict[str, torch.Tensor]] = field(default_factory=list, compare=False)

    def client_update(self, down, state, data, ctx):
        update = super().client_update(down, state, data, ctx)
        self.calls.append((ctx.client, down, state, update.state, update.up))
        self.experts.append({n: p.detach().clone() for n, p in ctx.net.module.named_parameters() if ".experts." in n})
        return update


def noted(path: Path, **plan):
    whole = dataclasses.replace(experiment(FLEX, **plan), method=Noted(local()), rebuild=None)
    return start(path, whole), whole.method, whole


def at_work(client: int = 0, **options):
    """Method, context, data and the initial download of a client in one stage, without batch order."""
    method = flex(local=local(), **options)
    whole = dataclasses.replace(experiment(FLEX, num_stages=1), method=method, rebuild=None)
    ctx = whole.context(whole.net(), 0, round=0, client=client)
    return method, ctx, whole.plan.train(client, 0, 0, "train"), method.init_server(ctx)


def names(payload: Payload) -> set[str]:
    return {name for tree in payload.values() for name in tree}


def test_experts_and_grafts_never_travel_and_pretrained_experts_stay_bit_for_bit(tmp_path: Path):
    summary, method, _ = noted(tmp_path / "run")
    net = expert_spec().classifier()
    experts = {name for layer in moe_layers(net) for name in layer.expert_names}
    rest = {name for name, _ in net.named_parameters()} - experts
    assert len(method.calls) > 5
    for _, down, _, state, up in method.calls:
        assert names(down) == names(up) == rest and set(state) == {"grafts"} and set(state["grafts"]) == GRAFT
    values = dict(net.named_parameters())
    assert all(set(seen) == experts for seen in method.experts)
    assert all(torch.equal(values[name], tensor) for seen in method.experts for name, tensor in seen.items())
    per_class = sum(p.numel() * 4 for n, p in net.named_parameters() if n.startswith("head.")) // 6
    size = sum(p.numel() * 4 for n, p in net.named_parameters() if n in rest and not n.startswith("head."))
    want = sum(row["clients"] * (size + 2 * (row["stage"] + 1) * per_class) for row in rows(tmp_path / "run"))
    assert summary["bytes_up"] == summary["bytes_down"] == want


def test_a_client_grafts_once_and_goes_on_with_what_training_left(tmp_path: Path):
    _, method, _ = noted(tmp_path / "run", cohort=1.0)
    last: dict[int, Payload] = {}
    for client, _, state, new, _ in method.calls:
        if client in last:
            assert all(torch.equal(state["grafts"][n], t) for n, t in last[client]["grafts"].items())
        else:
            assert state == {}
        last[client] = new
    moved = [not torch.equal(last[0]["grafts"][name], last[1]["grafts"][name]) for name in sorted(GRAFT)]
    assert all(moved), "each client has its own"
    stored = ClientStore(tmp_path / "run" / "clients").load(0, newest(tmp_path / "run")[1].versions[0])
    assert all(torch.equal(stored["grafts"][n], t) for n, t in last[0]["grafts"].items())


def test_the_server_is_fedavg_on_what_is_shared():
    method, ctx, _, server = at_work()
    ups = []
    for client in (0, 1, 2):
        _, own, data, down = at_work(client)
        ups.append(Reply(client, float(len(data)), method.client_update(down, {}, data, own).up, {}))
    merged = method.server_update(server, ups, ctx)
    weights = torch.tensor([reply.weight for reply in ups], dtype=torch.float64)
    for name, tensor in merged["params"].items():
        stacked = torch.stack([reply.up["params"][name].double() for reply in ups])
        mean = torch.einsum("k,k...->...", weights / weights.sum(), stacked)
        torch.testing.assert_close(tensor.double(), mean, atol=1e-7, rtol=1e-6)
    alike = [ups[0], ups[0]._replace(client=1), ups[0]._replace(client=2)]
    same = method.server_update(server, alike, ctx)["params"]
    assert all(torch.equal(tensor, ups[0].up["params"][name]) for name, tensor in same.items())


def test_without_grafts_it_is_fedavg_on_a_network_with_frozen_experts(tmp_path: Path):
    @dataclass(frozen=True)
    class Frozen:
        num_classes: int = 6
        seed: int = 0

        def backbone(self):
            return expert_spec().backbone()

        def classifier(self):
            net = expert_spec().classifier()
            for name, param in net.named_parameters():
                param.requires_grad_(".experts." not in name)
            return net

    own = start(tmp_path / "own", experiment(FLEX, options={"graft": "none"}))
    avg = start(tmp_path / "avg", experiment(AVG, spec=Frozen()))
    assert own["params_sha256"] == avg["params_sha256"] and own["bytes_up"] == avg["bytes_up"]
    assert own["accuracy_matrix"] == avg["accuracy_matrix"]
    with_grafts = start(tmp_path / "grafts", experiment(FLEX))
    assert with_grafts["params_sha256"] != own["params_sha256"]


def test_a_shut_gate_and_a_new_client_give_the_base_model():
    method, ctx, data, down = at_work(bias=-50.0)
    x, _ = data.stored(torch.arange(len(data)))
    update = method.client_update(down, {}, data, ctx)
    down = {**update.up}
    base = expert_spec().classifier().eval()
    base.load_state_dict({**base.state_dict(), **down["params"]})
    with torch.no_grad():
        want = base(x)["logits"]
    assert torch.equal(method.predict(down, {}, x, ctx), want), "a new client runs without graft"
    shut = {n: torch.full_like(t, -200.0) if n.endswith("gate_bias") else t for n, t in update.state["grafts"].items()}
    shut |= {n: torch.zeros_like(t) for n, t in shut.items() if n.endswith("gate_weight")}
    assert torch.equal(method.predict(down, {"grafts": shut}, x, ctx), want)
    opened = {n: torch.zeros_like(t) if n.endswith("gate_bias") else t for n, t in shut.items()}
    assert not torch.allclose(method.predict(down, {"grafts": opened}, x, ctx), want)


def test_the_global_view_has_no_graft_and_clients_views_differ(tmp_path: Path):
    _, method, whole = noted(tmp_path / "run", num_stages=1, cohort=1.0)
    server = load_payload(tmp_path / "run" / "checkpoints" / "stage0001-trip00000" / "server.safetensors")
    assert not names(server) & GRAFT
    ctx = whole.context(whole.net(), 0)
    x, _ = whole.plan.test(0).stored(torch.arange(30))
    state = {client: new for client, _, _, new, _ in method.calls}
    scores = [method.predict(server, own, x, ctx) for own in (method.init_client(ctx), state[0], state[1])]
    assert all(not torch.equal(scores[i], scores[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_a_client_without_examples_has_no_graft():
    method, ctx, data, down = at_work()
    update = method.client_update(down, {}, data.part(0, 0), ctx)
    assert update.state == {}
    assert all(torch.equal(down["params"][name], tensor) for name, tensor in update.up["params"].items())


def test_the_fit_reads_only_so_many_examples():
    method, ctx, data, down = at_work(graft_examples=5)
    before = data.visits.passes
    method.client_update(down, {}, data, ctx)
    assert data.visits.passes - before == 2 * 5


def test_frozen_tensors_are_not_in_the_payload_of_a_larger_network():
    method = flex(local=local())
    whole = dataclasses.replace(experiment(FLEX, spec=expert_spec(inner=64, experts=8)), method=method, rebuild=None)
    ctx = whole.context(whole.net(), 0)
    every = nbytes(
        fedavg(local=local()).init_server(
            experiment(AVG, spec=whole.spec).context(experiment(AVG, spec=whole.spec).net(), 0)
        )
    )
    experts = 2 * 8 * (64 * 8 + 64 + 8 * 64 + 8) * 4
    assert nbytes(method.init_server(ctx)) == every - experts


def test_a_network_without_experts_is_refused_in_words():
    with pytest.raises(ConfigError, match="method 'flex' needs a network with mixture-of-experts layers"):
        flex(local=local()).module(BlobSpec())
