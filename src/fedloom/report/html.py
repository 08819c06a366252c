"""One self-contained page about one run, or about several side by side.

Everything is inside the file: styles, pictures as SVG or data URIs. It asks the network for nothing and runs
no script. All text that comes from a run folder is escaped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fedloom.core.errors import ConfigError
from fedloom.report import comparison, plots, several, sweep
from fedloom.report.cells import Grid
from fedloom.report.glossary import GLOSSARY
from fedloom.report.groups import Group, grouped
from fedloom.report.record import RunRecord, read_run
from fedloom.report.run_view import Defaults, data_uri, run_view


class Found(NamedTuple):
    """What the folders hold: groups of runs, the contents of compare.json of those that are comparisons, and of
    sweep.json of those that are sweeps.
    """

    groups: Sequence[Group]
    contents: Sequence[Mapping[str, Any]] = ()
    sweeps: Sequence[Mapping[str, Any]] = ()


def write_report(folders: Sequence[Path], out: Path, *, defaults: Defaults | None = None) -> Path:
    """Write the page about the runs in `folders` to the file `out` and return its path.

    Runs that differ in nothing but the seed are shown as one, with intervals over seeds. The folder of a comparison
    stands for its finished runs, and its table comes first; that of a sweep for the comparisons of its settings. What
    a folder lacks is shown as "not recorded".
    defaults: the tree of defaults for a tree of settings, to show what a run has changed.
    Raises `ConfigError` when there is no folder, when one holds neither a run nor a comparison or sweep of which some
    run has ended, or when the file cannot be written.
    """
    if not folders:
        raise ConfigError("a report needs at least one run folder.")
    if out.exists() and not (out.is_file() or out.is_dir()):  # a device, which would be replaced
        raise ConfigError(f"the report '{out}' cannot be written: it is no file; name one with --out.")
    page = render(*_find(list(map(Path, folders))), defaults=defaults)
    try:
        partial = out.with_name(out.name + ".partial")
        partial.write_text(page, encoding="utf-8", errors="backslashreplace")
        os.replace(partial, out)
    except OSError as error:
        raise ConfigError(f"the report '{out}' cannot be written: {error.strerror}.") from error
    return out


def _find(folders: Sequence[Path]) -> Found:
    """The groups of sweeps and comparisons, then those of runs that were named one by one."""
    swept = {folder: sweep.read_sweep(folder) for folder in folders if sweep.is_sweep(folder)}
    alone = [folder for folder in folders if folder not in swept and comparison.is_comparison(folder)]
    compared = [found for folder, content in swept.items() for found in _settings(folder, content)]
    compared += [(folder, "", comparison.read_comparison(folder)) for folder in alone]
    groups = [group for found in compared for group in _of_comparison(*found)]
    groups += grouped([read_run(folder) for folder in folders if folder not in (*swept, *alone)])
    names = [group.name for group in groups]
    if len(set(names)) < len(names):
        groups = [Group(f"{i + 1}. {group.name}", group.records) for i, group in enumerate(groups)]
    return Found(groups, [content for *_, content in compared], list(swept.values()))


def _settings(folder: Path, content: Mapping[str, Any]) -> list[tuple[Path, str, Mapping[str, Any]]]:
    """Folder, label and comparison of each setting of a sweep of which some run has ended.

    Raises `ConfigError` where there is none.
    """
    places = [(folder / setting["folder"], label) for label, setting in content["settings"].items()]
    ended: list[tuple[Path, str, Mapping[str, Any]]] = []
    for home, label in places:
        if comparison.is_comparison(home) and _ended(found := comparison.read_comparison(home)):
            ended.append((home, label, found))
    if not ended:
        raise ConfigError(f"no run of the sweep '{folder}' has ended; go on with the same `fedloom sweep`")
    return ended


def _ended(content: Mapping[str, Any]) -> int:
    """Number of runs of a comparison that have ended, one that several labels share counted once."""
    entries = content["methods"].values()
    return len({key for entry in entries for seed, key in entry["runs"].items() if seed not in entry["missing"]})


def _of_comparison(folder: Path, setting: str, content: Mapping[str, Any]) -> list[Group]:
    """A group per method of which some run has ended. setting: of a sweep, for their names."""
    records = {path: read_run(path) for path in comparison.run_folders(folder, content).values()}
    home, found = folder / content.get("runs_folder", comparison.RUNS), []
    for label, entry in content["methods"].items():
        own = [records[home / key] for seed, key in entry["runs"].items() if seed not in entry["missing"]]
        found += [Group(f"{label}, {setting}" if setting else label, tuple(own))] if own else []
    return found


def render(
    groups: Sequence[Group],
    contents: Sequence[Mapping[str, Any]] = (),
    sweeps: Sequence[Mapping[str, Any]] = (),
    *,
    defaults: Defaults | None = None,
) -> str:
    """The page as text. contents, sweeps: of compare.json and of sweep.json, whose tables come first."""
    from importlib.resources import files

    from jinja2 import Environment, StrictUndefined

    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(files("fedloom.report").joinpath("template.html").read_text(encoding="utf-8"))
    records = {id(record): record for group in groups for record in group.records}
    single = len(records) == 1
    names = dict.fromkeys(records, "This run") if single else _names(groups)
    with plots.styled():
        runs = [run_view(record, names[key], f"run{i}", defaults) for i, (key, record) in enumerate(records.items())]
        together = None if single else several.view(groups)
    return template.render(
        title=_title(groups, contents, sweeps, len(records)),
        about=_about(list(records.values())),
        troubles=[*_incomplete(contents), *several.troubles(groups, names)],
        runs=runs,
        several=together,
        comparisons=[*(_table(sweep, found) for found in sweeps), *(_table(comparison, found) for found in contents)],
        data=[] if single else [(one.title, data_uri(one.record.picture)) for one in several.data_pictures(groups)],
        glossary=GLOSSARY,
    )


def _names(groups: Sequence[Group]) -> dict[int, str]:
    """Name of every run by the id of its record: that of its group, with the seed where that has several."""
    return {
        id(record): group.name if len(group.records) == 1 else f"{group.name}, seed {record.seed}"
        for group in reversed(groups)
        for record in group.records
    }


def _title(
    groups: Sequence[Group], contents: Sequence[Mapping[str, Any]], sweeps: Sequence[Mapping[str, Any]], runs: int
) -> str:
    whole = sweeps or contents
    if len(whole) == 1 and runs == sum(map(_ended, contents)):
        return f"{whole[0]['title']}, {whole[0]['recipe']}"
    return groups[0].name if runs == 1 else f"{runs} runs compared"


def _about(records: Sequence[RunRecord]) -> str:
    """What all runs share, data set and scenario, and how many they are."""
    facts = ([record.dataset for record in records], [record.summary.get("scenario") for record in records])
    shared = [values[0] for values in facts if values[0] and values.count(values[0]) == len(values)]
    return " · ".join([*(str(value).replace("_", " ") for value in shared), f"{len(records)} runs"])


def _incomplete(contents: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence per comparison of which runs are missing."""
    told = []
    for content in contents:
        asked, missing = (sum(len(entry[k]) for entry in content["methods"].values()) for k in ("runs", "missing"))
        if missing:
            ended = f"{asked - missing} of {asked} runs have ended"
            told.append(f"{comparison.title(content)}: {ended}; the notes under the table say which are missing.")
    return told


def _table(form: ModuleType, content: Mapping[str, Any]) -> dict[str, Any]:
    """Title, table and notes of a comparison or a sweep. form: the module that writes it."""
    head, *rows = form.grid(content)
    return {"title": form.title(content), "table": Grid(head, rows), "notes": form.notes(content)}
