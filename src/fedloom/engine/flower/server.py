"""The server's side: the loop's instructions go to the nodes as messages, and their answers come back as files."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from flwr.serverapp import Grid

from fedloom.core import Payload, RunError
from fedloom.core.payload import nbytes
from fedloom.engine.experiment import Experiment, Options
from fedloom.engine.files import write_json
from fedloom.engine.flower.dispatch import Dispatch, Letter
from fedloom.engine.flower.post import Post
from fedloom.engine.flower.roster import Roster
from fedloom.engine.flower.rows import Rows
from fedloom.engine.flower.states import RemoteStates
from fedloom.engine.flower.telling import tell
from fedloom.engine.flower.wire import Packer, message
from fedloom.engine.folder import RunFolder
from fedloom.engine.force import Down
from fedloom.engine.runtime import Answer, Instruction, Runtime, Work, threads
from fedloom.engine.spool import Spool
from fedloom.engine.store import ClientStore

SPARE = 16 * 2**20  # bytes that an upload may have beyond four times what its client was sent


@contextmanager
def hire(
    grid: Grid,
    card: Mapping[str, Any],
    experiment: Experiment,
    options: Options,
    folder: RunFolder,
    note: Callable[[str], None],
) -> Iterator[Federation]:
    """The nodes behind a grid, for as long as a run lasts; waits for them to join first.

    card: `config` and `model` (its description) for the models that are left on the nodes at the end.
    """
    with threads(experiment.threads):
        force = Federation(Post(grid), card, experiment, options, folder, note)
        try:
            force.roster.gather(options.join, options.on_client_failure == "fail")
            yield force
        finally:
            force.spool.close()
            with suppress(RunError):  # a full disk has been told of already
                write_json(folder.path / "traffic.json", force.post.traffic)


class Federation:
    """A `Force` of nodes. The global view is evaluated here, whatever is a client's where the client lives."""

    def __init__(
        self,
        post: Post,
        card: Mapping[str, Any],
        experiment: Experiment,
        options: Options,
        folder: RunFolder,
        note: Callable[[str], None],
    ):
        self.post, self.note, self.experiment = post, note, experiment
        self._card, self._options = card, options
        self.spool = Spool(folder.path / ".spool" / "0.bin")
        self.states = RemoteStates(folder.path / "federation.json")
        store, log = ClientStore(folder.path / "clients"), folder.path / "log.txt"
        try:
            self.runtime = Runtime(experiment, store, self.spool, log)
            self.rows = Rows(self.runtime)
        except BaseException:
            self.spool.close()
            raise
        self.roster = Roster(post, self.states, experiment.plan.num_clients, self._common(), note)
        self._number = secrets.randbelow(2**31)

    def carry_out(
        self,
        instructions: Sequence[Instruction],
        down: Down,
        *,
        stop: Callable[[], bool] = lambda: False,
        late: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda done, total: None,
        again: bool = False,
    ) -> list[Answer]:
        """See `Force.carry_out`. An answer that comes after `late` says so is lost."""
        if not again:
            self.spool.reset()
        dispatch = Dispatch(self, instructions, progress)
        dispatch.send(self._letters(instructions, down, "work"))
        for k, todo in enumerate(instructions):
            if todo.client is None and not stop():
                dispatch.settle(k, self.runtime.carry_out(todo, down(None)))
        return dispatch.wait(stop, late)

    def deliver(self, views: Iterable[Instruction], down: Down) -> None:
        """Leave the final view of every client on its node; a node that does not take them is told of."""
        own = list(views)
        dispatch = Dispatch(self, own, lambda done, total: None)
        dispatch.send(self._letters(own, down, "deliver"))
        dispatch.hand_over(self._options.join)

    def _letters(self, instructions: Sequence[Instruction], down: Down, ask: str) -> Iterator[Letter]:
        """A letter per node, made when it is asked for; clients without a node are in none."""
        self.roster.refresh()
        homes, shares = self.roster.homes(), dict[int, list[int]]()
        for k in sorted(range(len(instructions)), key=lambda k: (instructions[k].client or 0, k)):
            client = instructions[k].client
            if client is not None and client in homes:
                shares.setdefault(homes[client], []).append(k)
        self._number += 1
        cut = self.rows.cut(instructions[0].stage) if instructions else None
        packers = {True: Packer(cut), False: Packer()}
        for node, share in shares.items():
            member = self.roster.members[node]
            views, named, sizes = _views([instructions[k] for k in share], down)
            records, index = packers[member.rows].pack(views)
            todo = [self._item(instructions[k], view) for k, view in zip(share, named, strict=True)]
            head = {"ask": ask, "run": self.states.run, "number": self._number, "rows": member.rows, "todo": todo}
            more = {"card": self._card, "stage": instructions[0].stage} if ask == "deliver" else {}
            content = message({**head, **more, "index": index}, records)
            limits = [self._options.reply_limit or 4 * size + SPARE for size in sizes]
            yield Letter(node, member.name, self._number, share, content, limits, cut if member.rows else None)

    def _item(self, todo: Instruction, view: str) -> dict[str, Any]:
        client = todo.client or 0
        version = todo.start if isinstance(todo, Work) else todo.state
        known = "" if version is None else self.states.sha256(client, version)
        return {**tell(todo), "view": view, "keep": self.states.keep(client, version), "sha256": known}

    def _common(self) -> dict[str, Any]:
        """What a node is compared with."""
        return {
            "plan": self.experiment.plan.fingerprint(),
            "rows": self.rows.digest,
            "torch": str(torch.__version__),
            "processor": platform.machine(),
            "device": self.experiment.forward.device.type,
        }


def _views(instructions: Sequence[Instruction], down: Down) -> tuple[dict[str, Payload], list[str], list[int]]:
    """Distinct downloads by name, and for each instruction the name and the bytes of its own."""
    views: dict[str, Payload] = {}
    names: dict[object, str] = {}
    named, sizes = [], []
    for todo in instructions:
        payload = {field: dict(tree) for field, tree in down(todo.client).items()}
        same = tuple((f, tuple((n, id(t)) for n, t in sorted(payload[f].items()))) for f in sorted(payload))
        name = names.setdefault(same, str(len(names)))
        views.setdefault(name, payload)  # kept: an identity means something only while its tensor lives
        named.append(name)
        sizes.append(nbytes(payload))
    return views, named, sizes
