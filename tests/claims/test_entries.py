"""The entries: every one can be configured at every scale, names what it judges, and stands in docs/findings.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedloom.api import configure
from fedloom.claims import SCALES, Found, chosen, claims
from fedloom.claims.entries import read
from fedloom.claims.rules import HELD, NOT_HELD, NOT_TESTABLE, NOT_TESTED, steps
from fedloom.claims.trial import sections
from fedloom.config.layers import merge, nested
from fedloom.core import ConfigError
from fedloom.evaluate.comparison import MEASURES
from fedloom.methods import ablations

IDS = [*(f"X{k}" for k in range(1, 12)), *(f"F{k}" for k in range(1, 10)), *(f"D{k}" for k in range(1, 11)),
       *(f"A{k}" for k in range(1, 9))]  # fmt: skip
FINDINGS = Path(__file__).parents[2] / "docs" / "findings.md"
TRIALS = [(key, scale) for key, claim in claims().items() for scale in SCALES if not claim.scales[scale].needs]


def test_every_claim_of_the_four_papers_has_an_entry() -> None:
    assert sorted(claims()) == sorted(IDS)


@pytest.mark.parametrize(("key", "scale"), TRIALS)
def test_every_run_of_an_entry_can_be_configured(key: str, scale: str) -> None:
    trial = claims()[key].scales[scale]
    made = sections(trial)
    assert tuple(made) == trial.labels
    seen = set()
    for setting in trial.settings.values():
        layer: Any = merge(nested(dict(trial.set)), nested(dict(setting.set)))
        for section in made.values():
            config = configure(setting.recipe or trial.recipe, method=section, seed=0, **layer)[1]
            seen.add(config.model_dump_json())
    assert len(seen) == len(made) * len(trial.settings), "two labels stand for the same run"


@pytest.mark.parametrize(("key", "scale"), TRIALS)
def test_every_check_finds_its_labels(key: str, scale: str) -> None:
    claim = claims()[key]
    trial = claim.scales[scale]
    values = {label: {m: {0: 0.1 * k, 1: 0.2 * k} for m in MEASURES} for k, label in enumerate(trial.labels, 1)}
    curves = {label: {0: [0.1, 0.2], 1: [0.1, 0.2]} for label in trial.labels}
    found = Found(dict.fromkeys(trial.settings, values), dict.fromkeys(trial.settings, curves))
    assert steps(claim.checks, found)
    for numbers in claim.numbers:
        assert trial.labels[0] in numbers.values and numbers.metric in MEASURES


def test_ladders_are_the_switches_that_ablate_knows() -> None:
    ladders = {"X10": "fedfmx", "F6": "fedfip", "D6": "fedduet", "A4": "fedalign_moe"}
    for key, method in ladders.items():
        trial = claims()[key].scales["small"]
        assert trial.methods == {"full": method} and set(trial.switches) <= set(ablations(method))
    parts = sections(claims()["F6"].scales["small"])
    assert parts["bare"] == {"name": "fedfip", "keep": 1.0, "contrast_weight": 0.0}, "which is FedAvg"
    assert parts["dsfp-only"] == {"name": "fedfip", "contrast_weight": 0.0, "aggregate": "owned"}
    assert parts["full"] == {"name": "fedfip"}


def test_ids_are_taken_once_in_the_order_given() -> None:
    assert [claim.id for claim in chosen(["X10,D6", "X10"])] == ["X10", "D6"]
    assert len(chosen(["F1", "all"])) == 38
    with pytest.raises(ConfigError, match=r"unknown claim 'X12'. Did you mean 'X2'"):
        chosen(["X12"])


def test_only_scales_of_three_seeds_decide() -> None:
    found = {scale: claims()["X10"].ability(scale) for scale in SCALES}
    assert found == {"smoke": "tries", "small": "decides", "paper": "decides"}
    assert claims()["X1"].ability("paper") == "rival missing" and claims()["F2"].ability("small") == "not testable"


FILE = """
paper: A paper
scales:
  smoke: {recipe: quickstart, seeds: [0], differs: all of it}
  small: {recipe: quickstart, differs: most of it}
  paper: {recipe: quickstart, differs: nothing}
claims:
  Z1:
    claim: ours is best
    source: table 1
    methods: [fedprox+mu=1, fedavg]
    checks: [{rule: above, metric: final_accuracy, first: fedprox+mu=1}]
"""


def written(folder: Path, text: str) -> Path:
    (folder / "mine.yaml").write_text(text)
    return folder / "mine.yaml"


def test_an_entry_of_ten_lines_is_a_claim(tmp_path: Path) -> None:
    (claim,) = read(written(tmp_path, FILE))
    assert claim.scales["small"].labels == ("fedprox+mu=1", "fedavg") and claim.scales["small"].seeds == (0, 1, 2)
    assert claim.metrics == ("final_accuracy",) and claim.scales["smoke"].differs == "all of it"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("rule: above", "rule: abve"), "'mine.yaml', claim Z1, checks: .*unknown rule 'abve'"),
        (("    source: table 1\n", ""), "'mine.yaml', claim Z1, source: Field required"),
        (("    source:", "    sorce: x\n    source:"), "'mine.yaml', claim Z1, sorce: Extra inputs"),
        (("methods: [fedprox+mu=1, fedavg]", "methods: []"), "claim Z1, scales.smoke: .*names a recipe and methods"),
        (("    source:", "    scales: {big: {}}\n    source:"), "claim Z1: unknown scale 'big'"),
    ],
)
def test_a_slip_in_an_entry_is_named(tmp_path: Path, change: tuple[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(written(tmp_path, FILE.replace(*change)))


def test_findings_tell_of_every_claim_and_of_no_other() -> None:
    rows = re.findall(r"^\| \[?([XFDA]\d+)\]?\S* \| ([^|]+) \|", FINDINGS.read_text(encoding="utf-8"), re.MULTILINE)
    assert [key for key, _ in rows] == IDS
    for key, verdict in rows:
        claim = claims()[key]
        expected = {NOT_TESTED} if claim.missing else {NOT_TESTABLE} if claim.scales["small"].needs else None
        known = expected or {HELD, NOT_HELD, NOT_TESTED}
        assert verdict.strip() in known, f"{key} is told as {verdict.strip()}"
