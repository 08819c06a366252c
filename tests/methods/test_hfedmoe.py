"""HFedMoE: sets by importance, means weighted by it, gate rows after levelling, and where it is FedAvg."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedloom.core import Reply
from fedloom.core.moe import MoELayer, Slice, moe_layers
from fedloom.local import LocalSGD
from fedloom.local.expert_use import expert_importance
from fedloom.merge.held_experts import layout
from fedloom.merge.mean import weighted_mean
from fedloom.methods.hfedmoe import hfedmoe, levelled
from toys.federation import experiment, expert_spec
from toys.running import rows, start

HFEDMOE = "fedloom.methods.hfedmoe:hfedmoe"
E, H = 4, 5


def layer(score: str = "softmax") -> MoELayer:
    return MoELayer("l", tuple((Slice("up", (slice(e, e + 1),)),) for e in range(E)), ("gate",), 1, H, score)


def context(score: str = "softmax") -> Any:
    module = SimpleNamespace(moe_layers=(layer(score),))
    return SimpleNamespace(net=SimpleNamespace(module=module), global_round=9)


def model(seed: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=rng) for name, shape in (("gate", (E, H)), ("up", (E, 3)), ("rest", (2,)))
    }


def mask(text: str) -> torch.Tensor:
    return torch.tensor([[c == "x" for c in text]])


class Clients:
    """Replies of clients with these importances, weights and sets, and the merge of them."""

    def __init__(self, scores, weights, held=None, score: str = "softmax", weighting: Any = "importance"):
        self.ctx, self.old = context(score), model(0)
        self.params = [model(1 + k) for k in range(len(scores))]
        self.scores = [torch.tensor([found]) for found in scores]
        self.weights, self.held = weights, held or [mask("x" * E)] * len(scores)
        self.method = hfedmoe(local=LocalSGD(), weighting=weighting)

    def merged(self) -> dict[str, torch.Tensor]:
        where, replies = layout((layer(),), self.old), []
        for k, (params, score) in enumerate(zip(self.params, self.scores, strict=True)):
            up = {"params": where.cut(params, self.held[k]), "buffers": {}, "importance": {"score": score}}
            replies.append(Reply(k, self.weights[k], up, {}))
        server = {"params": self.old, "buffers": {}}
        return dict(self.method.merged(server, replies, self.held, self.ctx)["params"])


def test_equal_importance_and_every_expert_active_is_fedavg():
    clients = Clients([[0.25] * E] * 3, [1.0, 2.0, 5.0])
    expected = weighted_mean(clients.params, clients.weights, clients.old)
    for name, tensor in clients.merged().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


def test_experts_are_means_weighted_by_examples_times_importance():
    clients = Clients([[0.5, 0.5, 0.0, 0.0], [0.2, 0.0, 0.8, 0.0]], [10.0, 30.0])
    up, (first, second) = clients.merged()["up"], [params["up"] for params in clients.params]
    torch.testing.assert_close(up[0], (5 * first[0] + 6 * second[0]) / 11)
    assert torch.equal(up[1], first[1]) and torch.equal(up[2], second[2])
    torch.testing.assert_close(
        clients.merged()["rest"], 0.25 * clients.params[0]["rest"] + 0.75 * clients.params[1]["rest"]
    )


def test_inactive_experts_and_their_gate_rows_are_unchanged_bit_for_bit():
    clients = Clients([[0.5, 0.5, 0.0, 0.0], [0.2, 0.0, 0.8, 0.0]], [10.0, 30.0], [mask("xx.."), mask("x.x.")])
    found = clients.merged()
    assert torch.equal(found["up"][3], clients.old["up"][3]) and torch.equal(found["gate"][3], clients.old["gate"][3])


def test_gate_rows_are_centred_and_get_the_mean_row_back():
    """The equation of the specification, with every row held."""
    shares, sizes = [[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]], [3.0, 1.0, 6.0]
    clients = Clients(shares, sizes)
    gates = torch.stack([params["gate"] for params in clients.params]).double()
    weights = torch.tensor(sizes).double()[:, None] * torch.tensor(shares).double()
    centred, means = gates - gates.mean(1, keepdim=True), gates.mean(1)
    expected = (weights[..., None] * centred).sum(0) / weights.sum(0)[:, None]
    expected += (torch.tensor(sizes).double()[:, None] * means).sum(0) / sum(sizes)
    torch.testing.assert_close(clients.merged()["gate"].double(), expected, rtol=1e-6, atol=1e-6)


def test_a_vector_added_to_all_rows_of_a_clients_gate_changes_no_routing():
    clients, hidden = Clients([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]], [1.0, 2.0]), torch.randn(7, H)
    before = (hidden @ clients.merged()["gate"].T).softmax(1)
    clients.params[1]["gate"] = clients.params[1]["gate"] + torch.randn(H)
    torch.testing.assert_close((hidden @ clients.merged()["gate"].T).softmax(1), before, rtol=0, atol=1e-5)


def test_rows_of_different_sets_are_levelled_against_the_servers():
    """A client that only added a vector to the rows that it holds leaves differences between these as they were."""
    clients = Clients([[0.9, 0.1, 0.0, 0.0], [0.0, 0.3, 0.7, 0.0]], [1.0, 1.0], [mask("xx.."), mask(".xx.")])
    old, shift = clients.old["gate"], torch.randn(2, H)
    for params, vector in zip(clients.params, shift, strict=True):
        params["gate"] = old + vector
    torch.testing.assert_close(clients.merged()["gate"][:3], old[:3] + shift.mean(0), rtol=0, atol=1e-5)


def test_sigmoid_gates_are_averaged_as_they_are():
    clients = Clients([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]], [1.0, 1.0], score="sigmoid")
    first, second = (params["gate"] for params in clients.params)
    torch.testing.assert_close(clients.merged()["gate"][0], (first[0] + 7 * second[0]) / 8)


def test_levelling_leaves_everything_else_of_a_reply_alone():
    clients = Clients([[0.5] * E], [1.0])
    reply = Reply(0, 1.0, {"params": clients.params[0], "buffers": {}}, {})
    (found,) = levelled([reply], clients.old, ["gate"], [torch.ones(E, dtype=torch.bool)])
    assert found.up["params"]["up"] is clients.params[0]["up"] and set(found.up["params"]) == {"gate", "up", "rest"}
    torch.testing.assert_close(found.up["params"]["gate"], clients.params[0]["gate"])


def test_by_samples_every_active_expert_counts_by_its_clients_examples():
    clients = Clients([[0.9, 0.1, 0.0, 0.0], [0.2, 0.0, 0.8, 0.0]], [10.0, 30.0], weighting="samples")
    up, (first, second) = clients.merged()["up"], [params["up"] for params in clients.params]
    torch.testing.assert_close(up[0], 0.25 * first[0] + 0.75 * second[0])
    assert torch.equal(up[1], first[1]) and torch.equal(up[3], clients.old["up"][3])


@pytest.mark.parametrize(
    ("budget", "expected"), [(0.25, [[0], [1]]), (0.5, [[0], [0, 1, 2]]), (1.0, [[0, 2], [0, 1, 2, 3]])]
)
def test_the_most_important_experts_fill_the_budget(budget, expected):
    scores = torch.tensor([[0.9, 0.0, 0.1, 0.0], [0.2, 0.5, 0.2, 0.1]])
    chosen = hfedmoe(local=LocalSGD(), budget=budget).choose(scores, [1, 1])
    assert [row.nonzero().flatten().tolist() for row in chosen] == expected


def test_importance_is_measured_in_every_round_with_the_trained_model():
    whole = experiment(HFEDMOE, num_clients=2, num_stages=1)
    net, method = whole.net(), whole.method
    server = method.init_server(whole.context(net, 0))
    for r in range(2):
        ctx, data = whole.context(net, 0, round=r, client=0), whole.plan.train(0, 0, r, "train")
        down = method.send(server, 0, ctx)
        assert ("held" in down) is (r == 1)
        up = method.client_update(down, {}, data, ctx).up
        score = up["importance"]["score"]
        torch.testing.assert_close(score.sum(1), torch.ones(2))
        if r == 0:
            net.bind(up["params"], up["buffers"])
            torch.testing.assert_close(score, expert_importance(ctx, data))
            server = method.server_update(server, [Reply(0, 3.0, up, {})], ctx)
            assert torch.equal(server["held"]["clients"][0], method.choose(score, [1, 1]))
        else:
            assert not score[~down["held"]["experts"]].any()
    assert set(up) == set(method.reveals)
    assert moe_layers(net.module)[0].num_experts == 4


def test_a_run_gives_every_client_half_of_the_experts_at_most(tmp_path):
    plan = {"num_stages": 1, "rounds": 3, "cohort": 1.0}
    summary = start(tmp_path / "run", experiment(HFEDMOE, spec=expert_spec(), **plan))
    assert summary["rejected_updates"] == summary["failed_clients"] == 0
    held = [row["train/held_experts"] for row in rows(tmp_path / "run")]
    assert held[0] == 8 and 2 <= held[1] <= 4 and held[2] == held[1]
