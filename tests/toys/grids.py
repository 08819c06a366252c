"""Runs of the toy federation over nodes in this process, with a grid whose traffic can be watched, changed and lost."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedloom.engine import loop
from fedloom.engine.experiment import Experiment, Observer, Options
from fedloom.engine.flower.client import client_app
from fedloom.engine.flower.hosting import parse_clients, spread
from fedloom.engine.flower.inprocess import InProcessGrid
from fedloom.engine.flower.node import Node
from fedloom.engine.flower.server import hire
from fedloom.engine.flower.wire import header
from fedloom.engine.folder import RunFolder

CARD = {"config": {"toy": True}, "model": {"name": "toy"}}


class Tapped(InProcessGrid):
    """A grid that can be told to lose things.

    offline: nodes that are not there. unreachable: nodes to which nothing can be sent. broken: what the grid raises
    when it is asked for anything. `sent`, `held` and `answered` are for subclasses.
    """

    def __init__(self, apps: Mapping[int, ClientApp]):
        super().__init__(apps)
        self.offline: set[int] = set()
        self.unreachable: set[int] = set()
        self.broken: Exception | None = None

    def sent(self, node: int, asked: Mapping[str, Any], message: Message) -> None:
        """Called with every message to a node and its header, before it leaves."""

    def held(self, node: int, asked: Mapping[str, Any]) -> bool:
        """Whether the answer to a message is held back for now; asked each time somebody looks for it."""
        return False

    def answered(self, node: int, asked: Mapping[str, Any], reply: Message) -> list[Message]:
        """Called with every reply and the header of what it answers; what comes back instead of it."""
        return [reply]

    def join(self, node: int, app: ClientApp) -> None:
        """A node more."""
        self._apps[node], self._contexts[node] = app, Context(1, node, {}, RecordDict(), {})

    def get_node_ids(self) -> list[int]:
        self._raise()
        return [node for node in super().get_node_ids() if node not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        found: list[Any] = []
        for message in messages:
            node = message.metadata.dst_node_id
            self.sent(node, header(message.content), message)
            self._raise()
            found += [None] if node in self.unreachable else super().push_messages([message])
        return found

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self._raise()
        for number in message_ids:
            message = self._mail.get(number)
            if message is None or (node := message.metadata.dst_node_id) in self.offline:
                continue
            asked = header(message.content)
            if not self.held(node, asked):
                (reply,) = super().pull_messages([number])
                return self.answered(node, asked, reply)
        return []

    def _raise(self) -> None:
        if self.broken is not None:
            raise self.broken


class Carried(Tapped):
    """A grid that takes every message apart and puts it together as Flower's transport does."""

    def sent(self, node: int, asked: Mapping[str, Any], message: Message) -> None:
        message.content = deflated(message.content)

    def answered(self, node: int, asked: Mapping[str, Any], reply: Message) -> list[Message]:
        reply.content = deflated(reply.content)
        return [reply]


def deflated(content: RecordDict) -> RecordDict:
    """The content of a message as it comes out of Flower's transport: every object apart, as bytes."""
    base = pytest.importorskip("flwr.supercore.inflatable.inflatable_object")
    utils = pytest.importorskip("flwr.supercore.inflatable.inflatable_utils")
    contents = {number: part.deflate() for number, part in base.get_all_nested_objects(content).items()}
    return utils.inflate_object_from_contents(content.object_id, contents)


def at(asked: Mapping[str, Any], stage: int, round: int | None, exchange: str = "train") -> bool:
    """Whether a message asks for the work of this place."""
    first = {"kind": None, **(asked.get("todo") or [{}])[0]}
    place = (first["kind"], first.get("stage"), first.get("round"), first.get("exchange"))
    return place == ("work", stage, round, exchange)


def node(path: Path, experiment: Experiment, number: int, clients: str) -> Node:
    """The node that hosts some clients, with its folder in the run folder `path`."""
    hosted = parse_clients(clients, experiment.plan.num_clients)
    return Node(experiment, path / "nodes" / str(number), hosted, f"node {number}")


def app(given: Node) -> ClientApp:
    """A node's `ClientApp`."""
    return client_app(lambda context: given)


def grid(path: Path, experiment: Experiment, *, nodes: int = 2, kind: Any = Tapped, **given: Any) -> Any:
    """A grid of nodes, numbered from 1, that share out the clients. kind: its class; given: what that also takes."""
    blocks = spread(experiment.plan.num_clients, nodes)
    apps = {k: app(node(path, experiment, k, clients)) for k, clients in enumerate(blocks, 1)}
    return kind(apps, **given)


def start(path: Path, experiment: Experiment, grid: Any, observers: Sequence[Observer] = (), **options: Any) -> Any:
    """A new run in `path` over a grid."""
    with RunFolder.create(path, {"toy": True}, {}) as folder:
        return _run(folder, experiment, grid, observers, options)


def resume(path: Path, experiment: Experiment, grid: Any, observers: Sequence[Observer] = (), **options: Any) -> Any:
    """Go on with the run in `path` over a grid."""
    with RunFolder.open(path) as folder:
        return _run(folder, experiment, grid, observers, options)


def _run(folder: RunFolder, experiment: Experiment, grid: Any, observers: Any, options: Mapping[str, Any]) -> Any:
    hired = functools.partial(hire, grid, CARD)
    return loop.run(experiment, Options(**{"join": 5.0, **options}), folder, observers, hired)
