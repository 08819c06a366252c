"""What a stage's row says: every accuracy has a name that tells its population."""

from __future__ import annotations

from pathlib import Path

import pytest

from toys.federation import experiment
from toys.running import rows, start


def federation():
    return experiment("fedloom.methods.fedavg:fedavg", num_clients=3, cohort=1)


def stage_rows(path: Path, **options) -> list[dict]:
    start(path, federation(), **options)
    return rows(path, "stage")


def test_accuracies_are_named_by_their_population(tmp_path: Path):
    """Every client that has taken part is asked, not the last cohort; means by examples and by clients have names."""
    found, served = stage_rows(tmp_path / "run"), set()
    whole = federation()
    assert [row["stage"] for row in found] == [0, 1, 2]
    for row in found:
        served |= {client for r in range(2) for client in whole.draw(row["stage"], r, "cohort")}
        assert row["accuracy/clients"] == len(served)
        assert {"accuracy", "accuracy/weighted", "accuracy/client_mean", "accuracy/client_worst10"} <= row.keys()
        tasks = [value for value in row["accuracy/tasks"] if value is not None]
        assert (
            len(tasks) == row["stage"] + 1 and len(row["accuracy/tasks"]) == 3 and row["seen_classes"] == 2 * len(tasks)
        )
        assert row["accuracy"] == pytest.approx(sum(tasks) / len(tasks)), "test sets of equal size"
        assert row["accuracy/current"] == tasks[-1]
        assert row["accuracy"] <= row["accuracy/within_task"] <= 1, "knowing the task can only help"
    assert len(served) > 1, "more than one cohort"
    assert found[0]["accuracy"] == found[0]["accuracy/within_task"]


def test_personal_views_can_be_left_out(tmp_path: Path):
    whole, bare = stage_rows(tmp_path / "whole"), stage_rows(tmp_path / "bare", personal=False)
    assert [row["accuracy"] for row in whole] == [row["accuracy"] for row in bare]
    assert not any(key.startswith("accuracy/client") for row in bare for key in row if row[key] is not None)
