"""A claim from its entry to its verdict."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedloom import lifecycle
from fedloom.claims import Claim, Found, claims, prepare, report
from fedloom.claims.rules import HELD, NOT_HELD, NOT_TESTED, TOO_FEW
from fedloom.claims.trial import Outcome, Prepared
from fedloom.core import ConfigError

TINY = {
    "model": {"name": "linear"},
    "training": {"rounds": 2, "local_epochs": 1},
    "partition": {"clients": 3},
    "stream": {"tasks": 2},
}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take a second."""
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)


def prepared(claim: Claim, seeds: int = 3, scale: str = "small") -> Prepared:
    """With plans that nobody carries out."""
    plans: Any = {"": SimpleNamespace(seeds=tuple(range(seeds)), runs=dict.fromkeys("abc"))}
    return Prepared(claim, scale, {} if claim.scales[scale].needs else plans)


def numbers(**means: float) -> Found:
    return Found(
        {"": {k: {"final_accuracy": {s: m + 0.001 * s for s in range(3)}} for k, m in means.items()}}
    )  # fmt: skip


def test_a_claim_is_held_or_not_by_its_checks() -> None:
    x5 = prepared(claims()["X5"])
    assert x5.verdict(numbers(adaptive=0.5, top1=0.4), 0).word == HELD
    assert x5.verdict(numbers(adaptive=0.4, top1=0.4), 0).word == NOT_HELD
    assert prepared(claims()["X5"], seeds=2).verdict(numbers(adaptive=0.5, top1=0.4), 0).word == TOO_FEW


def test_a_claim_whose_rival_is_missing_is_never_held() -> None:
    word, reasons = prepared(claims()["X2"]).verdict(numbers(fedfmx=0.9, fedlwf=0.1, fedewc=0.1), 0)
    assert word == NOT_TESTED and reasons[0] == "rivals FedCBDR and pFedMxF missing"
    assert reasons[1] == "fedfmx (90.1 ± 0.2) is above fedlwf (10.1 ± 0.2)"
    verdict = prepared(claims()["D1"]).verdict(Found({}), 1)
    assert str(verdict) == "not tested: rival FedKNOW missing"


def test_a_claim_without_its_data_says_what_it_needs() -> None:
    verdict = prepared(claims()["F2"]).verdict(Found({}), 0)
    assert str(verdict) == "not testable here: it needs Office-Caltech10, a folder per domain and class"
    assert prepare(claims()["F2"], "small").plans == {}, "so nothing is run"


def test_runs_that_failed_leave_a_claim_untested() -> None:
    assert str(prepared(claims()["X5"]).verdict(Found({}), 2)) == "not tested: 2 of 3 runs failed"


def test_a_smoke_trial_goes_from_entry_to_verdict_and_is_computed_once(tmp_path: Path) -> None:
    layer = {**TINY, "stream": {"kind": "static"}, "evaluate": {"every": 1}}
    told: list[str] = []

    def outcome() -> Outcome:
        made = prepare(claims()["X5"], "smoke", out=tmp_path, layer=layer)
        return made.carry_out(lambda work: work([]), told.append)

    found = outcome()
    assert str(found.verdict) == "too few seeds: the scale smoke only shows that the trial runs" and not found.failed
    assert found.folders == (tmp_path / "X5-smoke",) and len(list((tmp_path / "runs").iterdir())) == 2
    assert set(found.found.values[""]) == {"adaptive", "top1"}
    accuracy = found.found.of("", "adaptive", "final_accuracy")[0]
    curve = found.found.curves[""]["adaptive"][0]
    assert len(curve) == 2 and curve[-1] == accuracy, "one accuracy a round"
    text = report.text(found)
    assert "X5: adaptive selection of experts beats Top-1 in training on CIFAR-100\nFedFMX (ECCV 2026" in text
    row = next(line for line in text.splitlines() if line.startswith("adaptive "))
    assert row.split() == ["adaptive", "50.32", f"{100 * accuracy:.1f}"]
    assert text.endswith(
        f"verdict: too few seeds: the scale smoke only shows that the trial runs\nfolder: {tmp_path / 'X5-smoke'}"
    )

    told.clear()
    assert outcome().found == found.found and "already there: 2 of 2 runs" in told


def test_the_seeds_and_settings_of_a_call_go_over_those_of_the_entry(tmp_path: Path) -> None:
    made = prepare(claims()["X5"], "smoke", out=tmp_path, seeds="3,4", layer=TINY)
    assert made.plans[""].seeds == (3, 4) and made.plans[""].settings["model.name"] == "linear"
    with pytest.raises(ConfigError, match="unknown key 'reference'"):
        prepare(claims()["X5"], "smoke", layer={"reference": "top1"})


def test_numbers_of_the_paper_stand_beside_ours() -> None:
    claim = claims()["X2"]
    found = Outcome(claim, "small", prepared(claim).verdict(numbers(fedfmx=0.5, fedlwf=0.1, fedewc=0.1), 0),
                    numbers(fedfmx=0.5, fedlwf=0.1, fedewc=0.1))  # fmt: skip
    rows = {row["method"]: row for row in report.rows(found)}
    assert (rows["fedfmx"]["paper"], rows["fedfmx"]["n"]) == (50.32, 3)
    assert rows["fedfmx"]["mean"] == pytest.approx(0.501) and rows["FedCBDR"]["mean"] is None
    assert report.grid(found)[1:] == [
        ["fedfmx", "50.32", "50.1 ± 0.2"],
        ["fedlwf", "25.21", "10.1 ± 0.2"],
        ["fedewc", "11.03", "10.1 ± 0.2"],
        ["FedCBDR", "46.27", "–"],
        ["pFedMxF", "46.09", "–"],
    ]


def test_settings_have_a_column_where_there_are_several() -> None:
    claim = claims()["A6"]
    alike = {label: {"final_accuracy": dict.fromkeys(range(3), 0.5)} for label in ("fedalign_moe", "fedavg")}
    found = Found({"alpha 1.0": alike, "alpha 0.1": alike})
    table = report.grid(Outcome(claim, "small", prepared(claim).verdict(found, 0), found))
    assert table[0] == ["setting", "method", "final accuracy, %: paper", "final accuracy, %: here"]
    assert table[1] == ["alpha 1.0", "fedalign_moe", "94.20", "50.0 ± 0.0"]
