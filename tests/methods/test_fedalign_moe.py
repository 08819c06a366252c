"""FedAlign-MoE: identical and single clients, the ladder's first rung, unused experts, gates, and refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.core import ConfigError, Context, Payload, Reply
from fedloom.core.moe import moe_layers
from fedloom.core.payload import check_finite, nbytes
from fedloom.engine.experiment import Experiment
from fedloom.engine.files import load_payload
from fedloom.local import SGD, AdamW
from fedloom.methods.aligned import AlignedFedAvg
from fedloom.methods.fedalign_moe import ABLATIONS
from toys.federation import experiment, expert_spec
from toys.language_models import text_spec
from toys.running import rows, start
from toys.token_mixture import TokenSpec

NAME = "fedloom.methods.fedalign_moe:fedalign_moe"
GATES = ("pooled", "row_weighted", "fedavg", "distill")
PLAIN = {"training": {"optimizer": SGD(lr=0.1)}}  # no weight decay
ONE_STAGE: dict[str, Any] = {"num_stages": 1, "cohort": 1.0, "per_class": 10}


def made(options: Mapping[str, Any] | None = None, **plan: Any) -> tuple[Experiment, Context]:
    whole = experiment(NAME, options={**PLAIN, **(options or {})}, **{**ONE_STAGE, "spec": TokenSpec(), **plan})
    return whole, whole.context(whole.net(), 0, round=0)


def trained(whole: Experiment, server: Payload, client: int, round: int = 0, state: Payload | None = None) -> Any:
    """One client's update in a round."""
    ctx = whole.context(whole.net(), 0, round=round, client=client)
    down = whole.method.send(server, client, ctx)
    own = whole.method.init_client(ctx) if state is None else state
    return whole.method.client_update(down, own, whole.plan.train(client, 0, round, "train"), ctx)


def replies(update: Any, weights: list[float]) -> list[Reply]:
    return [Reply(client, weight, update.up, {}) for client, weight in enumerate(weights)]


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], names: Any = None) -> None:
    for name in names or expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)


def used(update: Any, ctx: Context) -> list[tuple[Any, bool]]:
    """Every expert's slices, and whether the client's pass routed a token to it."""
    counts = update.up["routing"]["count"]
    return [
        (part, bool(counts[at, e]))
        for at, layer in enumerate(moe_layers(ctx.net.module))
        for e, expert in enumerate(layer.experts)
        for part in expert
    ]


@pytest.mark.parametrize("gate_mode", GATES)
@pytest.mark.parametrize("weights", [[10.0], [10.0, 20.0, 30.0, 40.0]], ids=["one", "identical"])
def test_one_client_and_identical_clients_give_their_own_model(gate_mode: str, weights: list[float]):
    whole, ctx = made({"gate_mode": gate_mode})
    server = whole.method.init_server(ctx)
    update = trained(whole, server, 0)
    new = whole.method.server_update(server, replies(update, weights), ctx)
    experts = {name for layer in moe_layers(ctx.net.module) for name in layer.expert_names}
    assert_near(new["params"], update.up["params"], [name for name in new["params"] if name not in experts])
    assert_near(new["buffers"], {n: b for n, b in update.up["buffers"].items() if b.is_floating_point()})
    for part, routed in used(update, ctx):
        expected = update.up["params"] if routed else server["params"]
        torch.testing.assert_close(part.of(new["params"]), part.of(expected), rtol=0, atol=1e-6 if routed else 0)
    consensus = new["consensus"]
    torch.testing.assert_close(consensus["routing"], update.up["routing"]["mean"], rtol=0, atol=2e-6)
    torch.testing.assert_close(consensus["alpha"], torch.ones_like(consensus["alpha"]))
    assert new["consensus"]["known"].tolist() == [k < len(weights) for k in range(4)]


def test_kept_gates_are_the_servers_whatever_clients_do():
    for gate_mode in ("local", "frozen"):
        whole, ctx = made({"gate_mode": gate_mode})
        server = whole.method.init_server(ctx)
        client = whole.context(whole.net(), 0, round=0, client=0)
        own, data = whole.method.init_client(client), whole.plan.train(0, 0, 0, "train")
        update = whole.method.client_update(whole.method.send(server, 0, client), own, data, client)
        gates = {name for layer in moe_layers(ctx.net.module) for name in layer.gate}
        assert gates.isdisjoint(update.up["params"])
        new = whole.method.server_update(server, replies(update, [1.0, 2.0]), ctx)
        assert all(torch.equal(new["params"][name], server["params"][name]) for name in gates)
        moved = {n for n, t in client.net.take()[0].items() if not torch.equal(t, server["params"][n])}
        assert (gates <= moved) is (gate_mode == "local") and moved - gates


def test_a_local_gate_stays_with_its_client_and_serves_it():
    whole, ctx = made({"gate_mode": "local"})
    server = whole.method.init_server(ctx)
    assert whole.method.personal
    update = trained(whole, server, 0)
    again = trained(whole, server, 0, 1, update.state)
    gate = next(iter(update.state["gate"]))
    assert not torch.equal(again.state["gate"][gate], update.state["gate"][gate])
    x = next(iter(whole.plan.test(0).epoch(batch_size=40, shuffle=False))).x
    own = whole.context(whole.net(), 0, client=0, exchange="evaluate")
    scores = whole.method.predict(whole.method.send(server, 0, own), update.state, x, own).clone()
    own.bind({**server["params"], **update.state["gate"]}, server["buffers"])
    torch.testing.assert_close(scores, own.scores(x))
    other = whole.method.predict(whole.method.send(server, None, own), {}, x, own)
    assert (scores - other).abs().max() > 1e-4


def test_the_first_rung_is_fedavg(tmp_path: Path):
    plan = {"spec": expert_spec(), "cohort": 1.0, "rounds": 3, "num_stages": 1, "per_class": 10}
    direct = start(tmp_path / "direct", experiment(NAME, options=ABLATIONS["l0-direct"], **plan))
    fedavg = start(tmp_path / "avg", experiment("fedloom.methods.fedavg:fedavg", **plan))
    assert direct["params_sha256"] == fedavg["params_sha256"]
    assert direct["accuracy_matrix"] == fedavg["accuracy_matrix"]
    rungs = [direct["params_sha256"]]
    for name in ("l1-distribution", "l2-consistency", "l3-adaptive"):
        rungs.append(start(tmp_path / name, experiment(NAME, options=ABLATIONS[name], **plan))["params_sha256"])
    rungs.append(start(tmp_path / "full", experiment(NAME, **plan))["params_sha256"])
    assert len(set(rungs)) == 5


def test_without_the_regulariser_clients_train_as_in_fedavg():
    whole, ctx = made({"lambda_reg": 0.0})
    plain = experiment("fedloom.methods.fedavg:fedavg", options=PLAIN, spec=TokenSpec(), **ONE_STAGE)
    server = whole.method.init_server(ctx)
    one, two = trained(whole, server, 1), trained(plain, plain.method.init_server(ctx), 1)
    assert all(torch.equal(one.up["params"][name], value) for name, value in two.up["params"].items())


def test_the_regulariser_starts_when_asked_and_sends_only_the_clients_own():
    whole, ctx = made()
    server = whole.method.init_server(ctx)
    update = trained(whole, server, 0)
    later = whole.method.server_update(server, replies(update, [1.0, 1.0, 0.5]), ctx)
    sent = {
        (start, round): whole_of.method.send(state, 1, whole_of.context(whole_of.net(), 0, round=round)).get(
            "consensus"
        )
        for start, whole_of in ((1, made({"reg_start_round": 1})[0]), (2, whole), (3, made({"reg_start_round": 3})[0]))
        for round, state in ((0, server), (1, later), (2, later))
    }
    assert sent[1, 0]["routing"].unique().tolist() == [0.25] and sent[1, 0]["alpha"].unique().tolist() == [1.0]
    assert sent[2, 0] is sent[3, 0] is sent[3, 1] is None and sent[3, 2] is not None
    assert torch.equal(sent[2, 1]["alpha"], later["consensus"]["alpha"][1])
    assert nbytes({"consensus": sent[2, 1]}) == 2 * 2 * 4 * 4  # 2 L E floats
    assert "consensus" not in whole.method.send(later, None, ctx)
    # after a round that nobody took part in there is still no consensus
    assert "consensus" not in whole.method.send(server, 1, whole.context(whole.net(), 0, round=1))


def test_the_regulariser_brings_a_client_to_the_consensus():
    goal, gaps = torch.tensor([[0.7, 0.1, 0.1, 0.1]]).expand(2, 4), {}
    for weight in (0.0, 30.0):
        whole, ctx = made({"lambda_reg": weight, "mask_k": "all"})
        server = whole.method.init_server(ctx)
        server = {**server, "consensus": {**server["consensus"], "routing": goal, "rounds": torch.tensor(1)}}
        gaps[weight] = (trained(whole, server, 0, 1).up["routing"]["mean"] - goal).abs().mean().item()
    assert gaps[30.0] < 0.7 * gaps[0.0]


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, weight_decay=0.5), AdamW(lr=0.01, weight_decay=0.5)])
def test_an_expert_that_nobody_used_keeps_its_bits(optimizer: Any):
    whole, ctx = made({"training": {"optimizer": optimizer}})
    server = whole.method.init_server(ctx)
    update = trained(whole, server, 0)
    update.up["routing"]["count"][0, 2] = 0
    new = whole.method.server_update(server, replies(update, [1.0, 3.0]), ctx)
    for part in moe_layers(ctx.net.module)[0].experts[2]:
        assert torch.equal(part.of(new["params"]), part.of(server["params"]))


def test_clients_away_keep_their_record_and_the_consensus_persists():
    whole, ctx = made()
    server = whole.method.init_server(ctx)
    first = [Reply(k, 1.0, trained(whole, server, k).up, {}) for k in range(3)]
    server = whole.method.server_update(server, first, ctx)
    second = [Reply(1, 1.0, trained(whole, server, 1, 1).up, {})]
    new = whole.method.server_update(server, second, ctx)
    before, after = server["consensus"], new["consensus"]
    assert after["known"].tolist() == [True, True, True, False]
    for name in ("means", "weights", "margin"):
        assert torch.equal(after[name][[0, 2]], before[name][[0, 2]])
        assert not torch.equal(after[name][1], before[name][1])
    assert not torch.equal(after["alpha"][0], before["alpha"][0]), "held against the newest consensus"
    assert (after["alpha"][3] == 1).all()


def test_a_client_whose_pass_saw_no_token_has_no_part_in_routing_and_experts():
    whole, ctx = made()
    server = whole.method.init_server(ctx)
    one, two = trained(whole, server, 0), trained(whole, server, 1)
    nothing = {**two.up, "routing": {name: torch.zeros_like(value) for name, value in two.up["routing"].items()}}
    both = whole.method.server_update(server, [Reply(0, 1.0, one.up, {}), Reply(1, 3.0, nothing, {})], ctx)
    alone = whole.method.server_update(server, [Reply(0, 1.0, one.up, {})], ctx)
    layers = moe_layers(ctx.net.module)
    for name in [name for layer in layers for name in (*layer.gate, *layer.expert_names)]:
        torch.testing.assert_close(both["params"][name], alone["params"][name], rtol=0, atol=1e-6)
    assert not both["consensus"]["known"][1]
    rest = "body.backbone.input.weight"
    expected = (one.up["params"][rest] + 3 * two.up["params"][rest]) / 4
    torch.testing.assert_close(both["params"][rest], expected)
    nobody = whole.method.server_update(server, [Reply(1, 3.0, nothing, {})], ctx)
    assert all(torch.equal(nobody["params"][n], server["params"][n]) for layer in layers for n in layer.gate)
    assert nobody["consensus"] is server["consensus"]


def test_statistics_that_are_not_finite_are_refused_like_any_upload():
    whole, ctx = made()
    up = trained(whole, whole.method.init_server(ctx), 0).up
    up["routing"]["margin"][0, 0] = torch.nan
    with pytest.raises(ValueError, match="'routing/margin' holds NaN"):
        check_finite(up)


def test_a_permuted_client_is_brought_in_order_and_the_index_lowers_its_share():
    shares, results = {}, {}
    for matching in ("index", "hungarian"):
        whole, ctx = made({"expert_matching": matching})
        server = whole.method.init_server(ctx)
        done = [trained(whole, server, k).up for k in range(3)]
        server = whole.method.server_update(server, [Reply(k, 1.0, up, {}) for k, up in enumerate(done)], ctx)
        done = [trained(whole, server, k, 1).up for k in range(3)]
        turned = {**done[2], "params": dict(done[2]["params"]), "routing": dict(done[2]["routing"])}
        order = torch.tensor([2, 0, 3, 1])
        for layer in moe_layers(ctx.net.module):
            for name in (*layer.gate, *layer.expert_names):
                turned["params"][name] = done[2]["params"][name][order]
        for name in ("mean", "margin", "count", "centroid"):
            turned["routing"][name] = done[2]["routing"][name][:, order]
        straight, crossed = (
            whole.method.server_update(server, [Reply(k, 1.0, up, {}) for k, up in enumerate([*done[:2], last])], ctx)
            for last in (done[2], turned)
        )
        results[matching] = (straight, crossed)
        shares[matching] = [new["region"]["similarity"][:, 0, 2].mean().item() for new in (straight, crossed)]
    straight, crossed = results["hungarian"]
    assert all(torch.equal(crossed["params"][name], value) for name, value in straight["params"].items())
    straight, crossed = results["index"]
    assert any(not torch.allclose(crossed["params"][name], value) for name, value in straight["params"].items())
    assert shares["index"][1] < 0.85 * shares["index"][0] and shares["hungarian"][1] == shares["hungarian"][0]


def test_frozen_experts_stay_and_are_not_reordered():
    spec = text_spec("mixtral", lora={"targets": ["attention"]})
    whole, ctx = made(spec=spec)
    server = whole.method.init_server(ctx)
    one = {
        n: torch.ones(2, 4, *shape) for n, shape in {"mean": (), "margin": (), "count": (), "centroid": (16,)}.items()
    }
    routing = {**one, "tokens": torch.ones(1), "hidden": torch.ones(2, 16)}
    up = {"params": {n: t + 1 for n, t in server["params"].items()}, "buffers": {}, "routing": routing}
    new = whole.method.server_update(server, [Reply(k, 1.0, up, {}) for k in range(2)], ctx)
    assert_near(new["params"], up["params"])
    for targets in ("attention", "experts"):
        given = made({"expert_matching": "hungarian"}, spec=text_spec("mixtral", lora={"targets": [targets]}))
        with pytest.raises(ConfigError, match=r"experts.* is frozen .* set expert_matching to index"):
            given[0].method.init_server(given[1])


def test_personalized_experts_go_to_their_client_alone():
    whole, ctx = made({"expert_mode": "personalized"})
    assert whole.method.personal
    server = whole.method.init_server(ctx)
    done = [Reply(k, 1.0, trained(whole, server, k).up, {}) for k in range(3)]
    new = whole.method.server_update(server, done, ctx)
    name = moe_layers(ctx.net.module)[0].expert_names[0]
    views = [whole.method.send(new, k, ctx)["params"][name] for k in (None, 0, 1, 3)]
    assert torch.equal(views[0], views[3]) and not torch.equal(views[0], views[1])
    assert not torch.equal(views[1], views[2])
    alone = whole.method.server_update(server, done[:1], ctx)
    own = whole.method.send(alone, 0, ctx)["params"]
    assert torch.equal(own[name], alone["params"][name]), "one client's own experts are the common ones"


def test_what_travels_up_is_counted_by_the_formula():
    width, layers, experts = 8, 2, 4
    for options, floats in [
        ({}, 3 * experts + experts * width + width),
        ({"semantic_sim": "none"}, 3 * experts),
        ({"expert_mode": "fedavg"}, 3 * experts),
        ({"mu_dims": 3}, 3 * experts + experts * 3 + 3),
        ({"overlap": "token_product"}, 4 * experts + experts * width + width),
    ]:
        whole, ctx = made(options)
        up = trained(whole, whole.method.init_server(ctx), 0).up
        assert nbytes({"routing": up["routing"]}) == 4 * (layers * floats + 1), options


def test_the_pass_is_bounded_by_batches_and_by_a_share_of_the_epoch():
    for options, batches in [({"stats_share": 1.0}, 16), ({"stats_share": 0.5}, None), ({"stats_share": 0.01}, 1)]:
        whole, ctx = made({**options, "training": {"batch_size": 2}}, spec=expert_spec())
        data = whole.plan.train(0, 0, 0, "train")
        expected = min(2 * (data.steps(2) // 2 if batches is None else batches), len(data))
        up = trained(whole, whole.method.init_server(ctx), 0).up
        assert len(data) > 8 and up["routing"]["tokens"].item() == expected  # an example is one token
    whole, ctx = made({"stats_max_batches": 2, "training": {"batch_size": 1}}, spec=expert_spec())
    assert trained(whole, whole.method.init_server(ctx), 0).up["routing"]["tokens"].item() == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gate_mode": "local", "expert_matching": "hungarian"}, "gate_mode 'local' .* set expert_matching to index"),
        ({"gate_mode": "frozen", "expert_matching": "hungarian"}, "gate_mode 'frozen'"),
        ({"overlap": "token_product", "stats_source": "train_pass"}, "stats_source to post_pass"),
        ({"overlap": "token_product", "expert_matching": "hungarian"}, "expert_matching to index"),
        ({"gate_mode": "distill", "mu_dims": 2}, "mu_dims is 2; set it to 0"),
        ({"mu_noise": 1.0}, "set mu_clip above 0"),
        ({"gate_mode": "pool"}, "Did you mean 'pooled'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        experiment(NAME, options=options)


def test_a_run_with_absent_and_empty_clients_tells_its_routing(tmp_path: Path):
    whole = experiment(NAME, spec=TokenSpec(), hollow=(1,), cohort=1.0, num_stages=2, rounds=2)
    summary = start(tmp_path / "run", whole)
    assert summary["rejected_updates"] == summary["failed_clients"] == 0
    assert {"train/gate_entropy", "train/load_cv"} <= rows(tmp_path / "run")[-1].keys()
    tables = {t["title"]: t for t in json.loads((tmp_path / "run" / "facts.json").read_text())["tables"]}
    routing = tables["Routing distribution, layer 1 of 2"]
    assert routing["rows"] == [0, 2, 3] and routing["columns"] == [0, 1, 2, 3]
    assert [sum(row) for row in routing["values"]] == pytest.approx([1, 1, 1], abs=1e-5)
    server = load_payload(next(iter(sorted((tmp_path / "run" / "checkpoints").iterdir()))) / "server.safetensors")
    assert isinstance(whole.method, AlignedFedAvg) and not server["consensus"]["known"][1]


@pytest.mark.parametrize("options", [{"expert_mode": "fedavg"}, {"semantic_sim": "none"}])
def test_experts_are_matched_by_parameters_where_no_centroids_travel(options: dict[str, Any]):
    merged = []
    for matching in ("index", "hungarian_parameters"):
        whole, ctx = made({**options, "expert_matching": matching})
        server = whole.method.init_server(ctx)
        up = [trained(whole, server, client) for client in (0, 1)]
        assert "centroid" not in up[0].up["routing"] and "matching" not in server
        given = [Reply(client, 1.0, update.up, {}) for client, update in enumerate(up)]
        merged.append(whole.method.server_update(server, given, ctx)["params"])
    assert all(torch.equal(tensor, merged[1][name]) for name, tensor in merged[0].items())  # they are in order already
