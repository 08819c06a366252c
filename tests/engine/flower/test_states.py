"""What the server knows of client states that lie on nodes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedloom.engine.flower.states import RemoteStates


def test_the_word_of_a_run_is_its_own_and_is_kept(tmp_path: Path):
    file = tmp_path / "federation.json"
    states = RemoteStates(file)
    assert re.fullmatch(r"[0-9a-f]{32}", states.run)
    assert json.loads(file.read_text()) == {"run": states.run} == {"run": RemoteStates(file).run}
    assert RemoteStates(tmp_path / "other.json").run != states.run


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"run": 1}', '{"run": "../../etc"}', "{}"])
def test_a_damaged_word_is_replaced(text: str, tmp_path: Path):
    file = tmp_path / "federation.json"
    file.write_text(text)
    states = RemoteStates(file)
    assert re.fullmatch(r"[0-9a-f]{32}", states.run) and json.loads(file.read_text())["run"] == states.run


def test_a_run_that_starts_over_forgets_all(tmp_path: Path):
    states = RemoteStates(tmp_path / "federation.json")
    before = states.run
    states.learn(3, "v1", "ab")
    states.prune([{3: "v1"}])
    states.clear()
    assert states.run != before and RemoteStates(tmp_path / "federation.json").run == states.run
    assert states.sha256(3, "v1") == "" and states.keep(3, None) == []


def test_versions_that_may_still_be_named(tmp_path: Path):
    states = RemoteStates(tmp_path / "federation.json")
    for version in ("v1", "v2", "v3"):
        states.learn(3, version, f"sha of {version}")
    assert states.keep(3, None) == [] and states.keep(3, "v1") == ["v1"]
    states.prune([{3: "v2", 4: "v1"}, {3: "v3"}])
    assert states.keep(3, "v3") == ["v2", "v3"] and states.keep(3, "v4") == ["v2", "v3", "v4"]
    assert states.keep(4, None) == ["v1"] and states.keep(5, None) == []
    assert (states.sha256(3, "v1"), states.sha256(3, "v2"), states.sha256(3, "v3")) == ("", "sha of v2", "sha of v3")


def test_what_a_checkpoint_says_is_believed_until_the_node_is_asked(tmp_path: Path):
    states = RemoteStates(tmp_path / "federation.json")
    assert states.sound(1, "v1", "ab") and states.sha256(1, "v1") == "ab"
