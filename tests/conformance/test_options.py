"""Every declared option of every method changes what a run gives, or says here why it does nothing by itself."""

from __future__ import annotations

import functools
import typing
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple

import pytest
from pydantic import ValidationError

import fedloom.methods
from fedloom.config.options import schema
from fedloom.core import ConfigError
from toys.clip import ClipSpec
from toys.federation import BlobSpec, experiment
from toys.normed_experts import NormedExpertSpec
from toys.running import rows, start
from toys.token_mixture import TokenSpec
from toys.weights_shared import SlidingSpec

PLAN = {"num_clients": 3, "num_stages": 2, "rounds": 2, "per_class": 20, "cohort": 1.0}
# methods some of whose options matter only where clients are away, channels form groups that differ, or late in a run
PLANS: dict[str, dict[str, Any]] = {
    "fedprox": {**PLAN, "spec": NormedExpertSpec()},
    "fedheal": {**PLAN, "cohort": 2},
    "fedfip": {**PLAN, "spec": BlobSpec(residual=True)},
    "dapperfl": {**PLAN, "spec": BlobSpec(residual=True)},
    "fdse": {**PLAN, "spec": BlobSpec(residual=True)},
    "fedmoe": {**PLAN, "rounds": 3},
    "fedalign_moe": {**PLAN, "spec": TokenSpec()},
    "prunefl": {**PLAN, "rounds": 26, "spec": SlidingSpec(6)},
    "flex": {**PLAN, "spec": NormedExpertSpec()},
    "pfl_moe": {**PLAN, "spec": NormedExpertSpec()},
    "pfedmoap": {**PLAN, "spec": ClipSpec(joint=72)},
    "fedduet": {**PLAN, "per_class": 12, "spec": ClipSpec(joint=256)},
}
# Of these options few values fit the toy.
VALUES = {
    ("fedduet", "pooled"): 64,
    ("fedduet", "heads"): 4,
    ("fedduet", "vocabulary"): "torchvision",
    ("fedduet", "shared_width"): 8,
}
SAME = ("params_sha256", "state_sha256", "bytes_up", "bytes_down")


class Inert(NamedTuple):
    """Why an option does nothing next to the defaults, and options and changes of the plan among which it matters."""

    reason: str
    among: dict[str, Any]
    plan: dict[str, Any] = {}


# (method, option, value); the value "*" stands for every alternative.
INERT: dict[tuple[str, str, Any], Inert] = {
    ("fedfmx", "fisher_squash", "identity"): Inert(
        "refused with z-scores, which are negative for some entries", {"fisher_scale": "trace"}
    ),
    ("fedewc", "fisher_labels", "model"): Inert(
        "the blobs' network has few weights, whose Fisher is above the cap everywhere", {"lam": 1.0, "fisher_cap": 1.0}
    ),
    ("fedheal", "tau", 0.15): Inert("over four rounds no consistency lies between 0.15 and 0.3", {"tau": 0.5}),
    ("fedfip", "min_keep", 0.025): Inert("the floor lies far below the share that is kept", {"keep": 0.01}),
    ("fedfip", "fisher_samples", 513): Inert(
        "no client holds so many examples of a domain",
        {},
        {"per_class": 180, "num_clients": 1, "num_stages": 1, "rounds": 1},
    ),
    ("fedfip", "contrast_batch", 17): Inert("no client holds so many examples of a domain", {}, {"per_class": 80}),
    ("fedfip", "reactivation", "*"): Inert(
        "early in training no pruned channel has so large a score", {"keep": 0.3, "reactivation_threshold": 0.5}
    ),
    ("fedfip", "reactivation_threshold", 0.5): Inert(
        "early in training none of few pruned channels has so large a score", {"keep": 0.3}
    ),
    ("fedfip", "react_max", 0.05): Inert(
        "early in training no pruned channel has so large a score", {"keep": 0.3, "reactivation_threshold": 0.0}
    ),
    ("dapperfl", "alpha_min", 0.05): Inert("in four rounds the share does not fall so far", {"alpha": 0.0}),
    ("prunefl", "half_life", 5000.0): Inert("no share of the few weights changes within 52 rounds", {"half_life": 1.0}),
    ("flex", "graft_examples", 513): Inert(
        "no client holds so many examples", {}, {"per_class": 180, "num_clients": 1, "num_stages": 1, "rounds": 1}
    ),
    ("fedalign_moe", "alpha_min", 0.025): Inert("no overlap is so small", {"alpha": "omega"}),
    ("fedalign_moe", "stats_max_batches", 17): Inert(
        "no client holds so many batches", {}, {"per_class": 180, "num_clients": 1, "num_stages": 1, "rounds": 1}
    ),
    ("fedalign_moe", "stats_share", 0.175): Inert("of three batches either is one", {}, {"per_class": 80}),
    ("fedalign_moe", "quantile", "*"): Inert("of another threshold than the default", {"threshold": "quantile"}),
    ("fedalign_moe", "threshold_decay", "*"): Inert("of another threshold than the default", {"threshold": "ema"}),
    ("fedalign_moe", "tau_s", "*"): Inert("of another threshold than the default", {"threshold": "const"}),
    ("fedalign_moe", "tau_d", "*"): Inert("of another threshold than the default", {"threshold": "const"}),
    ("fedalign_moe", "mu_noise", "*"): Inert("refused without a largest norm", {"mu_clip": 1.0}),
    ("moafcl", "cluster_every", 12): Inert("a run has two stages", {"cluster_every": 1}),
    ("moe_adapters", "top_k", 3): Inert("there are two experts", {"experts": 3}),
    ("fedduet", "explore", 0.05): Inert("no draw of so few lies between 0.05 and 0.1", {"explore": 0.9}),
    ("fedduet", "noise", "laplace"): Inert("without noise its kind is all one", {"noise_sigma": 1.0}),
    ("fedduet", "train", "alternate"): Inert("two rounds are one of each kind either way", {}, {"rounds": 3}),
    ("pfedmoap", "choose", "random"): Inert("three clients are sent the prompts of all others", {"experts": 2}),
    ("pfedmoap", "experts", 11): Inert("three clients are sent the prompts of all others", {"experts": 2}),
    ("pfedmoap", "pooled", 129): Inert("either takes the joint width, 72, whole", {"pooled": 24}),
    ("replay", "memory", 101): Inert("shared among 3 or 6 classes, one example more is none per class", {"memory": 6}),
}


class Flip(NamedTuple):
    """One option of one method at another value than its default."""

    method: str
    option: str
    value: Any

    @property
    def inert(self) -> Inert | None:
        found = INERT.get((self.method, self.option, self.value))
        return found or INERT.get((self.method, self.option, "*"))


def alternatives(name: str, option: str) -> list[Any]:
    """Other valid values of an option: every word of a choice, the other boolean, one of every other type."""
    if (name, option) in VALUES:
        return [VALUES[name, option]]
    model = schema(name)
    field = model.model_fields[option]
    members = _members(field.annotation)
    found: list[Any] = [w for m in members if typing.get_origin(m) is Literal for w in typing.get_args(m)]
    kinds = {typing.get_origin(m) or m for m in members}
    default = field.default if not isinstance(field.default, bool | str | tuple) else 0
    if bool in kinds:
        found.append(not field.default)
    if int in kinds:
        found.append(_first_valid(model, option, [default + 1, default - 1]))
    if float in kinds:
        found.append(_first_valid(model, option, [default / 2 or 0.25, 2.0 * default + 1, 1.0]))
    if tuple in kinds:
        found.append(_first_valid(model, option, [(5,), (0.5,)]))
    return [value for value in found if value != field.default]


def _members(hint: Any) -> list[Any]:
    if typing.get_origin(hint) is typing.Annotated:
        return _members(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return [m for arg in typing.get_args(hint) for m in _members(arg)]
    return [hint]


def _first_valid(model: Any, option: str, values: list[Any]) -> Any:
    for value in values:
        try:
            model.model_validate({option: value})
        except ValidationError:
            continue
        return value
    raise AssertionError(f"no valid value of {option} among {values}")


@functools.cache
def flips() -> list[Flip]:
    """Every alternative of every option of every method, presets aside."""
    names = fedloom.methods.names()
    return [Flip(n, o, v) for n in names for o in schema(n).model_fields for v in alternatives(n, o)]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory):
    """What a run of a method with some options gave: hashes, byte counts and rows of metrics; None if refused."""

    @functools.cache
    def of(
        name: str, options: tuple[tuple[str, Any], ...], plan: tuple[tuple[str, Any], ...]
    ) -> tuple[Any, ...] | None:
        folder: Path = tmp_path_factory.mktemp("run")
        given = {**PLANS.get(name, PLAN), **dict(plan)}
        try:
            whole = experiment(f"fedloom.methods.{name}:{name}", options=dict(options), **given)
        except ConfigError:
            return None
        summary = start(folder, whole, checkpoint_every=0)
        return (*(summary[key] for key in SAME), str(rows(folder)), str(rows(folder, "stage")))

    return lambda name, options, **plan: of(name, tuple(sorted(options.items())), tuple(sorted(plan.items())))


@pytest.mark.filterwarnings("ignore:.*follows the public code")
@pytest.mark.parametrize("flip", flips(), ids=lambda f: f"{f.method}-{f.option}={f.value}")
def test_every_option_does_something(flip: Flip, outcome):
    changed = {flip.option: flip.value}
    alone = outcome(flip.method, changed) not in (None, outcome(flip.method, {}))
    if flip.inert is None:
        assert alone, "the option does nothing: mend it, or list here why and where it matters"
        return
    assert not alone, f"the option is listed as inert ({flip.inert.reason}), but it is not"
    among, plan = flip.inert.among, flip.inert.plan
    there = outcome(flip.method, {**among, **changed}, **plan)
    assert there not in (None, outcome(flip.method, among, **plan)), flip.inert.reason


@pytest.mark.filterwarnings("ignore:.*follows the public code")
@pytest.mark.parametrize("name", fedloom.methods.names())
def test_every_preset_does_something(name: str, outcome):
    """`paper` may equal the defaults; every other preset exists because a release differs."""
    presets = fedloom.methods.presets(name)
    assert "paper" in presets
    given = [outcome(name, options) for options in presets.values()]
    assert len(set(given)) == len(given)


def test_what_is_listed_as_inert_exists():
    known = {(flip.method, flip.option) for flip in flips()}
    assert {(method, option) for method, option, _ in INERT} <= known
    assert all(inert.reason and (inert.among or inert.plan) for inert in INERT.values())


def test_alternatives_cover_every_kind():
    assert alternatives("fedfmx", "body") == ["identity", (5,)]
    assert alternatives("fedfmx", "stop") == ["exclude_trigger", "abs", "all", 1]
    assert alternatives("fedfmx", "empty_value") == ["chance", 0.25]
    assert alternatives("fedfmx", "rho") == [0.475] and alternatives("fedavg", "uniform") == [True]
    assert alternatives("dapperfl", "ratios") == [(0.5,)]
