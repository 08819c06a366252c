"""What `run` and `resume` print at the end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedloom.cli.train import closing_lines, show

WHOLE = {
    "parameters": 78042,
    "active_parameters": 78042,
    "flops_per_example": 1530000,
    "sample_visits": 5752,
    "pass_visits": 0,
}
PRUNED = {**WHOLE, "active_parameters": 38912}
PASSES = {**WHOLE, "pass_visits": 1200}
USED = "active parameters: 38\u2009912 of 78\u2009042 (49.9 %), 1\u2009530\u2009000 FLOPs per example"
VISITS = "sample visits: 5\u2009752 in training, 1\u2009200 in passes without training"


@pytest.mark.parametrize(
    ("summary", "lines"),
    [
        (WHOLE, []),
        (PRUNED, [USED]),
        (PASSES, [VISITS]),
        (PRUNED | {"pass_visits": 1200}, [USED, VISITS]),
        (PRUNED | {"flops_per_example": None}, [USED.partition(",")[0]]),
        (PRUNED | {"active_parameters": 0}, [USED.replace("38\u2009912", "0").replace("49.9", "0.0")]),
        ({}, []),
        ({"parameters": 5, "sample_visits": 3}, []),
    ],
)
def test_a_line_tells_what_is_not_the_same_by_nature(summary: dict[str, Any], lines: list[str]) -> None:
    assert closing_lines(summary) == lines


def test_the_lines_follow_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(SimpleNamespace(summary=PRUNED | PASSES | {"active_parameters": 38912}, folder=tmp_path), as_json=False)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-3:] == [USED, VISITS, f"folder: {tmp_path}"] and printed[0] == "run"
