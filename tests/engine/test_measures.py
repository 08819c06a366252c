"""What a network measures of itself is evaluated with the global view, whatever the workers, and shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.core import RunError
from fedloom.engine import evaluation, runtime
from fedloom.engine.checkpoint import newest
from fedloom.report import read_run, save_accuracy, write_report
from toys.choices import OPTIONS, ChoiceSpec, Likelihood, questions
from toys.federation import experiment
from toys.running import Patient, rows, start


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces so small that there are several per part of the test set, and several batches per piece."""
    monkeypatch.setattr(evaluation, "CHUNK", 30)
    monkeypatch.setattr(runtime, "BATCH", 13)


def test_measures_are_those_of_the_whole_test_set_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    small(monkeypatch)
    whole = questions(rounds=3)
    summary, row = start(tmp_path, whole), rows(tmp_path, "stage")[-1]
    net = whole.net()
    net.bind(newest(tmp_path)[0]["params"])
    x, y, _ = next(whole.plan.test(0).epoch(batch_size=1000, shuffle=False))
    with torch.no_grad():
        out = net(x)
    right = torch.arange(len(y))
    normalised = (out["logits"] / out["characters"]).argmax(1) == y
    mean = -out["logits"][right, y].double().sum() / out["tokens"][right, y].sum()
    assert row["measures"] == summary["measures"]
    assert summary["measures"]["accuracy_norm"] == float(normalised.double().mean())
    assert summary["measures"]["perplexity"] == pytest.approx(float(mean.exp()), rel=1e-6)
    assert summary["final_accuracy"] == float((out["logits"].argmax(1) == y).double().mean())
    assert summary["final_accuracy"] != summary["measures"]["accuracy_norm"] > 1.5 / OPTIONS, "it has learnt"


def test_workers_change_no_bit_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evaluation, "CHUNK", 30)
    patient = Patient()
    two = start(tmp_path / "2", questions(), [patient], workers=2)
    assert patient.shared and two["measures"] == start(tmp_path / "1", questions())["measures"]


def test_flower_measures_the_same(tmp_path: Path):
    pytest.importorskip("flwr")
    from fedloom.engine.experiment import Options
    from fedloom.engine.folder import RunFolder
    from fedloom.engine.start import carry_out
    from toys import grids

    with RunFolder.create(tmp_path / "grid", {"toy": True}, {}) as folder:
        options = Options(engine="flower", runtime="grid")
        found = carry_out(questions(), options, folder, (), grids.CARD)
    assert found["measures"] == start(tmp_path / "serial", questions())["measures"]


def test_a_network_without_measures_has_none(tmp_path: Path):
    summary = start(tmp_path, experiment("fedloom.methods.fedavg:fedavg", num_stages=1))
    assert summary["measures"] is None and rows(tmp_path, "stage")[-1]["measures"] is None


class Damaged(Likelihood):
    """Returns a number for a pair."""

    def measures(self, out: Any, y: Any) -> Any:
        return {"nll": 1.0}


class DamagedSpec(ChoiceSpec):
    """A network whose measures are none."""

    def classifier(self) -> Damaged:
        return Damaged()


def test_measures_that_are_none_end_the_run_in_words(tmp_path: Path):
    whole = replace(questions(), spec=DamagedSpec(), rebuild=None)
    with pytest.raises(
        RunError, match=r"evaluation of the global view .*the network's measures must be \(sum, count\)"
    ):
        start(tmp_path, whole)


def test_a_report_is_made_of_classes_that_are_positions_of_options(tmp_path: Path):
    summary = start(tmp_path, questions())
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "method": "fedavg"}))
    record = read_run(tmp_path)
    assert record.problems == () and record.stages[0]["seen_classes"] == OPTIONS
    assert save_accuracy(record, tmp_path / "accuracy.png").is_file()
    page = write_report([tmp_path], tmp_path / "report.html").read_text()
    for shown in ("Final accuracy, length-normalised", "Perplexity", f"{summary['measures']['perplexity']:.4g}"):
        assert shown in page
    assert ">chance</text>" in page and f">{100 / OPTIONS:.1f} %</text>" in page, "one of so many options"
