"""`reproduce` and `list claims` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fedloom import lifecycle
from fedloom.cli import app

FAST = ["-s", "model.name=linear", "-s", "training.rounds=1", "-s", "training.local_epochs=1",
        "-s", "partition.clients=3", "-s", "stream.tasks=2"]  # fmt: skip


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], prog_name="fedloom")


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take a second."""
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)


def test_a_claim_ends_with_its_verdict_and_several_share_their_runs(tmp_path: Path) -> None:
    found = call("reproduce", "X5", "X7", "--scale", "smoke", "--out", tmp_path, "-q", *FAST)
    assert found.exit_code == 0 and not found.stderr
    assert found.stdout.count("verdict: too few seeds: the scale smoke only shows that the trial runs\n") == 2
    assert "scale smoke: the digits of scikit-learn" in found.stdout
    assert len(list((tmp_path / "runs").iterdir())) == 3
    again = call("reproduce", "X5,X7", "--scale", "smoke", "--out", tmp_path, "--json", *FAST)
    told = json.loads(again.stdout)["claims"]
    assert [claim["id"] for claim in told] == ["X5", "X7"] and not again.stderr
    assert told[0]["verdict"] == "too few seeds" and told[0]["folders"] == [str(tmp_path / "X5-smoke")]
    assert [row["paper"] for row in told[0]["numbers"]] == [50.32, 45.96]


def test_what_cannot_be_tried_here_is_told_without_a_run(tmp_path: Path) -> None:
    found = call("reproduce", "F2", "X1", "--out", tmp_path / "none")
    assert found.exit_code == 0 and not (tmp_path / "none").exists()
    assert "verdict: not testable here: it needs Office-Caltech10" in found.stdout
    assert "verdict: not tested\n  rivals FedCBDR and pFedMxF missing\n" in found.stdout


def test_a_dry_run_lists_the_runs_of_every_claim_and_starts_nothing(tmp_path: Path) -> None:
    found = call("reproduce", "X5", "F2", "--scale", "small", "--dry-run", "--out", tmp_path, "--data-root", tmp_path)
    assert found.exit_code == 2 and "X5: adaptive, seed 0: " in found.stderr, "there are no data"
    assert found.stdout == "F2, scale small: nothing to run; it needs Office-Caltech10, a folder per domain and class\n"
    found = call("reproduce", "X5", "--scale", "smoke", "--dry-run", "--out", tmp_path, *FAST)
    assert found.stdout.startswith(f"X5, scale smoke: 2 runs in {tmp_path}/X5-smoke: 2 missing\n  adaptive  seed 0  ")
    assert not list(tmp_path.iterdir())
    told = json.loads(call("reproduce", "X5", "--scale", "smoke", "--dry-run", "--json", *FAST).stdout)["claims"]
    assert [run["label"] for run in told[0]["runs"]] == ["adaptive", "top1"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["X12"], "unknown claim 'X12'. Did you mean 'X2'"),
        (["X5", "--scale", "smoke", "--seeds", "a"], "X5: seeds must be whole numbers"),
        (["X5", "--scale", "smoke", "-s", "training.round=1"], "X5: unknown key 'training.round'"),
        (["X5", "--scale", "smoke", "-s", "out=1"], "X5: unknown key 'out'"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(arguments: list[str], sentence: str) -> None:
    found = call("reproduce", *arguments)
    assert found.exit_code == 2 and sentence in " ".join(found.stderr.split())
    assert found.stderr.count("\n") == 1 and not found.stdout


def test_claims_are_listed_with_what_each_scale_can_say() -> None:
    text = call("list", "claims").stdout
    assert "X10  each module helps on CIFAR-100" in text and "(smoke: tries, small: decides, paper: decides)" in text
    rows = json.loads(call("list", "claims", "--json").stdout)["claims"]
    assert len(rows) == 38 and rows[0]["name"] == "A1"
