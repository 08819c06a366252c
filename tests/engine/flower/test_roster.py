"""Which node hosts which client, as nodes come, go, come back and say odd things."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, RecordDict

from fedloom.core import ConfigError
from fedloom.engine.flower import roster as module
from fedloom.engine.flower.roster import Roster
from fedloom.engine.flower.states import RemoteStates
from fedloom.engine.flower.wire import HEADER, PROTOCOL, header, message

OURS = {"plan": "the plan", "rows": "ab", "torch": "9.9", "processor": "abacus", "device": "cpu"}


class Hall:
    """A `Post` whose nodes answer at once with what `here` holds for them; None does not answer."""

    def __init__(self, **here: Any):
        self.here: dict[int, Any] = {int(name[1:]): said for name, said in here.items()}
        self.asked: list[int] = []

    def online(self) -> set[int]:
        return set(self.here)

    def send(self, letters: Mapping[int, RecordDict], kind: str) -> dict[str, int]:
        assert kind == "query" and all(header(content)["ask"] == "hello" for content in letters.values())
        self.asked += letters
        return {f"{len(self.asked)}:{node}": node for node in letters}

    def collect(self, waiting: dict[str, int]) -> Iterator[tuple[int, Any]]:
        for number, node in list(waiting.items()):
            said = self.here.get(node)
            if said is not None:
                yield waiting.pop(number), _reply(said)

    def nap(self, *, busy: bool) -> None:
        """No time to lose."""


def _reply(said: Any) -> Any:
    if isinstance(said, Exception):
        error = SimpleNamespace(code=7, reason=str(said))
        return SimpleNamespace(has_error=lambda: True, error=error)
    content = message(said, {}) if isinstance(said, dict) else said
    return SimpleNamespace(has_error=lambda: False, content=content)


def says(*hosted: int, home: str = "", **other: Any) -> dict[str, Any]:
    """What a node says of itself; its name is that of its home."""
    home = home or f"home of {hosted}"
    return {"name": f"at {home}", "home": home, "hosted": list(hosted), **OURS, **other}


def roster(tmp_path: Path, hall: Hall, total: int = 4) -> tuple[Roster, list[str]]:
    notes: list[str] = []
    return Roster(hall, RemoteStates(tmp_path / "federation.json"), total, OURS, notes.append), notes


def test_a_run_begins_when_every_client_has_a_node(tmp_path: Path):
    hall = Hall(n1=says(0, 1), n2=says(3, 2))
    found, notes = roster(tmp_path, hall)
    found.gather(60.0, strict=True)
    assert found.homes() == {0: 1, 1: 1, 2: 2, 3: 2} and found.missing() == [] and notes == []
    assert found.members[2].name == "at home of (3, 2)" and found.members[2].rows
    found.refresh()
    assert hall.asked == [1, 2], "nobody is asked twice"


def test_nodes_that_are_late_are_waited_for(tmp_path: Path):
    class Slow(Hall):
        naps = 0

        def nap(self, *, busy: bool) -> None:
            self.naps += 1
            if self.naps == 2:
                self.here[1] = says(0, 1)
            if self.naps == 4:
                self.here[2] = says(2, 3)

    hall = Slow(n1=None)
    found, _ = roster(tmp_path, hall)
    found.gather(60.0, strict=False)
    assert found.missing() == [] and hall.naps >= 4


def test_without_anybody_there_is_no_run(tmp_path: Path):
    for hall in (Hall(), Hall(n1=None)):
        found, _ = roster(tmp_path, hall)
        with pytest.raises(
            ConfigError, match=r"no client at all has joined \(engine.join is 0.01 s\); start their nodes"
        ):
            found.gather(0.01, strict=False)


def test_missing_clients_are_told_or_end_the_run(tmp_path: Path):
    found, notes = roster(tmp_path, Hall(n1=says(0)), total=12)
    found.gather(0.01, strict=False)
    (note,) = notes
    assert note == "1, 2, 3, 4, 5, 6, 7, 8 and 3 more of 12 clients have no node and fail when they are drawn"
    with pytest.raises(ConfigError, match=r"1, 2, 3, 4, 5, 6, 7, 8 and 3 more of 12 clients have no node"):
        found.gather(0.01, strict=True)


ENDLESS = json.dumps({**says(), "protocol": PROTOCOL, "hosted": [math.inf]})
REFUSALS = {
    "beyond": (says(0, 4), "it hosts client 4, and there are 4 clients"),
    "below": (says(-1), "it hosts client -1, and there are 4 clients"),
    "other data": (says(0, plan="another"), "its data, or how they are shared out, are not those of the server"),
    "refused": ({"refused": "its folder is gone"}, "its folder is gone"),
    "Flower's error": (ValueError("what it was"), "Flower's error 7: what it was"),
    "no fedloom": (RecordDict({}), "a message without FedLoom's header came"),
    "no clients": ({**OURS, "name": "odd"}, "KeyError: 'hosted'"),
    "endless": (RecordDict({HEADER: ConfigRecord({"header": ENDLESS})}), "OverflowError"),
    "odd clients": (says(0, hosted="0-3"), "ValueError"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_node_that_cannot_take_part_is_told_why(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "GRACE", 0.0)
    said, words = REFUSALS[kind]
    found, notes = roster(tmp_path, Hall(n1=said, n2=says(1, 2)))
    with pytest.raises(ConfigError, match="0, 3 of 4 clients have no node") as some:
        found.gather(60.0, strict=False)
    assert words in str(some.value)
    assert found.homes() == {1: 2, 2: 2}
    whole, _ = roster(tmp_path, Hall(n1=said, n2=says(0, 1, 2, 3)))
    whole.gather(60.0, strict=False)
    assert len(whole.homes()) == 4, "a node that nobody needs does not matter"
    assert "cannot take part: " in notes[0] and words in notes[0]
    alone, _ = roster(tmp_path, Hall(n1=said))
    with pytest.raises(ConfigError, match="no client at all has joined") as caught:
        alone.gather(60.0, strict=False)
    assert words in str(caught.value)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*says(0), "refused"]), JSON))
def test_whatever_a_node_says_of_itself_hurts_nobody(tmp_path_factory: pytest.TempPathFactory, odd: dict[str, Any]):
    found, _ = roster(tmp_path_factory.mktemp("run"), Hall(n1={**says(0), **odd}, n2=says(3)))
    found.refresh()
    assert found.homes()[3] == 2 or 3 in odd["hosted"]
    assert all(0 <= client < 4 for client in found.homes())


def test_a_node_without_the_same_first_rows_takes_part_and_gets_all_rows(tmp_path: Path):
    found, notes = roster(tmp_path, Hall(n1=says(0, 1, 2, 3, rows="cd")))
    found.gather(1.0, strict=True)
    assert not found.members[1].rows and notes == []


def test_other_versions_and_devices_are_told_once(tmp_path: Path):
    hall = Hall(n1=says(0, torch="9.8"), n2=says(1, 2, 3, device="cuda"))
    found, notes = roster(tmp_path, hall)
    found.gather(1.0, strict=True)
    assert "'at home of (0,)' has torch 9.8, the server 9.9: equal bits are promised on equal ones only" in notes
    assert "'at home of (1, 2, 3)' has device cuda, the server cpu: equal bits are promised on equal ones only" in notes
    hall.here[3] = hall.here.pop(1)
    found.refresh()
    assert len(notes) == 2 and found.homes()[0] == 3


def test_a_client_that_two_nodes_claim_stays_where_it_is(tmp_path: Path):
    """Until its node leaves: then the other one may have it."""
    hall = Hall(n1=says(0, 1), n2=says(1, 2, 3))
    found, notes = roster(tmp_path, hall)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GRACE", 0.0)
        with pytest.raises(ConfigError, match=r"client 1 is hosted by 'at home of \(0, 1\)' already"):
            found.gather(60.0, strict=False)
    assert found.homes() == {0: 1, 1: 1}
    words = "'at home of (1, 2, 3)' cannot take part: client 1 is hosted by 'at home of (0, 1)' already"
    assert notes[0] == f"{words}; give every client to one node"
    found.refresh()
    assert hall.asked == [1, 2]
    del hall.here[1]
    found.refresh()
    assert found.homes() == {1: 2, 2: 2, 3: 2} and hall.asked == [1, 2, 2]


@pytest.mark.parametrize("gone", [True, False])
def test_a_node_under_another_number_takes_its_own_place(gone: bool, tmp_path: Path):
    """Whether or not the old number still counts as online; it does not take the place back."""
    hall = Hall(n1=says(0, 1, home="a"), n2=says(2, 3, home="b"))
    found, notes = roster(tmp_path, hall)
    found.gather(1.0, strict=True)
    if gone:
        del hall.here[2]
    hall.here[9] = says(2, 3, home="b")
    for _ in range(3):
        found.refresh()
        assert found.homes() == {0: 1, 1: 1, 2: 9, 3: 9}
    assert hall.asked == [1, 2, 9] and notes == []


def test_a_node_that_comes_back_is_asked_again(tmp_path: Path):
    """It may host other clients now; until it has said so, it counts as what it was."""
    hall = Hall(n1=says(0, 1, home="a"), n2=says(2, 3, home="b"))
    found, _ = roster(tmp_path, hall)
    found.gather(1.0, strict=True)
    del hall.here[2]
    found.refresh()
    assert found.homes() == {0: 1, 1: 1} and found.missing() == [2, 3]
    hall.here[2] = None
    found.refresh()
    assert found.homes() == {0: 1, 1: 1, 2: 2, 3: 2}
    hall.here[2] = says(3, home="b")
    found.refresh()
    assert found.homes() == {0: 1, 1: 1, 3: 2}
    del hall.here[2]
    found.refresh()
    hall.here[2] = says(3, home="b", plan="another")
    found.refresh()
    assert found.homes() == {0: 1, 1: 1} and "are not those of the server" in found.refused[2]


def test_a_node_that_lost_the_question_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hall = Hall(n1=says(0, 1), n2=None)
    found, _ = roster(tmp_path, hall)
    found.refresh()
    found.refresh()
    assert hall.asked == [1, 2]
    monkeypatch.setattr(module, "AGAIN", 0.0)
    found.refresh()
    hall.here[2] = says(2, 3)
    found.refresh()
    assert hall.asked == [1, 2, 2, 2] and found.homes() == {0: 1, 1: 1, 2: 2, 3: 2}, "all of its answers say the same"


def test_another_node_may_take_the_place_of_one_that_is_gone(tmp_path: Path):
    hall = Hall(n1=says(0, 1, home="a"), n2=says(2, 3, home="b"))
    found, _ = roster(tmp_path, hall)
    found.gather(1.0, strict=True)
    del hall.here[2]
    hall.here[3] = says(2, home="c")
    found.refresh()
    assert found.homes() == {0: 1, 1: 1, 2: 3}
    hall.here[2] = says(2, 3, home="b")
    found.refresh()
    assert found.homes() == {0: 1, 1: 1, 2: 3}, "the one that was there first keeps its clients"


def test_many_clients_on_few_nodes(tmp_path: Path):
    found, _ = roster(tmp_path, Hall(n1=says(*range(0, 10_000, 2)), n2=says(*range(1, 10_000, 2))), total=10_000)
    found.gather(60.0, strict=True)
    assert found.homes() == {client: 1 + client % 2 for client in range(10_000)}
