"""The configuration there and back through Flower's run config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.config import recipe_names, resolve, resolve_source
from fedloom.core.errors import ConfigError
from fedloom.deploy.flatten import Deployment, flatten, read_run_config, run_config, unflatten
from fedloom.deploy.folder import deployed

WORDS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    ["yaml:", "yaml:null", "1e5", "1e-3", "null", "true", "~", "0x1f", "1_000", "12:30", "- a", "a: b", "2020-01-01"]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([1.0, 1e-08, 1e16, 1e22, -0.0])
    | TEXTS
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | TEXTS, inner, max_size=3), max_leaves=8
)
TREES = st.dictionaries(
    WORDS, st.recursive(VALUES, lambda inner: st.dictionaries(WORDS, inner, max_size=4), max_leaves=12), max_size=5
)


def same(one: Any, other: Any) -> bool:
    """Equality that tells 1 from 1.0 and True, and 0.0 from -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The dotted key of everything that is no mapping, or an empty one."""
    found = []
    for key, value in tree.items():
        found += leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"]
    return found


@given(TREES)
def test_there_and_back_is_the_identity(tree: dict[str, Any]) -> None:
    flat = flatten(tree)
    assert all(type(value) in (bool, int, float, str) for value in flat.values())
    assert all(abs(value) < 2**63 for value in flat.values() if type(value) is int)
    assert same(unflatten(flat), tree)


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_travels_whole(recipe: str) -> None:
    tree = resolve(resolve_source(recipe)[1]).as_dict()
    flat = flatten(tree)
    assert list(flat) == leaves(tree)
    assert same(unflatten(flat), tree)


def test_plain_values_travel_as_they_are() -> None:
    tree = {"a": {"lr": 1.0, "on": True, "n": 2**63 - 1, "word": "x y", "deep": {"er": 0}}}
    assert same(
        flatten(tree), {"a.lr": 1.0, "a.on": True, "a.n": 2**63 - 1, "a.word": "x y", "a.deep.er": 0}
    )  # fmt: skip


def test_other_values_travel_as_yaml() -> None:
    tree = {
        "none": None, "pair": [0.9, 1e-08], "empty": {}, "odd": {"0": {"1": 2}}, "text": "yaml:x", "wide": 2**63,
        "dotted": {"a.b": "1e5"},
    }  # fmt: skip
    assert flatten(tree) == {
        "none": "yaml:null", "pair": "yaml:[0.9, 1.0e-08]", "empty": "yaml:{}", "odd": 'yaml:{"0": {"1": 2}}',
        "text": 'yaml:"yaml:x"', "wide": "yaml:9223372036854775808", "dotted": 'yaml:{"a.b": "1e5"}',
    }  # fmt: skip


def test_a_section_whose_name_is_no_word_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"key 'a\.b' cannot be sent to Flower"):
        flatten({"a.b": 1})


@pytest.mark.parametrize(
    ("flat", "sentence"),
    [
        ({"a": 1, "a.b": 2}, "'a.b' lies below a key that has a value"),
        ({"a.b": 2, "a": 1}, "'a' has a value and keys below it"),
        ({"a.b": "yaml:[1"}, "run config: the text of a.b is not valid YAML"),
    ],
)
def test_what_cannot_be_read_is_refused(flat: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        unflatten(flat)
    assert sentence in str(caught.value)


@pytest.fixture(scope="module")
def app() -> dict[str, Any]:
    """What an app of the quickstart says."""
    return run_config(deployed(resolve(resolve_source("quickstart")[1])), Deployment(name="quickstart"))


def test_an_app_says_its_configuration_and_where_to_write(app: Mapping[str, Any]) -> None:
    config, deployment = read_run_config(app)
    assert same(config.as_dict(), deployed(resolve(resolve_source("quickstart")[1])).as_dict())
    assert deployment == Deployment("quickstart", "", False, "")
    assert {key for key in app if key.startswith("run.")} == {
        "run.name", "run.out", "run.resume", "run.events", "run.choices"
    }  # fmt: skip


def test_overrides_are_checked_as_those_of_set_are(app: Mapping[str, Any]) -> None:
    given = {
        "training.optimizer.lr": 1, "training.clip_norm": "yaml:null", "model.options": "yaml:{width: 3}",
        "run.out": "there", "run.resume": True,
    }  # fmt: skip
    config, deployment = read_run_config({**app, **given})
    assert type(config.training.optimizer.lr) is float and config.training.optimizer.lr == 1.0
    assert config.training.clip_norm is None and config.model.options == {"width": 3}
    assert deployment == Deployment("quickstart", "there", True, "")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"training.optimizer.lr": "fast"}, "training.optimizer.lr must be a number, got 'fast'"),
        ({"training.rounds": 1.5}, "training.rounds must be a whole number, got 1.5"),
        ({"training.optimizer.lr": float("inf")}, "training.optimizer.lr must be a finite number"),
        ({"method.experts": 0}, "method.experts must be at least 1, got 0"),
        (
            {"method.name": "fedprox"},
            "method.name is fedfmx in this app and cannot become 'fedprox', for its options would not fit; "
            "make a new app with `fedloom deploy RECIPE --method fedprox`",
        ),
        ({"method.preset": "other"}, "method.preset is paper in this app and cannot become 'other'"),
        ({"training.optimizer.name": "adamw"}, "`fedloom deploy RECIPE --set training.optimizer.name=adamw`"),
        ({"stream.kind": "static"}, "stream.kind is class_incremental in this app"),
        ({"run.resume": "yes"}, "run.resume must be true or false, got 'yes'"),
        ({"run.out": 3}, "run.out must be text in quotes, got 3"),
        ({"run.otu": "x"}, "unknown key 'run.otu'; known are name, out, resume, events"),
        ({"run.choices": "x"}, "run.choices must be left as the app has it"),
    ],
)
def test_overrides_that_cannot_be_run_are_refused(
    app: Mapping[str, Any], change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_run_config({**app, **change})
    assert sentence in str(caught.value)


def test_a_run_config_without_the_section_run_is_a_configuration_alone(app: Mapping[str, Any]) -> None:
    config, deployment = read_run_config({key: value for key, value in app.items() if not key.startswith("run.")})
    assert config.method["name"] == "fedfmx" and deployment == Deployment()
