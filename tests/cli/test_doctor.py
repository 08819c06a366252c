"""`doctor`: a mend for everything that is missing, and an exit code that says whether runs can start."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from fedloom import environment
from fedloom.cli import app, doctor


def found(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["doctor", *arguments, "--json"])
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Versions that are found instead of the real ones."""
    changed: dict[str, str | None] = {}
    known = environment.installed
    monkeypatch.setattr(environment, "installed", lambda name: changed[name] if name in changed else known(name))
    return changed


def test_a_usable_machine_has_notes_at_most(versions: dict[str, str | None]) -> None:
    versions["wandb"] = None
    code, said = found()
    assert code == 0 and said["usable"] is True
    assert {item["level"] for item in said["findings"]} == {"ok", "note"}
    (trackers,) = [item for item in said["findings"] if item["what"].startswith("extra 'trackers'")]
    assert trackers["what"].startswith("extra 'trackers': wandb missing")
    assert trackers["mend"] == "pip install -e '.[trackers]'"
    assert CliRunner().invoke(app, ["doctor"]).stdout.endswith("usable: `fedloom run` starts the quickstart\n")


def test_a_missing_and_an_old_package_are_problems(versions: dict[str, str | None]) -> None:
    versions |= {"scipy": None, "torch": "2.3.1", "timm": "0.4"}
    code, said = found()
    assert code == 1 and said["usable"] is False
    problems = {item["what"]: item["mend"] for item in said["findings"] if item["level"] == "problem"}
    assert problems == {
        "scipy is missing": "pip install 'scipy>=1.11'",
        "torch 2.3.1 is installed, and FedLoom needs torch>=2.11": "pip install 'torch>=2.11'",
    }
    (vision,) = [item for item in said["findings"] if item["what"].startswith("extra 'vision'")]
    assert vision["level"] == "note" and "timm 0.4 (needs >=1.0)" in vision["what"]


def test_little_memory_and_little_disk_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module(), "ROOM", 2**60)
    monkeypatch.setattr(doctor_module(), "SPARE", 2**60)
    code, said = found()
    told = {item["level"]: item["what"] for item in said["findings"] if "GiB" in item["what"]}
    assert code == 1 and "of memory" in told["note"] and "free in" in told["problem"]


@pytest.mark.parametrize("root", ["/no/such", __file__, "a" * 5000])
def test_a_data_root_that_is_no_folder_is_a_problem(root: str) -> None:
    code, said = found("--data-root", root)
    (problem,) = [item for item in said["findings"] if item["level"] == "problem"]
    assert code == 1 and problem["what"].startswith("data root '") and "is not a folder" in problem["what"]
    assert problem["mend"] == "correct FEDLOOM_DATA or --data-root" and len(problem["what"]) < 100


def doctor_module() -> Any:
    import sys

    return sys.modules[doctor.__module__]
