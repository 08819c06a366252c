"""Which node hosts which client. Nodes come, go and come back under other numbers; clients keep theirs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.core import ClientId, ConfigError
from fedloom.engine.flower.post import Post, content_of
from fedloom.engine.flower.states import RemoteStates
from fedloom.engine.flower.telling import said
from fedloom.engine.flower.wire import header, message

AGAIN = 60.0  # seconds without an answer after which a node is asked again who it is; it may have lost the question
GRACE = 10.0  # seconds for a node that was refused to be mended before the run starts without it


@dataclass(frozen=True)
class Member:
    """A node that has introduced itself. rows: it knows the server's initial class rows, so they need not travel."""

    name: str
    home: str
    hosted: tuple[ClientId, ...]
    rows: bool


class Roster:
    """The nodes that take part. expected: what a node must have in common with the server (`plan`, `rows`, ...)."""

    def __init__(
        self,
        post: Post,
        states: RemoteStates,
        total: int,
        expected: Mapping[str, Any],
        note: Callable[[str], None],
    ):
        self._post, self._states, self._total, self._expected, self._note = post, states, total, expected, note
        self.members: dict[int, Member] = {}
        self.refused: dict[int, str] = {}
        self.online: set[int] = set()
        self._asked: dict[str, int] = {}
        self._since: dict[int, float] = {}
        self._told: set[str] = set()

    def gather(self, seconds: float, strict: bool) -> None:
        """Wait until every client has a node, at most so long.

        Raises `ConfigError` when nobody has come, and when a client is missing although a node was refused (another
        client's, or other data), or with `strict`; otherwise missing clients are told, and fail when they are drawn.
        """
        began, quiet = time.monotonic(), time.monotonic()
        while self.missing():
            known = len(self.members) + len(self.refused)
            self.refresh()
            came = len(self.members) + len(self.refused) > known
            quiet = time.monotonic() if came or self._asked else quiet
            patience = GRACE if self.refused else seconds
            if time.monotonic() - began > seconds or time.monotonic() - quiet > patience:
                break
            self._post.nap(busy=came)
        self._require(seconds, strict)

    def refresh(self) -> None:
        """See who is there, ask newcomers who they are, and note who has answered. Does not wait."""
        before, self.online = self.online, self._post.online()
        if before - self.online:
            self.refused.clear()  # with one node less, another may be welcome
        now = time.monotonic()
        asked = {node for node in self._asked.values() if now - self._since[node] < AGAIN}
        new = self.online - (self.members.keys() & before) - self.refused.keys() - asked
        self._since |= dict.fromkeys(new, now)
        hello = message({"ask": "hello", "run": self._states.run}, {})
        self._asked |= self._post.send(dict.fromkeys(sorted(new), hello), "query")
        self._asked = {number: node for number, node in self._asked.items() if node in self.online}
        for node, reply in self._post.collect(self._asked):
            content = content_of(reply)
            try:
                self._welcome(node, {"refused": content} if isinstance(content, str) else header(content))
            except Exception as error:  # a node may send anything
                self._refuse(node, f"node {node}", said(error))

    def homes(self) -> dict[ClientId, int]:
        """The node of every client that has one online."""
        here = [(node, member) for node, member in self.members.items() if node in self.online]
        return {client: node for node, member in here for client in member.hosted}

    def missing(self) -> list[ClientId]:
        """Clients without a node that is online."""
        homes = self.homes()
        return [client for client in range(self._total) if client not in homes]

    def _welcome(self, node: int, found: Mapping[str, Any]) -> None:
        name = str(found.get("name", f"node {node}"))[:200]
        if "refused" in found:
            self._refuse(node, name, str(found["refused"]))
            return
        hosted = tuple(int(client) for client in found["hosted"])
        beyond = [client for client in hosted if not 0 <= client < self._total]
        if beyond:
            self._refuse(node, name, f"it hosts client {beyond[0]}, and there are {self._total} clients")
        elif found["plan"] != self._expected["plan"]:
            self._refuse(node, name, "its data, or how they are shared out, are not those of the server")
        else:
            self._admit(node, Member(name, str(found["home"]), hosted, found["rows"] == self._expected["rows"]))
            for key in ("torch", "processor", "device"):
                if found[key] != self._expected[key]:
                    self._say(
                        f"'{name}' has {key} {str(found[key])[:80]}, the server {self._expected[key]}: "
                        "equal bits are promised on equal ones only"
                    )

    def _admit(self, node: int, member: Member) -> None:
        for other, known in list(self.members.items()):
            both = set(known.hosted) & set(member.hosted)
            if not both:
                continue
            if known.home == member.home or other == node or other not in self.online:
                del self.members[other]  # the same node under another number, or one that took its place
                if other != node and other in self.online:
                    self.refused[other] = f"'{known.name}' has come back under another number"
            else:
                text = f"client {min(both)} is hosted by '{known.name}' already; give every client to one node"
                self._refuse(node, member.name, text)
                return
        self.members[node] = member

    def _refuse(self, node: int, name: str, reason: str) -> None:
        self.members.pop(node, None)
        self.refused[node] = f"'{name}' cannot take part: {reason[:2000]}"
        self._say(self.refused[node])

    def _say(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._note(text)

    def _require(self, seconds: float, strict: bool) -> None:
        missing = self.missing()
        if not missing:
            return
        causes = "".join(f"; {reason}" for reason in list(self.refused.values())[:3])
        if strict or causes or len(missing) == self._total:
            what = f"{_listed(missing)} of {self._total} clients" if len(missing) < self._total else "no client at all"
            lack = "have no node" if len(missing) < self._total else "has joined"
            raise ConfigError(f"{what} {lack} (engine.join is {seconds:g} s){causes}; start their nodes and try again")
        self._say(f"{_listed(missing)} of {self._total} clients have no node and fail when they are drawn")


def _listed(clients: Sequence[ClientId]) -> str:
    shown = ", ".join(map(str, clients[:8]))
    return f"{shown} and {len(clients) - 8} more" if len(clients) > 8 else shown
