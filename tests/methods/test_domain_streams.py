"""Continual methods where domains arrive in place of classes: every class is old from the second stage on."""

from pathlib import Path

import pytest

from toys.domains import arriving
from toys.running import rows, start

OPTIONS = {
    "fedavg": {},
    "fedewc": {"lam": 100.0},
    "fedfmx": {},
    "fedlwf": {},
    "joint": {},
    "replay": {"memory": 24},
}


def run(folder: Path, name: str, **options):
    return start(folder, arriving(f"fedloom.methods.{name}:{name}", options={**OPTIONS[name], **options}))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_continual_method_goes_through_all_domains(name: str, tmp_path: Path):
    summary = run(tmp_path / name, name)
    assert summary["failed_clients"] == summary["rejected_updates"] == summary["degraded_rounds"] == 0
    assert summary["sample_visits"] == 2 * 2 * 240, "two rounds of two epochs of every example"
    stages = [row for row in rows(tmp_path / name) if row["exchange"] == "train"]
    assert [row["stage"] for row in stages] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_joint_training_learns_the_domains_that_finetuning_forgets(tmp_path: Path):
    forgetful, joint = run(tmp_path / "fedavg", "fedavg"), run(tmp_path / "joint", "joint")
    assert joint["final_accuracy"] > forgetful["final_accuracy"]


@pytest.mark.parametrize(
    ("name", "switched_off"), [("fedlwf", {"weight": 0.0}), ("fedewc", {"lam": 0.0}), ("replay", {"distillation": 0.0})]
)
def test_what_holds_on_to_the_past_acts_from_the_second_domain_on(name: str, switched_off: dict, tmp_path: Path):
    """The first stage is the same with and without it."""
    folders = tmp_path / "with", tmp_path / "without"
    summaries = [run(folder, name, **options) for folder, options in zip(folders, ({}, switched_off), strict=True)]
    assert summaries[0]["params_sha256"] != summaries[1]["params_sha256"]
    losses = [[row["train/loss"] for row in rows(folder) if row["exchange"] == "train"] for folder in folders]
    assert losses[0][:2] == losses[1][:2]


def test_fedewc_measures_after_every_domain_but_the_last(tmp_path: Path):
    run(tmp_path / "run", "fedewc")
    assert [row["stage"] for row in rows(tmp_path / "run") if row["exchange"] == "consolidate"] == [0, 1, 2]
