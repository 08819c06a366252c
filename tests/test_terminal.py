"""Standard streams that are closed, full or left."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from typing import Any

import pytest

from fedloom.terminal import OutputLost, say


class Broken(io.StringIO):
    def __init__(self, error: Exception):
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("closed"), BrokenPipeError()])
def test_standard_error_may_refuse(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Broken(error))
    say("x", err=True)
    monkeypatch.setattr(sys, "stderr", None)
    say("x", err=True)


def test_standard_output_tells_of_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Broken(OSError(28, "No space left on device")))
    with pytest.raises(OutputLost, match=r"cannot be written \(No space left on device\)"):
        say("x")
    for quiet in (Broken(BrokenPipeError()), None):
        monkeypatch.setattr(sys, "stdout", quiet)
        say("x")


def test_characters_that_an_encoding_lacks_are_spelt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    say("é \udcff")
    assert raw.getvalue() == b"\\xe9 \\udcff\n"


@pytest.mark.parametrize(("redirect", "code"), [(">&- 2>&-", 0), ("| true", 0), (">/dev/full", 1)])
def test_a_command_without_its_streams(redirect: str, code: int) -> None:
    if "full" in redirect and not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    found: Any = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m fedloom list models {redirect}"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert found.returncode == code
    assert "Traceback" not in found.stderr and "Exception ignored" not in found.stderr
