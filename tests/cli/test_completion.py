"""TAB: names from the folder, the same as those of the registry, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedloom.claims import claims
from fedloom.cli import app, completion
from fedloom.config import recipe_names
from fedloom.methods import names


def proposed(words: str) -> list[str]:
    """What bash is offered for the last of the words."""
    count = str(len(words.split(" ")) - 1)
    env = {"_FEDLOOM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": count}
    return CliRunner().invoke(app, prog_name="fedloom", env=env).stdout.split()


def test_all_methods_and_recipes_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert completion.methods("") == names()
    assert completion.claims("") == sorted([*claims(), "all"])
    assert completion.recipes("") == recipe_names()
    for name in ("mine.yaml", "notes.txt", ".hidden.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "minor").mkdir()
    (tmp_path / "minor" / "two.yml").touch()
    assert completion.recipes("mi") == ["mine.yaml", "minor/"]
    assert completion.recipes("minor/") == ["minor/two.yml"]
    assert completion.recipes("no/such/") == []
    assert completion.entries("fedavg,fedpr") == ["fedavg,fedprox"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("fedloom do", ["doctor"]),
        ("fedloom run quickstart --method fedp", ["fedprox"]),
        ("fedloom show-data quickstart", ["quickstart", "quickstart-domains"]),
        ("fedloom run --engine f", ["flower"]),
        ("fedloom deploy ", ["certs", "local-demo"]),
        ("fedloom list methods fedf", ["fedfip", "fedfmx"]),
        ("fedloom list recipes pacs-s", ["pacs-small"]),
        ("fedloom list claims X10", ["X10"]),
        ("fedloom new me", ["method"]),
    ],
)
def test_a_shell_is_offered_names(words: str, expected: list[str]) -> None:
    found = proposed(words)
    assert found[: len(expected)] == expected
    if words == "fedloom deploy ":
        assert set(recipe_names()) <= set(found)


def test_completion_can_be_shown_and_imports_no_torch(tmp_path: Path) -> None:
    """For the shell that the user has; and a shell does not wait."""
    code = """
import sys
from fedloom.cli import app
try:
    app(prog_name="fedloom")
finally:
    heavy = {"torch", "numpy", "pydantic"} & set(sys.modules)
    assert not heavy, heavy
"""
    shell = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    asked = {
        **os.environ,
        "_FEDLOOM_COMPLETE": "complete_bash",
        "COMP_WORDS": "fedloom run -m fedavg",
        "COMP_CWORD": "3",
    }
    for arguments, env, said in (
        (["--show-completion", "bash"], shell, "_FEDLOOM_COMPLETE=complete_bash"),
        ([], asked, "fedavg"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 and said in done.stdout, done.stderr
