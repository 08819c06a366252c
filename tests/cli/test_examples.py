"""The help of every command ends with examples, and they do what they say."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from fedloom import lifecycle
from fedloom.cli import app
from fedloom.cli.examples import EXAMPLES

PARSED = ("alignment", "pretrain-clip", "deploy local-demo")  # long, or of runs of vision-language models
SMALL = ["-s", "model.name=linear", "-s", "training.rounds=1", "-s", "partition.clients=3", "-s", "stream.tasks=2"]


def commands(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every command that is not hidden, by its words."""
    for name, command in group.commands.items():
        if not command.hidden:
            yield f"{above}{name}", command
            if hasattr(command, "commands"):
                yield from commands(command, f"{above}{name} ")


COMMANDS = dict(commands(typer.main.get_command(app)))
LINES = {line: command for command, lines in EXAMPLES.items() for line in lines}


def call(arguments: list[str]) -> Any:
    return CliRunner().invoke(app, arguments, prog_name="fedloom")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with what the examples speak of: two runs, data folder and digits to classify."""
    here = tmp_path_factory.mktemp("examples")
    (here / "data").mkdir()
    np.save(here / "digits.npy", load_digits().images[:2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifecycle, "_pictures", lambda *args: None)
        for name in ("first", "second"):
            result = call(["run", "quickstart", "-m", "fedavg", *SMALL, "--out", str(here / "runs" / name)])
            assert result.exit_code == 0, result.stderr
    return here


def test_every_command_has_examples_that_call_it() -> None:
    assert set(EXAMPLES) - {""} <= set(COMMANDS)
    assert set(COMMANDS) - set(EXAMPLES) == {"new"}
    assert all(line.startswith(f"fedloom {command}".strip()) for line, command in LINES.items())


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_the_examples_and_the_help_of_arguments(command: str) -> None:
    text = call([*command.split(), "--help"]).stdout
    assert all(line in text for line in EXAMPLES.get(command, ()))
    assert "\\[" not in text, "no markup is escaped, for none is used"
    rows = re.search(r"^Arguments:\n((?:  .*\n)+)", text, re.MULTILINE)
    bare = rows and re.search(r"^  \S+\s+\[(default|required)", rows[1], re.MULTILINE)
    assert not bare, "an argument lacks help"


@pytest.mark.parametrize("line", LINES)
def test_examples_work(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    command, arguments = LINES[line], shlex.split(line)[1:]
    if command in PARSED:
        with typer.main.get_command(app).make_context("fedloom", arguments) as outer:
            group, words = outer.command, list(arguments)
            while hasattr(group, "commands") and words:
                name, group, words = group.resolve_command(outer, words)
            group.make_context(name, words, parent=outer).close()
        return
    chosen = COMMANDS[command or arguments[0]]
    dry = ["--dry-run"] if any(param.name == "dry_run" for param in chosen.params) else []
    if dry and "--out" in arguments:
        at = arguments.index("--out")
        arguments = [*arguments[:at], *arguments[at + 2 :]]  # the folder of the run that the other examples use
    result = call([*arguments, *dry])
    assert result.exit_code == 0, result.stderr
