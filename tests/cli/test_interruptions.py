"""Signals outside the training loop, and results that cannot be printed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from fedloom import lifecycle
from fedloom.cli import app
from fedloom.cli.application import layers
from fedloom.cli.inputs import read_inputs
from fedloom.core.errors import DataError
from fedloom.report.tables import summary_text, warning
from fedloom.terminal import OutputLost

FAST = ["-s", "model.name=linear", "-s", "training.rounds=1", "-s", "partition.clients=3", "-m", "fedavg", "-q",
        "-s", "stream.tasks=2", "-s", "training.local_epochs=1"]  # fmt: skip


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], prog_name="fedloom")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_run_folder(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.config.resolve_source", lambda *args: os.kill(os.getpid(), number))
    before = signal.getsignal(number)
    result = call("run")
    assert (result.exit_code, result.stderr) == (130, "error: interrupted\n")
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_pictures_are_made(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, "_pictures", lambda *args: os.kill(os.getpid(), number))
        result = call("run", *FAST, "--out", tmp_path / "a")
    assert result.exit_code == 130
    assert result.stderr.endswith(f"continue with `fedloom resume {tmp_path / 'a'}`\n")
    assert not (tmp_path / "a" / "DONE").exists()
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    assert call("resume", tmp_path / "a", "-q").exit_code == 0
    assert (tmp_path / "a" / "DONE").exists()


def test_an_error_that_a_signal_caused_is_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_imported(*args: Any) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise ImportError("half imported") from None

    monkeypatch.setattr("fedloom.config.resolve_source", half_imported)
    assert call("run").exit_code == 130


def test_a_result_that_cannot_be_printed_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any) -> None:
        raise OutputLost("standard output cannot be written (full)")

    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    monkeypatch.setattr("fedloom.cli.train._print", lost)
    result = call("run", *FAST, "--out", tmp_path / "a")
    assert result.exit_code == 0 and "the run is done" in result.stderr


@pytest.mark.parametrize("text", ["--5", "²", "٣", "1.5"])
def test_workers_that_are_no_number(text: str) -> None:
    assert layers(workers=text)["engine"]["workers"] == text
    assert "must be auto or a whole number of at least 1" in call("run", "--dry-run", "--workers", text).stderr


def test_an_empty_out() -> None:
    result = call("run", *FAST, "--out", "")
    assert (result.exit_code, result.stderr) == (2, "error: --out is empty; name a folder\n")


def test_files_that_hold_no_inputs(tmp_path: Path) -> None:
    meta = {"input_shape": [1, 8, 8], "stored": "uint8"}
    np.save(tmp_path / "scalar.npy", np.array(3))
    np.savez(tmp_path / "objects.npz", x=np.array([{}, 1], dtype=object))
    (tmp_path / "junk.npz").write_bytes(b"PK\x03\x04junk")
    for name, sentence in (("scalar.npy", "single number"), ("objects.npz", "Python objects"), ("junk.npz", "damaged")):
        with pytest.raises(DataError, match=sentence) as caught:
            read_inputs(tmp_path / name, meta)
        assert "pickle" not in str(caught.value) and "BytesIO" not in str(caught.value)


def test_a_run_in_which_nothing_was_learnt_says_so() -> None:
    summary = {"method": "m", "rounds": 4, "degraded_rounds": 4, "rejected_updates": 12}
    assert "WARNING: none of the 4 rounds changed the model (12 updates were rejected)" in summary_text(summary)
    assert "Degraded rounds" in summary_text(summary)
    assert warning({"rounds": 4, "degraded_rounds": 3}) == "" == warning({})
