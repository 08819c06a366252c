"""Messages to nodes and their replies, through a `Grid`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedloom.core import Interrupted, RunError
from fedloom.engine.flower.wire import weigh

UNAUTHORIZED = 401  # what the SuperLink says to the app of a run that was stopped
NAPS = (0.02, 0.3)  # shortest and longest pause between two looks for replies, in seconds


class Post:
    """Sends to nodes and collects what they answer. Nothing waits for ever here; the caller decides how long.

    traffic: per kind of message what went either way: messages, bytes of tensors, bytes of framing (see `weigh`).
    """

    def __init__(self, grid: Grid):
        self._grid = grid
        self._nap = NAPS[0]
        self.traffic: dict[str, dict[str, int]] = {}

    def online(self) -> set[int]:
        """Nodes that the federation knows and believes to be alive."""
        return {int(node) for node in self._call(self._grid.get_node_ids)}

    def send(self, letters: Mapping[int, RecordDict], kind: str) -> dict[str, int]:
        """Send each node its content; node by message. A node that could not be reached has none."""
        sent: dict[str, int] = {}
        for node, content in letters.items():  # one by one: several large ones may be too many bytes at once
            for found in self._call(self._grid.push_messages, [Message(content, node, kind)]):
                if found:
                    sent[found] = node
                    self._count(kind, "sent", content)
        self._nap = NAPS[0]
        return sent

    def collect(self, waiting: dict[str, int]) -> Iterator[tuple[int, Message]]:
        """Replies that have come, with their nodes; their messages are waited for no more.

        They may be large, so each is fetched when it is asked for, and not kept here.
        """
        for number in list(waiting):
            found = self._call(self._grid.pull_messages, [number]) if number in waiting else []
            if found and found[0].metadata.reply_to_message_id == number:
                if found[0].has_content():
                    self._count(found[0].metadata.message_type, "received", found[0].content)
                yield waiting.pop(number), found.pop(0)

    def nap(self, *, busy: bool) -> None:
        """Pause between two looks, longer the longer nothing comes."""
        if busy:
            self._nap = NAPS[0]
            return
        time.sleep(self._nap)
        self._nap = min(self._nap * 1.5, NAPS[1])

    def _count(self, kind: str, way: str, content: RecordDict) -> None:
        tensors, framing = weigh(content)
        counted = self.traffic.setdefault(kind, {})
        for name, more in (("messages", 1), ("tensor_bytes", tensors), ("framing_bytes", framing)):
            counted[f"{name}_{way}"] = counted.get(f"{name}_{way}", 0) + more

    def _call(self, function: Any, *arguments: Any) -> list[Any]:
        try:
            return list(function(*arguments))
        except Exception as error:  # whatever the transport below raises when the other side is gone
            if getattr(getattr(error, "response", None), "status_code", None) == UNAUTHORIZED:
                raise Interrupted("Flower has ended the run, or the SuperLink was started again") from error
            raise RunError(
                f"the SuperLink does not answer ({type(error).__name__}: {error}); start it again and resume the run"
            ) from error


def content_of(reply: Message) -> RecordDict | str:
    """The content of a reply, or why there is none."""
    if reply.has_error():
        code, reason = reply.error.code, (reply.error.reason or "").strip()
        return f"Flower's error {code}" + (f": {reason.splitlines()[-1]}" if reason else "")
    return reply.content
