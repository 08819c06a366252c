"""Files are written whole or not at all, and a disk that refuses is told in one sentence."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
import torch

from fedloom.config import read_yaml
from fedloom.core import CheckpointError, ConfigError, RunError
from fedloom.core.payload import digest
from fedloom.engine import checkpoint, files
from fedloom.engine.files import load_payload, save_payload, write_bytes, write_json
from fedloom.engine.folder import RunFolder
from fedloom.engine.store import ClientStore, version_of
from toys.federation import experiment
from toys.running import Notes, resume, rows, start

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def odd_payload():
    shared = torch.arange(6.0)
    typed = {str(d).removeprefix("torch."): torch.ones(2, 3).to(d) for d in DTYPES}
    return {
        "typed": typed,
        "shapes": {"scalar": torch.tensor(7), "none": torch.zeros(0, 3), "view": torch.arange(6.0).reshape(2, 3).T},
        "shared": {"a": shared, "b": shared, "part": shared[2:]},
        "net/work": {"layer.0/weight": torch.full((2,), -0.0)},
        "empty": {},
    }


def test_payloads_come_back_with_every_dtype_rank_and_layout(tmp_path: Path):
    payload = odd_payload()
    save_payload(tmp_path / "deep" / "p.safetensors", {**payload, "net": {"b": torch.ones(1)}} | {"net/work": {}})
    payload.pop("net/work")
    save_payload(tmp_path / "p.safetensors", payload)
    back = load_payload(tmp_path / "p.safetensors")
    assert digest(back) == digest(payload) and set(back) == set(payload)
    assert all(
        t.is_contiguous() and t.data_ptr() % 64 == 0 for tree in back.values() for t in tree.values() if t.numel()
    )
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["p.safetensors"]


def test_what_cannot_be_read_is_a_checkpoint_error(tmp_path: Path):
    (tmp_path / "bad").write_bytes(b"nonsense")
    for name in ("bad", "absent"):
        with pytest.raises(CheckpointError, match=f"{name} is missing or damaged"):
            load_payload(tmp_path / name)


@pytest.mark.parametrize(
    "write", [lambda p: write_json(p, {"a": 1}), lambda p: save_payload(p, {"a": {"b": torch.ones(2)}})]
)
@pytest.mark.parametrize("error", [FULL, OSError(errno.EACCES, os.strerror(errno.EACCES)), OSError("odd")])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(write, error: OSError, tmp_path: Path, monkeypatch):
    target = tmp_path / "file"
    write_bytes(target, b"old")

    def refuse(*args):
        raise error

    monkeypatch.setattr(files.os, "replace", refuse)
    with pytest.raises(RunError, match=f"cannot write {target}: ") as info:
        write(target)
    assert target.read_bytes() == b"old" and list(tmp_path.iterdir()) == [target]
    if error is FULL:
        assert "no space left on device; free some space and resume the run" in str(info.value)


def test_a_full_disk_reported_by_safetensors_is_told_in_words(tmp_path: Path, monkeypatch):
    import safetensors.torch

    def refuse(*args, **kwargs):
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", refuse)
    with pytest.raises(RunError, match=r"No space left on device.*; free some space and resume the run"):
        save_payload(tmp_path / "file", {"a": {"b": torch.ones(2)}})


@pytest.mark.parametrize("step", ["save_payload", "write_json", "replace", "mkdir"])
def test_a_full_disk_while_saving_keeps_the_checkpoint_before(step: str, tmp_path: Path, monkeypatch):
    whole = start(tmp_path / "whole", experiment("toys.tally:tally"))
    real, calls = checkpoint.Checkpoints.save, [0]

    def refuse(*args, **kwargs):
        raise FULL if step in ("replace", "mkdir") else RunError(f"cannot write: {FULL}")

    def save(self, server, progress):
        calls[0] += 1
        with monkeypatch.context() as patch:
            if calls[0] > 3:
                owner = {"replace": checkpoint.os, "mkdir": Path}.get(step, checkpoint)
                patch.setattr(owner, step, refuse)
            real(self, server, progress)

    monkeypatch.setattr(checkpoint.Checkpoints, "save", save)
    with pytest.raises(RunError, match="cannot write") as info:
        start(tmp_path / "run", experiment("toys.tally:tally"))
    assert info.value.exit_code == 1
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2, "nothing half written, nothing lost"
    monkeypatch.undo()
    assert resume(tmp_path / "run", experiment("toys.tally:tally"))["state_sha256"] == whole["state_sha256"]
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


@pytest.fixture
def tiny_disk(tmp_path: Path):
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", mount], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("cannot mount a file system here")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_real_disk_that_is_full(workers: int, tiny_disk: Path):
    """Whatever is refused first (a client's state, its upload, a checkpoint, a row), the run ends in one sentence."""
    plan = {"rounds": 8, "cohort": 1.0}
    with pytest.raises(RunError, match=r"No space left|no space left") as info:
        start(tiny_disk / "run", experiment("toys.tally:tally", **plan), workers=workers, checkpoint_keep=100)
    assert "free some space and resume the run" in str(info.value)
    subprocess.run(["mount", "-o", "remount,size=64m", tiny_disk], check=True)
    notes = Notes()
    summary = resume(tiny_disk / "run", experiment("toys.tally:tally", **plan), [notes], workers=workers)
    assert summary["failed_clients"] == 0, "a full disk is no fault of a client"
    assert not notes.notes


def test_run_folders_are_checked(tmp_path: Path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(ConfigError, match="used, which is not empty; name another folder, or continue it"):
        RunFolder.create(tmp_path / "used", {}, {})
    with pytest.raises(ConfigError, match="which is a file"):
        RunFolder.create(tmp_path / "used" / "file", {}, {})
    with pytest.raises(ConfigError, match="which cannot be written"):
        RunFolder.create(tmp_path / "used" / "file" / "below", {}, {})
    with pytest.raises(CheckpointError, match=r"is not a run folder: it has no config.yaml"):
        RunFolder.open(tmp_path / "used")
    with RunFolder.create(tmp_path / "new" / "deep", {"b": 1, "a": "ü"}, {"x": 1}) as folder:
        assert (folder.path / "config.yaml").read_text(encoding="utf-8") == "b: 1\na: ü\n"
        folder.mark("FAILED", "why")
        folder.mark("DONE")
        assert not (folder.path / "FAILED").exists() and (folder.path / "DONE").exists()
        folder.mark(None)
        assert not (folder.path / "DONE").exists()


def test_what_a_start_that_was_killed_leaves_is_no_run(tmp_path: Path):
    path = tmp_path / "run"
    path.mkdir()
    for name in (".lock", "env.json", ".env.json.77.tmp", ".config.yaml.77.tmp"):
        (path / name).write_text("old")
    with RunFolder.create(path, {"a": 1}, {"x": 1}):
        assert sorted(p.name for p in path.iterdir()) == [".lock", "config.yaml", "env.json"]
        assert (path / "env.json").read_text() != "old"
        with pytest.raises(ConfigError, match="is not empty"):
            RunFolder.create(path, {}, {})
        (path / "config.yaml").unlink()
        with pytest.raises(ConfigError, match="in use by another run"):
            RunFolder.create(path, {}, {})


def test_rewinding_never_makes_the_records_longer(tmp_path: Path):
    with RunFolder.create(tmp_path / "run", {}, {}) as folder:
        folder.rewind(10)
        folder.append({"a": 1})
        size = folder.metrics_size()
        folder.append({"b": 2})
        folder.rewind(10**6)
        assert len(folder.metrics.read_text().splitlines()) == 2
        folder.rewind(size)
        assert folder.metrics.read_text() == '{"a": 1}\n'
        with pytest.raises(ValueError, match="not JSON compliant"):
            folder.append({"nan": float("nan")})


def test_client_states_are_versions(tmp_path: Path):
    store = ClientStore(tmp_path / "clients")
    assert store.load(3, None) is None
    one, two = version_of(0, 1, "train"), version_of(0, 2, "train")
    assert one < two < version_of(1, 0, "census")
    store.save(3, one, {"n": {"x": torch.tensor(1)}})
    store.save(3, two, {"n": {"x": torch.tensor(2)}})
    assert store.load(3, one)["n"]["x"].item() == 1
    (tmp_path / "clients" / "3" / ".left.tmp").touch()
    store.prune([{3: two}])
    assert [p.name for p in (tmp_path / "clients" / "3").iterdir()] == [f"{two}.safetensors"]
    with pytest.raises(CheckpointError, match="missing or damaged"):
        store.load(3, one)
    store.clear()
    store.prune([])
    assert not (tmp_path / "clients").exists()


@pytest.mark.parametrize("text", ["1e5", "yes", "null", "~", "0x1f", "1_000", "2026-11-30", "a: b", "- c", " d ", ""])
def test_a_text_comes_back_from_the_run_folder_as_a_text(tmp_path: Path, text: str):
    config = {"model": {"name": text, "options": {"x": [text, None, 1, 0.5, True]}}}
    with RunFolder.create(tmp_path / "run", config, {}):
        assert read_yaml(tmp_path / "run" / "config.yaml") == config
