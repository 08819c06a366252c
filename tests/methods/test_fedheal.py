"""FedHEAL: its weights and masks in numbers, against a brute force, and where it is FedAvg."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedloom.core import Reply
from fedloom.engine.checkpoint import newest
from fedloom.local import LocalSGD
from fedloom.methods.fedheal import RELEASE, fedheal, history_of
from toys.federation import experiment
from toys.running import start

HEAL, AVG = "fedloom.methods.fedheal:fedheal", "fedloom.methods.fedavg:fedavg"


def heal(**options: Any):
    return fedheal(local=LocalSGD(), **options)


def context(clients: int = 2, t: int = 0, rows: Mapping[str, int] | None = None, seen: tuple[int, ...] = (0, 1, 2)):
    return SimpleNamespace(
        num_clients=clients, num_classes=3, class_rows=rows or {}, global_round=t, stage=SimpleNamespace(seen=seen)
    )


def begin(method, params, buffers=None, **changes: Any):
    """The server's state with these tensors."""
    ctx = context(**changes)
    ctx.init_state = lambda: {"params": params, "buffers": buffers or {}}
    return method.init_server(ctx)


def moved(server, client: int, buffers=None, weight: float = 1.0, **update: Any) -> Reply:
    """A reply whose parameters are theta - u; weight: examples, which do not matter."""
    params = {name: value - torch.tensor(update[name]) for name, value in server["params"].items()}
    return Reply(client, weight, {"params": params, "buffers": buffers or {}}, {})


def values(server, name: str = "w") -> list[float]:
    return server["params"][name].tolist()


def test_two_rounds_of_two_clients_in_numbers():
    method = heal()
    server = begin(method, {"w": torch.zeros(1)})
    server = method.server_update(
        server, [moved(server, 0, w=[3.0], weight=90.0), moved(server, 1, w=[1.0])], context()
    )
    assert server["clients"]["step"].tolist() == pytest.approx([0.3, 0.1])
    assert server["clients"]["weight"].tolist() == pytest.approx([0.8, 0.6])
    first = -(0.8 * 3 + 0.6 * 1) / 1.4  # used .5714 and .4286
    assert values(server) == pytest.approx([first])
    server = method.server_update(server, [moved(server, 0, w=[1.0]), moved(server, 1, w=[1.0])], context(t=1))
    assert server["clients"]["step"].tolist() == pytest.approx([0.38, 0.26])
    assert server["clients"]["weight"].tolist() == pytest.approx([1.18, 0.86])
    assert values(server) == pytest.approx([first - 1.0])


def test_an_entry_that_everybody_masks_stays_and_one_that_one_client_keeps_takes_its_whole_update():
    method = heal()
    server = begin(method, {"w": torch.tensor([7.0, 7.0, 7.0])})
    for t in range(2):
        server = method.server_update(server, [moved(server, i, w=[1.0, 1.0, 1.0]) for i in (0, 1)], context(t=t))
    before = values(server)
    replies = [moved(server, 0, w=[-2.0, -2.0, 2.0]), moved(server, 1, w=[-2.0, 5.0, 2.0])]
    after = method.server_update(server, replies, context(t=2))
    assert values(after)[0] == before[0]
    assert values(after)[1:] == [before[1] - 5.0, before[2] - 2.0]
    # masked entries are not in the distance: 2 against ||(5, 2)||
    distances = torch.tensor([2.0, 29.0**0.5])
    expected = 0.6 * server["clients"]["step"] + 0.4 * distances / distances.sum()
    torch.testing.assert_close(after["clients"]["step"], expected.double(), atol=1e-7, rtol=0)


@pytest.mark.parametrize("history", ["own", "round"])
def test_against_a_brute_force_with_clients_that_stay_away(history: str):
    rng = torch.Generator().manual_seed(3)
    method, n = heal(history=history), 4
    server = begin(method, {"a": torch.randn(3, 2, generator=rng), "b": torch.randn(4, generator=rng)}, clients=n)
    flat = torch.cat([t.flatten() for t in server["params"].values()]).double()
    p, step, h, taken = [1 / n] * n, [0.0] * n, {}, [0] * n
    for t, cohort in enumerate([(0, 1), (1, 2, 3), (0, 1, 2, 3), (0, 3), (1, 2), (0, 1, 2, 3), (2, 3)]):
        updates = {i: torch.randn(10, generator=rng) for i in cohort}
        replies = [moved(server, i, a=u[:6].view(3, 2).tolist(), b=u[6:].tolist()) for i, u in updates.items()]
        server = method.server_update(server, replies, context(n, t))
        masks, d = {}, {}
        for i, u in updates.items():
            past = h.get(i, [0.0] * 10)
            agreement = [past[k] if u[k] >= 0 else 1 - past[k] for k in range(10)]
            masks[i] = torch.tensor([float(taken[i] == 0 or c > 0.3) for c in agreement])
            span = taken[i] if history == "own" or taken[i] == 0 else t
            h[i] = [(past[k] * span + float(u[k] >= 0)) / (span + 1) for k in range(10)]
            d[i] = float((masks[i] * u)[:6].norm() + (masks[i] * u)[6:].norm())
            taken[i] += 1
        for i in cohort:
            step[i] = 0.6 * step[i] + 0.4 * len(cohort) / n * d[i] / sum(d.values())
            p[i] += step[i]
        for k in range(10):
            total = sum(p[i] * float(masks[i][k]) for i in cohort)
            if total > 0:
                flat[k] -= sum(p[i] * float(masks[i][k]) * float(updates[i][k]) for i in cohort) / total
        got = torch.cat([tensor.flatten() for tensor in server["params"].values()])
        torch.testing.assert_close(got, flat.float(), atol=1e-5, rtol=1e-5)
        assert server["clients"]["weight"].tolist() == pytest.approx(p, abs=1e-6)
        assert server["clients"]["rounds"].tolist() == taken


@pytest.mark.parametrize(("history", "share"), [("own", 0.5), ("round", 0.75)])
def test_a_client_that_was_away_keeps_its_history_weight_and_step(history: str, share: float):
    method = heal(history=history)
    server = begin(method, {"w": torch.zeros(1)})
    server = method.server_update(server, [moved(server, 0, w=[1.0])], context(t=0))
    kept = server[history_of(0)]["w"]
    assert history_of(1) not in server
    for t in (1, 2):
        after = method.server_update(server, [moved(server, 1, w=[1.0])], context(t=t))
        assert after[history_of(0)]["w"] is kept
        assert after["clients"]["weight"][0] == server["clients"]["weight"][0]
        assert after["clients"]["step"][0] == server["clients"]["step"][0]
        server = after
    server = method.server_update(server, [moved(server, 0, w=[-1.0])], context(t=3))
    assert float(server[history_of(0)]["w"]) == share


def test_a_class_that_arrives_late_is_kept_whole_in_its_first_round_with_a_client():
    method, rows = heal(), {"w": 0}
    server = begin(method, {"w": torch.zeros(3)}, rows=rows)
    for t in range(3):
        replies = [moved(server, i, w=[1.0, 1.0, 0.0]) for i in (0, 1)]
        server = method.server_update(server, replies, context(t=t, rows=rows, seen=(0, 1)))
    assert values(server)[2] == 0.0
    before = values(server)
    replies = [moved(server, i, w=[-1.0, 1.0, -1.0]) for i in (0, 1)]
    server = method.server_update(server, replies, context(t=3, rows=rows))
    assert values(server) == [before[0], before[1] - 1.0, 1.0]
    assert server["clients"]["class_rounds"].tolist() == [[4, 4, 1]] * 2
    assert server[history_of(0)]["w"].tolist() == [0.75, 1.0, 0.0]


def test_buffers_are_averaged_with_the_weights_or_masked_like_parameters():
    old = {"mean": torch.tensor([4.0]), "count": torch.tensor(10)}
    sent = [
        {"mean": torch.tensor([1.0]), "count": torch.tensor(12)},
        {"mean": torch.tensor([8.0]), "count": old["count"]},
    ]
    for buffers, expected in (("mean", (0.8 * 1 + 0.6 * 8) / 1.4), ("masked", 1.0), ("frozen", 4.0)):
        method = heal(buffers=buffers)
        server = begin(method, {"w": torch.zeros(1)}, dict(old))
        server[history_of(1)] = {"w": torch.ones(1), "mean": torch.ones(1), "count": torch.tensor(1.0)}
        server["clients"]["rounds"][1] = 1
        replies = [moved(server, 0, sent[0], w=[3.0]), moved(server, 1, sent[1], w=[1.0])]
        after = method.server_update(server, replies, context(t=1))
        assert float(after["buffers"]["mean"]) == pytest.approx(expected)
        assert after["buffers"]["count"].dtype == torch.int64
        assert after["clients"]["weight"].tolist() == pytest.approx([0.8, 0.6])  # distances are of parameters alone
        assert set(after[history_of(0)]) == ({"w", "mean", "count"} if buffers == "masked" else {"w"})


@pytest.mark.parametrize("buffers", ["mean", "masked", "pooled", "frozen"])
def test_without_masks_and_diversity_it_is_uniform_fedavg(buffers: str, tmp_path: Path):
    neither = experiment(HEAL, options={"tau": -1.0, "beta": 0.0, "buffers": buffers})
    plain = {"uniform": True, "buffers": "mean" if buffers == "masked" else buffers}
    whole = start(tmp_path / "whole", experiment(HEAL, options={"buffers": buffers}))
    ours, theirs = start(tmp_path / "ours", neither), start(tmp_path / "avg", experiment(AVG, options=plain))
    assert ours["params_sha256"] == theirs["params_sha256"] != whole["params_sha256"]
    assert (ours["bytes_up"], ours["bytes_down"]) == (theirs["bytes_up"], theirs["bytes_down"])


def test_histories_hold_shares_of_the_rounds_that_each_client_took_part_in(tmp_path: Path):
    start(tmp_path / "run", experiment(HEAL, cohort=0.5, num_stages=1, rounds=5))
    server, progress = newest(tmp_path / "run")
    rounds = server["clients"]["rounds"].tolist()
    assert sum(rounds) == 10 and sorted(progress.served) == [i for i, n in enumerate(rounds) if n]
    for client, n in enumerate(rounds):
        for h in server.get(history_of(client), {}).values():
            assert h.dtype == torch.float32
            torch.testing.assert_close((h * n).round() / n, h)


class Counted(Mapping[str, torch.Tensor]):
    """A lazy tree that makes its tensors when asked; `alive` holds those of all trees that somebody still has."""

    alive: weakref.WeakSet = weakref.WeakSet()
    most = 0

    def __init__(self, value: float):
        self.value = value

    def __getitem__(self, name: str) -> torch.Tensor:
        made = torch.full((1000,), self.value)
        Counted.alive.add(made)
        Counted.most = max(Counted.most, len(Counted.alive))
        return made

    def __iter__(self):
        return iter(["a", "b", "c"])

    def __len__(self) -> int:
        return 3


def test_the_server_holds_few_tensors_of_replies_however_many_clients_answer():
    method = heal()
    server = begin(method, {name: torch.zeros(1000) for name in "abc"}, clients=30)
    replies = [Reply(i, 1.0, {"params": Counted(float(i)), "buffers": {}}, {}) for i in range(30)]
    after = method.server_update(server, replies, context(30))
    assert 0 < Counted.most <= 3
    weight = after["clients"]["weight"]
    assert values(after, "a")[0] == pytest.approx(float((weight * torch.arange(30)).sum() / weight.sum()), rel=1e-6)


def test_the_release_s_reading_says_so():
    with pytest.warns(UserWarning, match=r"follows the public code.*rounds of the run.*buffers are masked"):
        heal(**RELEASE)
    heal(history="round")
    heal(buffers="masked")
