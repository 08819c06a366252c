"""One exchange with the nodes: letters out, answers in, and what becomes of those that do not come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flwr.app import Message, RecordDict

from fedloom.core import Interrupted, PayloadError
from fedloom.engine.flower.post import content_of
from fedloom.engine.flower.telling import answer_of, said
from fedloom.engine.flower.wire import Cut, check_announced, header, message
from fedloom.engine.runtime import Answer, Done, Failed, Instruction, Work

if TYPE_CHECKING:
    from fedloom.engine.flower.server import Federation

LOOK = 2.0  # seconds between two looks at who is online while answers are waited for
PING = 20.0  # seconds of silence after which a node is asked whether it is still at work


class Letter(NamedTuple):
    """A message to a node. share: positions of its instructions in the exchange. limits: bytes per upload."""

    node: int
    name: str
    number: int
    share: Sequence[int]
    content: RecordDict | None
    limits: Sequence[int]
    cut: Cut | None


class Dispatch:
    """Every instruction of an exchange gets one answer."""

    def __init__(self, force: Federation, instructions: Sequence[Instruction], progress: Callable[[int, int], None]):
        self._force, self._todo, self._progress = force, instructions, progress
        self._answers: dict[int, Answer] = {}
        self._letters: dict[int, Letter] = {}
        self._waiting: dict[str, int] = {}
        self._pings: dict[str, int] = {}
        self._heard: dict[int, float] = {}
        self._gone: set[int] = set()
        self._looked = time.monotonic()

    def send(self, letters: Iterable[Letter]) -> None:
        """Send the letters; clients that are in none, or whose letter does not leave, fail."""
        kind = "train" if self._todo and isinstance(self._todo[0], Work) else "evaluate"
        for letter in letters:
            assert letter.content is not None
            self._letters[letter.node] = letter._replace(content=None)  # once it has left, it is only in the way
            self._waiting |= (sent := self._force.post.send({letter.node: letter.content}, kind))
            if not sent:
                self._fail(letter.node, "its node could not be reached")
        self._heard = dict.fromkeys(self._letters, time.monotonic())
        posted = {k for letter in self._letters.values() for k in letter.share}
        for k, todo in enumerate(self._todo):
            if k not in posted and todo.client is not None:
                self.settle(k, Failed(todo.client, "no node that hosts it is online", "", lost=True))

    def wait(self, stop: Callable[[], bool], late: Callable[[], bool]) -> list[Answer]:
        """Collect answers until all are there, until `late`, or until `stop` (`Interrupted`)."""
        while self._waiting:
            came = False
            for node, reply in self._force.post.collect(self._waiting):
                came = True
                self._take(self._letters[node], reply)
                del reply  # before the next one is fetched
                if stop():
                    break
            if stop():
                raise Interrupted("stopped by the user")
            if not came and late():
                for node in set(self._waiting.values()):
                    self._fail(node, "no answer before the deadline")
            self._look()
            self._force.post.nap(busy=came or not self._waiting)
        if stop():
            raise Interrupted("stopped by the user")
        return [self._answers[k] for k in range(len(self._todo))]

    def hand_over(self, seconds: float) -> None:
        """Wait at most so long for nodes that only have to take something; tell of those that do not."""
        ends = time.monotonic() + seconds
        while self._waiting and time.monotonic() < ends:
            came = False
            for node, reply in self._force.post.collect(self._waiting):
                came = True
                self._taken(self._letters[node], reply)
            self._look()
            self._force.post.nap(busy=came or not self._waiting)
        for node in set(self._waiting.values()):
            self._fail(node, f"no answer within {seconds:g} s")
        for answer in self._answers.values():
            if isinstance(answer, Failed):
                self._force.note(f"the model of client {answer.client} was not left with it: {answer.reason}")

    def _taken(self, letter: Letter, reply: Message) -> None:
        content = content_of(reply)
        try:
            reason = content if isinstance(content, str) else header(content).get("refused")
        except PayloadError as error:
            reason = str(error)
        if reason:
            self._fail(letter.node, f"its node '{letter.name}' did not take it: {reason}")

    def settle(self, k: int, answer: Answer) -> None:
        """Keep an instruction's answer."""
        self._answers[k] = answer
        self._progress(len(self._answers), len(self._todo))

    def _take(self, letter: Letter, reply: Message) -> None:
        """The answers in a reply; whatever is wrong with it fails its clients and nobody else's."""
        content = content_of(reply)
        try:
            if isinstance(content, str):
                raise PayloadError(f"its node '{letter.name}' failed: {content}")
            items = self._items(letter, content)
        except Exception as error:  # a node may send anything
            damaged = "" if isinstance(error, PayloadError) else f"the reply of its node '{letter.name}' is damaged: "
            self._fail(letter.node, f"{damaged}{said(error)}"[:2000])
            return
        for position, k in enumerate(letter.share):
            self.settle(k, self._answer(letter, position, items.get(position), content))

    def _items(self, letter: Letter, content: RecordDict) -> dict[int, Any]:
        """What a reply's header says of each answer; `PayloadError` when the reply is not one to this letter."""
        found = header(content)
        if "refused" in found:
            raise PayloadError(f"its node '{letter.name}' refused: {found['refused']}")
        if (found["run"], found["number"]) != (self._force.states.run, letter.number):
            raise PayloadError("its node answered for another round")
        items = {int(item["k"]): item for item in found["answers"]}
        if len(items) < len(found["answers"]) or not items.keys() <= set(range(len(letter.share))):
            raise PayloadError("its node answered twice for a client, or for one that it was not asked for")
        check_announced(content, [item["index"] for item in items.values() if "index" in item])
        return items

    def _answer(self, letter: Letter, position: int, item: Any, content: RecordDict) -> Answer:
        todo = self._todo[letter.share[position]]
        if not isinstance(item, dict):
            return Failed(todo.client, "its node did not answer for it", "", lost=True)
        answer = answer_of(
            item,
            content,
            todo,
            cut=letter.cut,
            limit=letter.limits[position],
            classes=self._force.experiment.plan.num_classes,
            write=self._force.spool.write,
        )
        if isinstance(answer, Done) and isinstance(todo, Work) and answer.stored:
            self._force.states.learn(todo.client, todo.version, str(item["stored"]))
        return answer

    def _look(self) -> None:
        """Give up on nodes that have gone offline, and on those that no longer work on their letter."""
        if time.monotonic() - self._looked < LOOK or not self._waiting:
            return
        self._looked, roster = time.monotonic(), self._force.roster
        roster.refresh()
        there = roster.online & roster.members.keys()  # one that came back under another number is no member any more
        gone = set(self._waiting.values()) - there
        for node in gone & self._gone:  # twice in a row
            self._fail(node, f"its node '{self._letters[node].name}' went offline")
        self._gone = gone
        for node, reply in self._force.post.collect(self._pings):
            self._pong(node, reply)
        now = time.monotonic()
        silent = [n for n in set(self._waiting.values()) & there if now - self._heard[n] > PING]
        ask = message({"ask": "ping", "run": self._force.states.run}, {})
        self._pings |= self._force.post.send({n: ask for n in silent if n not in self._pings.values()}, "query")

    def _pong(self, node: int, reply: Message) -> None:
        """A node that is at work on something else, or on nothing, has lost its letter, unless its answer is there."""
        content = content_of(reply)
        try:
            at_work = None if isinstance(content, str) else header(content).get("at_work")
        except PayloadError:
            at_work = None
        self._heard[node], letter = time.monotonic(), self._letters[node]
        if at_work == letter.number:
            return
        for other, late_reply in self._force.post.collect(self._waiting):
            self._take(self._letters[other], late_reply)
        if node in self._waiting.values():
            self._fail(node, f"its node '{letter.name}' was started again and has lost its work")

    def _fail(self, node: int, reason: str) -> None:
        for number in [number for number, other in self._waiting.items() if other == node]:
            del self._waiting[number]
        for k in self._letters[node].share:
            if k not in self._answers:
                self.settle(k, Failed(self._todo[k].client, reason, "", lost=True))
