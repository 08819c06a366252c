"""A node: carries out, for the clients that it hosts, what the server asks, with the one client runtime.

The clients of a message are taken in the order of their numbers. Client states, logs and personal models stay
below the node's folder, in one sub-folder per run:

    ROOT/<run>/clients/<client>/<version>.safetensors
    ROOT/<run>/personal/<client>/       a served model, for `fedloom predict`
    ROOT/<run>/log.txt                  tracebacks
"""

from __future__ import annotations

import functools
import json
import os
import platform
import secrets
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from flwr.app import MetricRecord, RecordDict

from fedloom.core import CheckpointError, ClientId, FedloomError, Payload, PayloadError
from fedloom.core.payload import not_finite
from fedloom.engine.experiment import Experiment
from fedloom.engine.files import save_payload, write_bytes, write_json, yaml_text
from fedloom.engine.flower.rows import Rows
from fedloom.engine.flower.telling import WEIGHT, WORD, counts_payload, metrics_at, told
from fedloom.engine.flower.wire import Cut, Packer, header, message, owned, unpack
from fedloom.engine.result import arrived
from fedloom.engine.runtime import Answer, Failed, Instruction, Measured, Runtime, Work, threads
from fedloom.engine.spool import Ref
from fedloom.engine.store import ClientStore


class Node:
    """One node. experiment: the same as the server's. hosted: the logical clients that live here.

    name: how messages and the server's log call this node.
    """

    def __init__(self, experiment: Experiment, root: Path, hosted: Sequence[ClientId], name: str):
        self.experiment, self.root, self.hosted, self.name = experiment, root, tuple(sorted(hosted)), name
        self._here = frozenset(self.hosted)
        self._asks = {"hello": self._hello, "work": self._work, "deliver": self._deliver, "ping": self._ping}
        self._runtime: Runtime | None = None

    def answer(self, content: RecordDict) -> RecordDict:
        """The content of the reply; `PayloadError` for a message that this version does not understand."""
        asked = header(content)
        run = asked.get("run")
        if not (isinstance(run, str) and WORD.fullmatch(run)) or str(asked.get("ask")) not in self._asks:
            raise PayloadError("the message asks for something that this version of fedloom does not know")
        with threads(self.experiment.threads):
            return self._asks[asked["ask"]](asked, content)

    def _hello(self, asked: Mapping[str, Any], content: RecordDict) -> RecordDict:
        """Who lives here, and with what."""
        self._enter(asked["run"])
        found = {
            "name": self.name,
            "home": self._home(),
            "hosted": list(self.hosted),
            "plan": self.experiment.plan.fingerprint(),
            "rows": self._rows.digest,
            "torch": str(torch.__version__),
            "processor": platform.machine(),
            "device": self.experiment.forward.device.type,
        }
        return message(found, {})

    def _work(self, asked: Mapping[str, Any], content: RecordDict) -> RecordDict:
        """Work or evaluation of some clients; an answer to each instruction."""
        self._enter(asked["run"])
        todo = [told(item) for item in asked["todo"]]
        cut = self._rows.cut(todo[0].stage) if asked["rows"] and todo else None
        downs = unpack(content, asked["index"], cut)
        view = functools.lru_cache(maxsize=1)(lambda name: owned(downs[name]))
        answers: list[dict[str, Any]] = []
        records: dict[str, Any] = {}
        with self._at_work(asked):
            for k in sorted(range(len(todo)), key=lambda k: (todo[k].client or 0, k)):
                self._outbox.begin(str(k), cut)
                answer = self._carry_out(todo[k], asked["todo"][k], view)
                found, more = self._told(str(k), answer, todo[k])
                answers.append({"k": k, **found})
                records |= more
        return message({"run": asked["run"], "number": asked["number"], "answers": answers}, records)

    def _carry_out(self, todo: Instruction, item: Mapping[str, Any], view: Callable[[str], Payload]) -> Answer:
        try:
            if todo.client not in self._here:
                raise PayloadError(f"client {todo.client} does not live on this node")
            self.store.keep(todo.client, item["keep"])
            start = todo.start if isinstance(todo, Work) else todo.state
            if start is not None and not self.store.sound(todo.client, start, item["sha256"]):
                path = self.store.path(todo.client, start)
                raise CheckpointError(f"its state is missing on its node or has changed; restore '{path}'")
            down = view(item["view"])
        except (FedloomError, KeyError, TypeError, OSError) as error:
            return Failed(todo.client, str(error), traceback.format_exc(), lost=True)
        return self.runtime.carry_out(todo, down)

    def _told(self, key: str, answer: Answer, todo: Instruction) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the header says of an answer, and its records."""
        if isinstance(answer, Failed):
            self._log(answer.trace)
            return {"failed": answer.reason, "trace": answer.trace, "lost": answer.lost}, {}
        if isinstance(answer, Measured):
            self._outbox.write(counts_payload(answer.counts))
        records, index = self._outbox.take()
        if isinstance(answer, Measured) or not isinstance(todo, Work):
            return {"index": index}, records
        stored = self.store.sha256(todo.client, todo.version) if answer.stored else None
        metrics = MetricRecord({**answer.metrics, WEIGHT: answer.weight})
        header = {"index": index, "stored": stored, "seconds": answer.seconds, "visits": [answer.visits, answer.passes]}
        header |= {} if answer.spoilt is None else {"spoilt": answer.spoilt}
        return header, {**records, metrics_at(key): metrics}

    def _log(self, text: str) -> None:
        path = self.runtime.log
        with suppress(OSError):  # what went wrong is told to the server as well
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{text.rstrip()}\n")

    def _deliver(self, asked: Mapping[str, Any], content: RecordDict) -> RecordDict:
        """Keep the final view of each client as a served model, with the client's state."""
        self._enter(asked["run"])
        cut = self._rows.cut(int(asked["stage"])) if asked["rows"] else None
        downs = unpack(content, asked["index"], cut)
        for item in asked["todo"]:
            todo = told(item)
            folder = self.root / asked["run"] / "personal" / str(todo.client) / "model"
            save_payload(folder / "model.safetensors", owned(downs[item["view"]]), {"format": "fedloom"})
            state = self.store.load(todo.client, todo.state) if not isinstance(todo, Work) else None
            if state is not None:
                save_payload(folder / "state.safetensors", state)
            stage = self.experiment.plan.stage(todo.stage, todo.client)
            own = {"client": todo.client, **arrived(stage)}
            write_json(folder / "model.json", {**asked["card"]["model"], **own})
            write_bytes(folder.parent / "config.yaml", yaml_text(asked["card"]["config"]).encode())
        return message({"run": asked["run"], "number": asked["number"]}, {})

    def _ping(self, asked: Mapping[str, Any], content: RecordDict) -> RecordDict:
        """The number of the message that this node is at work on; None when it is idle."""
        try:
            found = json.loads(self._mark(asked["run"]).read_text())
            os.kill(int(found["pid"]), 0)
        except (OSError, ValueError, KeyError, TypeError):
            return message({"at_work": None}, {})
        return message({"at_work": found["number"]}, {})

    def _home(self) -> str:
        """Tells a node that comes back under another number from another node."""
        path = self.root / "home.json"
        if not path.exists():
            write_json(path, {"home": secrets.token_hex(8)})
        return f"{json.loads(path.read_text())['home']}:{self.hosted[:1]}"

    @contextmanager
    def _at_work(self, asked: Mapping[str, Any]) -> Iterator[None]:
        mark = self._mark(asked["run"])
        write_json(mark, {"pid": os.getpid(), "number": asked["number"]}, sync=False)
        try:
            yield
        finally:
            mark.unlink(missing_ok=True)

    def _mark(self, run: str) -> Path:
        return self.root / run / f"at-work-{'-'.join(map(str, self.hosted[:1]))}.json"

    def _enter(self, run: str) -> None:
        """Use the folder of a run; the network is made once and kept."""
        self.store, log = NodeStore(self.root / run / "clients"), self.root / run / "log.txt"
        if self._runtime is None:
            self._outbox = _Outbox()
            self._runtime = Runtime(self.experiment, self.store, self._outbox, log)
            self._rows = Rows(self._runtime)
        self.runtime = self._runtime
        self.runtime.store, self.runtime.log = self.store, log


class NodeStore(ClientStore):
    """States on a node; the server says with every instruction which versions of a client it may still name."""

    def keep(self, client: ClientId, versions: Collection[str]) -> None:
        """Remove every version of a client that is not named."""
        folder = self.folder / str(client)
        if not folder.is_dir():
            return
        kept = {self.path(client, version) for version in versions}
        for path in folder.iterdir():
            if path not in kept:
                path.unlink(missing_ok=True)


class _Outbox:
    """Encodes an upload at once: its tensors may be those of the network, which the next client writes to."""

    _packed: tuple[dict[str, Any], dict[str, Any]]

    def begin(self, key: str, cut: Cut | None) -> None:
        """The next upload's key and rows."""
        self._key, self._cut, self._packed = key, cut, ({}, {})

    def write(self, payload: Payload) -> Ref:
        """Encode a payload, and say whether it is finite."""
        self._packed = Packer(self._cut).pack({self._key: payload})
        return Ref("", tuple(sorted(payload)), (), not_finite(payload))

    def take(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Records and index of what was written; they are not kept here."""
        packed, self._packed = self._packed, ({}, {})
        return packed
