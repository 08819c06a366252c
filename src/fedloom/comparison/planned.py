"""A comparison that is checked to the last word before its first run: which runs, where, under which key."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.api import Run, checked_path, configure, load_run, resume, start
from fedloom.build import Built, build
from fedloom.comparison import entries
from fedloom.comparison.settings import settings
from fedloom.config.layers import nested
from fedloom.config.options import schema
from fedloom.core.errors import CheckpointError, ConfigError, FedloomError, unknown
from fedloom.environment import edited, sources
from fedloom.report.comparison import RUNS

if TYPE_CHECKING:
    from fedloom.engine.experiment import Observer

Resolved = Callable[[str, int], tuple[str, Any, Any, Any]]
LONGEST = 100  # characters of a word in the name of a folder
UNFINISHED = ("failed", "unfinished")  # states of runs that were begun and have not ended well


@dataclass(frozen=True)
class Planned:
    """A comparison whose configurations are checked; nothing has been run.

    settings: what is set over the recipe, see `fedloom.comparison.settings`. methods: label -> resolved section
    `method`. keys: label -> seed -> key of the run, equal for equal runs (see `run_key`). make: (label, seed) -> the
    assembled run and the user's own model. given: what a run needs to be opened and gone on with: the user's own data
    and model, and workers (None: as they were).
    """

    title: str
    recipe: str
    settings: Mapping[str, Any]
    folder: Path
    reference: str
    seeds: tuple[int, ...]
    methods: Mapping[str, Mapping[str, Any]]
    keys: Mapping[str, Mapping[int, str]]
    make: Callable[[str, int], tuple[Built, Any]]
    given: Mapping[str, Any]

    @property
    def runs(self) -> dict[str, tuple[str, int]]:
        """Key -> first label and seed, in the order of running: all methods on a seed, then the next."""
        found: dict[str, tuple[str, int]] = {}
        for seed in self.seeds:
            for label in self.methods:
                found.setdefault(self.keys[label][seed], (label, seed))
        return found

    def path(self, key: str) -> Path:
        """Folder of the run with that key."""
        return self.folder / RUNS / key

    def state(self, key: str) -> str:
        """`done`, `failed`, `unfinished` or `missing`, as the folder of the run says."""
        path = self.path(key)
        if (path / "DONE").exists() and (path / "summary.json").exists():
            return "done"
        if not (path / "config.yaml").exists():
            return "missing"
        return "failed" if (path / "FAILED").exists() else "unfinished"

    def held(self, key: str) -> bool:
        """Whether another process works on the run."""
        from fedloom.engine.folder import RunFolder

        try:
            RunFolder(self.path(key)).close()
        except ConfigError:
            return True
        except OSError:  # there is no folder yet, or none that can be written
            return False
        return False

    def open(self, key: str) -> Run:
        """The finished run; `CheckpointError` when the folder is damaged or holds another one."""
        path, (label, seed) = self.path(key), self.runs[key]
        _check_key(path, key)
        found = load_run(path, model=self.given["model"])
        if (found.summary.get("method"), found.summary.get("seed")) != (self.methods[label]["name"], seed):
            raise CheckpointError(
                f"'{path / 'summary.json'}' is of another run; move '{path}' away to run this one again"
            )
        return found

    def carry(self, key: str, observers: Sequence[Observer]) -> Run:
        """Run it, or go on with it."""
        path = self.path(key)
        if self.state(key) != "missing":
            _check_key(path, key)
            return resume(path, observers=observers, **self.given)
        built, model = self.make(*self.runs[key])
        return start(built, path, observers, model)


def plan(recipe_or_config: Any, methods: Any, seeds: Any, *, out: Any, reference: Any, **given: Any) -> Planned:
    """Check everything that `compare` is asked for. Raises `ConfigError` or `DataError`."""
    sections = entries.sections(methods)
    title = f"Comparison of {len(sections)} methods" if len(sections) > 1 else next(iter(sections))
    return _plan(recipe_or_config, sections, seeds, given, out=out, reference=reference, title=title, name="compare")


def plan_ablation(
    method: Any, recipe_or_config: Any, seeds: Any, *, switches: Any, out: Any, reference: Any, **given: Any
) -> Planned:
    """Check everything that `ablate` is asked for. Raises `ConfigError` or `DataError`."""
    full = entries.section(method)
    found = entries.switches(full["name"], switches)
    sections = {entries.FULL: full, **{name: {**full, **options} for name, options in found.items()}}
    word = entries.label(method)
    named = {
        "title": f"Ablation of {word}",
        "name": f"ablate-{re.sub(r'[^A-Za-z0-9_.+=@-]+', '-', word).strip('-')[:LONGEST]}",
        "part": "switch",
    }
    return _plan(recipe_or_config, sections, seeds, given, out=out, reference=reference, **named)


def _plan(
    source: Any,
    sections: Mapping[str, Mapping[str, Any]],
    seeds: Any,
    given: Mapping[str, Any],
    *,
    out: Any,
    reference: Any,
    title: str,
    name: str,
    part: str = "",
) -> Planned:
    numbers = entries.seeds(seeds)
    reference = next(iter(sections)) if reference is None else reference
    if reference not in sections:
        raise ConfigError(unknown("reference", str(reference), sections))
    common, layer = _common(given)

    def resolved(label: str, seed: int) -> tuple[str, Any, Any, Any]:
        return configure(source, method={**common, **sections[label]}, seed=seed, **layer)

    def make(label: str, seed: int) -> tuple[Built, Any]:
        _, config, own_data, own_model = resolved(label, seed)
        return build(config, data=own_data, model=own_model), own_model

    trees = _trees(resolved, sections, common, numbers[0], part)
    recipe, config, own_data, own_model = next(iter(trees.values()))
    keys = {label: {seed: _key(make, label, seed) for seed in numbers} for label in sections}
    workers = config.engine.workers
    return Planned(
        title=title,
        recipe=recipe,
        settings=settings(source, given),
        folder=Path("runs") / recipe / name if out is None else checked_path("out", out),
        reference=reference,
        seeds=numbers,
        methods={label: tree[1].method for label, tree in trees.items()},
        keys=keys,
        make=make,
        given={"data": own_data, "model": own_model, "workers": None if workers == "auto" else workers},
    )


def _trees(
    resolved: Resolved, sections: Mapping[str, Mapping[str, Any]], common: Mapping[str, Any], seed: int, part: str
) -> dict[str, tuple[str, Any, Any, Any]]:
    """Label -> what `configure` gives, so that a slip in the last word is found at once.

    part: what every label but the first stands for, to tell where the slip is.
    """
    found: dict[str, tuple[str, Any, Any, Any]] = {}
    for label in sections:
        try:
            found[label] = resolved(label, seed)
        except ConfigError as error:
            place = f"{part} {label}: " if found and part else ""
            error.args = (f"{place}{error}{_for_one(common, label, sections)}",)
            raise
    return found


def _for_one(common: Mapping[str, Any], label: str, sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Where a method lacks an option that was meant for all: how to give it to one that has it."""
    try:
        options = {section["name"]: schema(section["name"]).model_fields for section in sections.values()}
    except ConfigError:  # another slip
        return ""
    for option in common.keys() - options[sections[label]["name"]].keys():
        if having := next((name for name, known in options.items() if option in known), None):
            word = f"{having}+{option}={entries.text(common[option])}"
            return f" method.{option} is for every method of the comparison; for one of them name {word} instead."
    return ""


def _common(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options for every method, and all other keywords of `configure`."""
    ours = [key for key in given if key.split(".")[0] == "method"]
    common = nested({key: given[key] for key in ours}).get("method", {})
    if "seed" in given:
        raise ConfigError("seed is set for every run by the seeds of the comparison; name it there")
    if not isinstance(common, Mapping):
        raise ConfigError("method must be a mapping of options for every method; methods are named as entries")
    for key in ("name", "preset"):
        if key in common:
            raise ConfigError(
                f"method.{key} is set by the entries of the comparison, as in fedprox@paper; name it there"
            )
    return dict(common), {key: value for key, value in given.items() if key not in ours}


def _key(make: Callable[[str, int], tuple[Built, Any]], label: str, seed: int) -> str:
    """The key of a run that can be assembled."""
    try:
        built = make(label, seed)[0]
        if files := edited(built.config):
            raise ConfigError(
                f"'{files[0]}' was edited after Python had imported it; start Python anew, or importlib.reload it"
            )
        return run_key({"config_hash": built.hash, **sources(built.config)})
    except FedloomError as error:
        error.args = (f"{label}, seed {seed}: {error}",)
        raise


def run_key(env: Mapping[str, Any]) -> str:
    """The name of a run's folder in `runs/`, from what env.json holds.

    It is `config_hash`; where the method or the network is a file of the user's own, the SHA-256 of that and of
    `method_source` and `model_source`, so that an edited file is another run.
    """
    found = [env[key] for key in ("method_source", "model_source") if env.get(key)]
    name = str(env["config_hash"])
    return hashlib.sha256("".join([name, *found]).encode()).hexdigest() if found else name


def _check_key(path: Path, key: str) -> None:
    """Raise `CheckpointError` unless the folder holds the run that its name says."""
    mend = f"move '{path}' away, and the same comparison makes the run anew"
    try:
        known = run_key(json.loads((path / "env.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"'{path / 'env.json'}' is missing or damaged; {mend}") from error
    if known != key:
        raise CheckpointError(f"'{path}' holds another run, that of the key {known[:12]}; {mend}")
