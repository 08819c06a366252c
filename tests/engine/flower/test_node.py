"""A node by itself: what it answers to messages, and what it keeps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict

from fedloom.core import Payload, PayloadError
from fedloom.core.payload import digest
from fedloom.engine.files import file_sha256, load_payload, write_json
from fedloom.engine.flower.client import client_app
from fedloom.engine.flower.compat import identify
from fedloom.engine.flower.node import Node
from fedloom.engine.flower.telling import WEIGHT, metrics_at, tell
from fedloom.engine.flower.wire import Packer, header, message, unpack
from fedloom.engine.runtime import Probe, Work
from toys.faults import Fault
from toys.federation import experiment

RUN = "0123abcd"
TRAIN, CENSUS = "0000.00001.train", "0000.00000.census"


def node(path: Path, *faults: Fault, hosted: tuple[int, ...] = (2, 0)) -> Node:
    whole = experiment("toys.faults:faulty", options={"faults": faults})
    return Node(whole, path, hosted, "the node")


def work(client: int, start: str | None = None, version: str = TRAIN, exchange: str = "train") -> Work:
    return Work(client, 0, 0 if exchange == "train" else None, exchange, start, version, 1)


def first_view(given: Node) -> Payload:
    whole = given.experiment
    server = whole.method.init_server(whole.context(whole.net(), 0))
    return {"params": server["params"], "buffers": server["buffers"]}


def ask(given: Node, *todo: Any, views: Any = None, **changes: Any) -> tuple[dict[str, Any], RecordDict]:
    """Header and content of the answer to some work; an instruction may come with changes to what is said of it."""
    items = []
    for each in todo:
        instruction, odd = each if isinstance(each[-1], dict) else (each, {})
        items.append({**tell(instruction), "view": "0", "keep": [], "sha256": "", **odd})
    records, index = Packer().pack({"0": first_view(given)} if views is None else views)
    said = {"ask": "work", "run": RUN, "number": 7, "rows": False, "todo": items, "index": index, **changes}
    reply = given.answer(message(said, records))
    return header(reply), reply


def states(path: Path, client: int) -> list[str]:
    return sorted(file.name for file in (path / RUN / "clients" / str(client)).glob("*"))


def test_a_node_says_who_it_is(tmp_path: Path):
    given = node(tmp_path)
    said = header(given.answer(message({"ask": "hello", "run": RUN}, {})))
    assert (said["name"], said["hosted"]) == ("the node", [0, 2])
    assert said["plan"] == given.experiment.plan.fingerprint() and said["torch"] == torch.__version__
    again = header(node(tmp_path).answer(message({"ask": "hello", "run": RUN}, {})))
    assert again == said, "it is the same after it was started again"
    elsewhere = header(node(tmp_path / "b").answer(message({"ask": "hello", "run": RUN}, {})))
    assert elsewhere["home"] != said["home"] and elsewhere["rows"] == said["rows"]
    neighbour = header(node(tmp_path, hosted=(3,)).answer(message({"ask": "hello", "run": RUN}, {})))
    assert neighbour["home"] != said["home"], "two nodes may share a folder"


@pytest.mark.parametrize(
    "said",
    [{"ask": "work"}, {"ask": "other", "run": RUN}, {"run": RUN}, {"ask": ["hello"], "run": RUN}]
    + [{"ask": "hello", "run": run} for run in ("../../up", "", "ABCDEF00", 7, None, "0" * 65, "0123abcd\n")],
)  # fmt: skip
def test_messages_that_it_does_not_know_are_refused(said: dict[str, Any], tmp_path: Path):
    with pytest.raises(PayloadError, match="asks for something that this version of fedloom does not know"):
        node(tmp_path / "node").answer(message(said, {}))
    assert not (tmp_path / "node").exists()


def test_work_leaves_an_upload_and_a_state(tmp_path: Path):
    given = node(tmp_path)
    said, content = ask(given, work(2))
    (answer,) = said["answers"]
    assert (said["run"], said["number"], answer["k"]) == (RUN, 7, 0)
    upload = unpack(content, answer["index"])["0"]
    assert sorted(upload) == ["buffers", "params"] and content[metrics_at("0")]["visits"] == 1.0
    assert content[metrics_at("0")][WEIGHT] == given.experiment.plan.size(2, 0)
    path = tmp_path / RUN / "clients" / "2" / f"{TRAIN}.safetensors"
    assert answer["stored"] == file_sha256(path)
    assert digest({"params": load_payload(path)["memory"]}) == digest({"params": upload["params"]})
    census, content = ask(given, work(2, version=CENSUS, exchange="census"), views={"0": {}})
    assert census["answers"][0]["stored"] is None, "this exchange leaves no state"
    counts = unpack(content, census["answers"][0]["index"])["0"]["census"]["counts"]
    assert int(counts.sum()) == given.experiment.plan.size(2, 0)


def test_clients_are_taken_in_the_order_of_their_numbers_and_share_what_they_are_sent(tmp_path: Path, monkeypatch):
    given, taken = node(tmp_path, hosted=(0, 1, 2)), []
    given._enter(RUN)
    real = given.runtime.carry_out
    monkeypatch.setattr(
        given.runtime, "carry_out", lambda todo, down: taken.append((todo.client, down)) or real(todo, down)
    )
    said, content = ask(given, work(2), work(0), work(1))
    assert [client for client, _ in taken] == [0, 1, 2] and taken[0][1] is taken[2][1]
    assert sorted(answer["k"] for answer in said["answers"]) == [0, 1, 2]
    alone = [unpack(part, said["answers"][0]["index"])["0"] for said, part in (ask(given, work(c)) for c in (2, 0, 1))]
    together = [unpack(content, a["index"])[str(a["k"])] for a in sorted(said["answers"], key=lambda a: a["k"])]
    assert [digest(upload) for upload in together] == [digest(upload) for upload in alone]


def test_one_clients_trouble_is_not_anothers(tmp_path: Path):
    given = node(tmp_path, Fault("raise", 2), hosted=(0, 1, 2))
    missing = (work(1, "0000.00000.train"), {"sha256": "ab"})
    said, content = ask(given, work(0), missing, work(2), work(3), (work(1), {"view": "9"}), (work(0), {"keep": 3}))
    found = {answer["k"]: answer for answer in said["answers"]}
    assert found[0]["stored"] and set(content.metric_records) == {metrics_at("0")}
    path = tmp_path / RUN / "clients" / "1" / "0000.00000.train.safetensors"
    assert found[1]["failed"] == f"its state is missing on its node or has changed; restore '{path}'"
    assert found[2]["failed"].startswith("ValueError: broken on purpose (faults.py")
    assert found[3]["failed"] == "client 3 does not live on this node"
    assert "failed" in found[4] and "failed" in found[5]
    assert [found[k]["lost"] for k in (1, 2, 3, 4, 5)] == [True, False, True, True, True]
    assert "ValueError: broken on purpose" in (tmp_path / RUN / "log.txt").read_text()


def test_a_view_is_copied_so_that_nothing_a_client_does_reaches_the_message(tmp_path: Path, monkeypatch):
    given = node(tmp_path)
    given._enter(RUN)
    seen: list[Payload] = []
    monkeypatch.setattr(given.runtime, "carry_out", lambda todo, down: seen.append(down) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ask(given, work(2))
    assert digest(seen[0]) == digest(first_view(given))
    assert all(t.data_ptr() % 64 == 0 and t.is_contiguous() for tree in seen[0].values() for t in tree.values())


def test_a_state_that_changed_is_noticed_before_it_is_used(tmp_path: Path):
    given = node(tmp_path)
    sha = ask(given, work(2))[0]["answers"][0]["stored"]
    next_one = (work(2, TRAIN, "0000.00002.train"), {"keep": [TRAIN], "sha256": sha})
    assert ask(given, next_one)[1][metrics_at("0")]["visits"] == 2.0
    path = tmp_path / RUN / "clients" / "2" / f"{TRAIN}.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert "has changed" in ask(given, next_one)[0]["answers"][0]["failed"]


def test_only_versions_that_may_be_named_are_kept(tmp_path: Path):
    given, sha, names = node(tmp_path), "", [f"0000.0000{k}.train" for k in range(1, 6)]
    for before, name in zip([None, *names], names, strict=False):
        kept = [names[0], before] if before else []
        sha = ask(given, (work(2, before, name), {"keep": kept, "sha256": sha}))[0]["answers"][0]["stored"]
    assert states(tmp_path, 2) == [f"{name}.safetensors" for name in (names[0], names[3], names[4])]
    (tmp_path / RUN / "clients" / "2" / ".half.123.tmp").write_text("left by a killed process")
    ask(given, (work(2, names[4], "0001.00000.train"), {"keep": [names[4]], "sha256": sha}))
    assert states(tmp_path, 2) == [f"{names[4]}.safetensors", "0001.00000.train.safetensors"]
    ask(given, work(0))
    assert len(states(tmp_path, 2)) == 2, "another client's are not touched"


def test_evaluation_counts_a_part_of_the_test_examples(tmp_path: Path):
    said, content = ask(node(tmp_path), Probe(2, 0, 0, 10, 30, None, 20))
    counts = unpack(content, said["answers"][0]["index"])["0"]["counts"]
    assert int(counts["total"].sum()) == 20 and counts["total"].shape == (6,)
    assert set(said["answers"][0]) == {"k", "index"}


def test_evaluation_may_be_of_one_domain(tmp_path: Path):
    """Of the task's 80 examples every second one is of the second domain."""
    given = node(tmp_path)
    for start, stop, number in ((0, 40, 40), (30, 80, 10)):
        said, content = ask(given, Probe(2, 0, 0, start, stop, None, 0, 1))
        counts = unpack(content, said["answers"][0]["index"])["0"]["counts"]
        assert int(counts["total"].sum()) == number


def test_pings_say_what_a_node_is_at_work_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given = node(tmp_path)

    def ping() -> Any:
        return header(given.answer(message({"ask": "ping", "run": RUN}, {})))["at_work"]

    assert ping() is None
    given._enter(RUN)
    real, seen = given.runtime.carry_out, []
    monkeypatch.setattr(given.runtime, "carry_out", lambda todo, down: seen.append(ping()) or real(todo, down))
    ask(given, work(2), number=41)
    assert seen == [41] and ping() is None
    mark = tmp_path / RUN / "at-work-0.json"
    write_json(mark, {"pid": os.getpid(), "number": 5})
    assert ping() == 5
    for damaged in ("{", "[]", '{"pid": "x"}', '{"number": 5}', json.dumps({"pid": 2**22 + 1, "number": 5})):
        mark.write_text(damaged)
        assert ping() is None, "a process that is gone, or words that are none"


def test_the_mark_goes_when_the_work_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given = node(tmp_path)
    given._enter(RUN)
    monkeypatch.setattr(given.runtime, "carry_out", lambda todo, down: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ask(given, work(2))
    assert not list((tmp_path / RUN).glob("at-work*"))


def deliver(given: Node, probe: Probe) -> dict[str, Any]:
    records, index = Packer().pack({"0": first_view(given)})
    todo = [{**tell(probe), "view": "0", "keep": [], "sha256": ""}]
    card = {"config": {"seed": 3, "method": "größe"}, "model": {"name": "toy"}}
    said = {"ask": "deliver", "run": RUN, "number": 9, "rows": False, "stage": 2, "index": index}
    return header(given.answer(message({**said, "todo": todo, "card": card}, records)))


def test_the_final_view_of_a_client_is_left_with_its_state(tmp_path: Path):
    given, folder = node(tmp_path), tmp_path / RUN / "personal" / "2"
    ask(given, work(2))
    assert (deliver(given, Probe(2, 2, 0, 0, 0, TRAIN, 0)))["number"] == 9
    assert digest(load_payload(folder / "model" / "model.safetensors")) == digest(first_view(given))
    kept = tmp_path / RUN / "clients" / "2" / f"{TRAIN}.safetensors"
    assert digest(load_payload(folder / "model" / "state.safetensors")) == digest(load_payload(kept))
    said = json.loads((folder / "model" / "model.json").read_text())
    assert (said["name"], said["client"]) == ("toy", 2)
    assert (said["seen"], said["old"], said["current"]) == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3], [4, 5])
    assert said["seen_domains"] == said["old_domains"] == said["current_domains"] == [0, 1]
    import yaml

    assert yaml.safe_load((folder / "config.yaml").read_text()) == {"seed": 3, "method": "größe"}
    deliver(given, Probe(0, 2, 0, 0, 0, None, 0))
    assert not (tmp_path / RUN / "personal" / "0" / "model" / "state.safetensors").exists()


def test_whatever_goes_wrong_on_a_node_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A refusal in the words of the error; a traceback only for what nobody foresaw."""
    identify(1, 0)

    def answer(given: Any, said: dict[str, Any]) -> dict[str, Any]:
        asked = Message(message(said, {}), 1, "query")
        asked.metadata.__dict__["_message_id"] = "3"
        reply = client_app(given)(asked, Context(1, 1, {}, RecordDict(), {}))
        assert reply.metadata.reply_to_message_id == "3"
        return header(reply.content)

    here = node(tmp_path)
    assert answer(lambda context: here, {"ask": "hello", "run": RUN})["hosted"] == [0, 2]
    assert "does not know" in answer(lambda context: here, {"ask": "sing", "run": RUN})["refused"]
    assert capsys.readouterr().err.count("\n") == 1, "the node's own log has the sentence too"
    assert answer(lambda context: 1 / 0, {"ask": "hello"})["refused"] == "ZeroDivisionError: division by zero"
    assert answer(lambda context: here, {"ask": "work", "run": RUN})["refused"] == "KeyError: 'todo'"
    assert "ZeroDivisionError" in capsys.readouterr().err
