"""What README.md, docs/method-guide.md, docs/compare.md and docs/domains.md show is run, or at least understood."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fedloom import api, lifecycle
from fedloom.cli import app

ROOT = Path(__file__).parents[1]
GUIDE, README, COMPARE = ROOT / "docs" / "method-guide.md", ROOT / "README.md", ROOT / "docs" / "compare.md"
DOMAINS = ROOT / "docs" / "domains.md"
PAGES = (README, GUIDE, COMPARE, DOMAINS)
ELSEWHERE = ("flwrlabs", "parquet:DIR", "ylecun", "folder:")  # data that are not there, or made by the test of the page
TINY = ["training.rounds=1", "training.local_epochs=1", "stream.tasks=2", "partition.clients=4", "model.name=linear"]


def blocks(path: Path, language: str) -> list[str]:
    """Fenced code blocks of a language, verbatim."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """Arguments of every `fedloom ...` line of the shell blocks, without comments."""
    lines = [line for path in PAGES for block in blocks(path, "bash") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("fedloom ")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that holds the guide's FedProx as the reader saves it."""
    (block,) = [text for text in blocks(GUIDE, "python") if "def fedprox(" in text]
    (tmp_path / "my_fedprox.py").write_text(block, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_fedprox", None)


def shell(folder: Path, *arguments: str) -> dict[str, Any]:
    """The summary of a run that the command line makes in a process of its own."""
    sets = [part for pair in ("method.mu=0.1", *TINY) for part in ("--set", pair)]
    command = [sys.executable, "-m", "fedloom", "run", "quickstart", *arguments, *sets, "--json"]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_guides_fedprox_is_the_built_in_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = shell(folder, "--method", "my_fedprox:fedprox", "--out", "runs/mine", "--workers", "1")
    two = shell(folder, "--method", "my_fedprox:fedprox", "--out", "runs/two", "--workers", "2")
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    pairs = [part for pair in ("method.mu=0.1", *TINY) for part in ("--set", pair)]
    done = CliRunner().invoke(app, ["run", "--method", "fedprox", *pairs, "--out", str(folder / "theirs"), "--json"])
    theirs = json.loads(done.stdout)
    assert mine["params_sha256"] == two["params_sha256"] == theirs["params_sha256"]
    assert mine["state_sha256"] == two["state_sha256"]
    assert (folder / "runs" / "mine" / "report.html").exists()
    plain = api.run("quickstart", method="fedavg", **dict(_typed(pair) for pair in TINY), out=folder / "plain")
    assert plain.summary["params_sha256"] != theirs["params_sha256"], "the proximal term did nothing"


def _typed(pair: str) -> tuple[str, Any]:
    key, _, value = pair.partition("=")
    return key, int(value) if value.isdigit() else value


def test_the_guides_fedprox_refuses_in_words(folder: Path) -> None:
    done = CliRunner().invoke(app, ["run", "--method", "my_fedprox:fedprox", "--set", "method.mu=-1"])
    assert done.exit_code == 2 and "method.mu must be at least 0, got -1" in done.stderr


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_python_blocks_compile(path: Path) -> None:
    found = blocks(path, "python")
    assert found
    for block in found:
        compile(block, path.name, "exec")


def test_commands_parse() -> None:
    """Every option and argument that the pages show exists; nothing is carried out."""
    group = typer.main.get_command(app)
    shown = commands()
    assert {"run", "resume", "list", "show-data", "predict", "report", "export", "doctor"} <= {c[0] for c in shown}
    for arguments in shown:
        with group.make_context("fedloom", list(arguments), resilient_parsing=False) as outer:
            name, command, rest = group.resolve_command(outer, list(arguments))
            command.make_context(name, rest, parent=outer).close()


HERE = [c for c in commands() if c[0] == "run" and not any(name in word for name in ELSEWHERE for word in c)]


@pytest.mark.parametrize("arguments", HERE, ids=" ".join)
def test_runs_could_start(arguments: list[str], folder: Path) -> None:
    done = CliRunner().invoke(app, [*arguments, "--dry-run", "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["parameters"] > 0
    assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == ["my_fedprox.py"]


def test_folders_and_arrays_of_the_page_on_domains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes data is executed, and the commands on folders could start; without its setting they are refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    folders, arrays, _ = blocks(DOMAINS, "python")
    exec(folders, {})
    found = [c for c in commands() if any("folder:" in word for word in c)]
    assert len(found) == 2
    for arguments in found:
        done = CliRunner().invoke(app, [*arguments, "--dry-run", "--json"])
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout)["data"]["domain_names"] in (["board", "paper"], ["paper", "board"])
    bare = [word.replace("data.domain=folders", "data.domain=null") for word in found[0]]
    assert bare != found[0]
    done = CliRunner().invoke(app, [*bare, "--dry-run"])
    assert done.exit_code == 2 and "look like domains" in done.stderr
    few = re.sub(r"load_digits\(\)", "load_digits(n_class=3)", arrays).replace('"rounds": 2', '"rounds": 1')
    assert few != arrays
    exec(few, shown := {})
    assert shown["run"].summary["domain_accuracy"].keys() == {"board", "paper"}
