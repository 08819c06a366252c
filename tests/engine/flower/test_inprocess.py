"""Whole runs over nodes in this process: the folder, the bytes on the wire, memory, and what resuming finds."""

from __future__ import annotations

import json
import shutil
import signal
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Message

from fedloom.core import CheckpointError, ConfigError, Interrupted
from fedloom.core.payload import digest
from fedloom.engine.experiment import Options
from fedloom.engine.files import load_payload
from fedloom.engine.flower import inprocess
from fedloom.engine.flower.wire import arrays_of
from fedloom.engine.folder import RunFolder
from fedloom.engine.start import carry_out
from toys import grids
from toys.federation import experiment
from toys.grids import Tapped, at
from toys.running import Notes, resume, rows
from toys.running import start as start_serial

FEDAVG, FEDFMX, TALLY = "fedloom.methods.fedavg:fedavg", "fedloom.methods.fedfmx:fedfmx", "toys.tally:tally"


def start(path: Path, whole: Any, observers: Any = (), **options: Any) -> dict[str, Any]:
    """A new run on the engine of the configuration `engine: flower`."""
    with RunFolder.create(path, {"toy": True}, {}) as folder:
        return carry_out(whole, Options(engine="flower", runtime="grid", **options), folder, observers, grids.CARD)


def states(path: Path) -> dict[str, list[str]]:
    """Versions by client, as they lie on the nodes."""
    found = {folder.name: sorted(f.stem for f in folder.iterdir()) for folder in path.glob("nodes/*/*/clients/*")}
    return dict(sorted(found.items()))


def word(path: Path) -> str:
    return json.loads((path / "federation.json").read_text())["run"]


def test_a_run_leaves_what_a_run_leaves(tmp_path: Path):
    notes = Notes()
    path = tmp_path / "run"
    summary = start(path, experiment(TALLY), [notes])
    found = {entry.name for entry in path.iterdir()} - {".lock", "log.txt"}
    assert found == {
        ".spool", "accuracy_matrix.csv", "checkpoints", "config.yaml", "env.json", "federation.json", "metrics.jsonl",
        "model", "nodes", "traffic.json",
    }  # fmt: skip
    assert not list((path / ".spool").iterdir()) and not list(path.rglob("*.tmp")) and not list(path.rglob("at-work*"))
    assert {entry.name for entry in (path / "nodes").iterdir()} == {"0", "1"}
    assert notes.notes == [] and notes.info["clients"] == 4 and (2, 2) in notes.clients
    assert summary["failed_clients"] == 0
    assert digest(load_payload(path / "model" / "model.safetensors"))


@pytest.mark.parametrize("name", [FEDAVG, FEDFMX, TALLY, "toys.slim:slim"])
def test_through_flowers_own_encoding_the_bits_are_the_same(name: str, tmp_path: Path):
    whole = experiment(name)
    found = grids.start(tmp_path / "grid", whole, grids.grid(tmp_path / "grid", whole, nodes=3, kind=grids.Carried))
    one = start_serial(tmp_path / "serial", whole)
    assert [found[key] for key in ("state_sha256", "params_sha256")] == [one["state_sha256"], one["params_sha256"]]
    assert rows(tmp_path / "grid") == rows(tmp_path / "serial")
    assert rows(tmp_path / "grid", "stage") == rows(tmp_path / "serial", "stage")


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_any_number_of_clients(clients: int, tmp_path: Path):
    plan = {"num_clients": clients, "cohort": 1.0, "num_stages": 1}
    one = start_serial(tmp_path / "serial", experiment(TALLY, **plan))
    two = start(tmp_path / "grid", experiment(TALLY, **plan))
    assert two["state_sha256"] == one["state_sha256"]
    assert len(list((tmp_path / "grid" / "nodes").iterdir())) == min(2, clients)


def test_personal_models_are_left_on_the_nodes(tmp_path: Path):
    path, whole = tmp_path / "run", experiment(TALLY, cohort=1.0)
    start(path, whole)
    last = json.loads((sorted((path / "checkpoints").iterdir())[-1] / "meta.json").read_text())["progress"]["versions"]
    for client, (node, version) in enumerate(zip((0, 0, 1, 1), last.values(), strict=True)):
        folder = path / "nodes" / str(node) / word(path) / "personal" / str(client)
        state = load_payload(
            path / "nodes" / str(node) / word(path) / "clients" / str(client) / f"{version}.safetensors"
        )
        assert digest(load_payload(folder / "model" / "state.safetensors")) == digest(state)
        view = load_payload(folder / "model" / "model.safetensors")
        assert digest(view) == digest(load_payload(path / "model" / "model.safetensors"))
        assert json.loads((folder / "model" / "model.json").read_text())["client"] == client
    start(tmp_path / "not", whole, personal=False)
    start(tmp_path / "same", experiment(FEDAVG))
    assert not list((tmp_path / "not").glob("nodes/*/*/personal")), "nobody asked for them"
    assert not list((tmp_path / "same").glob("nodes/*/*/personal")), "every view is the global one"


def test_clients_that_are_sent_other_tensors_get_their_own_view(tmp_path: Path):
    path, whole = tmp_path / "run", experiment("toys.slim:slim", cohort=1.0)
    start(path, whole)
    widths = {
        folder.name: len(load_payload(folder / "model" / "model.safetensors")["params"]["body.bias"])
        for folder in path.glob("nodes/*/*/personal/*")
    }
    assert widths == {"0": 4, "1": 4, "3": 4}, "client 2 has the whole network"


@pytest.mark.parametrize(("every", "most"), [(1, 3), (3, 4), (0, 2)])
def test_old_states_do_not_pile_up_on_the_nodes(every: int, most: int, tmp_path: Path):
    """Those that a checkpoint names, the one that a client began from, and the newest."""
    path, counts = tmp_path / "run", []

    class Counting(Notes):
        def round_done(self, row: Mapping[str, Any]) -> None:
            counts.append(max((len(versions) for versions in states(path).values()), default=0))

    whole = experiment(TALLY, rounds=12, num_stages=1, cohort=1.0)
    start(path, whole, [Counting()], checkpoint_every=every)
    assert len(counts) == 13 and max(counts) <= most and counts[-1] <= most
    assert set(states(path)) == {"0", "1", "2", "3"}


def test_a_run_that_starts_over_takes_no_states_of_the_run_before(tmp_path: Path):
    path, whole = tmp_path / "run", experiment(TALLY)
    first, before = start(path, whole), word(tmp_path / "run")
    shutil.rmtree(path / "checkpoints")
    with RunFolder.open(path) as folder:
        again = inprocess.run(whole, Options(), folder, [], grids.CARD)
    assert word(path) != before and again["state_sha256"] == first["state_sha256"]
    assert again["failed_clients"] == 0


def test_a_damaged_newest_checkpoint_leaves_the_states_of_the_one_before(tmp_path: Path):
    """Also when the run had already been resumed, and gone on, before the newest was found to be damaged."""

    class Stopping(Tapped):
        def held(self, node: int, asked: Mapping[str, Any]) -> bool:
            if at(asked, 1, 1):
                signal.raise_signal(signal.SIGINT)
            return False

    path, whole = tmp_path / "run", experiment(TALLY, cohort=1.0)
    reference = start(tmp_path / "whole", whole)
    for go in (grids.start, grids.resume):
        with pytest.raises(Interrupted):
            go(path, whole, grids.grid(path, whole, kind=Stopping))
    newest = sorted((path / "checkpoints").iterdir())[-1]
    (newest / "meta.json").write_text("{")
    notes = Notes()
    again = grids.resume(path, whole, grids.grid(path, whole), [notes])
    assert any("is damaged" in note for note in notes.notes)
    assert again["state_sha256"] == reference["state_sha256"] and again["failed_clients"] == 0


def test_a_run_cannot_change_its_engine_and_keep_its_states(tmp_path: Path):
    """States lie elsewhere: what the serial engine does not find is told, not made up."""
    path, whole = tmp_path / "run", experiment(TALLY)
    start(path, whole)
    with pytest.raises(CheckpointError, match="every checkpoint of the run is damaged"):
        resume(path, whole)


def test_ctrl_c_ends_after_the_node_that_is_at_work(tmp_path: Path):
    path, asked = tmp_path / "run", []

    class Interrupting(Tapped):
        def held(self, node: int, said: Mapping[str, Any]) -> bool:
            if at(said, 1, 0):
                asked.append(node)
                signal.raise_signal(signal.SIGINT)
            return False

    whole = experiment(TALLY, cohort=1.0)
    with pytest.raises(Interrupted):
        grids.start(path, whole, grids.grid(path, whole, kind=Interrupting))
    assert asked == [1], "the second node was not begun"
    again = grids.resume(path, whole, grids.grid(path, whole))
    assert again["state_sha256"] == start_serial(tmp_path / "whole", whole)["state_sha256"]


def traffic(folder: Path) -> dict[str, int]:
    return json.loads((folder / "traffic.json").read_text())["train"]


@pytest.mark.parametrize("name", [FEDAVG, FEDFMX, "toys.stacked:stacked"])
def test_what_crosses_the_wire_is_what_the_summary_says(name: str, tmp_path: Path):
    """With a client a node, to the byte; what frames it stays below 5 KiB a message on these small networks.

    In the first stages only the rows of the classes seen so far travel.
    """
    whole = experiment(name, cohort=1.0)
    summary = grids.start(tmp_path / "run", whole, grids.grid(tmp_path / "run", whole, nodes=4))
    found = traffic(tmp_path / "run")
    assert found["tensor_bytes_sent"] == summary["bytes_down"]
    assert found["tensor_bytes_received"] == summary["bytes_up"]
    assert found["messages_sent"] == found["messages_received"] == 4 * summary["rounds"]
    framing = found["framing_bytes_sent"] + found["framing_bytes_received"]
    assert 0 < framing < 5 * 1024 * 2 * found["messages_sent"]
    again = grids.start(tmp_path / "two", whole, grids.grid(tmp_path / "two", whole))
    assert again["bytes_down"] == summary["bytes_down"]
    two = traffic(tmp_path / "two")
    assert two["tensor_bytes_sent"] == found["tensor_bytes_sent"] // 2, "clients of one node are sent it once"
    assert two["tensor_bytes_received"] == found["tensor_bytes_received"]


def wide(size: int, clients: int = 4, rounds: int = 1) -> Any:
    options = {"values": [1.0] * clients, "size": size}
    plan = {"num_stages": 1, "num_classes": 2, "per_class": 4, "num_clients": clients, "rounds": rounds, "cohort": 1.0}
    return experiment("toys.scripted:drifting", options=options, **plan)


def test_for_large_models_it_is_within_two_per_cent(tmp_path: Path):
    whole = wide(250_000, rounds=2)
    grid = grids.grid(tmp_path / "run", whole, nodes=4)
    summary = grids.start(tmp_path / "run", whole, grid)
    found = traffic(tmp_path / "run")
    for way, counted in (("sent", "bytes_down"), ("received", "bytes_up")):
        everything = found[f"tensor_bytes_{way}"] + found[f"framing_bytes_{way}"]
        assert 1.0 <= everything / summary[counted] < 1.02


def test_the_server_holds_the_reply_of_one_node_at_a_time(tmp_path: Path):
    alive: list[Any] = []

    class Watching(Tapped):
        most = 0

        def held(self, node: int, asked: Mapping[str, Any]) -> bool:
            Watching.most = max(Watching.most, sum(watched() is not None for watched in alive))
            return False

        def answered(self, node: int, asked: Mapping[str, Any], reply: Message) -> list[Message]:
            alive.extend(weakref.ref(a) for record in arrays_of(reply.content).values() for a in record.values())
            return [reply]

    whole = wide(1000, clients=6, rounds=3)
    grids.start(tmp_path / "run", whole, grids.grid(tmp_path / "run", whole, nodes=6, kind=Watching))
    assert len(alive) == 18 and Watching.most == 0, "a reply was still held when the next one was made"


def test_letters_share_what_they_have_in_common(tmp_path: Path):
    seen: list[bytes] = []

    class Watching(Tapped):
        def sent(self, node: int, asked: Mapping[str, Any], message: Message) -> None:
            seen.extend(a.data for record in arrays_of(message.content).values() for a in record.values())

    whole = wide(1000)
    grids.start(tmp_path / "run", whole, grids.grid(tmp_path / "run", whole, nodes=4, kind=Watching))
    assert len(seen) == 4 and len({id(data) for data in seen}) == 1


def test_the_number_of_threads_is_that_of_the_experiment(tmp_path: Path):
    before, seen = torch.get_num_threads(), set()

    class Watching(Notes):
        def client_done(self, done: int, total: int) -> None:
            seen.add(torch.get_num_threads())

    start(tmp_path / "run", experiment(FEDAVG), [Watching()])
    assert seen == {1} and torch.get_num_threads() == before


def test_a_deployment_is_not_started_from_here(tmp_path: Path):
    with RunFolder.create(tmp_path / "run", {}, {}) as folder, pytest.raises(ConfigError, match="`flwr run`"):
        carry_out(experiment(FEDAVG), Options(engine="flower", runtime="deployment"), folder, [], grids.CARD)


def test_rounds_of_a_grid_are_told_as_those_of_a_serial_run(tmp_path: Path):
    one, two = Notes(), Notes()
    start_serial(tmp_path / "serial", experiment(FEDAVG, cohort=1.0), [one])
    start(tmp_path / "grid", experiment(FEDAVG, cohort=1.0), [two])
    assert one.clients == two.clients and one.info == two.info
    assert rows(tmp_path / "serial") == rows(tmp_path / "grid")
