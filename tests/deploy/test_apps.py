"""The apps of an app folder, over a grid in this process."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fedloom
from fedloom import lifecycle
from fedloom.config import resolve
from fedloom.core import CheckpointError, ConfigError, Interrupted, RunError

pytest.importorskip("flwr")

from fedloom.deploy.apps import Hosts, node_of, serve
from fedloom.deploy.events import Follower
from fedloom.deploy.flatten import Deployment, run_config
from fedloom.deploy.folder import deployed
from fedloom.engine.flower.client import client_app
from fedloom.engine.flower.inprocess import InProcessGrid
from test_api import DIGITS
from toys.running import Notes

METHODS = ["fedavg", "fedprox", "fedfmx", "toys.tally:tally"]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)


def flat(tree: Any, **deployment: Any) -> dict[str, Any]:
    return run_config(deployed(resolve(tree)), Deployment(**deployment))


def federation(config: Any, *shares: str, root: Path, **given: Any) -> InProcessGrid:
    """A grid of the client app's nodes, one per share of the clients."""
    apps = {}
    for k, clients in enumerate(shares):
        context = SimpleNamespace(
            run_config=config, node_config={"clients": clients, "state-root": str(root / str(k)), **given}
        )
        hosts = Hosts()
        apps[k + 1] = client_app(functools.partial(lambda of, context, _: of(context), hosts, context))
    return InProcessGrid(apps)


@pytest.mark.parametrize("method", METHODS)
def test_a_deployed_run_equals_the_serial_one(method: str, tmp_path: Path) -> None:
    tree = {**DIGITS, "partition": {"kind": "dirichlet", "clients": 4}, "method": {"name": method}}
    serial = fedloom.run(tree, out=tmp_path / "serial")
    config = flat(tree, out=str(tmp_path / "deployed"), events=str(tmp_path / "events"))
    folder = serve(federation(config, "0,3", "1-2", root=tmp_path / "nodes"), config)
    found = fedloom.load_run(folder)
    for key in ("state_sha256", "params_sha256", "accuracy_matrix", "bytes_up", "bytes_down", "final_accuracy"):
        assert found.summary[key] == serial.summary[key], key
    assert found.summary["engine"] == "flower"
    heard = Notes()
    follower = Follower(tmp_path / "events", [heard])
    follower.look()
    assert follower.ended and follower.error is None and follower.folder == folder
    assert heard.info["clients"] == 4 and len(heard.clients) >= 4 * 2
    configs = {r.folder: json.loads((r.folder / "env.json").read_text())["config_hash"] for r in (serial, found)}
    assert len(set(configs.values())) == 1


def test_a_run_that_is_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    tree = {**DIGITS, "training": {"rounds": 3}, "method": {"name": "toys.tally:tally"}}
    whole = fedloom.run(tree, out=tmp_path / "whole").summary["state_sha256"]
    first = flat(tree, out=str(tmp_path / "run"), events=str(tmp_path / "events"))
    nodes = functools.partial(federation, root=tmp_path / "nodes")
    (tmp_path / "events.stop").touch()
    with pytest.raises(Interrupted, match=r"continue through Flower with run.resume=true and run.out='.*run'"):
        serve(nodes(first, "0", "1"), first)
    follower = Follower(tmp_path / "events", [])
    assert follower.look() and isinstance(follower.error, Interrupted)
    again = flat(tree, out=str(tmp_path / "run"), resume=True)
    other = flat({**tree, "seed": 1}, out=str(tmp_path / "run"), resume=True)
    with pytest.raises(CheckpointError, match=r"seed was 0 when the run in .* began, and is 1 now; give the same keys"):
        serve(nodes(other, "0", "1"), other)
    serve(nodes(again, "0", "1"), again)
    assert fedloom.load_run(tmp_path / "run").summary["state_sha256"] == whole
    with pytest.raises(ConfigError, match="is done; nothing is left to continue"):
        serve(nodes(again, "0", "1"), again)
    nowhere = flat(tree, resume=True)
    with pytest.raises(ConfigError, match=r"run\.resume is true, but run.out is empty"):
        serve(nodes(nowhere, "0", "1"), nowhere)


def test_what_ends_a_run_is_printed_recorded_and_raised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {**flat(DIGITS, events=str(tmp_path / "events")), "training.rounds": 0}
    with pytest.raises(ConfigError, match=r"training\.rounds must be at least 1, got 0"):
        serve(federation(config, root=tmp_path), config)
    follower = Follower(tmp_path / "events", [])
    follower.look()
    assert isinstance(follower.error, ConfigError) and "training.rounds" in str(follower.error)
    assert "error: training.rounds must be at least 1, got 0" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_an_error_that_nobody_foresaw_is_recorded_too(tmp_path: Path) -> None:
    class Broken(InProcessGrid):
        def get_node_ids(self) -> list[int]:
            raise TimeoutError("nobody there")

    config = flat(DIGITS, out=str(tmp_path / "run"), events=str(tmp_path / "events"))
    with pytest.raises(RunError, match=r"the SuperLink does not answer \(TimeoutError: nobody there\)"):
        serve(Broken({}), config)
    follower = Follower(tmp_path / "events", [])
    follower.look()
    assert isinstance(follower.error, RunError)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, 'names no clients; add clients="0-4"'),
        ({"clients": "0-9"}, "there is no client 9; the run has 2, numbered from 0 to 1"),
        ({"clients": "0", "data_root": "/x"}, "unknown key 'data_root'. Did you mean 'data-root'?"),
        ({"clients": "0", "state-root": ""}, "state-root must be a text in double quotes, got ''"),
        ({"clients": "0", "state-root": True}, "state-root must be a text in double quotes, got True"),
        ({"clients": "0", "device": "tpu"}, "engine.device must be auto, cpu, cuda, cuda:N or mps"),
    ],
)
def test_a_node_config_is_checked(given: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        node_of(flat(DIGITS), given)
    assert sentence in str(caught.value)


def test_neither_server_nor_node_takes_a_method_that_pools_the_data(tmp_path: Path) -> None:
    """Whoever wrote the run config: `fedloom deploy` writes none of the kind."""
    tree = resolve({**DIGITS, "method": "joint", "engine": {"name": "flower", "runtime": "deployment"}})
    config = run_config(tree, Deployment(out=str(tmp_path / "run")))
    with pytest.raises(ConfigError, match="method 'joint' has the data view pooled_cumulative, for which all data"):
        serve(federation(config, "0", root=tmp_path), config)
    with pytest.raises(ConfigError, match="method 'joint' has the data view pooled_cumulative, for which all data"):
        node_of(config, {"clients": "0"})
    assert not (tmp_path / "run").exists()


def test_a_node_that_is_refused_is_told_to_the_server(tmp_path: Path) -> None:
    tree = {**DIGITS, "engine": {"join": 0.2}}
    config = flat(tree, out=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"no client at all has joined .*unknown key 'claents'"):
        serve(federation(config, "0-1", root=tmp_path / "nodes", claents="0"), config)
    assert not (tmp_path / "run").exists()


def test_states_have_a_home_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_STATE", str(tmp_path / "home"))
    node = node_of(flat(DIGITS), {"clients": 1, "partition-id": 0, "num-partitions": 2})
    assert node.root == tmp_path / "home" / "nodes" and node.hosted == (1,)
    assert node_of(flat(DIGITS), {"clients": "0-1", "name": "left"}).name == "left"
