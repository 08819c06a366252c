"""Whatever a node answers, the run goes on without its client, by name, with the same bits as if it had raised."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedloom.core import RunError
from fedloom.engine.flower import server
from fedloom.engine.flower.dispatch import Dispatch, Letter
from fedloom.engine.flower.telling import WEIGHT
from fedloom.engine.flower.wire import HEADER, NPY, PROTOCOL, encode, header
from fedloom.engine.runtime import Failed, Work
from toys import grids
from toys.faults import Fault
from toys.federation import experiment
from toys.running import Notes, rows
from toys.running import start as start_serial

PLAN = {"num_stages": 2, "cohort": 1.0}
HEAD, METRICS = "0/params", "metrics/0"
Change = Callable[[dict[str, Any], dict[str, Any]], object]


def faulty(*faults: Fault):
    return experiment("toys.faults:faulty", options={"faults": faults}, **PLAN)


@functools.cache
def serial(*faults: Fault) -> dict[str, Any]:
    """What a serial run with these faults gives."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return start_serial(Path(folder) / "run", faulty(*faults))


class Forging(grids.Tapped):
    """One client a node; the answers of client 1 to the training of stage 1, round 1 are forged.

    change: works on the header and the records of a reply. times: how often.
    """

    def __init__(self, apps: Any, change: Change, times: int = 1, exchange: str = "train"):
        super().__init__(apps)
        self.change, self.times, self.exchange = change, times, exchange

    def answered(self, node: int, asked: Mapping[str, Any], reply: Message) -> list[Message]:
        if node != 2 or asked["ask"] != "work" or not self.times:
            return [reply]
        todo = asked["todo"][0]
        if (todo["stage"], todo.get("round", 1), todo.get("exchange", "evaluate")) != (1, 1, self.exchange):
            return [reply]
        self.times -= 1
        found, records = header(reply.content), dict(reply.content)
        del records[HEADER]
        self.change(found, records)
        words = {} if "no header" in found else {HEADER: ConfigRecord({"header": json.dumps(found)})}
        reply.content = RecordDict({**words, **records})
        return [reply]


def forged(
    path: Path, change: Change, notes: Notes | None = None, *, times: int = 1, exchange: str = "train", **options
):
    whole = faulty()
    grid = grids.grid(path, whole, nodes=4, kind=Forging, change=change, times=times, exchange=exchange)
    found = grids.start(path, whole, grid, [notes] if notes else [], **{"checkpoint_every": 0, **options})
    assert grid.times == 0, "nothing was forged"
    return found


def put(name: str, tensor: Any, record: str = HEAD) -> Change:
    """A forgery that puts a tensor, or an array, in the place of another one."""

    def change(found: dict[str, Any], records: dict[str, Any]) -> None:
        array = tensor if isinstance(tensor, Array) else encode(tensor)[0]
        records[record] = ArrayRecord({**records.get(record, {}), name: array})

    return change


def metric(**values: Any) -> Change:
    def change(found: dict[str, Any], records: dict[str, Any]) -> None:
        records[METRICS] = MetricRecord(
            {**records[METRICS], **{k.replace("WEIGHT", WEIGHT): v for k, v in values.items()}}
        )

    return change


def said(**values: Any) -> Change:
    """A forgery of the header."""
    return lambda found, records: found.update(values)


def item(**values: Any) -> Change:
    """A forgery of what the header says of the answer."""
    return lambda found, records: found["answers"][0].update(values)


def npy(descr: str, shape: str, values: bytes) -> Array:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + values
    return Array(dtype="float32", shape=(6,), stype=NPY, data=data)


def drop(*names: str) -> Change:
    return lambda found, records: [records.pop(name) for name in names]


def forget(key: str) -> Change:
    return lambda found, records: found["answers"][0].pop(key)


OTHER_ROUND = "its node answered for another round"
NO_HEADER = "a message without FedLoom's header came; something else answers for this node"
NOT_ASKED = "its node answered twice for a client, or for one that it was not asked for"
INDEX = "the index of the message is damaged"
UNREADABLE = "its answer is damaged: 'params/head.bias' is no readable array"
WEIGHTLESS = "its answer is damaged: its weight did not come"

FAILED: dict[str, tuple[Change, str]] = {
    "no header": (said(**{"no header": True}), NO_HEADER),
    "another protocol": (said(protocol=1), "the other side speaks version 1 of the protocol and this one 2"),
    "another run": (said(run="0" * 32), OTHER_ROUND),
    "another round": (lambda found, records: found.update(number=found["number"] - 1), OTHER_ROUND),
    "no round": (said(number=None), OTHER_ROUND),
    "no run": (lambda found, records: found.pop("run"), "the reply of its node 'node 2' is damaged: KeyError"),
    "no answers": (lambda found, records: found.pop("answers"), "is damaged: KeyError: 'answers'"),
    "answers by name": (said(answers={"0": {}}), "is damaged: TypeError"),
    "answers that are none": (said(answers=[3]), "is damaged: TypeError"),
    "answers to infinity": (item(k=math.inf), "is damaged: OverflowError"),
    "answers to nothing": (said(answers=[{}]), "is damaged: KeyError: 'k'"),
    "an empty answer": (said(answers=[]), "the field '0/buffers' came and was not announced"),
    "nothing": (lambda found, records: (found.update(answers=[]), records.clear()), "did not answer for it"),
    "not asked for": (item(k=4), NOT_ASKED),
    "not asked for below": (item(k=-1), NOT_ASKED),
    "twice": (lambda found, records: found["answers"].append(dict(found["answers"][0])), NOT_ASKED),
    "no index": (forget("index"), "the field '0/buffers' came and was not announced"),
    "no such index": (item(index=[]), INDEX),
    "half an index": (item(index={"fields": {}}), INDEX),
    "another index": (item(index={"fields": {}, "same": {}, "dtypes": {}, "rows": []}), "came and was not announced"),
    "not stored": (forget("stored"), "its answer is damaged: KeyError: 'stored'"),
    "no time": (item(seconds="long"), "its answer is damaged: ValueError"),
    "a field missing": (drop(HEAD), "its answer is damaged: the field 'params' was announced and did not come"),
    "a field more": (put("w", torch.ones(2), "0/surprise"), "the field '0/surprise' came and was not announced"),
    "a field that is metrics": (lambda found, records: records.update({HEAD: MetricRecord({"a": 1})}), "did not come"),
    "refused": (said(refused="out of order"), "its node 'node 2' refused: out of order"),
    "no metrics": (drop(METRICS), WEIGHTLESS),
    "no weight": (lambda found, records: records.update({METRICS: MetricRecord({"loss": 1.0})}), WEIGHTLESS),
    "weights": (metric(WEIGHT=[1.0]), WEIGHTLESS),
    "words": (lambda found, records: records.update({METRICS: ConfigRecord({WEIGHT: "1"})}), WEIGHTLESS),
    "pickled": (put("head.bias", npy("'|O'", "(1,)", b"\x80\x04N.    ")), UNREADABLE),
    "truncated": (put("head.bias", npy("'<f4'", "(6,)", b"\0" * 23)), UNREADABLE),
    "huge": (put("head.bias", npy("'<f4'", "(1" + "0" * 30 + ",)", b"\0" * 24)), UNREADABLE),
    "negative": (put("head.bias", npy("'<f4'", "(-6,)", b"\0" * 24)), UNREADABLE),
    "another storage": (put("head.bias", Array("float32", (6,), "pickle", b"")), "is stored as 'pickle'"),
    "too large": (put("head.bias", torch.zeros(40_000)), "the upload has 160"),
}  # fmt: skip

REJECTED: dict[str, tuple[Change, str]] = {
    "NaN": (put("head.bias", torch.full((6,), math.nan)), "'params/head.bias' holds NaN or infinite values"),
    "infinite": (put("head.bias", torch.full((6,), math.inf)), "'params/head.bias' holds NaN or infinite values"),
    "another name": (put("head.bios", torch.ones(6)), "'params/head.bios' is not a tensor that the server holds"),
    "another shape": (put("head.bias", torch.ones(5)), "'params/head.bias' has shape (5,), expected (6,)"),
    "another type": (put("head.bias", torch.ones(6).double()), "has dtype torch.float64, expected torch.float32"),
    "integers": (put("head.bias", torch.ones(6).int()), "has dtype torch.int32, expected torch.float32"),
    "NaN weight": (metric(WEIGHT=math.nan), "the weight must be a finite number of at least 0, got nan"),
    "negative weight": (metric(WEIGHT=-1.0), "the weight must be a finite number of at least 0, got -1.0"),
    "infinite weight": (metric(WEIGHT=math.inf), "the weight must be a finite number of at least 0, got inf"),
}
BOTH = {**FAILED, **REJECTED}


@pytest.mark.parametrize("kind", BOTH)
def test_a_forged_answer_costs_its_client_that_round_and_nothing_else(kind: str, tmp_path: Path):
    (change, words), notes = BOTH[kind], Notes()
    found = forged(tmp_path / "run", change, notes, reply_limit=100_000)
    assert found["state_sha256"] == serial(Fault("raise", 1, 1, 1))["state_sha256"]
    where = "client 1 (stage 1, round 1, exchange 'train')"
    verb = "failed" if kind in FAILED else "update rejected"
    (note,) = [note for note in notes.notes if note.startswith("client")]
    assert note.startswith(f"{where}: {verb}: " if verb != "failed" else f"{where} failed: ") and words in note
    assert (found["failed_clients"], found["rejected_updates"]) == ((1, 0) if kind in FAILED else (0, 1))


@pytest.mark.parametrize("kind", ["another round", "truncated", "NaN"])
def test_with_fail_it_ends_the_run_with_the_name_of_the_client(kind: str, tmp_path: Path):
    with pytest.raises(RunError, match=r"client 1 \(stage 1, round 1, exchange 'train'\).*on_client_failure is 'fail'"):
        forged(tmp_path / "run", BOTH[kind][0], on_client_failure="fail")


@pytest.mark.parametrize("kind", ["another round", "truncated", "no metrics", "too large"])
def test_a_retry_gives_the_bits_of_a_run_without_the_forgery(kind: str, tmp_path: Path):
    options = {"on_client_failure": "retry", "retries": 2, "reply_limit": 100_000}
    found = forged(tmp_path / "run", FAILED[kind][0], times=2, **options)
    assert found["state_sha256"] == serial()["state_sha256"] and found["failed_clients"] == 0


def test_without_a_limit_an_upload_may_be_four_times_the_download_and_some(tmp_path: Path, monkeypatch):
    size = serial()["bytes_down"] // (4 * 4)  # of 4 rounds with 4 clients; heads of two stages count in part
    monkeypatch.setattr(server, "SPARE", 100)
    notes, upload = Notes(), put("head.bias", torch.zeros(3 * size))
    found = forged(tmp_path / "run", upload, notes)
    assert found["failed_clients"] == 1 and any("raise engine.reply_limit if the method" in n for n in notes.notes)
    found = forged(tmp_path / "small", put("head.bias", torch.zeros(size // 4)))
    assert (found["failed_clients"], found["rejected_updates"]) == (0, 1), "its shape is wrong, not its size"


def test_a_name_that_is_missing_means_not_mine(tmp_path: Path):
    def change(found: dict[str, Any], records: dict[str, Any]) -> None:
        del records[HEAD]["head.bias"]

    found = forged(tmp_path / "run", change)
    assert found["state_sha256"] == serial(Fault("missing", 1, 1, 1))["state_sha256"] != serial()["state_sha256"]
    assert found["failed_clients"] == found["rejected_updates"] == 0


def test_fields_and_metrics_that_the_server_does_not_know_change_nothing(tmp_path: Path):
    def change(found: dict[str, Any], records: dict[str, Any]) -> None:
        found["answers"][0]["index"]["fields"]["0"].append("metrics")
        found["answers"][0].update(trace=3, k=0.0)
        records["0/metrics"] = ArrayRecord({"w": encode(torch.ones(2))[0]})
        records[METRICS] = MetricRecord({**records[METRICS], "odd": math.nan, "list": [1.0, 2.0], "big": 2**62})

    def whole(found: dict[str, Any], records: dict[str, Any]) -> None:
        change(found, records)
        found["answers"][0]["k"] = 0

    notes = Notes()
    found = forged(tmp_path / "run", whole, notes)
    assert found["state_sha256"] == serial()["state_sha256"] and not [n for n in notes.notes if "client" in n]
    assert any("train/big" in row and "train/odd" not in row for row in rows(tmp_path / "run"))
    with pytest.raises(RunError, match="its payload did not come"):
        forged(tmp_path / "key", change, on_client_failure="fail")


def test_flowers_own_errors_fail_the_client(tmp_path: Path):
    class Failing(Forging):
        def answered(self, node: int, asked: Mapping[str, Any], reply: Message) -> list[Message]:
            before = self.times
            (reply,) = super().answered(node, asked, reply)
            if self.times < before:
                reply.__dict__.update(_content=None, _error=Error(3, "a traceback\nValueError: the last line of it\n"))
            return [reply]

    notes = Notes()
    whole = faulty()
    grid = grids.grid(tmp_path, whole, nodes=4, kind=Failing, change=lambda found, records: None)
    found = grids.start(tmp_path / "run", whole, grid, [notes])
    assert found["state_sha256"] == serial(Fault("raise", 1, 1, 1))["state_sha256"] and found["failed_clients"] == 1
    words = "its node 'node 2' failed: Flower's error 3: ValueError: the last line of it"
    assert any(words in note for note in notes.notes)


def test_an_answer_that_comes_twice_counts_once(tmp_path: Path):
    class Echoing(grids.Tapped):
        def answered(self, node: int, asked: Mapping[str, Any], reply: Message) -> list[Message]:
            return [reply, reply]

    grid = grids.grid(tmp_path / "run", faulty(), nodes=4, kind=Echoing)
    assert grids.start(tmp_path / "run", faulty(), grid)["state_sha256"] == serial()["state_sha256"]


def test_an_answer_to_another_message_is_not_taken(tmp_path: Path):
    """A grid that hands out what was not asked for: the run waits for its own answer until the deadline."""

    class Mixing(Forging):
        def answered(self, node: int, asked: Mapping[str, Any], reply: Message) -> list[Message]:
            before = self.times
            (reply,) = super().answered(node, asked, reply)
            if self.times < before:
                reply.metadata.__dict__["_reply_to_message_id"] = "another"
            return [reply]

    notes = Notes()
    grid = grids.grid(tmp_path, faulty(), nodes=4, kind=Mixing, change=lambda found, records: None)
    found = grids.start(tmp_path / "run", faulty(), grid, [notes], deadline=1.0)
    assert found["state_sha256"] == serial(Fault("raise", 1, 1, 1))["state_sha256"]
    assert any("client 1" in note and "no answer before the deadline" in note for note in notes.notes)


@pytest.mark.parametrize(
    "change",
    [put("total", torch.ones(5, dtype=torch.int64), "0/counts"), put("correct", torch.full((6,), 99), "0/counts"),
     put("others", torch.tensor([-1, 0]), "0/counts"), drop("0/counts"), said(number=0)],
    ids=["shape", "more than all", "negative", "missing", "another round"],
)  # fmt: skip
def test_a_forged_evaluation_leaves_that_client_out_of_the_accuracies(change: Change, tmp_path: Path):
    notes = Notes()
    found = forged(tmp_path / "run", change, notes, exchange="evaluate")
    assert found["state_sha256"] == serial()["state_sha256"]
    assert [row["accuracy/clients"] for row in rows(tmp_path / "run", "stage")] == [4, 3]
    (note,) = [note for note in notes.notes if "client 1" in note]
    assert note.startswith("evaluation of the view of client 1 at stage 1 failed: ")
    with pytest.raises(RunError, match="evaluation of the view of client 1 at stage 1 failed: "):
        forged(tmp_path / "fail", change, exchange="evaluate", on_client_failure="fail")


def test_what_a_type_without_numpy_carries_is_checked_as_well(tmp_path: Path):
    """8-bit floats that are NaN, under the name of a parameter."""

    def change(found: dict[str, Any], records: dict[str, Any]) -> None:
        put("head.bias", torch.full((6,), -1, dtype=torch.int8))(found, records)
        found["answers"][0]["index"]["dtypes"]["0/params/head.bias"] = "float8_e4m3fn"

    notes = Notes()
    found = forged(tmp_path / "run", change, notes)
    assert found["rejected_updates"] == 1 and np.isfinite(found["final_accuracy"])
    assert any("update rejected: 'params/head.bias' holds NaN" in note for note in notes.notes)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["k", "index", "failed"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(["run", "number", "answers", "refused", "protocol"]), JSON), st.booleans())
def test_no_header_of_a_reply_does_more_than_fail_its_clients(damage: dict[str, Any], rest: bool):
    said = {**({"protocol": PROTOCOL, "run": "ab", "number": 7, "answers": []} if rest else {}), **damage}
    content = RecordDict({HEADER: ConfigRecord({"header": json.dumps(said)})})
    reply = SimpleNamespace(has_error=lambda: False, content=content)
    todo = [Work(client, 0, 0, "train", None, "v", 1) for client in (4, 2, 9)]
    force = SimpleNamespace(
        post=SimpleNamespace(
            send=lambda letters, kind: {"m": 5},
            collect=lambda waiting: [(waiting.pop("m"), reply)],
            nap=lambda busy: None,
        ),
        states=SimpleNamespace(run="ab"),
        experiment=SimpleNamespace(plan=SimpleNamespace(num_classes=3)),
        spool=SimpleNamespace(write=None),
    )
    told: list[tuple[int, int]] = []
    exchange = Dispatch(force, todo, lambda done, total: told.append((done, total)))
    exchange.send([Letter(5, "node 5", 7, [1, 0], RecordDict(), [100, 100], None)])
    answers = exchange.wait(lambda: False, lambda: False)
    assert [(type(answer), answer.client) for answer in answers] == [(Failed, 4), (Failed, 2), (Failed, 9)]
    assert answers[2].reason == "no node that hosts it is online" and told == [(1, 3), (2, 3), (3, 3)]
    assert all(0 < len(answer.reason) <= 2000 for answer in answers) or damage.get("answers")
