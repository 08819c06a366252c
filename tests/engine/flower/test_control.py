"""Flower's command line, played by a script that tells what it was asked."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.core import ConfigError, RunError
from fedloom.engine.flower import control
from fedloom.engine.flower.control import Control, app_config

PLAYED = """#!{python} -S
import json, os, sys
here = os.environ["FLWR_HOME"]
with open(here + "/asked", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
with open(here + "/answers") as file:
    answers = json.load(file)
answer = answers.pop(0) if len(answers) > 1 else answers[0]
with open(here + "/answers", "w") as file:
    json.dump(answers, file)
print(answer["out"])
sys.exit(answer.get("code", 0))
"""
Play = Callable[..., Control]


def good(**more: Any) -> dict[str, Any]:
    return {"out": "Loading project configuration...\n" + json.dumps({"success": True, **more}, indent=2)}


def bad(message: str) -> dict[str, Any]:
    return {"out": json.dumps({"success": False, "error-message": message})}


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Makes a command line that gives these answers, one after the other; the last one again and again."""
    monkeypatch.setattr(control.time, "sleep", lambda _: None)
    script = tmp_path / "flwr"
    script.write_text(PLAYED.format(python=sys.executable))
    script.chmod(0o755)
    home = tmp_path / "command line"

    def made(*answers: dict[str, Any]) -> Control:
        environment = {**os.environ, "FLWR_HOME": str(home)}
        line = Control(home, "127.0.0.1:8000", tmp_path / 'c "a".crt', script, environment, "")
        (home / "answers").write_text(json.dumps(answers))
        return line

    return made


def asked(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "command line" / "asked").read_text().splitlines()]


@pytest.fixture
def app(tmp_path: Path) -> Path:
    folder = tmp_path / "app"
    folder.mkdir()
    config = "[tool.flwr.app.config]\nrounds = 3\ndata.root = ''\n[tool.flwr.app.config.optimizer]\nlr = 0.1\n"
    (folder / "pyproject.toml").write_text(f"[project]\nname = 'a'\n{config}")
    return folder


def test_the_connection_is_written_where_flower_looks(play: Play, tmp_path: Path) -> None:
    play(good())
    written = tomllib.loads((tmp_path / "command line" / "config.toml").read_text())["superlink"]
    connection = {"address": "127.0.0.1:8000", "root-certificates": str(tmp_path / 'c "a".crt')}
    assert written == {"default": "federation", "federation": connection}


def test_a_key_is_registered(play: Play, tmp_path: Path) -> None:
    assert play(good(**{"node-id": 2622324161752540452})).register(Path("/k/n.pub")) == 2622324161752540452
    assert asked(tmp_path) == [["supernode", "register", "/k/n.pub", "federation", "--format", "json"]]


def test_a_refused_key_is_named(play: Play) -> None:
    said = "Using SuperLink: federation (127.0.0.1:8000)\n\n[code: 23] Public key already in use."
    with pytest.raises(RunError, match=r"^the SuperLink does not take the key /k/n.pub: Public key already in use$"):
        play(bad(said)).register(Path("/k/n.pub"))


def test_nodes_by_their_numbers(play: Play) -> None:
    nodes = [{"node-id": "11", "status": "online"}, {"node-id": "12", "status": "offline"}]
    assert play(good(nodes=nodes)).nodes() == {11: "online", 12: "offline"}


def test_a_run_is_submitted_with_its_overrides(play: Play, app: Path, tmp_path: Path) -> None:
    config = {"rounds": 5, "optimizer.lr": 1e-5, "data.root": 'a "b"\\c'}
    assert play(good(**{"run-id": "4309619388045906282"})).submit(app, config) == 4309619388045906282
    overrides = tmp_path / "command line" / "run-config.toml"
    assert asked(tmp_path) == [["run", str(app), "federation", "-c", str(overrides), "--format", "json"]]
    assert tomllib.loads(overrides.read_text()) == config


def test_a_run_as_it_is_needs_no_overrides(play: Play, app: Path, tmp_path: Path) -> None:
    play(good(**{"run-id": "1"})).submit(app, {})
    assert asked(tmp_path) == [["run", str(app), "federation", "--format", "json"]]


def test_a_key_that_the_app_does_not_have_is_refused_before_flower_is_asked(play: Play, app: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'round'\. Did you mean 'rounds'\? Known: data.root, optimiz"):
        play(good()).submit(app, {"round": 3})


@pytest.mark.parametrize("text", [None, "[project]\n", "nonsense"])
def test_a_folder_that_is_no_app(text: str | None, play: Play, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"is not a Flower app .* make one with `fedloom deploy"):
        play(good()).submit(tmp_path, {})


def test_nested_tables_are_dotted_names(app: Path) -> None:
    assert app_config(app) == {"rounds": 3, "data.root": "", "optimizer.lr": 0.1}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "\nInvalid Flower App configuration in '/a/pyproject.toml':\n- Unable to find attribute app in module a.b"
            "\n\n\nThe object reference string should have the form <module>:<attribute>.\n",
            "Unable to find attribute app in module a.b",
        ),
        (
            "Flower App configuration warnings in '/a/pyproject.toml':\n- Recommended property \"license\" missing\n"
            "Using SuperLink: federation (127.0.0.1:1)\n\n[code: 15] Invalid run configuration.",
            "Invalid run configuration",
        ),
        ("FAB size exceeds\nthe maximum.", "FAB size exceeds the maximum"),
        ("Exit Code: 500\nUnable to parse the key.\n\nFor more information, visit: <x>", "Unable to parse the key"),
        ("", "it gives no reason"),
    ],
)
def test_a_refused_app_is_told_in_one_sentence(said: str, told: str, play: Play, app: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        play(bad(said)).submit(app, {})
    assert str(caught.value) == f"Flower refuses the app {app}: {told}"


UNREACHED = "Connection to the SuperLink is unavailable. Please check your network connection."


def test_a_superlink_that_does_not_answer_is_no_fault_of_the_app(play: Play, app: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the SuperLink does not take the run: Connection to the SuperLink is unavail"):
        play(bad(UNREACHED)).submit(app, {})
    assert len(asked(tmp_path)) == 1, "a second request could start a second run"


def test_a_busy_superlink_is_asked_again(play: Play, tmp_path: Path) -> None:
    run = {"status": "finished:failed", "status-details": "ServerApp failed"}
    assert play(bad(UNREACHED), good(runs=[run])).run(7) == run
    assert asked(tmp_path) == 2 * [["list", "federation", "--run-id", "7", "--format", "json"]]


def test_an_unknown_run(play: Play, tmp_path: Path) -> None:
    said = "Using SuperLink: f (127.0.0.1:1)\n Displaying information for run ID 7...\n\n[code: 16] Run ID not found."
    with pytest.raises(RunError, match=r"does not tell the status of run 7: Run ID not found$"):
        play(bad(said)).run(7)
    assert len(asked(tmp_path)) == 1


def test_an_answer_that_is_no_json(play: Play) -> None:
    with pytest.raises(RunError, match=r"does not stop run 7: Segmentation fault$"):
        play({"out": "Segmentation fault", "code": 139}).stop(7)


def test_a_log_without_flowers_own_lines(play: Play) -> None:
    out = "Using SuperLink: federation (127.0.0.1:8000)\n\x1b[92mINFO \x1b[0m:      Start\nnodes [1, 2]\n\n"
    assert play({"out": out}).log(7) == "INFO :      Start\nnodes [1, 2]"


def test_no_log_for_an_unknown_run(play: Play) -> None:
    boxed = "╭─ Error ────────╮\n│ Run ID not     │\n│ found.         │\n╰────────────────╯"
    with pytest.raises(RunError, match=r"does not give the log of run 7: Run ID not found$"):
        play({"out": boxed, "code": 1}).log(7)


def test_a_command_that_hangs_is_given_up(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "PATIENCE", 0.2)
    line = play(good())
    line._script.write_text("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(RunError, match=r"`flwr stop` has not ended within 0.2 s"):
        line.stop(7)
