"""Messages through a grid: what is sent, what comes, and what a grid that is gone is told as."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import RecordDict

from fedloom.core import Interrupted, RunError
from fedloom.engine.flower import post as module
from fedloom.engine.flower.compat import identify
from fedloom.engine.flower.post import Post, content_of


class Reply(SimpleNamespace):
    """As much of a message as is looked at."""


def reply(number: str) -> Reply:
    metadata = SimpleNamespace(reply_to_message_id=number)
    return Reply(metadata=metadata, payload=bytearray(1000), has_content=lambda: False)


class Grid:
    """Gives out the replies that it is made of; remembers what it was sent."""

    def __init__(self, replies: dict[str, Any] | None = None, numbers: list[Any] | None = None):
        self.replies, self.numbers, self.pushed, self.asked = replies or {}, numbers, [], []

    def get_node_ids(self) -> Iterable[Any]:
        return iter([3, 1])

    def push_messages(self, messages: Iterable[Any]) -> list[Any]:
        self.pushed += messages
        return [f"m{len(self.pushed)}"] if self.numbers is None else self.numbers

    def pull_messages(self, numbers: Iterable[str]) -> list[Any]:
        self.asked.append(list(numbers))
        return [self.replies.pop(number) for number in self.asked[-1] if number in self.replies]


@pytest.fixture(autouse=True)
def identified():
    identify(1, 0)


def test_letters_leave_one_by_one_with_their_kind():
    grid = Grid()
    sent = Post(grid).send({4: RecordDict(), 2: RecordDict()}, "train")
    assert sent == {"m1": 4, "m2": 2} and Post(grid).online() == {1, 3}
    assert [(m.metadata.dst_node_id, m.metadata.message_type) for m in grid.pushed] == [(4, "train"), (2, "train")]


@pytest.mark.parametrize("numbers", [[], [None], [""]])
def test_a_letter_that_did_not_leave_has_no_number(numbers: list[Any]):
    assert Post(Grid(numbers=numbers)).send({4: RecordDict()}, "train") == {}


def test_replies_are_fetched_one_at_a_time_and_not_kept():
    grid, waiting, alive = Grid({"a": reply("a"), "c": reply("c")}), {"a": 1, "b": 2, "c": 3}, []
    for node, came in Post(grid).collect(waiting):
        gc.collect()
        assert [watched() for watched in alive] == [None] * len(alive), "the reply before is still held"
        alive.append(weakref.ref(came))
        assert node == {"a": 1, "c": 3}[came.metadata.reply_to_message_id]
        del came
    assert waiting == {"b": 2} and grid.asked == [["a"], ["b"], ["c"]] and len(alive) == 2
    assert list(Post(grid).collect({})) == []


def test_what_is_no_longer_waited_for_is_not_fetched():
    grid, waiting = Grid({name: reply(name) for name in "abc"}), {"a": 1, "b": 2, "c": 3}
    for _ in Post(grid).collect(waiting):
        waiting.pop("b", None)
    assert waiting == {} and grid.asked == [["a"], ["c"]]


def test_a_reply_to_something_else_is_not_taken():
    waiting = {"a": 1}
    assert list(Post(Grid({"a": reply("z")})).collect(waiting)) == [] and waiting == {"a": 1}


@pytest.mark.parametrize("error", [ConnectionError("refused"), TimeoutError(), ValueError("odd"), StopIteration()])
def test_a_grid_that_is_gone_is_told_with_what_to_do(error: Exception):
    class Gone:
        def __getattr__(self, name: str) -> Any:
            def gone(*given: Any) -> Any:
                raise error

            return gone

    words = rf"the SuperLink does not answer \({type(error).__name__}: .*\); start it again and resume the run"
    post = Post(Gone())
    for step in (post.online, lambda: post.send({1: RecordDict()}, "train"), lambda: list(post.collect({"a": 1}))):
        with pytest.raises(RunError, match=words):
            step()


def test_pauses_grow_until_something_comes(monkeypatch: pytest.MonkeyPatch):
    pauses: list[float] = []
    monkeypatch.setattr(module.time, "sleep", pauses.append)
    post = Post(Grid())
    for busy in (False, False, True, False, *[False] * 20):
        post.nap(busy=busy)
    low, high = module.NAPS
    assert pauses[:3] == [low, low * 1.5, low] and pauses[-1] == high and max(pauses) == high
    post.send({}, "train")
    post.nap(busy=False)
    assert pauses[-1] == low


def test_an_error_is_told_by_its_last_line():
    def failed(reason: str | None) -> Any:
        return SimpleNamespace(has_error=lambda: True, error=SimpleNamespace(code=3, reason=reason))

    assert content_of(failed("Traceback\n  line\nValueError: no\n")) == "Flower's error 3: ValueError: no"
    assert content_of(failed(None)) == content_of(failed(" \n")) == "Flower's error 3"
    content = RecordDict()
    assert content_of(SimpleNamespace(has_error=lambda: False, content=content)) is content


def test_a_run_that_was_stopped_through_flower_is_no_fault_of_the_superlink():
    class Stopped(Grid):
        def get_node_ids(self) -> Iterable[Any]:
            error = OSError("401 Unauthorized")
            error.response = SimpleNamespace(status_code=401)  # type: ignore[attr-defined]
            raise error

    with pytest.raises(Interrupted, match="Flower has ended the run"):
        Post(Stopped()).online()
