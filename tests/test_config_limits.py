"""Values that no run can use are refused in one sentence, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedloom.config import overrides, read_yaml, resolve, resolve_source
from fedloom.config.layers import method_hint
from fedloom.core.errors import ConfigError

REFUSED = [
    ("engine=3", "engine must be a mapping"),
    ("data=3", "data must be a mapping"),
    ("model=[1]", "model must be a mapping"),
    ("method=null", "method must be a mapping"),
    ("method.preset=[1]", "unknown preset"),
    ("recipe_or_config=3", "unknown key 'recipe_or_config'"),
    ("training.rounds=1000000000", "training.rounds must be at most 1000000, got 1000000000"),
    ("partition.clients=100000000", "partition.clients must be at most"),
    ("engine.workers=9999", "engine.workers must be auto or a whole number of at most 256, got 9999"),
    ("engine.threads=100000", "engine.threads must be at most 1024"),
    ("training.optimizer.lr=1e30", "training.optimizer.lr must be at most 1e+06"),
    ("partition.alpha=1e308", "partition.alpha must be at most 1e+06"),
    ("method={name: fedprox, mu: 1.0e+30}", "method.mu must be in [-1e+06, 1e+06]"),
    ("method={name: fedfmx, experts: 1000000}", "method.experts must be at most 10000"),
    ("stream.arrival={0: {0: 1.7}}", "of whole numbers from 0"),
    ("stream.arrival={0: {0: true}}", "of whole numbers from 0"),
    ("engine.on_client_failure=retry(٣)", "engine.on_client_failure must be fail, skip or retry(n)"),
    ("data.name=folder:", "write folder:PATH, or put it in quotes"),
    ('data.name="\\ud800"', "data.name holds characters that are no text"),
    ("model={options: &x {a: *x}}", "refers to itself"),
    ("data={name: a, name: b}", "the key 'name' is given twice"),
    ("stream={2024-01-01: 3}", "keys of stream must be text, got datetime.date(2024, 1, 1)"),
    ("seed=" + "1" * 5000, "is not valid YAML: a value cannot be read"),
    ("seed=" + "1" * 400, "seed is a number of more than 64 bits"),
    ("data.root=" + "[" * 2000 + "]" * 2000, "nested too deeply"),
    ("method=" + "m" * 300, "is too long for a name"),
]


@pytest.mark.parametrize(("pair", "sentence"), REFUSED, ids=[pair[:40] for pair, _ in REFUSED])
def test_what_no_run_can_use_is_refused(pair: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(overrides([pair]))
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("layer", [{"model": {"options": {(1, 2): 3}}}, {"seed": 10**5000}, {"data": {"name": ["x"]}}])
def test_values_from_python_are_checked_alike(layer: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        resolve(layer)


def test_long_values_are_shortened_in_sentences() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"training": {"rounds": "x" * 5000}})
    assert len(str(caught.value)) < 150


def test_a_key_given_twice_in_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("seed: 1\ntraining: {rounds: 1}\nseed: 2\n")
    with pytest.raises(ConfigError, match="line 1: the key 'seed' is given twice"):
        read_yaml(path)


def test_merge_keys_and_anchors_stay_usable(tmp_path: Path) -> None:
    path = tmp_path / "anchors.yaml"
    path.write_text("model: {options: &o {width: 8}}\npartition: {kind: iid}\ndata: {name: a/b}\nseed: 3\n")
    assert read_yaml(path)["model"] == {"options": {"width": 8}}


def test_a_name_too_long_for_a_file_is_told() -> None:
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        resolve_source("x" * 300 + ".yaml")


def test_options_under_the_name_of_a_method() -> None:
    assert "Did you mean 'method.mu'?" in method_hint("fedprox.mu")
