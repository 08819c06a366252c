"""FedMoE: what is held, sent, trained and merged, when sets are chosen and swapped, and where it is FedAvg."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedloom.core import ConfigError, Reply
from fedloom.core.moe import moe_layers
from fedloom.core.payload import digest, nbytes
from fedloom.local import SGD, AdamW
from fedloom.methods.expert_subsets import entropy, held_part, restricted, whole_model
from toys.federation import BlobSpec, experiment, expert_spec
from toys.running import rows, start

FEDMOE, FEDAVG = "fedloom.methods.fedmoe:fedmoe", "fedloom.methods.fedavg:fedavg"
SHAPE = (2, 4)


class Walk:
    """Rounds of the toy federation call by call."""

    def __init__(self, name: str = FEDMOE, clients: int = 3, **options: Any):
        self.whole = experiment(name, options=options, num_clients=clients, num_stages=1, rounds=20)
        self.method, self.net = self.whole.method, self.whole.net()
        self.server = self.method.init_server(self.ctx(0))
        self.round = 0

    def ctx(self, round: int | None, client: int | None = None):
        return self.whole.context(self.net, 0, round=round, client=client)

    def down(self, client: int | None):
        return self.method.send(self.server, client, self.ctx(self.round, client))

    def update(self, client: int):
        data = self.whole.plan.train(client, 0, self.round, "train")
        return self.method.client_update(self.down(client), {}, data, self.ctx(self.round, client))

    def step(self, *clients: int) -> list[Reply]:
        """One round of these clients; gives their replies."""
        done = [(k, self.update(k)) for k in clients]
        replies = [Reply(k, float(self.whole.plan.size(k, 0)), u.up, u.metrics) for k, u in done]
        self.server = self.method.server_update(self.server, replies, self.ctx(self.round))
        self.round += 1
        return replies

    def hold(self, *sets: str) -> None:
        """Give client k the k-th set, such as "xx.. .x.."; a sign per expert."""
        held = torch.tensor([[[c == "x" for c in row] for row in mine.split()] for mine in sets])
        self.server = {**self.server, "held": {"clients": held}}

    @property
    def held(self):
        return self.server["held"]["clients"]


def expert(params, walk: Walk, layer: int, e: int) -> list[torch.Tensor]:
    there = moe_layers(walk.net.module)[layer]
    return [*(part.of(params) for part in there.experts[e]), *(params[name][e] for name in there.gate)]


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_stage_one_counts_what_every_expert_processes():
    walk = Walk(warm_rounds=2)
    replies = walk.step(0, 1)
    for reply in replies:
        k, up = reply.client, reply.up["routing"]
        walk.net.bind(reply.up["params"], reply.up["buffers"])
        data = walk.whole.plan.train(k, 0, 0, "train")
        with walk.ctx(0).evaluating():
            out = walk.ctx(0).apply(data.stored(torch.arange(len(data)))[0])
        assert torch.equal(up["count"].long(), out["dispatched"].sum(1)) and up["tokens"].tolist() == [len(data)]
        assert torch.equal(walk.server["use"]["clients"][k], up["count"] / len(data))
        assert torch.allclose(walk.server["use"]["clients"][k].sum(1), torch.ones(2))
    assert not walk.server["use"]["clients"][2].any() and replies[0].up["params"].keys() == walk.server["params"].keys()


def test_sets_are_chosen_after_the_last_warm_round_also_for_those_who_sat_it_out():
    walk = Walk(warm_rounds=2)
    walk.step(0)
    assert not walk.held.any()
    walk.step(1)
    for k in (0, 1):
        assert torch.equal(walk.held[k], walk.method.choose(walk.server["use"]["clients"][k], [1, 1]))
    assert 2 <= int(walk.held[0].sum()) <= 4 and not walk.held[2].any()


def test_who_takes_part_later_begins_with_the_whole_model():
    walk = Walk()
    walk.step(0)
    assert walk.down(2).keys() == {"params", "buffers"} and "held" in walk.down(0)
    (first, second) = walk.step(0, 2)
    assert "routing" not in first.up and "routing" in second.up
    assert walk.held[2].any()


def test_a_client_whose_tokens_were_none_stays_without_a_set():
    walk = Walk()
    update = walk.update(0)
    nothing = {name: torch.zeros_like(tensor) for name, tensor in update.up["routing"].items()}
    reply = Reply(0, 1.0, {**update.up, "routing": nothing}, {})
    assert not walk.method.server_update(walk.server, [reply], walk.ctx(0))["held"]["clients"].any()


def test_a_set_stays_while_its_client_is_away():
    walk = Walk(recommend_every=0)
    walk.step(0, 1, 2)
    before = walk.held.clone()
    walk.step(1)
    walk.step(1)
    assert torch.equal(walk.held, before)


def test_experts_that_nobody_holds_stay_and_those_of_one_client_are_copied_bit_for_bit():
    walk = Walk(recommend_every=0)
    walk.hold("xx.. x...", ".x.. x...", "xx.. ..x.")
    old = walk.server["params"]
    replies = walk.step(0, 1, 2)
    new, sizes = walk.server["params"], [reply.weight for reply in replies]
    for layer, e in ((0, 2), (0, 3), (1, 1), (1, 3)):
        assert same(expert(new, walk, layer, e), expert(old, walk, layer, e))
    name = moe_layers(walk.net.module)[1].experts[2][0].name
    assert torch.equal(new[name][2], replies[2].up["params"][name][0])
    assert not torch.equal(new[name][2], old[name][2])
    name, firsts = moe_layers(walk.net.module)[0].gate[0], [replies[k].up["params"] for k in (0, 2)]
    mean = sum(sizes[k] * part[name][0].double() for k, part in zip((0, 2), firsts, strict=True)) / (
        sizes[0] + sizes[2]
    )
    torch.testing.assert_close(new[name][0].double(), mean, rtol=1e-6, atol=1e-7)
    mean = sum(s * r.up["params"]["head.weight"].double() for s, r in zip(sizes, replies, strict=True)) / sum(sizes)
    torch.testing.assert_close(new["head.weight"].double(), mean, rtol=1e-6, atol=1e-7)


def test_only_what_is_held_travels_and_bytes_are_affine_in_the_number_of_experts():
    walk = Walk()

    def sizes(held: str) -> tuple[int, int]:
        walk.hold(held, held, held)
        return nbytes(walk.down(0)), nbytes(walk.update(0).up)

    found = [sizes(held) for held in ("x... x...", "xx.. x...", "xx.. .x.x", "xxxx xxxx")]
    one = found[1][0] - found[0][0]
    per_expert = 4 * (8 * 8 + 8 + 8 * 8 + 8 + 8)  # two weights, two biases, a gate row; fp32
    assert one == per_expert
    assert [down - found[0][0] for down, _ in found] == [0, one, 2 * one, 6 * one]
    assert [up - found[0][1] for _, up in found] == [0, one, 2 * one, 6 * one]
    assert found[0][0] - found[0][1] == 8  # a byte per expert tells the client which it holds


def test_no_token_goes_outside_the_set_and_probabilities_inside_sum_to_one():
    walk = Walk()
    walk.hold("x.x. .xx.", "xxxx xxxx", "xxxx xxxx")
    down, ctx = walk.down(0), walk.ctx(0, 0)
    held = down["held"]["experts"]
    seen = []
    walk.net.module.register_forward_hook(lambda module, args, out: seen.append(out))
    data = walk.whole.plan.train(0, 0, 0, "train")
    walk.method.client_update(down, {}, data, ctx)
    walk.method.predict(down, {}, data.stored(torch.arange(20))[0], ctx)
    assert len(seen) > 2
    for out in seen:
        assert not out["dispatched"][~held[:, None].expand_as(out["dispatched"])].any()
        assert out["dispatched"].any(2).all()
        probs = out["routing"].exp()
        assert not probs[~held[:, None].expand_as(probs)].any()
        torch.testing.assert_close(probs.sum(2), torch.ones(probs.shape[:2]))


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.9, weight_decay=0.1), AdamW(weight_decay=0.1)], ids=repr)
def test_what_is_not_held_is_neither_read_nor_changed_in_training(optimizer):
    walk = Walk()
    walk.hold("x.x. .xx.", "xxxx xxxx", "xxxx xxxx")
    down, ctx = walk.down(0), walk.ctx(0, 0)
    held = down["held"]["experts"]
    local = replace(walk.method.local, optimizer=optimizer, clip_norm=1.0)
    zeros = whole_model(down, held, ctx)
    other = {**ctx.init_state()["params"]}
    filled = {n: torch.where(zeros["params"][n] != 0, zeros["params"][n], other[n]) for n in other}
    ends = []
    for params in (zeros["params"], filled):
        data = walk.whole.plan.train(0, 0, 0, "train")
        with restricted(ctx, held):
            ends.append(local({"params": params, "buffers": down["buffers"]}, data, ctx).params)
    parts = [held_part({"params": end, "buffers": {}}, held, ctx)["params"] for end in ends]
    assert same(parts[0].values(), parts[1].values())
    for layer, e in (~held).nonzero().tolist():
        assert not any(tensor.any() for tensor in expert(ends[0], walk, layer, e))
    assert not torch.equal(parts[0]["head.weight"], down["params"]["head.weight"])


def test_clients_predict_with_their_part_and_the_global_view_with_everything():
    walk = Walk()
    walk.hold("x... x...", "xxxx xxxx", "xxxx xxxx")
    x = walk.whole.plan.test(0).stored(torch.arange(40))[0]
    walk.net.bind(walk.server["params"], walk.server["buffers"])
    everything = walk.ctx(0).scores(x)
    for client, equal in ((None, True), (1, True), (0, False)):
        found = walk.method.predict(walk.down(client), {}, x, walk.ctx(0, client))
        assert torch.equal(found, everything) is equal
    allowed = torch.tensor([[True, False, False, False]] * 2)
    walk.net.bind(walk.server["params"], walk.server["buffers"])
    with walk.net.module.restricted(allowed):
        torch.testing.assert_close(walk.method.predict(walk.down(0), {}, x, walk.ctx(0, 0)), walk.ctx(0).scores(x))


@pytest.mark.parametrize(("every", "changes"), [(1, [True, True, True]), (2, [True, False, True]), (0, [False] * 3)])
def test_recommendations_come_at_their_rounds(monkeypatch, every, changes):
    def turned(use, held, top_k):
        return held.roll(1, 2), use

    monkeypatch.setattr("fedloom.methods.fedmoe.recommended", turned)
    walk, found = Walk(recommend_every=every), []
    walk.hold("x... xx..", "x... xx..", "x... xx..")
    walk.round = 1
    for _ in changes:
        before = walk.held.clone()
        walk.step(0, 1, 2)
        found.append(not torch.equal(walk.held, before))
    assert found == changes


def test_a_recommended_expert_comes_with_the_servers_values():
    walk = Walk(recommend_every=1)
    walk.hold("x... x...", "xx.. x...", "xx.. x...")
    walk.server["use"]["clients"][:] = torch.tensor([[0.1, 0.9, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    walk.step(0, 1, 2)
    assert walk.held[0].tolist() == [[False, True, False, False], [True, False, False, False]]
    name = moe_layers(walk.net.module)[0].experts[1][0].name
    assert torch.equal(walk.down(0)["params"][name][0], walk.server["params"][name][1])


def test_metrics_tell_how_many_experts_are_held_and_how_evenly_they_are_used():
    walk = Walk()
    (first,) = walk.step(0)
    assert first.metrics["held_experts"] == 8
    shares = first.up["routing"]["count"].double() / first.up["routing"]["count"].sum(1, keepdim=True)
    assert first.metrics["expert_entropy"] == pytest.approx(float(torch.special.entr(shares).sum(1).mean()), rel=1e-6)
    (second,) = walk.step(0)
    assert second.metrics["held_experts"] == int(walk.held[0].sum()) and "expert_entropy" not in second.metrics
    assert entropy(torch.tensor([[1.0, 1.0], [3.0, 0.0]])) == pytest.approx(0.5 * 0.693147, rel=1e-5)


def run(folder, name: str, **changes: Any):
    spec = changes.pop("spec", None)
    plan = {"num_stages": 2, "rounds": 2, "cohort": 0.75, **changes}
    return start(folder, experiment(name, spec=spec or expert_spec(), **plan), checkpoint_every=0)


def test_with_every_expert_held_it_is_fedavg(tmp_path):
    theirs = run(tmp_path / "avg", FEDAVG)
    assert run(tmp_path / "warm", FEDMOE, options={"warm_rounds": 9})["params_sha256"] == theirs["params_sha256"]
    plain = experiment(FEDMOE, spec=expert_spec(), num_stages=2, rounds=2, cohort=0.75)
    every = replace(plain.method, choose=lambda scores, top_k: torch.ones_like(scores, dtype=torch.bool))
    ours = start(tmp_path / "all", replace(plain, method=every, rebuild=None), checkpoint_every=0)
    assert ours["params_sha256"] == theirs["params_sha256"] and ours["bytes_down"] > theirs["bytes_down"]
    assert run(tmp_path / "ours", FEDMOE)["params_sha256"] != theirs["params_sha256"]


def test_a_run_tells_which_experts_the_clients_hold(tmp_path):
    summary = run(tmp_path / "run", FEDMOE)
    assert summary["rejected_updates"] == summary["failed_clients"] == 0
    held, overlap = json.loads((tmp_path / "run" / "facts.json").read_text())["tables"]
    assert held["title"] == "Experts held by the clients" and len(held["rows"]) == 4
    assert all(2 <= sum(row) <= 4 and min(row) >= 1 for row in held["values"])
    assert [row[k] for k, row in enumerate(overlap["values"])] == [1.0] * 4
    assert rows(tmp_path / "run")[-1]["train/held_experts"] <= 4


def test_every_upload_is_declared():
    walk = Walk()
    assert set(walk.update(0).up) == set(walk.method.reveals)
    walk.hold("x... x...", "x... x...", "x... x...")
    assert set(walk.update(0).up) == {"params", "buffers"}


def test_a_network_without_experts_is_refused_in_words():
    plain = experiment(FEDMOE, spec=BlobSpec(6))
    with pytest.raises(ConfigError, match="method 'fedmoe' needs a network with mixture-of-experts layers"):
        plain.method.init_server(plain.context(plain.net(), 0))


def test_nothing_that_comes_in_is_changed():
    walk = Walk(recommend_every=1)
    walk.step(0, 1, 2)
    before = digest(walk.server)
    server = walk.server
    walk.step(0, 1)
    assert digest(server) == before


def test_use_is_per_token_and_chosen_expert():
    layers = (SimpleNamespace(top_k=2), SimpleNamespace(top_k=1))
    ctx = SimpleNamespace(net=SimpleNamespace(module=SimpleNamespace(moe_layers=layers)))
    up = {"routing": {"count": torch.tensor([[6.0, 4.0], [3.0, 2.0]]), "tokens": torch.tensor([5.0])}}
    method = experiment(FEDMOE).method
    torch.testing.assert_close(method.use_of(Reply(0, 1.0, up, {}), ctx), torch.tensor([[0.6, 0.4], [0.6, 0.4]]))
