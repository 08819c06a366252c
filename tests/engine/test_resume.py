"""A run that was killed and resumed ends in the same bits as one that was not."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedloom.core import CheckpointError, ConfigError, Interrupted
from fedloom.engine.folder import RunFolder
from toys.faults import Fault
from toys.federation import experiment
from toys.running import Notes, resume, rows, start

FAULTY = "toys.faults:faulty"
KILLED = -signal.SIGKILL


def kill(cases: list[dict[str, Any]]) -> list[int]:
    """How each case ended: minus the signal, or the exit code."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("killer.py"))],
        input=json.dumps(cases), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@cache
def uninterrupted() -> tuple[str, str, str]:
    """Hash and rows of the run that nobody kills."""
    with tempfile.TemporaryDirectory() as folder:
        summary = start(Path(folder) / "run", experiment(FAULTY))
        return summary["state_sha256"], str(rows(Path(folder) / "run")), str(rows(Path(folder) / "run", "stage"))


def assert_same(path: Path, **options: Any) -> None:
    summary = resume(path, experiment(FAULTY), **options)
    assert (summary["state_sha256"], str(rows(path)), str(rows(path, "stage"))) == uninterrupted()
    left = [p for p in path.rglob("*.tmp") if p.parent.name != "checkpoints"]
    assert not left, "half-written files of killed processes stay behind"


PLACES = [
    ("row", 1, False), ("row", 3, True), ("client", 1, False), ("client", 4, True), ("commit", 5, False),
    ("save", 1, False), ("save", 1, True), ("save", 4, False), ("save", 4, True), ("meta", 2, False), ("meta", 2, True),
    ("sync", 1, False), ("sync", 3, True), ("prune", 1, False), ("prune", 3, True), ("commit", 9, True),
]  # fmt: skip


def test_kill_9_at_every_kind_of_step(tmp_path: Path):
    """Inside the saving of a checkpoint too: before and after each of its steps, the first time and later."""
    cases = [{"path": str(tmp_path / str(k)), "at": place} for k, place in enumerate(PLACES)]
    assert kill(cases) == [KILLED] * len(cases)
    for case in cases:
        assert_same(Path(case["path"]))


def test_kill_9_at_random_moments_again_and_again(tmp_path: Path):
    rng = random.Random(time.time_ns())
    began = time.perf_counter()
    start(tmp_path / "timed", experiment(FAULTY))
    whole = time.perf_counter() - began
    moments = [rng.uniform(0.02, whole) for _ in range(4)]
    cases = [{"path": str(tmp_path / str(k % 2)), "after": moment} for k, moment in enumerate(moments)]
    ends = kill(cases)
    assert set(ends) <= {KILLED, 0}, ends
    for k in range(2):
        go = tmp_path / str(k)
        if (go / "config.yaml").exists():
            assert_same(go)


def test_kill_9_in_the_middle_of_a_client_and_resume_with_other_workers(tmp_path: Path):
    fault = {"kind": "kill", "stage": 1, "round": 1}
    one = {"kind": "kill", "stage": 2, "round": 0}
    cases = [{"path": str(tmp_path / str(k)), "faults": [f]} for k, f in enumerate((fault, one))]
    assert kill(cases) == [KILLED, KILLED]
    assert_same(tmp_path / "0", workers=2)
    assert_same(tmp_path / "1", workers=1, evaluate_every="stage", checkpoint_keep=1)


def test_workers_end_when_their_parent_is_killed(tmp_path: Path):
    assert kill(
        [{"path": str(tmp_path / "run"), "after": 4.0, "plan": {"rounds": 400}, "options": {"workers": 2}}]
    ) == [KILLED]
    until = time.monotonic() + 15
    while _processes(str(tmp_path)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _processes(str(tmp_path))


def _processes(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if "fedloom.engine.worker" in command and text in command:
            found.append(command)
    return found


def cut(tmp_path: Path, stage: int = 2, trip: int = 1, name: str = "run", **options: Any) -> Path:
    """A run that was interrupted when it came to this trip."""
    at = None if options.get("workers", 1) > 1 else trip - 1  # whichever round this process works in first
    fault = Fault("interrupt", stage=stage, round=at)
    with pytest.raises(Interrupted):
        start(tmp_path / name, experiment(FAULTY, options={"faults": (fault,)}), **options)
    return tmp_path / name


def test_ctrl_c_ends_after_the_current_client_with_a_checkpoint(tmp_path: Path):
    before = signal.getsignal(signal.SIGINT)
    path = cut(tmp_path, checkpoint_every=100)
    assert signal.getsignal(signal.SIGINT) is before
    notes = Notes()
    summary = resume(path, experiment(FAULTY), [notes])
    assert notes.info["resumed_from"] == "stage 2, round 0", "the census of stage 2 was not lost"
    assert (summary["state_sha256"], str(rows(path)), str(rows(path, "stage"))) == uninterrupted()


def test_ctrl_c_with_two_processes(tmp_path: Path):
    path = cut(tmp_path, workers=2)
    assert not _processes(str(path))
    assert_same(path, workers=2)


def test_a_second_ctrl_c_stops_at_once_and_loses_no_checkpoint(tmp_path: Path):
    twice = (Fault("interrupt", stage=1, round=0), Fault("interrupt", stage=1, round=0))
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", experiment(FAULTY, options={"faults": twice}))
    assert_same(tmp_path / "run")


def test_a_run_in_a_thread_needs_no_signals(tmp_path: Path):
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(start(tmp_path / "run", experiment(FAULTY))["state_sha256"]))
    thread.start()
    thread.join()
    assert found == [uninterrupted()[0]]


def test_resume_of_a_finished_run_computes_nothing_again(tmp_path: Path):
    summary = start(tmp_path / "run", experiment(FAULTY))
    again = resume(tmp_path / "run", experiment(FAULTY))
    unequal = {k for k in summary if summary[k] != again[k]} - {"wall_seconds"}
    assert not unequal


def checkpoints(path: Path) -> list[Path]:
    return sorted((path / "checkpoints").iterdir())


def garble(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 0xFF
    file.write_bytes(bytes(data))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE = {
    "garbled server": lambda c: garble(c / "server.safetensors"),
    "short server": lambda c: truncate(c / "server.safetensors"),
    "no server": lambda c: (c / "server.safetensors").unlink(),
    "short meta": lambda c: truncate(c / "meta.json"),
    "empty meta": lambda c: (c / "meta.json").write_text(""),
    "other meta": lambda c: (c / "meta.json").write_text("[]"),
    "no meta": lambda c: (c / "meta.json").unlink(),
    "nothing": lambda c: (shutil.rmtree(c), c.mkdir()),
}


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path):
    whole = cut(tmp_path)
    for kind, damage in DAMAGE.items():
        path = tmp_path / kind
        shutil.copytree(whole, path)
        damage(checkpoints(path)[-1])
        notes = Notes()
        summary = resume(path, experiment(FAULTY), [notes], checkpoint_every=2)
        assert (summary["state_sha256"], str(rows(path))) == uninterrupted()[:2], kind
        assert any("damaged" in note and note.endswith("trying the one before") for note in notes.notes), kind


def test_a_client_state_that_changed_on_disk_is_noticed(tmp_path: Path):
    path = cut(tmp_path, trip=2)
    versions = json.loads((checkpoints(path)[-1] / "meta.json").read_text())["progress"]["versions"]
    older = json.loads((checkpoints(path)[-2] / "meta.json").read_text())["progress"]["versions"]
    client = next(c for c in versions if versions[c] != older.get(c))
    garble(path / "clients" / client / f"{versions[client]}.safetensors")
    notes = Notes()
    resume(path, experiment(FAULTY), [notes])
    assert any(f"the state of client {client} is missing or has changed" in note for note in notes.notes)
    assert (str(rows(path)), str(rows(path, "stage"))) == uninterrupted()[1:]


def test_when_every_checkpoint_is_damaged_the_run_is_refused(tmp_path: Path):
    path = cut(tmp_path)
    for folder in checkpoints(path):
        truncate(folder / "server.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"every checkpoint of the run is damaged; run the configuration again\. .*has changed on disk",
    ) as info:
        resume(path, experiment(FAULTY))
    assert info.value.exit_code == 2


def test_a_changed_configuration_is_refused_in_words(tmp_path: Path):
    path = cut(tmp_path, config_hash="one")
    with pytest.raises(CheckpointError, match=r"the configuration of .* has changed .* restore config.yaml"):
        resume(path, experiment(FAULTY), config_hash="two")
    resume(path, experiment(FAULTY), config_hash="one")


def test_a_folder_in_use_is_refused(tmp_path: Path):
    with RunFolder.create(tmp_path / "run", {}, {}), pytest.raises(ConfigError, match="is in use by another run"):
        RunFolder.open(tmp_path / "run")
    RunFolder.open(tmp_path / "run").close()


def test_metrics_of_rounds_that_are_made_again_are_not_doubled(tmp_path: Path):
    path = cut(tmp_path)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"scope": "round", "half a ro')
    assert_same(path)


def test_at_most_keep_checkpoints_and_only_states_that_they_name(tmp_path: Path):
    for keep in (1, 3):
        path = tmp_path / str(keep)
        start(path, experiment(FAULTY), checkpoint_keep=keep)
        assert len(checkpoints(path)) == keep
        named = set()
        for folder in checkpoints(path):
            versions = json.loads((folder / "meta.json").read_text())["progress"]["versions"]
            named |= {f"{client}/{version}.safetensors" for client, version in versions.items()}
        assert {str(p.relative_to(path / "clients")) for p in (path / "clients").glob("*/*")} == named


def test_without_checkpoints_old_client_states_do_not_pile_up(tmp_path: Path):
    path = tmp_path / "run"
    start(path, experiment(FAULTY, rounds=6), checkpoint_every=0)
    assert not (path / "checkpoints").exists()
    assert {len(list(folder.iterdir())) for folder in (path / "clients").iterdir()} == {1}
