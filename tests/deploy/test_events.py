"""Progress in a file: what one process writes, another reads while it grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.core import CheckpointError, ConfigError, Interrupted, PayloadError, RunError
from fedloom.deploy.events import Follower, Recorder
from toys.running import Notes


class Seen(Notes):
    """Keeps rows too."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict] = []

    def round_done(self, row):
        self.rows.append(dict(row))

    stage_done = round_done


def test_everything_is_passed_on_once_and_in_order(tmp_path: Path):
    seen = Seen()
    follower = Follower(tmp_path / "events", [seen])
    assert not follower.look()
    recorder = Recorder(tmp_path / "events")
    recorder.started({"clients": 3})
    recorder.client_done(1, 2)
    assert follower.look() and seen.info == {"clients": 3} and seen.clients == [(1, 2)]
    recorder.note("ü")
    recorder.round_done({"round": 0, "loss": 0.5})
    recorder.stage_done({"stage": 0, "accuracy": None})
    assert follower.look() and not follower.look()
    assert seen.notes == ["ü"]
    assert seen.rows == [{"round": 0, "loss": 0.5}, {"stage": 0, "accuracy": None}]
    recorder.ended(tmp_path)
    assert not follower.ended
    follower.look()
    assert follower.ended and follower.error is None and follower.folder == tmp_path


def test_half_a_line_waits_for_its_other_half(tmp_path: Path):
    seen = Seen()
    follower = Follower(tmp_path / "events", [seen])
    with open(tmp_path / "events", "w") as file:
        file.write('["note", "on')
        file.flush()
        follower.look()
        assert seen.notes == []
        file.write('e"]\n')
        file.flush()
        follower.look()
    assert seen.notes == ["one"]


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (ConfigError("a"), ConfigError, 2),
        (CheckpointError("a"), CheckpointError, 2),
        (RunError("a"), RunError, 1),
        (PayloadError("a"), RunError, 1),
        (Interrupted("a"), Interrupted, 130),
    ],
)
def test_an_error_keeps_its_sentence_and_its_exit_code(tmp_path: Path, error, kind, code):
    recorder = Recorder(tmp_path / "events")
    recorder.ended(None, error)
    follower = Follower(tmp_path / "events", [])
    follower.look()
    assert type(follower.error) is kind and str(follower.error) == "a" and follower.error.exit_code == code
    assert follower.folder is None


def test_a_file_beside_it_asks_the_run_to_stop(tmp_path: Path):
    recorder = Recorder(tmp_path / "events")
    recorder.client_done(1, 2)
    (tmp_path / "events.stop").touch()
    with pytest.raises(Interrupted):
        recorder.client_done(2, 2)
    recorder.ended(None)
