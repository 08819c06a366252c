"""A federation on this machine: what it does when its parts die, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fedloom.core import RunError
from fedloom.deploy.certs import Certificates, make_certificates
from fedloom.engine.flower import federation, processes
from fedloom.engine.flower.federation import Federation, NodeSpec

pytest.importorskip("cryptography")
SERVER = """
import json, time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    config = context.run_config
    print("the server's word", config["word"], flush=True)
    told = {"config": config, "rounds": []}
    for k in range(config["rounds"]):
        nodes = sorted(grid.get_node_ids())
        asked = RecordDict({"asked": ConfigRecord({"hold": config["hold"]})})
        left = set(grid.push_messages([Message(asked, node, "query") for node in nodes]))
        replies = []
        while left:
            for reply in grid.pull_messages(left):
                left.discard(reply.metadata.reply_to_message_id)
                told_by = json.loads(reply.content["told"]["config"]) if reply.has_content() else reply.error.code
                replies.append([reply.metadata.src_node_id, told_by])
            time.sleep(0.1)
        told["rounds"].append({"nodes": nodes, "replies": sorted(replies, key=str)})
        with open(config["out"], "w") as file:
            json.dump(told, file)
"""
CLIENT = """
import json, os, time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query()
def tell(message, context):
    with open(os.environ["BEGUN"], "a") as file:
        file.write("begun ")
    time.sleep(message.content["asked"]["hold"])
    told = ConfigRecord({"config": json.dumps(dict(context.node_config))})
    return Message(RecordDict({"told": told}), reply_to=message)
"""
PROJECT = """
[project]
name = "echo"
version = "0.1.0"
dependencies = ["flwr"]

[tool.flwr.app]
publisher = "fedloom"

[tool.flwr.app.components]
serverapp = "echo.server_app:app"
clientapp = "echo.client_app:app"

[tool.flwr.app.config]
rounds = 1
hold = 0.0
flag = false
word = ""
out = ""
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("made") / "certificates", nodes=2)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "app"
    (folder / "echo").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    for name, text in {"__init__": "", "server_app": SERVER, "client_app": CLIENT}.items():
        (folder / "echo" / f"{name}.py").write_text(text)
    return folder


@pytest.fixture
def made(tmp_path: Path, certificates: Certificates) -> Callable[..., Federation]:
    """Makes a federation of two nodes, or what the arguments say."""

    def make(**other: Any) -> Federation:
        nodes = [
            NodeSpec(f"node-{k}", key, {"clients": f"{k}-{k + 1}"}, {"BEGUN": str(tmp_path / f"begun {k}")})
            for k, key in enumerate(certificates.node_keys)
        ]
        files = {"ca": certificates.ca, "certificate": certificates.certificate, "key": certificates.key}
        defaults = {**files, "nodes": nodes, "note": lambda text: None, "preload": ("numpy",), "patience": 60.0}
        return Federation(tmp_path / "home folder", **{**defaults, **other})

    return make


def left(home: Path) -> list[int]:
    """Processes whose environment names the federation's home."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if str(home).encode() in Path(f"/proc/{entry}/environ").read_bytes():
                found.append(int(entry))
    return found


def until(happened: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.1)


def finish(running: Federation, run: int) -> str:
    until(lambda: running.status(run).startswith("finished"))
    return running.status(run)


def told(out: Path) -> Mapping[str, Any]:
    return json.loads(out.read_text())


slow = pytest.mark.slow
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


@slow
@linux
@pytest.mark.parametrize("preload", [("numpy",), None])
def test_a_run_from_start_to_end(
    preload: tuple[str, ...] | None, made: Callable[..., Federation], app: Path, tmp_path: Path
) -> None:
    pytest.importorskip("flwr")
    notes: list[str] = []
    config = {"rounds": 2, "flag": True, "word": 'it\'s "so" = \\ ü', "out": str(tmp_path / "out")}
    with made(note=notes.append, preload=preload) as running:
        assert notes[0].startswith("SuperLink on 127.0.0.1:")
        assert sorted(notes[1:]) == ["node-0 is online", "node-1 is online"]
        run = running.submit(app, config)
        assert finish(running, run) == "finished:completed"
        assert "the server's word it's \"so\" = \\ ü" in running.log(run)
        assert running.ended() == {}
    assert not left(running.home)
    found = told(tmp_path / "out")
    assert found["config"] == {"rounds": 2, "hold": 0.0, "flag": True, "word": config["word"], "out": config["out"]}
    for exchange in found["rounds"]:
        assert sorted(number for number, _ in exchange["replies"]) == exchange["nodes"]
        assert {config["clients"] for _, config in exchange["replies"]} == {"0-1", "1-2"}


@slow
@linux
def test_a_failed_run_is_told_apart(made: Callable[..., Federation], app: Path, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    with made() as running:
        run = running.submit(app, {"out": str(tmp_path / "no" / "such" / "folder")})
        assert finish(running, run) == "finished:failed"
        assert "No such file or directory" in running.log(run)
        details = running.details(run)
        assert not details or "No such file or directory" in details, "older versions say nothing"


@slow
@linux
def test_a_killed_node_is_missed_and_comes_back(made: Callable[..., Federation], app: Path, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    out = tmp_path / "out"
    with made() as running:
        run = running.submit(app, {"hold": 4.0, "out": str(out)})
        begun = [tmp_path / f"begun {k}" for k in range(2)]
        until(lambda: all(path.exists() for path in begun) or running.status(run).startswith("finished"))
        assert all(path.exists() for path in begun), running.log(run)
        before = set(left(running.home))
        running.kill_node(0)
        assert not [pid for pid in left(running.home) if _folder(pid) == str(running.home / "node-0")]
        assert set(left(running.home)) < before
        running.start_node(0)
        assert finish(running, run) == "finished:completed"
        [exchange] = told(out)["rounds"]
        assert sorted(
            (config if isinstance(config, int) else config["clients"] for _, config in exchange["replies"]), key=str
        ) == ["1-2", 5]
        again = running.submit(app, {"out": str(out)})
        assert finish(running, again) == "finished:completed"
    assert told(out)["rounds"][0]["nodes"] == exchange["nodes"], "the same key is the same node"
    assert len(told(out)["rounds"][0]["replies"]) == 2


@slow
@linux
def test_a_killed_superlink_comes_back_with_its_nodes(
    made: Callable[..., Federation], app: Path, tmp_path: Path
) -> None:
    pytest.importorskip("flwr")
    out = tmp_path / "out"
    with made() as running:
        run = running.submit(app, {"hold": 3.0, "rounds": 50, "out": str(out)})
        until(lambda: out.exists() or running.status(run).startswith("finished"))
        assert out.exists(), running.log(run)
        running.kill_link()
        assert not [pid for pid in left(running.home) if _folder(pid) == str(running.home / "superlink")]
        with pytest.raises(RunError, match="the SuperLink is not running; its log is"):
            running.status(run)
        assert running.ended() == {}, "it has not ended by itself"
        running.start_link()
        running.stop_run(run)
        assert running.status(run) == "finished:stopped"
        assert finish(running, running.submit(app, {"out": str(out)})) == "finished:completed"
    assert len(told(out)["rounds"][0]["replies"]) == 2


def _folder(pid: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/cwd")
    return ""


@slow
@linux
def test_what_ends_by_itself_is_told(made: Callable[..., Federation]) -> None:
    pytest.importorskip("flwr")
    with made() as running:
        [node] = [
            pid for pid in left(running.home) if "flower-supernode" in _command(pid) and "node-1/" in _command(pid)
        ][-1:]
        os.kill(node, signal.SIGKILL)
        until(lambda: running.ended() == {"node-1": "it was killed by signal 9"})
        [link] = [pid for pid in left(running.home) if "bin/flower-superlink" in _command(pid)][-1:]
        os.kill(link, signal.SIGKILL)
        until(lambda: len(running.ended()) == 2)
        with pytest.raises(RunError, match="the SuperLink is not running: it was killed by signal 9; its log is"):
            running.status(1)
    assert not left(running.home)


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


@slow
@linux
def test_an_expired_certificate(made: Callable[..., Federation], tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    begin = datetime.now(UTC) - timedelta(days=3)
    old = make_certificates(tmp_path / "old", nodes=1, days=1, start=begin)
    expired = made(ca=old.ca, certificate=old.certificate, key=old.key)
    with pytest.raises(RunError, match=r"server.* the server's certificate has expired; make new ones"), expired:
        pass
    assert not left(expired.home)


@slow
@linux
def test_a_node_whose_key_is_not_registered(
    made: Callable[..., Federation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr")
    others = iter(make_certificates(tmp_path / "other", nodes=2).node_keys)
    register = federation.Control.register
    monkeypatch.setattr(federation.Control, "register", lambda line, key: register(line, Path(f"{next(others)}.pub")))
    unknown = made()
    with pytest.raises(RunError, match=r"node-. ended while starting: the SuperLink refuses its key: it is"), unknown:
        pass
    assert not left(unknown.home)


@slow
@linux
def test_a_node_that_does_not_trust_the_server(
    made: Callable[..., Federation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr")
    other = make_certificates(tmp_path / "other", nodes=1)
    command = processes.node_command
    monkeypatch.setattr(federation, "node_command", lambda *a, **k: command(*a, **{**k, "ca": other.ca}))
    wary = made()
    expected = "node-. ended while starting: the server's certificate was not signed by the CA given; its log is"
    with pytest.raises(RunError, match=expected), wary:
        pass
    assert not left(wary.home)


@slow
@linux
def test_ports_that_are_taken_are_tried_no_more(
    made: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr")
    free, asked = processes.free_ports, []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        def ports(address: str, count: int) -> list[int]:
            asked.append(count)
            found = free(address, count)
            return [taken.getsockname()[1], *found[1:]] if asked.count(count) == 1 else found

        monkeypatch.setattr(processes, "free_ports", ports)
        monkeypatch.setattr(federation, "free_ports", ports)
        with made() as running:
            assert asked.count(3) == 2, "the SuperLink's ports"
            assert asked.count(1) == 3, "two nodes', and one of them again"
            assert running.ended() == {}


PARENT = """
import sys, time
from pathlib import Path
from fedloom.engine.flower.federation import Federation, NodeSpec

home, ca, certificate, key, *keys = map(Path, sys.argv[1:])
nodes = [NodeSpec(f"node-{k}", key, {}) for k, key in enumerate(keys)]
with Federation(home, ca=ca, certificate=certificate, key=key, nodes=nodes, note=print, preload=("numpy",)):
    print("up", flush=True)
    time.sleep(600)
"""


@slow
@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("when", ["SuperLink on", "up"])
def test_a_parent_that_dies_leaves_nothing(
    number: signal.Signals, when: str, certificates: Certificates, tmp_path: Path
) -> None:
    pytest.importorskip("flwr")
    home = tmp_path / "home"
    paths = [home, certificates.ca, certificates.certificate, certificates.key, *certificates.node_keys]
    command = [sys.executable, "-u", "-c", PARENT, *map(str, paths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        assert any(line.startswith(when) for line in parent.stdout)
        assert left(home)
        parent.send_signal(number)
        parent.wait(60)
    until(lambda: not left(home), 30)
