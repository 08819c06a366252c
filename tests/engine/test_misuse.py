"""Methods and observers that do what they must not: one sentence, the right exit code, nothing silent."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.core import ConfigError, Interrupted, RunError, Trip, Update
from fedloom.core.seeds import seeded
from fedloom.engine.files import load_payload
from fedloom.methods.fedavg import FedAvg
from toys.federation import BlobSpec, Features, Headed, experiment
from toys.running import Notes, resume, rows, start

FEDAVG = "fedloom.methods.fedavg:fedavg"
SMALL = {"num_stages": 1, "rounds": 1, "cohort": 1.0}


def misusing(**hooks: Any) -> Any:
    """FedAvg on the blobs with some of its functions replaced."""
    whole = experiment(FEDAVG, **SMALL)
    kind = dataclass(frozen=True)(type("Misusing", (FedAvg,), hooks))
    return replace(whole, method=kind(whole.method.local), rebuild=None)


@pytest.mark.parametrize(
    ("trips", "words"),
    [
        ([Trip("nope", 0)], "unknown exchange 'nope'.*train"),
        ([Trip("train", 0, "nobody")], "who must be cohort or all, got 'nobody'"),
        ([Trip("train", 0.5)], "round must be None or from 0 up, got 0.5"),
        ([Trip("train", -5)], "round must be None or from 0 up, got -5"),
        (["train"], "must yield Trips, got str"),
        ([], "plans no trip"),
    ],
)
def test_a_plan_is_checked_before_the_first_round(tmp_path: Path, trips: list[Any], words: str):
    with pytest.raises(ConfigError, match=words) as info:
        start(tmp_path / "run", misusing(plan=lambda self, stage: trips))
    assert info.value.exit_code == 2


def raising(*arguments: Any) -> Any:
    raise ZeroDivisionError("broken on purpose")


def leaving(*arguments: Any) -> Any:
    sys.exit(0)


def spoiled(self: Any, ctx: Any) -> Any:
    state = ctx.init_state()
    return {**state, "params": {name: tensor * float("nan") for name, tensor in state["params"].items()}}


@pytest.mark.parametrize(
    ("hook", "function", "words"),
    [
        ("plan", raising, r"plan of stage 0 failed: ZeroDivisionError: broken on purpose \(test_misuse.py:\d+\)"),
        ("init_server", raising, r"cannot start: ZeroDivisionError: broken on purpose \(test_misuse.py:\d+; "),
        ("init_server", leaving, r"cannot start: SystemExit: 0 \(test_misuse.py:\d+; "),
        ("init_server", lambda self, ctx: None, "cannot start: .*the server state must map fields"),
        ("init_server", spoiled, "cannot start: .*holds NaN or infinite values"),
        ("class_rows", raising, "cannot start: ZeroDivisionError"),
        ("class_rows", lambda self, ctx: [1], "cannot start: "),
    ],
)
def test_what_fails_before_the_first_round_exits_with_2(tmp_path: Path, hook: str, function: Any, words: str):
    with pytest.raises(ConfigError, match=words):
        start(tmp_path / "run", misusing(**{hook: function}))


@pytest.mark.parametrize("hook", ["client_update", "server_update", "predict"])
@pytest.mark.parametrize("function", [raising, leaving])
def test_what_fails_later_ends_the_run_in_words(tmp_path: Path, hook: str, function: Any):
    with pytest.raises(RunError, match=r"(ZeroDivisionError: broken on purpose|SystemExit: 0) \(test_misuse.py:\d+"):
        start(tmp_path / "run", misusing(**{hook: function}))


def test_a_client_must_return_an_update(tmp_path: Path):
    with pytest.raises(RunError, match="must return an Update, got NoneType"):
        start(tmp_path / "run", misusing(client_update=lambda *arguments: None))


@pytest.mark.parametrize("width", [3, 20])
def test_scores_must_have_one_column_per_class(tmp_path: Path, width: int):
    with pytest.raises(RunError, match=rf"predict returned scores of shape \[\d+, {width}\], expected \[\d+, 6\]"):
        start(tmp_path / "run", misusing(predict=lambda self, down, state, x, ctx: torch.zeros(len(x), width)))


@pytest.mark.parametrize("weight", [5e-324, 1e-300, 1e300, 1.7e308])
def test_the_size_of_all_weights_does_not_matter(tmp_path: Path, weight: float):
    def scaled(self: Any, down: Any, state: Any, data: Any, ctx: Any) -> Update:
        return FedAvg.client_update(self, down, state, data, ctx)._replace(weight=weight)

    start(tmp_path / "one", misusing(client_update=scaled))
    start(tmp_path / "two", experiment(FEDAVG, **SMALL, options={"uniform": True}))
    one, uniform = (load_payload(tmp_path / name / "model" / "model.safetensors")["params"] for name in ("one", "two"))
    for name in uniform:  # the weights are no powers of two, so the last bit may differ
        torch.testing.assert_close(one[name], uniform[name], rtol=1e-6, atol=1e-7)


def test_a_network_without_trainable_parameters_is_refused(tmp_path: Path):
    def frozen(self: Any, spec: Any) -> Any:
        return spec.classifier().requires_grad_(False)

    with pytest.raises(ConfigError, match="no trainable parameter"):
        start(tmp_path / "run", misusing(module=frozen))


class Broken(Notes):
    """Fails whenever it is told something."""

    def round_done(self, row: Any) -> None:
        raise BrokenPipeError("the terminal is gone")

    def note(self, text: str) -> None:
        raise ValueError("I/O operation on closed file")


def test_an_observer_that_fails_never_ends_a_run(tmp_path: Path):
    other = Notes()
    start(tmp_path / "run", experiment(FEDAVG, **SMALL), [Broken(), other])
    assert len(other.clients) == 4 and len(rows(tmp_path / "run")) == 1
    assert "BrokenPipeError: the terminal is gone" in (tmp_path / "run" / "log.txt").read_text()


class Stopping(Notes):
    """Asks for the end after the first stage."""

    def stage_done(self, row: Any) -> None:
        raise Interrupted("enough")


def test_an_observer_may_stop_a_run_that_can_be_resumed(tmp_path: Path):
    whole = experiment(FEDAVG, num_stages=2, rounds=1)
    expected = start(tmp_path / "whole", whole)["state_sha256"]
    with pytest.raises(Interrupted, match="enough"):
        start(tmp_path / "run", whole, [Stopping()])
    assert resume(tmp_path / "run", whole)["state_sha256"] == expected


@pytest.mark.parametrize(("key", "value"), [("stage", 99), ("stage", "a"), ("metrics_size", -5), ("rounds", 0)])
def test_a_record_changed_on_disk_counts_as_damaged(tmp_path: Path, key: str, value: Any):
    whole = experiment(FEDAVG, num_stages=2, rounds=1)
    expected = start(tmp_path / "run", whole)["state_sha256"]
    newest = max((tmp_path / "run" / "checkpoints").iterdir()) / "meta.json"
    meta = json.loads(newest.read_text())
    meta["progress"][key] = value
    newest.write_text(json.dumps(meta))
    notes = Notes()
    assert resume(tmp_path / "run", whole, [notes])["state_sha256"] == expected
    assert any("meta.json has changed on disk" in note for note in notes.notes)


class Dropping(Headed):
    """A head behind dropout, which draws from the global generator."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.dropout(self.body(x), 0.5, self.training))


@dataclass(frozen=True)
class DroppingSpec(BlobSpec):
    def classifier(self) -> Any:
        with seeded(self.seed, "dropping"):
            return Dropping(Features(), self.num_classes)


def test_runs_in_two_threads_do_not_share_their_randomness(tmp_path: Path):
    def one(seed: int, name: str, into: dict[int, str]) -> None:
        whole = experiment(FEDAVG, seed=seed, num_stages=1, rounds=3, spec=DroppingSpec(seed=seed))
        into[seed] = start(tmp_path / f"{name}{seed}", whole)["state_sha256"]

    alone: dict[int, str] = {}
    together: dict[int, str] = {}
    for seed in (1, 2):
        one(seed, "alone", alone)
    threads = [threading.Thread(target=one, args=(seed, "together", together)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
