"""FedBN: what stays on the client, what is averaged, and where it is FedAvg."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedloom.core import Payload
from fedloom.core.payload import digest, nbytes
from fedloom.engine.checkpoint import newest
from fedloom.engine.store import ClientStore
from fedloom.methods.fedbn import NORM, FedBN, norm_names
from fedloom.models import Classifier
from fedloom.models.resnet import resnet18
from toys.federation import BlobSpec, experiment, local
from toys.running import start

BN, AVG = "fedloom.methods.fedbn:fedbn", "fedloom.methods.fedavg:fedavg"
NAMES = {f"body.layers.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}


@dataclass(frozen=True)
class Noted(FedBN):
    """Notes every message and every state that comes and goes."""

    calls: list[tuple[int, Payload, Payload, Payload, Payload]] = field(default_factory=list, compare=False)

    def client_update(self, down, state, data, ctx):
        update = super().client_update(down, state, data, ctx)
        self.calls.append((ctx.client, down, state, update.state, update.up))
        return update


def noted(path: Path, unseen: str = "initial", **plan: Any):
    """(calls, experiment) of a run."""
    method = Noted(local(), unseen=unseen)
    whole = dataclasses.replace(experiment(BN, **plan), method=method, rebuild=None)
    start(path, whole)
    return method.calls, whole


def names(payload: Payload) -> set[str]:
    return {name for tree in payload.values() for name in tree}


def test_the_twenty_batch_norms_of_a_resnet18_are_local_those_of_shortcuts_too():
    with torch.device("meta"):
        module = Classifier(resnet18((3, 32, 32), groups=None), 10)
    found = norm_names(module)
    assert len({name.rpartition(".")[0] for name in found}) == 20
    assert len({name.rpartition(".")[0] for name in found if "shortcut" in name}) == 3
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    assert sum(params[name].numel() for name in found & params.keys()) == 9600
    assert sum(buffers[name].numel() for name in found & buffers.keys() if "running" in name) == 9600
    assert sum(p.numel() for name, p in params.items() if name not in found) == 11_173_962 - 9600


def test_batch_norm_is_known_by_its_type():
    class Mine(nn.BatchNorm1d):
        pass

    others = [nn.GroupNorm(1, 2), nn.LayerNorm(2), nn.InstanceNorm2d(2, affine=True, track_running_stats=True)]
    batch = [nn.BatchNorm3d(2), nn.SyncBatchNorm(2), Mine(2), nn.BatchNorm2d(2, affine=False)]
    found = norm_names(nn.ModuleDict({"bn_of_a_name": nn.Linear(2, 2), "rest": nn.Sequential(*others, *batch)}))
    assert {name.split(".")[1] for name in found} == {"3", "4", "5", "6"}
    assert norm_names(nn.BatchNorm1d(2, track_running_stats=False)) == {"weight", "bias"}


def test_no_norm_ever_travels_and_every_other_tensor_does(tmp_path: Path):
    calls, whole = noted(tmp_path / "run")
    every = names(whole.method.init_server(whole.context(whole.net(), 0)))
    assert len(calls) > 6 and every > NAMES
    for _, down, _, state, up in calls:
        assert names(down) == names(up) == every - NAMES
        assert set(state) == {NORM} and set(state[NORM]) == NAMES


def test_a_client_goes_on_with_the_norms_that_its_training_left_and_a_joining_one_with_the_initial(tmp_path: Path):
    calls, whole = noted(tmp_path / "run", rounds=3)
    first = whole.method.init_client(whole.context(whole.net(), 0))
    held, joined = {}, 0
    for number, (client, _, before, after, _) in enumerate(calls):
        assert digest(before) == held.get(client, digest(first))
        joined += client not in held and number > 1  # after the first round, whose cohort has two clients
        held[client] = digest(after)
    assert joined and len(set(held.values())) == len(held) == 4
    assert digest(first) not in held.values()


def test_after_a_round_clients_share_all_but_their_own_norms(tmp_path: Path):
    calls, whole = noted(tmp_path / "run", cohort=1.0, num_stages=1)
    server, progress = newest(tmp_path / "run")
    net, store = whole.net(), ClientStore(tmp_path / "run" / "clients")
    served = []
    for client in range(4):
        ctx = whole.context(net, 0, client=client)
        state = store.load(client, progress.versions[client])
        bound = whole.method.deployed(whole.method.send(server, client, ctx), state, ctx).net.module.state_dict()
        served.append({name: tensor.clone() for name, tensor in bound.items()})
        trained = next(after for who, _, _, after, _ in reversed(calls) if who == client)
        assert all(torch.equal(served[-1][name], tensor) for name, tensor in trained[NORM].items())
    for name in served[0]:
        alike = all(torch.equal(served[0][name], other[name]) for other in served[1:])
        assert alike is (name not in NAMES), name
    last = [up["params"]["head.weight"] for *_, up in calls[-4:]]
    torch.testing.assert_close(server["params"]["head.weight"], torch.stack(last).mean(0))


@pytest.mark.parametrize("unseen", ["initial", "mean"])
def test_the_global_view_has_the_norms_that_the_option_names(tmp_path: Path, unseen: str):
    calls, whole = noted(tmp_path / "run", unseen, cohort=1.0, num_stages=1)
    server, _ = newest(tmp_path / "run")
    ctx = whole.context(whole.net(), 0)
    view = whole.method.send(server, None, ctx)
    merged = {**view["params"], **view["buffers"]}
    own = [after[NORM] for _, _, _, after, _ in calls[-4:]]
    first = whole.method.init_client(ctx)[NORM]
    for name in NAMES - {"body.layers.1.num_batches_tracked"}:
        expected = first[name] if unseen == "initial" else torch.stack([norm[name] for norm in own]).mean(0)
        torch.testing.assert_close(merged[name], expected)
    bound = whole.method.deployed(view, whole.method.init_client(ctx), ctx).net.module.state_dict()
    assert all(torch.equal(bound[name], merged[name]) for name in NAMES)
    assert whole.method.deployed(view, {}, ctx) is ctx
    for _, down, _, after, up in calls:
        assert not names(down) & NAMES
        assert nbytes(up) - nbytes(down) == (nbytes(after) if unseen == "mean" else 0)


def test_the_norms_of_the_global_view_do_not_change_what_clients_do(tmp_path: Path):
    runs = [noted(tmp_path / unseen, unseen)[0] for unseen in ("initial", "mean")]
    assert [(c, digest(state)) for c, _, _, state, _ in runs[0]] == [(c, digest(s)) for c, _, _, s, _ in runs[1]]


def test_predictions_of_a_client_use_its_own_norms(tmp_path: Path):
    calls, whole = noted(tmp_path / "run", cohort=1.0, num_stages=1)
    server, progress = newest(tmp_path / "run")
    x, net = torch.randn(5, 2, generator=torch.Generator().manual_seed(0)), whole.net()
    ctx = whole.context(net, 0, client=1)
    norm = next(after[NORM] for who, _, _, after, _ in reversed(calls) if who == 1)
    weight, bias, mean, var = (norm[f"body.layers.1.{n}"] for n in ("weight", "bias", "running_mean", "running_var"))
    p = server["params"]
    hidden = x @ p["body.layers.0.weight"].T + p["body.layers.0.bias"]
    hidden = torch.relu((hidden - mean) / (var + 1e-5).sqrt() * weight + bias)
    expected = hidden @ p["head.weight"].T + p["head.bias"]
    got = whole.method.predict(whole.method.send(server, 1, ctx), {NORM: norm}, x, ctx)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert progress.versions.keys() == {0, 1, 2, 3}


@pytest.mark.parametrize("uniform", [True, False])
def test_a_network_without_batch_norm_gives_fedavg_with_the_same_weights(tmp_path: Path, uniform: bool):
    spec, options = BlobSpec(norm=False), {"uniform": uniform}
    ours = start(tmp_path / "ours", experiment(BN, spec=spec, options=options))
    theirs = start(tmp_path / "avg", experiment(AVG, spec=spec, options=options))
    default = start(tmp_path / "default", experiment(BN, spec=spec))
    assert ours["params_sha256"] == theirs["params_sha256"]
    assert (default["params_sha256"] == theirs["params_sha256"]) is uniform


def test_a_lone_client_is_served_what_fedavg_gives(tmp_path: Path):
    plan = {"num_clients": 1, "cohort": 1.0}
    start(tmp_path / "ours", whole := experiment(BN, **plan))
    theirs = start(tmp_path / "avg", experiment(AVG, **plan))
    server, progress = newest(tmp_path / "ours")
    ctx = whole.context(whole.net(), 2, client=0)
    state = ClientStore(tmp_path / "ours" / "clients").load(0, progress.versions[0])
    whole.method.deployed(whole.method.send(server, 0, ctx), state, ctx)
    params, buffers = ctx.net.take()
    assert digest({"params": params, "buffers": buffers}) == theirs["params_sha256"]
