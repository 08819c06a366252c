"""The script beside the sources."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "make.py"


class Slow:
    """A command that the user stops twice, and that ends in its own time."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.waits = 0

    def wait(self) -> int:
        self.waits += 1
        if self.waits < 3:
            raise KeyboardInterrupt
        return 1


def test_a_stopped_command_ends_quietly_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    call = runpy.run_path(str(SCRIPT))["call"]
    monkeypatch.setattr(subprocess, "Popen", Slow)
    with pytest.raises(SystemExit) as caught:
        call("anything")
    assert caught.value.code == 130


def test_a_failed_command_hands_on_its_code() -> None:
    call = runpy.run_path(str(SCRIPT))["call"]
    call(sys.executable, "-c", "")
    with pytest.raises(SystemExit) as caught:
        call(sys.executable, "-c", "raise SystemExit(3)")
    assert caught.value.code == 3
