"""`new method`: what it writes runs, passes its own test, and overwrites nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fedloom import lifecycle
from fedloom.cli import app
from fedloom.methods import ablations, presets

FAST = ["-s", "model.name=linear", "-s", "training.rounds=1", "-s", "partition.clients=3", "-s", "stream.tasks=2"]


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], prog_name="fedloom")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that Python imports from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    return tmp_path


def test_the_new_method_runs_and_passes_its_test(here: Path) -> None:
    result = call("new", "method", "my_method")
    assert result.exit_code == 0 and result.stdout.splitlines() == [
        "method: my_method.py",
        "test: test_my_method.py",
        "next: python -m pytest test_my_method.py; fedloom run quickstart --method my_method:my_method",
    ]
    code = pytest.main(["-q", "-p", "no:cacheprovider", f"--rootdir={here}", "-c", "/dev/null", "test_my_method.py"])
    assert code == 0
    assert sorted(path.name for path in here.glob("*.py")) == ["my_method.py", "test_my_method.py"]
    run = call("run", "quickstart", "-m", "my_method:my_method", *FAST, "--set", "method.strength=1", "--json")
    assert run.exit_code == 0 and json.loads(run.stdout)["method"] == "my_method:my_method"
    refused = call("run", "-m", "my_method:my_method", "--set", "method.strength=-1")
    assert refused.exit_code == 2 and "method.strength must be at least 0, got -1" in refused.stderr
    assert ablations("my_method:my_method") == {"no-pull": {"strength": 0.0}}
    assert presets("my_method:my_method") == {"paper": {}}


def test_no_word_of_the_pattern_is_left(here: Path) -> None:
    found = json.loads(call("new", "method", "odd_1", "--out", "deep/er", "--json").stdout)
    assert found == {"method": "deep/er/odd_1.py", "test": "deep/er/test_odd_1.py", "name": "odd_1:odd_1"}
    for path in (found["method"], found["test"]):
        text = (here / path).read_text()
        assert "NAME" not in text and "CLASS" not in text and "odd_1" in text
        compile(text, path, "exec")
    assert "class Odd1Method(Method)" in (here / found["method"]).read_text()
    assert "next: cd deep/er; python -m pytest test_odd_2.py" in call("new", "method", "odd_2", "-o", "deep/er").stdout


@pytest.mark.parametrize("name", ["my_method.py", "test_my_method.py"])
def test_nothing_is_overwritten(here: Path, name: str) -> None:
    (here / name).write_text("mine")
    result = call("new", "method", "my_method")
    assert result.exit_code == 2 and f"'{name}' exists" in result.stderr
    assert [(path.name, path.read_text()) for path in here.iterdir()] == [(name, "mine")]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("fedavg", "NAME is fedavg, which is a method of FedLoom; name another, such as my_fedavg"),
        ("9x", "must be a Python name in small letters, such as my_method; got '9x'"),
        ("MyMethod", "must be a Python name in small letters"),
        ("a b", "must be a Python name in small letters"),
        ("../x", "must be a Python name in small letters"),
        ("class", "must be a Python name in small letters"),
        ("random", "NAME is random, which is taken in Python or in the file itself"),
        ("numpy", "NAME is numpy, which is taken"),
        ("strength", "NAME is strength, which is taken"),
        ("print", "NAME is print, which is taken"),
        ("conftest", "NAME is conftest, which is taken"),
        ("test_mine", "NAME is test_mine, which is taken"),
    ],
)
def test_names_that_cannot_be_are_refused(here: Path, name: str, sentence: str) -> None:
    result = call("new", "method", name)
    assert result.exit_code == 2 and sentence in result.stderr and result.stderr.count("\n") == 1
    assert not list(here.iterdir())


@pytest.mark.parametrize("name", ["my_method.py", "test_my_method.py"])
def test_a_link_to_nowhere_is_something_too(here: Path, name: str) -> None:
    (here / name).symlink_to(here / "gone" / "file")
    result = call("new", "method", "my_method")
    assert result.exit_code == 2 and f"'{name}' exists" in result.stderr
    assert [path.name for path in here.iterdir()] == [name]


def test_half_a_pair_is_taken_back(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fedloom.cli.new"].os.path, "lexists", lambda path: False)
    (here / "test_my_method.py").write_text("another began at the same moment")
    result = call("new", "method", "my_method")
    assert result.exit_code == 2 and "cannot be written: File exists" in result.stderr
    assert [path.name for path in here.iterdir()] == ["test_my_method.py"]


def test_a_folder_that_cannot_be_written_is_named(here: Path) -> None:
    (here / "file").touch()
    result = call("new", "method", "my_method", "--out", "file")
    assert result.exit_code == 2 and "cannot be written" in result.stderr and "--out" in result.stderr
