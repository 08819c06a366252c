"""What is said while a run goes on."""

from __future__ import annotations

from typing import Any

import pytest

from fedloom.engine.experiment import Observer
from fedloom.progress import Lines, Live, observer

INFO = {"stages": 2, "rounds": 3, "clients": 5, "workers": 2, "resumed_from": "stage 1, round 0"}
ROUND: dict[str, Any] = {
    "stage": 0, "round": 1, "exchange": "train", "scope": "round", "clients": 4, "failed": 1, "rejected": 2,
    "degraded": True, "bytes_up": 10, "bytes_down": 20, "seconds": 0.5, "train/loss": 1.25, "train/extra": 3.0,
}  # fmt: skip
STAGE = {"stage": 0, "accuracy": 0.5, "accuracy/current": None, "seen_classes": 4}


def test_one_line_per_round_and_stage(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    lines.started(INFO)
    lines.round_done(ROUND)
    lines.round_done({**ROUND, "round": None, "exchange": "measure", "failed": 0, "rejected": 0, "degraded": False})
    lines.stage_done(STAGE)
    lines.note("client 3 failed")
    said = capsys.readouterr()
    assert not said.out
    assert said.err.splitlines() == [
        "5 clients, 2 stages of 3 rounds, counted from 0, 2 workers, resumed at stage 1, round 0",
        "stage 0 of 2, round 1 of 3: 4 clients, loss 1.25, 1 failed, 2 rejected, degraded, 0.50 s",
        "stage 0 of 2, measure: 4 clients, loss 1.25, 0.50 s",
        "stage 0 of 2 done: accuracy 0.500 on 4 classes, none on the current ones",
        "note: client 3 failed",
    ]


def test_domains_are_told_one_by_one() -> None:
    lines = Lines()
    lines.stages = 2
    domains = {"seen_domains": 2, "accuracy/domains": {"photo": 0.5, "sketch": 0.25, "art": None}}
    told = lines.stage_line({**STAGE, "accuracy/current": 0.75, **domains})
    assert told == (
        "stage 0 of 2 done: accuracy 0.500 on 4 classes of 2 domains, 0.750 on the current ones; "
        "photo 0.500, sketch 0.250"
    )
    lines.stages = 1
    assert lines.stage_line({**STAGE, **domains}) == "stage 0 of 1 done: accuracy 0.500; photo 0.500, sketch 0.250"


def test_one_is_no_plural(capsys: pytest.CaptureFixture[str]) -> None:
    Lines().started({**INFO, "stages": 1, "rounds": 1, "clients": 1, "workers": 1, "resumed_from": None})
    assert capsys.readouterr().err == "1 client, 1 stage of 1 round, counted from 0\n"


def test_verbose_says_every_measure() -> None:
    lines = Lines(verbose=True)
    lines.started({**INFO, "workers": 1, "resumed_from": None})
    assert "extra 3, accuracy 0.250, " in lines.round_line({**ROUND, "accuracy": 0.25})
    assert "up 10 B, down 20 B" in lines.round_line(ROUND)


def test_live_bars_stand_where_the_run_stands(capsys: pytest.CaptureFixture[str]) -> None:
    live = Live()
    live.started(INFO)
    live.client_done(2, 4)
    live.round_done(ROUND)
    live.stage_done(STAGE)
    rounds, clients = live.bars.tasks
    live.close()
    assert (rounds.completed, rounds.total) == (2, 6)
    assert (clients.completed, clients.total) == (2, 4)
    assert "stage 0 of 2 done" in capsys.readouterr().err


def test_the_observer_fits_the_terminal() -> None:
    assert type(observer(quiet=True, verbose=False)) is Observer
    assert type(observer(quiet=False, verbose=False)) is Lines
