"""What a method tells of a finished run lies in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from fedloom.core import Batches, Context, Payload, Reply, Table, Update
from fedloom.engine.experiment import Experiment, Options
from fedloom.engine.facts import StoredStates
from fedloom.engine.folder import RunFolder
from fedloom.engine.store import ClientStore
from fedloom.methods.fedavg import FedAvg
from toys.federation import experiment
from toys.running import resume, start


@dataclass(frozen=True)
class Counting(FedAvg):
    """Clients count the rounds in which they took part."""

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        done = super().client_update(down, state, data, ctx)
        before = state["rounds"]["count"] if state else torch.zeros(())
        return done._replace(state={"rounds": {"count": before + 1}})

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        return {**server, **super().server_update(server, replies, ctx)}

    def facts(self, server: Payload, states: Mapping[int, Payload], ctx: Context) -> Sequence[Table]:
        torch.rand(())  # what a method draws here is its run's own
        counts = [[float(state["rounds"]["count"])] for state in states.values()]
        return [Table("rounds", ("client", ""), list(states), ["done"], counts, f"of {ctx.total_rounds}")]


def counting(**changes: object) -> Experiment:
    whole = experiment("fedloom.methods.fedavg:fedavg", **changes)
    return replace(whole, method=Counting(whole.method.local), rebuild=None)


@pytest.mark.usefixtures("no_global_draws")
def test_the_method_sees_the_server_and_every_clients_last_state(tmp_path: Path):
    start(tmp_path / "run", counting(cohort=0.5, rounds=3))
    (table,) = json.loads((tmp_path / "run" / "facts.json").read_text())["tables"]
    assert table["rows"] == sorted(table["rows"]) and set(table["rows"]) <= {0, 1, 2, 3}
    assert sum(count for (count,) in table["values"]) == 3 * 3 * 2, "a cohort of two in three rounds of three stages"
    assert (table["title"], table["axes"], table["note"]) == ("rounds", ["client", ""], "of 9")
    assert Table(**table).values == table["values"]


def test_a_run_that_is_resumed_at_its_end_tells_the_same(tmp_path: Path):
    start(tmp_path / "run", counting())
    told = (tmp_path / "run" / "facts.json").read_bytes()
    (tmp_path / "run" / "facts.json").unlink()
    resume(tmp_path / "run", counting())
    assert (tmp_path / "run" / "facts.json").read_bytes() == told


def test_a_method_without_facts_leaves_no_file(tmp_path: Path):
    start(tmp_path / "run", experiment("fedloom.methods.fedavg:fedavg"))
    assert not (tmp_path / "run" / "facts.json").exists()


def test_states_that_lie_elsewhere_are_not_shown(tmp_path: Path):
    store = ClientStore(tmp_path)
    store.save(2, "a", {"rounds": {"count": torch.tensor(5.0)}})
    states = StoredStates(store, {7: "a", 2: "a", 0: "a"})
    assert list(states) == [2] and len(states) == 1
    assert states[2]["rounds"]["count"] == 5 and 7 not in states


def test_over_a_grid_only_the_server_tells(tmp_path: Path):
    pytest.importorskip("flwr")
    from fedloom.engine.flower import inprocess

    with RunFolder.create(tmp_path / "run", {"toy": True}, {}) as folder:
        inprocess.run(counting(num_stages=1, rounds=1), Options(), folder, [], {"config": {}, "model": {}})
    (table,) = json.loads((tmp_path / "run" / "facts.json").read_text())["tables"]
    assert (table["rows"], table["values"], table["note"]) == ([], [], "of 1")
