"""A comparison that is checked to the last word before its first run: which runs, where, under which key."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedloom.api import Run, checked_path, configure, resume, start
from fedloom.build import build
from fedloom.comparison import entries
from fedloom.comparison.folders import check_began, check_free, finished, mend, reason, run_key
from fedloom.comparison.settings import settings
from fedloom.config.layers import nested
from fedloom.config.options import schema
from fedloom.config.words import shorten, shown
from fedloom.core.errors import CheckpointError, ConfigError, FedloomError, unknown
from fedloom.environment import edited, sources
from fedloom.evaluate.comparison import DOMAIN, OF_DOMAINS, OF_STAGES
from fedloom.report.comparison import RUNS, is_comparison

if TYPE_CHECKING:
    from fedloom.build import Built
    from fedloom.config import Config
    from fedloom.engine.experiment import Observer

Resolved = Callable[[str, int], tuple[str, Any, Any, Any]]
Tell = Callable[[str], None]
PATIENCE = 5.0  # seconds of checking after which it is told what is being checked
LONGEST = 100  # characters of a word in the name of a folder
UNFINISHED = ("failed", "unfinished")  # states of runs that were begun and have not ended well


class Checked(NamedTuple):
    """A run that can be assembled: its key, whether clients may predict otherwise than the global view, its stream, the
    kind of its device.
    """

    key: str
    personal: bool
    domains: tuple[str, ...]
    stages: int
    device: str


@dataclass(frozen=True)
class Planned:
    """A comparison whose configurations are checked; nothing has been run.

    settings: what is set over the recipe, see `fedloom.comparison.settings`. metric: key of the result whose test the
    table shows. methods: label -> resolved section `method`. checked: label -> seed -> what is known of the run.
    resolved: (label, seed) -> what `fedloom.api.configure` gives. given: what a run needs beside that to be made,
    opened and gone on with: the user's own data and model, and workers (None: as they were). threads: of every run.
    store: where the folders of the runs are. setting: of a sweep, in words.
    """

    title: str
    recipe: str
    settings: Mapping[str, Any]
    folder: Path
    reference: str
    metric: str
    seeds: tuple[int, ...]
    methods: Mapping[str, Mapping[str, Any]]
    checked: Mapping[str, Mapping[int, Checked]]
    resolved: Resolved
    given: Mapping[str, Any]
    threads: int
    store: Path
    setting: str = ""

    @property
    def keys(self) -> dict[str, dict[int, str]]:
        """Label -> seed -> key of the run, equal for equal runs (see `fedloom.comparison.folders.run_key`)."""
        return {label: {seed: run.key for seed, run in runs.items()} for label, runs in self.checked.items()}

    @property
    def runs(self) -> dict[str, tuple[str, int]]:
        """Key -> first label and seed, in the order of running: all methods on a seed, then the next."""
        found: dict[str, tuple[str, int]] = {}
        for seed in self.seeds:
            for label in self.methods:
                found.setdefault(self.checked[label][seed].key, (label, seed))
        return found

    def path(self, key: str) -> Path:
        """Folder of the run with that key."""
        return self.store / key

    def state(self, key: str) -> str:
        """`done`, `failed`, `unfinished` or `missing`, as the folder of the run says."""
        path = self.path(key)
        done, summary, config, failed = (
            os.path.exists(path / name) for name in ("DONE", "summary.json", "config.yaml", "FAILED")
        )
        if done and summary:
            return "done"
        return "missing" if not config else "failed" if failed else "unfinished"

    def held(self, key: str) -> bool:
        """Whether another process works on the run."""
        return held(self.path(key))

    def open(self, key: str) -> Run:
        """The finished run; `CheckpointError` when the folder is damaged or holds another one."""
        path, (label, seed) = self.path(key), self.runs[key]
        check_began(path, key)
        return finished(path, self.methods[label]["name"], seed, self.given["model"])

    def carry(self, key: str, observers: Sequence[Observer]) -> Run:
        """Run it, go on with it, or open it; `CheckpointError` when the folder cannot be used."""
        if self.state(key) == "done":
            return self.open(key)
        return carry(self.path(key), key, self.resolved(*self.runs[key])[1], self.given, observers)


def held(path: Path) -> bool:
    """Whether a process works on the run of a folder."""
    from fedloom.engine.folder import RunFolder

    try:
        RunFolder(path).close()
    except ConfigError:
        return True
    except OSError:  # there is no folder yet, or none that can be written
        return False
    return False


def carry(path: Path, key: str, config: Config, given: Mapping[str, Any], observers: Sequence[Observer]) -> Run:
    """Run a configuration in the folder that its key names, or go on with it there.

    given: the user's own data and model, and workers for a run that is gone on with. Raises `CheckpointError` when the
    folder cannot be used.
    """
    if not (path / "config.yaml").exists():
        check_free(path)
        built = build(config, data=given["data"], model=given["model"])
        if _key(built) != key:
            raise ConfigError(
                f"what is to be run is not what the key {key[:12]} stands for: the data, the model or a file of the "
                "method have changed since the comparison was checked; call it again"
            )
        return start(built, path, observers, given["model"])
    check_began(path, key, given)
    try:
        return resume(path, observers=observers, **given)
    except CheckpointError as error:
        raise CheckpointError(f"'{path}' cannot be gone on with ({reason(error)}); {mend(path)}") from error


def plan(
    recipe_or_config: Any,
    methods: Any,
    seeds: Any,
    /,
    *,
    out: Any,
    reference: Any,
    metric: Any = None,
    setting: str = "",
    store: Path | None = None,
    tell: Tell | None = None,
    **given: Any,
) -> Planned:
    """Check everything that `compare` is asked for. tell: told what is checked when that takes long.

    setting: of a sweep, for the title. store: folder of the runs, by default `runs` in that of the comparison. Raises
    `ConfigError` or `DataError`.
    """
    sections = entries.sections(methods)
    title = f"Comparison of {len(sections)} methods" if len(sections) > 1 else next(iter(sections))
    title += f", {setting}" if setting else ""
    named = {"title": title, "name": "compare", "metric": metric, "setting": setting, "store": store}
    return _plan(recipe_or_config, sections, seeds, given, out=out, reference=reference, tell=tell, **named)


def plan_ablation(
    method: Any,
    recipe_or_config: Any,
    seeds: Any,
    /,
    *,
    switches: Any,
    out: Any,
    reference: Any,
    metric: Any = None,
    tell: Tell | None = None,
    **given: Any,
) -> Planned:
    """Check everything that `ablate` is asked for; see `plan`."""
    full = entries.section(method)
    found = entries.switches(full["name"], switches)
    sections = {entries.FULL: full, **{name: {**full, **options} for name, options in found.items()}}
    word = entries.label(method)
    named = {
        "title": f"Ablation of {word}",
        "name": f"ablate-{re.sub(r'[^A-Za-z0-9_.+=@-]+', '-', word).strip('-')[:LONGEST]}",
        "part": "switch",
        "metric": metric,
    }
    return _plan(recipe_or_config, sections, seeds, given, out=out, reference=reference, tell=tell, **named)


def _plan(
    source: Any,
    sections: Mapping[str, Mapping[str, Any]],
    seeds: Any,
    given: Mapping[str, Any],
    *,
    out: Any,
    reference: Any,
    metric: Any,
    tell: Tell | None,
    title: str,
    name: str,
    part: str = "",
    setting: str = "",
    store: Path | None = None,
) -> Planned:
    numbers, reference, metric = entries.seeds(seeds), entries.reference(reference, sections), entries.metric(metric)
    common, layer = _common(given)

    def resolved(label: str, seed: int) -> tuple[str, Any, Any, Any]:
        return configure(source, method={**common, **sections[label]}, seed=seed, **layer)

    trees = _trees(resolved, lambda: configure(source, **layer), sections, common, numbers[0], part)
    recipe, config, own_data, own_model = next(iter(trees.values()))
    workers = None if config.engine.workers == "auto" else config.engine.workers
    return Planned(
        title=title,
        recipe=recipe,
        settings=settings(source, given),
        folder=(folder := out_folder(out, Path("runs") / recipe / name)),
        reference=reference,
        metric=metric,
        seeds=numbers,
        methods={label: tree[1].method for label, tree in trees.items()},
        checked=_checked(resolved, tuple(sections), numbers, metric, tell),
        resolved=resolved,
        given={"data": own_data, "model": own_model, "workers": workers},
        threads=config.engine.threads,
        store=folder / RUNS if store is None else store,
        setting=setting,
    )


def out_folder(out: Any, default: Path) -> Path:
    """Where a comparison goes; `ConfigError` for what is no path or no folder, and for the folder of a run."""
    path = default if out is None else checked_path("out", out)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return path
    except (OSError, ValueError) as error:  # a loop of links, a null byte, a lone surrogate
        told = getattr(error, "strerror", None) or error
        raise ConfigError(f"out {shown(str(path))} is no usable path: {told}; name another") from error
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"out is '{path}', which is a file; name a folder")
    if (path / "config.yaml").exists() and not is_comparison(path):
        raise ConfigError(f"out is '{path}', which is the folder of a run (it holds config.yaml); name another folder")
    return path


def _trees(
    resolved: Resolved,
    base: Callable[[], Any],
    sections: Mapping[str, Mapping[str, Any]],
    common: Mapping[str, Any],
    seed: int,
    part: str,
) -> dict[str, tuple[str, Any, Any, Any]]:
    """Label -> what `configure` gives, so that a slip in the last word is found at once.

    base: configures without any method, to tell a slip in a word from one in what all have. part: what every label
    but the first stands for, where the first is no word of its own.
    """
    found: dict[str, tuple[str, Any, Any, Any]] = {}
    for label in sections:
        try:
            found[label] = resolved(label, seed)
        except ConfigError as error:
            if part:
                place = f"{part} {label}: " if found else ""
            else:
                common_slip = not found and refusal(base) == str(error)
                place = "" if common_slip or f"'{label}'" in str(error) else f"{label}: "
            error.args = (f"{place}{error}{_for_one(common, label, sections)}",)
            raise
    return found


def refusal(planned: Callable[[], object]) -> str:
    """Why something cannot be configured or planned; empty when it can."""
    try:
        planned()
    except FedloomError as error:
        return str(error)
    return ""


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


def _checked(
    resolved: Resolved, labels: Sequence[str], seeds: Sequence[int], metric: str, tell: Tell | None
) -> dict[str, dict[int, Checked]]:
    """Label -> seed -> what is known of a run that can be assembled."""
    found: dict[str, dict[int, Checked]] = {label: {} for label in labels}
    told = time.monotonic()
    for label in labels:
        for seed in seeds:
            if tell is not None and time.monotonic() - told >= PATIENCE:
                number = sum(map(len, found.values())) + 1
                tell(f"checking run {number} of {len(labels) * len(seeds)}: {label}, seed {seed}")
                told = time.monotonic()
            found[label][seed] = _check(resolved, label, seed)
            _check_metric(metric, found[label][seed])
    return found


def _check(resolved: Resolved, label: str, seed: int) -> Checked:
    try:
        _, config, own_data, own_model = resolved(label, seed)
        built = build(config, data=own_data, model=own_model)
        if files := edited(built.config):
            raise ConfigError(
                f"'{files[0]}' was edited after Python had imported it; start Python anew, or importlib.reload it"
            )
        key = _key(built)
    except FedloomError as error:
        error.args = (f"{label}, seed {seed}: {error}",)
        raise
    made, stream = built.experiment, built.experiment.plan
    return Checked(key, made.method.personal, tuple(stream.domains), stream.num_stages, made.forward.device.type)


def _key(built: Built) -> str:
    return run_key({"config_hash": built.hash, **sources(built.config)})


def _check_metric(metric: str, run: Checked) -> None:
    """Raise `ConfigError` for a metric that no run on this stream will have."""
    if metric.startswith(DOMAIN) and run.domains and (name := metric[len(DOMAIN) : -1]) not in run.domains:
        raise ConfigError(f"metric: {unknown('domain', shorten(name), run.domains)}")
    if not run.domains and (metric in OF_DOMAINS or metric.startswith(DOMAIN)):
        raise ConfigError(f"metric is '{metric}', but the data have no domains; take per_client_accuracy_mean, say")
    if run.stages < 2 and metric in OF_STAGES:
        raise ConfigError(f"metric is '{metric}', but the stream has a single stage; take final_accuracy, say")
