"""The files that W&B will send hold what a run has written; they are read with W&B's own messages."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedloom.trackers import Card
from fedloom.trackers.following import how_to_see

pytest.importorskip("wandb", reason="needs the extra 'trackers'")
OPTIONS = {"name": "wandb", "mode": "offline", "project": "fedloom", "entity": None, "group": "g", "tags": ["t"]}
BLOCK, HEAD, BEGIN = 32768, 7, 7  # a LevelDB log after seven bytes of W&B's own


def records(path: Path) -> Iterator[Any]:
    """The messages of a .wandb file."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), BEGIN, b""
    while at < len(data):
        if BLOCK - at % BLOCK < HEAD:  # what is left of a block holds no entry
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEAD])
        whole += data[at + HEAD : at + HEAD + size]
        at += HEAD + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def parts(folder: Path) -> list[list[Any]]:
    """The messages of every part of a run, in the order in which the parts began; W&B's process writes their ends."""
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    until = time.monotonic() + 10
    while time.monotonic() < until and not all(of("exit", list(records(path))) for path in files):
        time.sleep(0.01)
    return [list(records(path)) for path in files]


def of(kind: str, messages: list[Any]) -> list[Any]:
    return [getattr(m, kind) for m in messages if m.WhichOneof("record_type") == kind]


def items(entries: Any) -> dict[str, Any]:
    return {e.key or ".".join(e.nested_key): json.loads(e.value_json) for e in entries}


def test_a_resumed_run_has_every_point_once(resumed: Callable[..., Path], points: Callable[..., Any]) -> None:
    folder = resumed({"name": "wandb", "project": "mine"})
    first, second = parts(folder)
    (began,), (went_on,) = of("run", first), of("run", second)
    assert how_to_see(folder) == f"wandb sync {folder / 'wandb'}/offline-run-*-{began.run_id}"
    assert (began.project, began.display_name) == ("mine", "fedavg, seed 0")
    assert began.run_id == went_on.run_id == json.loads((folder / "tracker.json").read_text())["record"]
    assert items(began.config.update)["stream"]["tasks"] == 2
    found = [
        (key, entry.step.num, float(value))
        for entry in (*of("history", first), *of("history", second))
        for key, value in items(entry.item).items()
        if key[0] != "_" and key != "seconds"
    ]
    assert {(key, step): value for key, step, value in found} == points(folder)
    assert max(Counter((key, step) for key, step, _ in found).values()) == 1
    (end,) = of("exit", second)
    assert end.exit_code == 0 and of("exit", first)[0].exit_code == 1
    kept = items(entry for message in of("summary", second) for entry in message.update)
    assert kept["summary/final_accuracy"] == json.loads((folder / "summary.json").read_text())["final_accuracy"]
    (files,) = (folder / "wandb").glob("offline-run-*/files/summary.json")
    assert files.read_bytes() == (folder / "summary.json").read_bytes()


def test_a_part_that_died_is_removed_for_its_values_come_again(tmp_path: Path) -> None:
    from fedloom.trackers.wandb import wandb

    ended, died = (tmp_path / "wandb" / f"offline-run-2026010{k}_000000-id" for k in (1, 2))
    for part in (ended, died):
        (part / "files").mkdir(parents=True)
    (ended / ".closed").touch()
    tracker = wandb(Card(OPTIONS, tmp_path, "title", {}, "abc", "id"))
    assert (ended.exists(), died.exists(), tracker.record) == (True, False, "id")
    tracker.close("stopped")
    assert sum((part / ".closed").exists() for part in (tmp_path / "wandb").glob("offline-run-*")) == 2


def test_pictures_are_media_and_nothing_of_the_machine_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from fedloom.trackers.wandb import wandb

    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "accuracy.png")
    tracker = wandb(Card(OPTIONS, tmp_path, "title", {"seed": 3}, "abc"))
    tracker.log({"accuracy": 0.5}, 0)
    tracker.finish({"summary/rounds": 1.0}, 0, [tmp_path / "accuracy.png"], [])
    tracker.close("finished")
    (messages,) = parts(tmp_path)
    (run,) = of("run", messages)
    assert (run.run_group, list(run.tags)) == ("g", ["t"])
    assert items(run.config.update) | {"_wandb": 0} == {"seed": 3, "config_hash": "abc", "_wandb": 0}
    kept = items(entry for message in of("summary", messages) for entry in message.update)
    assert kept["pictures/accuracy"]["_type"] == "image-file" and kept["summary/rounds"] == 1.0
    names = {path.name for path in (tmp_path / "wandb").rglob("files/*")}
    assert names == {"media"}, "no metadata, no list of packages"
    assert capfd.readouterr() == ("", "")


WRITE = """
import os, sys
from pathlib import Path
from fedloom.trackers import Card
from fedloom.trackers.wandb import wandb
for name in sys.argv[2:]:
    tracker = wandb(Card(%r, Path(sys.argv[1], name), "title", {}, "abc"))
    tracker.log({"accuracy": 0.5}, 0)
    tracker.close("finished")
print(os.environ.get("WANDB_CACHE_DIR"))
"""


def test_offline_nothing_is_written_outside_the_run_folders(tmp_path: Path) -> None:
    for name in ("home", "one", "two"):
        (tmp_path / name).mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "XDG_"))}
    home = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", WRITE % OPTIONS, str(tmp_path), "one", "two"]
    told = subprocess.run(command, env={**kept, **home}, check=True, capture_output=True, text=True).stdout
    assert told.strip() == "None", "the environment is as it was"
    files = [path.relative_to(tmp_path).parts for path in tmp_path.rglob("*") if path.is_file()]
    assert {parts[0] for parts in files} == {"one", "two"}


@pytest.mark.parametrize(
    ("mode", "before", "within"),
    [("offline", None, "run/wandb/cache"), ("offline", "theirs", "theirs"), ("online", None, None)],
)
def test_the_cache_is_ours_while_wandb_begins_offline_unless_the_user_has_named_one(
    monkeypatch: pytest.MonkeyPatch, mode: str, before: str | None, within: str | None
) -> None:
    from fedloom.trackers.wandb import _caching

    if before is None:
        monkeypatch.delenv("WANDB_CACHE_DIR", raising=False)
    else:
        monkeypatch.setenv("WANDB_CACHE_DIR", before)
    with suppress(OSError), _caching(mode, Path("run")):
        assert os.environ.get("WANDB_CACHE_DIR") == within
        raise OSError("it did not begin")
    assert os.environ.get("WANDB_CACHE_DIR") == before
