"""HeteroFL: the numbers of the specification, owners of entries and of head rows, and where it is FedAvg."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fedloom
from fedloom.core import ConfigError, Reply
from fedloom.core.payload import digest
from fedloom.engine.checkpoint import newest
from fedloom.local import LocalSGD
from fedloom.local.statistics import measured_statistics
from fedloom.merge.buffers import pooled_moments
from fedloom.methods.heterofl import heterofl
from fedloom.models import NetworkSpec
from fedloom.models.channels import pack, unpack
from toys.federation import BlobSpec, experiment
from toys.running import rows, start

HETERO, AVG = "fedloom.methods.heterofl:heterofl", "fedloom.methods.fedavg:fedavg"
ALL = {"cohort": 1.0}


def merged(*uploads: list[float], old=(0.0, 0.0, 0.0, 9.0)) -> list[float]:
    """The server's vector after replies with these leading parts, of unequal weights."""
    replies = [
        Reply(
            k, 10.0**k, {"params": {"w": torch.tensor(u)}, "head": {}, "held": {"bits": pack(torch.ones(1).bool())}}, {}
        )
        for k, u in enumerate(uploads)
    ]
    ctx = SimpleNamespace(class_rows={}, num_classes=1)
    server = {"params": {"w": torch.tensor(old)}, "buffers": {}}
    return heterofl(local=LocalSGD()).server_update(server, replies, ctx)["params"]["w"].tolist()


def test_entries_are_means_over_their_owners_whatever_they_weigh():
    assert merged([1.0, 2.0, 3.0, 4.0], [3.0, 4.0]) == [2.0, 3.0, 3.0, 4.0]


def test_entries_without_an_owner_keep_their_value():
    assert merged([3.0, 4.0]) == [3.0, 4.0, 0.0, 9.0]


def contexts(rates=(1.0, 0.5), spec: Any = None, **options: Any):
    """The experiment, its server state and a function: client -> the context of its first round."""
    whole = experiment(HETERO, spec=spec, options={"rates": rates, **options}, num_stages=1)
    net = whole.net()
    server = whole.method.init_server(whole.context(net, 0))
    return whole, server, lambda client: whole.context(net, 0, round=0, client=client)


def test_clients_get_leading_blocks_of_the_width_of_their_rate():
    whole, server, ctx = contexts((1.0, 0.5, 0.25))
    sent = [whole.method.send_part(server, k, ctx(k)) for k in range(4)]
    assert [s["params"]["body.layers.0.weight"].shape[0] for s in sent] == [8, 4, 2, 8]
    assert [s["params"]["head.weight"].shape for s in sent[:3]] == [(6, 8), (6, 4), (6, 2)]
    assert all(s.keys() == {"params"} for s in sent)
    for name, tensor in sent[1]["params"].items():
        assert torch.equal(tensor, server["params"][name][tuple(slice(0, n) for n in tensor.shape)])


def test_a_half_wide_resnet18_has_a_quarter_of_the_parameters_on_the_wire():
    whole, server, ctx = contexts(spec=NetworkSpec("resnet18", 10, (3, 32, 32)))
    sent = [sum(t.numel() for t in whole.method.send_part(server, k, ctx(k))["params"].values()) for k in (0, 1)]
    assert sent == [11_173_962, 2_797_610]


@pytest.mark.parametrize("loss", ["zero", "inf", "none"])
def test_head_rows_are_sent_of_the_classes_that_the_client_holds(loss: str):
    whole, server, ctx = contexts(masked_loss=loss)
    data = whole.plan.train(1, 0, 0, "train")
    data = data.subset((data.labels < 3).nonzero().flatten())
    update = whole.method.client_update(whole.method.send_part(server, 1, ctx(1)), {}, data, ctx(1))
    held = [0, 1, 2] if loss != "none" else [0, 1, 2, 3, 4, 5]
    assert unpack(update.up["held"]["bits"], 6).nonzero().flatten().tolist() == held
    assert update.up["head"]["head.weight"].shape == (len(held), 4)
    assert not any(name.startswith("head") for name in update.up["params"])
    new = whole.method.server_update(server, [Reply(1, 5.0, update.up, {})], ctx(None))["params"]["head.weight"]
    moved = new != server["params"]["head.weight"]
    assert moved[held, :4].all() and not moved[:, 4:].any()
    assert not moved[[k for k in range(6) if k not in held]].any()


def test_a_client_without_examples_and_one_of_a_single_class_are_no_trouble(tmp_path: Path):
    summary = start(tmp_path / "run", experiment(HETERO, **ALL, num_stages=6, hollow=(1,)))
    assert summary["failed_clients"] == summary["rejected_updates"] == 0


@pytest.mark.parametrize("loss", ["zero", "inf"])
def test_fills_of_absent_logits_differ_from_each_other_and_from_none(loss: str, tmp_path: Path):
    one = start(tmp_path / "one", experiment(HETERO, options={"masked_loss": loss}))
    other = start(tmp_path / "other", experiment(HETERO, options={"masked_loss": "none"}))
    assert one["params_sha256"] != other["params_sha256"]


def test_with_every_rate_one_and_no_masked_loss_parameters_are_those_of_uniform_fedavg(tmp_path: Path):
    options = {"rates": (1.0,), "masked_loss": "none"}
    start(tmp_path / "ours", experiment(HETERO, options=options))
    start(tmp_path / "theirs", experiment(AVG, options={"uniform": True}))
    ours, theirs = ({"params": newest(tmp_path / name)[0]["params"]} for name in ("ours", "theirs"))
    assert digest(ours) == digest(theirs)


def test_without_batch_norm_nothing_is_measured_and_all_of_uniform_fedavg_is_found(tmp_path: Path):
    options, spec = {"rates": (1.0,), "masked_loss": "none"}, BlobSpec(6, norm=False)
    ours = start(tmp_path / "ours", experiment(HETERO, spec=spec, options=options))
    theirs = start(tmp_path / "theirs", experiment(AVG, spec=spec, options={"uniform": True}))
    assert ours["params_sha256"] == theirs["params_sha256"]
    assert ours["pass_visits"] == 0
    measured = [row for row in rows(tmp_path / "ours") if row["exchange"] == "statistics"]
    assert len(measured) == 3 and all(row["bytes_up"] == row["bytes_down"] == 0 for row in measured)


def test_statistics_are_the_moments_of_all_clients_data_in_the_dense_model(tmp_path: Path):
    whole = experiment(HETERO, **ALL, num_stages=1)
    summary = start(tmp_path / "run", whole)
    server = newest(tmp_path / "run")[0]
    ctx, clients = whole.context(whole.net(), 0), range(4)
    data = [whole.plan.train(k, 0, None, "statistics") for k in clients]
    found = []
    for client, part in zip(clients, data, strict=True):
        own = whole.context(ctx.net, 0, exchange="statistics", client=client)
        own.bind(server["params"], ctx.init_state()["buffers"])
        found.append({name: tensor.clone() for name, tensor in measured_statistics(own, part).items()})
    expected = pooled_moments(found, [float(len(part)) for part in data], server["buffers"])
    assert digest({"buffers": server["buffers"]}) == digest({"buffers": expected})
    assert summary["pass_visits"] == sum(len(part) for part in data)
    assert not torch.equal(server["buffers"]["body.layers.1.running_mean"], torch.zeros(8))


def test_statistics_after_every_round_change_no_parameter_and_serve_evaluations_inside_a_stage(tmp_path: Path):
    for name in ("stage", "round"):
        whole = experiment(HETERO, **ALL, num_stages=1, rounds=5, options={"statistics": name})
        start(tmp_path / name, whole, evaluate_every=1)
    servers = [newest(tmp_path / name)[0] for name in ("stage", "round")]
    assert digest(servers[0]) == digest(servers[1])
    exchanges = [row["exchange"] for row in rows(tmp_path / "round")]
    assert exchanges == ["train", "statistics"] * 5
    assert [row["exchange"] for row in rows(tmp_path / "stage")] == ["train"] * 5 + ["statistics"]
    late = [[row["accuracy"] for row in rows(tmp_path / name) if "accuracy" in row][-1] for name in ("stage", "round")]
    assert late[1] > 0.8


def test_rates_of_clients_are_fixed_or_drawn_in_every_round(tmp_path: Path):
    sent = {}
    for name in ("fixed", "dynamic"):
        whole = experiment(HETERO, **ALL, num_stages=1, rounds=6, options={"assignment": name})
        start(tmp_path / name, whole)
        sent[name] = {row["bytes_down"] for row in rows(tmp_path / name) if row["exchange"] == "train"}
    assert len(sent["fixed"]) == 1 < len(sent["dynamic"])


def test_a_small_client_moves_nothing_beyond_its_width(tmp_path: Path):
    whole = experiment(HETERO, **ALL, num_clients=2, num_stages=1, options={"rates": (0.5, 0.25)})
    first = whole.method.init_server(whole.context(whole.net(), 0))["params"]
    start(tmp_path / "run", whole)
    last = newest(tmp_path / "run")[0]["params"]
    for name in ("body.layers.0.weight", "body.layers.1.weight"):
        assert torch.equal(last[name][4:], first[name][4:]) and not torch.equal(last[name][:4], first[name][:4])
    assert torch.equal(last["head.weight"][:, 4:], first["head.weight"][:, 4:])


def test_options_and_networks_that_cannot_work_are_refused(tmp_path: Path):
    for method, told in (
        ({"rates": []}, "rates"),
        ({"rates": [1.5]}, "rates"),
        ({"masked_loss": "nan"}, "masked_loss"),
    ):
        with pytest.raises(ConfigError, match=told):
            fedloom.run("quickstart", method={"name": "heterofl", **method}, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="group normalisation"):
        fedloom.run("quickstart", method="heterofl", model={"name": "resnet8_gn"}, out=tmp_path / "run")


def told(path: Path, **options: Any) -> list[dict[str, Any]]:
    """The tables of a run over groups of 24 and 8 channels."""
    start(path, experiment(HETERO, spec=BlobSpec(residual=True), num_stages=1, rounds=1, options=options))
    file = path / "facts.json"
    return json.loads(file.read_text())["tables"] if file.exists() else []


def test_a_run_tells_how_wide_each_clients_network_is(tmp_path: Path):
    (table,) = told(tmp_path / "run", rates=(1.0, 0.3, 0.05))
    assert table["axes"] == ["client", "group"] and table["rows"] == [0, 1, 2, 3]
    assert table["columns"] == ["block.one of 24", "layers.0 of 8"]
    widths = [[round(share * size) for share, size in zip(row, (24, 8), strict=True)] for row in table["values"]]
    assert widths == [[24, 8], [8, 3], [2, 1], [24, 8]]
    whole, server, ctx = contexts((1.0, 0.3, 0.05), spec=BlobSpec(residual=True))
    sent = [whole.method.send_part(server, k, ctx(k))["params"]["body.block.one.weight"] for k in range(4)]
    assert [list(tensor.shape) for tensor in sent] == widths


def test_where_rates_are_drawn_a_run_tells_the_width_of_each(tmp_path: Path):
    (table,) = told(tmp_path / "run", rates=(0.25, 1.0, 0.25), assignment="dynamic")
    assert table["axes"] == ["rate", "group"] and table["rows"] == ["1.0", "0.25"]
    assert table["values"] == [[1.0, 1.0], [0.25, 0.25]] and "anew in every round" in table["note"]


@pytest.mark.parametrize("assignment", ["fixed", "dynamic"])
def test_a_run_of_whole_networks_tells_of_no_widths(assignment: str, tmp_path: Path):
    assert told(tmp_path / "run", rates=(1.0, 1.0), assignment=assignment) == []
