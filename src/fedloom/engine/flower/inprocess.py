"""`engine.runtime: grid`: real messages between a server and two nodes, all in this process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedloom.engine.experiment import Experiment, Observer, Options
from fedloom.engine.flower.client import client_app
from fedloom.engine.flower.compat import identify
from fedloom.engine.flower.hosting import parse_clients, spread
from fedloom.engine.flower.node import Node
from fedloom.engine.flower.server import hire
from fedloom.engine.folder import RunFolder
from fedloom.engine.loop import run as train

RUN = 1  # Flower's number of the run
NODES = 2


def run(
    experiment: Experiment,
    options: Options,
    folder: RunFolder,
    observers: Sequence[Observer],
    card: Mapping[str, Any],
) -> dict[str, Any]:
    """Carry out a run over an in-process grid; client states lie in `nodes/` of the run folder."""
    total = experiment.plan.num_clients
    apps = {}
    for k, clients in enumerate(spread(total, min(NODES, total))):
        name = f"node {k} (clients {clients})"
        node = Node(experiment, folder.path / "nodes" / str(k), parse_clients(clients, total), name)
        apps[k + 1] = client_app(functools.partial(_always, node))
    return train(experiment, options, folder, observers, functools.partial(hire, InProcessGrid(apps), card))


def _always(node: Node, context: Context) -> Node:
    return node


class InProcessGrid:
    """As much of a `Grid` as a `Post` needs, with nodes in this process.

    A message is answered when its reply is asked for.
    """

    def __init__(self, apps: Mapping[int, ClientApp]):
        self._apps = dict(apps)
        self._contexts = {node: Context(RUN, node, {}, RecordDict(), {}) for node in apps}
        self._mail: dict[str, Message] = {}
        self._numbers = itertools.count(1)
        identify(RUN, 0)

    def get_node_ids(self) -> list[int]:
        """Every node."""
        return sorted(self._apps)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Take messages; their numbers."""
        numbers = []
        for message in messages:
            numbers.append(str(next(self._numbers)))
            message.metadata.__dict__["_message_id"] = numbers[-1]
            self._mail[numbers[-1]] = message
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Let the node of the first message that has not been answered answer it."""
        for number in message_ids:
            if number in self._mail:
                message = self._mail.pop(number)
                node = message.metadata.dst_node_id
                return [self._apps[node](message, self._contexts[node])]
        return []
