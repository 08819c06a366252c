"""The entries of the claims, read from the YAML files beside this module.

A file has `paper`, `scales` and `claims`. `scales` are defaults for its claims: what a claim says of a scale goes over
them, key by key, and what it says of all scales (`methods`, `switches`, `settings`) lies between the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedloom.claims.rules import check_arguments
from fedloom.config import read_yaml
from fedloom.core.errors import ConfigError, unknown
from fedloom.evaluate.comparison import FEW

HERE = Path(__file__).parent
SCALES = ("smoke", "small", "paper")
ALL = "all"
SHARED = ("methods", "switches", "settings")  # keys of a claim that hold at every scale


class Entry(BaseModel):
    """Base: unknown keys refused, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Setting(Entry):
    """One condition of a trial. recipe: instead of that of the trial. set: dotted keys over it."""

    recipe: str | None = None
    set: Mapping[str, Any] = Field(default_factory=dict)


class Trial(Entry):
    """What is run at one scale.

    recipe: of every setting that names none. methods: label -> word as in `fedloom compare`, the flagship first; words
    alone are their own labels. switches: of the first method, each a label of its own. settings: name -> condition;
    every method runs in each. set: dotted keys over every recipe. needs: what is missing here, where nothing can be
    run. differs: how the protocol differs from that of the paper.
    """

    recipe: str | None = None
    methods: Mapping[str, str] = Field(default_factory=dict)
    switches: tuple[str, ...] = ()
    settings: Mapping[str, Setting] = Field(default_factory=lambda: {"": Setting()})
    set: Mapping[str, Any] = Field(default_factory=dict)
    seeds: tuple[int, ...] = tuple(range(FEW))
    needs: str | None = None
    differs: str

    @field_validator("methods", mode="before")
    @classmethod
    def _labelled(cls, value: Any) -> Any:
        return {word: word for word in value} if isinstance(value, list) else value

    @model_validator(mode="after")
    def _complete(self) -> Trial:
        if not self.needs and not (self.methods and all(s.recipe or self.recipe for s in self.settings.values())):
            raise ValueError("a trial names a recipe and methods, or says in `needs` what is missing")
        return self

    @property
    def labels(self) -> tuple[str, ...]:
        """Of methods and switches, in the order of the table."""
        return (*self.methods, *self.switches)


class Numbers(Entry):
    """Numbers of the paper: label -> value, in its unit (per cent for accuracies). setting: a name of the trial's."""

    metric: str
    setting: str = ""
    values: Mapping[str, float]


class Claim(Entry):
    """What a paper says, and how it is tried.

    source: table or figure. missing: rivals of the claim that are not built. checks: what must hold, each with `rule`,
    a name in `fedloom.claims.rules.RULES`, and its arguments. scales: name -> what is run.
    """

    id: str
    claim: str
    paper: str
    source: str
    missing: tuple[str, ...] = ()
    numbers: tuple[Numbers, ...] = ()
    checks: tuple[Mapping[str, Any], ...] = ()
    scales: Mapping[str, Trial]

    @field_validator("checks")
    @classmethod
    def _rules_exist(cls, checks: tuple[Mapping[str, Any], ...]) -> tuple[Mapping[str, Any], ...]:
        for check in checks:
            check_arguments(check)
        return checks

    @model_validator(mode="after")
    def _compares(self) -> Claim:
        if not self.checks and not all(trial.needs for trial in self.scales.values()):
            raise ValueError("a claim has checks, or says at every scale in `needs` what is missing")
        return self

    @property
    def metrics(self) -> tuple[str, ...]:
        """Keys of the results that the table shows."""
        named = [numbers.metric for numbers in self.numbers]
        return tuple(dict.fromkeys([*named, *(check["metric"] for check in self.checks if "metric" in check)]))

    def ability(self, scale: str) -> str:
        """Whether the claim can be decided at a scale, in a word or two."""
        trial = self.scales[scale]
        if self.missing:
            return "rival missing"
        if trial.needs:
            return "not testable"
        return "decides" if len(trial.seeds) >= FEW else "tries"


@cache
def claims() -> Mapping[str, Claim]:
    """Id -> claim, in the order of the files. Raises `ConfigError` for an entry that is wrong."""
    found: dict[str, Claim] = {}
    for path in sorted(HERE.glob("*.yaml")):
        for claim in read(path):
            if claim.id in found:
                raise ConfigError(f"'{path.name}': the claim {claim.id} is in two files; rename one of them")
            found[claim.id] = claim
    return found


def read(path: Path) -> list[Claim]:
    """The claims of one file. Raises `ConfigError` naming file, claim and what is wrong with it."""
    file = read_yaml(path)
    return [_claim(path, file, key, entry) for key, entry in file["claims"].items()]


def _claim(path: Path, file: Mapping[str, Any], key: str, entry: Mapping[str, Any]) -> Claim:
    shared = {name: entry[name] for name in SHARED if name in entry}
    own = entry.get("scales", {})
    scales = {scale: {**file["scales"][scale], **shared, **own.get(scale, {})} for scale in SCALES}
    rest = {name: value for name, value in entry.items() if name not in SHARED}
    try:
        if stray := sorted(own.keys() - set(SCALES)):
            raise ValueError(unknown("scale", stray[0], SCALES))
        return Claim.model_validate({**rest, "id": key, "paper": file["paper"], "scales": scales})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"'{path.name}', claim {key}, {place}: {first['msg']}") from None
    except ValueError as error:
        raise ConfigError(f"'{path.name}', claim {key}: {error}") from None


def chosen(ids: Iterable[str]) -> list[Claim]:
    """The claims of these ids, each once; `all` stands for every claim. Raises `ConfigError` for an unknown one."""
    known = claims()
    wanted = [part.strip() for text in ids for part in text.split(",")]
    for name in wanted:
        if name not in known and name != ALL:
            raise ConfigError(unknown("claim", name, [*known, ALL]))
    named = [key for name in wanted for key in (known if name == ALL else [name])]
    return [known[key] for key in dict.fromkeys(named)]
