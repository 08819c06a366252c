"""What a run folder holds, read without trusting it: any file may be missing, cut short or damaged."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedloom.core.errors import ConfigError
from fedloom.evaluate.matrix import AccuracyMatrix

Matrix = list[list[float | None]]
Row = Mapping[str, Any]

MARKS = ("config.yaml", "summary.json", "metrics.jsonl")
LARGEST = 1e40  # of a number: above all of 32 bits, and its square and its percentage are numbers too


@dataclass(frozen=True)
class RunRecord:
    """One run as its folder tells it.

    Mappings are empty where a file is missing. matrix: R[t][j] as fractions, None where there is no value.
    problems: one sentence per file that is there but cannot be read. status: "done", "failed" or "unfinished"; reason:
    why it failed, where that is known. picture: the picture of the partition, None where there is none. facts: what the
    method tells of the run.
    """

    folder: Path
    status: str = "unfinished"
    reason: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    config_text: str = ""
    env: Mapping[str, Any] = field(default_factory=dict)
    metrics: tuple[Row, ...] = ()
    partition: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    matrix: Matrix = field(default_factory=list)
    picture: Path | None = None
    problems: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        """Name of the method, or of the folder where it is not recorded."""
        return str(self.summary.get("method") or _dig(self.config, "method", "name") or self.folder.name)

    @property
    def dataset(self) -> str | None:
        """Name of the data set."""
        name = self.summary.get("dataset") or _dig(self.config, "data", "name")
        return None if name is None else str(name)

    @property
    def seed(self) -> Any:
        """Seed of the run."""
        return self.summary.get("seed", self.config.get("seed"))

    @property
    def stages(self) -> list[Row]:
        """The last row of scope "stage" per stage, in order."""
        return list({row["stage"]: row for row in self._scope("stage")}.values())

    @property
    def rounds(self) -> list[Row]:
        """Rows of scope "round", in order; a repeated round (after a resume) is its last repetition."""
        return list({(r["stage"], r.get("round"), r.get("exchange")): r for r in self._scope("round")}.values())

    @property
    def round_numbers(self) -> dict[tuple[int, Any], int]:
        """Running number, from 1, of every (stage, round) in which something was done."""
        return {key: i + 1 for i, key in enumerate(dict.fromkeys((r["stage"], r.get("round")) for r in self.rounds))}

    @property
    def accuracy_by_round(self) -> list[tuple[int, float]]:
        """(running number of the round, accuracy over all seen classes) wherever it was evaluated.

        Empty unless something was evaluated inside a stage: then the ends of stages tell everything.
        """
        return [(place, row["accuracy"]) for place, row in self._evaluations]

    @property
    def _evaluations(self) -> list[tuple[int, Row]]:
        order = self.round_numbers
        inside = {order[r["stage"], r.get("round")]: r for r in self.rounds if _has_accuracy(r)}
        last = {stage: i for (stage, _), i in order.items()}
        ends = {last[r["stage"]]: r for r in self.stages if r["stage"] in last and _has_accuracy(r)}
        return sorted((inside | ends).items()) if inside else []

    @property
    def forgetting_by_stage(self) -> dict[int, float]:
        """Stage -> forgetting if the stream had ended there, from the second stage on, where there is a value."""
        if not _fractions(self.matrix):
            return {}
        ends = range(1, len(self.matrix))
        found = {t: AccuracyMatrix.from_lists(self.matrix[: t + 1]).forgetting for t in ends}
        return {stage: value for stage, value in found.items() if value is not None}

    @property
    def domain_names(self) -> list[str]:
        """Names of the domains by id; empty where there are none."""
        names = self.partition.get("domain_names")
        return [str(name) for name in names] if isinstance(names, list) else []

    @property
    def task_names(self) -> list[str]:
        """Names of the tasks where each of several is a domain of its own; else empty."""
        names, tasks = self.domain_names, self.partition.get("task_domains")
        found = [_only(task) for task in tasks] if isinstance(tasks, list) else []
        known = [names[k] for k in found if k is not None and 0 <= k < len(names)]
        return known if len(known) == len(found) == len(set(found)) > 1 else []

    @property
    def domain_curves(self) -> dict[str, list[float | None]]:
        """Domain -> accuracy of the global view after every stage; without domains that never have one."""
        return _by_domain(self.stages)

    @property
    def domain_curves_by_round(self) -> tuple[list[int], dict[str, list[float | None]]]:
        """Running numbers of the rounds in which domains were evaluated, and the same curves over these.

        Empty for fewer than two such rounds.
        """
        found = [(place, row) for place, row in self._evaluations if isinstance(row.get("accuracy/domains"), Mapping)]
        return ([place for place, _ in found], _by_domain([row for _, row in found])) if len(found) > 1 else ([], {})

    @cached_property
    def main_domains(self) -> dict[str, int]:
        """Client id as text -> id of the domain of which it holds most examples over all stages."""
        held: dict[str, Counter[int]] = {}
        stages = self.partition.get("stages")
        for stage in stages if isinstance(stages, list) else ():
            clients = _dig(stage, "clients")
            for client in clients if isinstance(clients, Mapping) else ():
                counts = _dig(clients, client, "domains")
                known = counts if isinstance(counts, Mapping) else {}
                numbers = {int(k): number(known, k) or 0 for k in known if k.isdecimal() and len(k) < 9}
                held.setdefault(client, Counter()).update(numbers)
        return {client: counts.most_common(1)[0][0] for client, counts in held.items() if counts}

    def _scope(self, scope: str) -> Iterator[Row]:
        rows = (row for row in self.metrics if row.get("scope") == scope and _is_placed(row))
        # Stable: rows of a stage keep the order in which they were written.
        return iter(sorted(rows, key=lambda row: row["stage"]))


def _fractions(matrix: Matrix) -> bool:
    return all(v is None or 0.0 <= v <= 1.0 for row in matrix for v in row)


def number(row: Row, key: str) -> float | None:
    """A number of a row of at most `LARGEST`, else None."""
    value = row.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and abs(value) <= LARGEST else None


def _is_placed(row: Row) -> bool:
    """Whether a row says where in the run it belongs."""
    known = isinstance(row.get("stage"), int) and number(row, "stage") is not None
    return known and isinstance(row.get("round"), int | None) and isinstance(row.get("exchange"), str | None)


def _by_domain(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """Domain -> accuracy in every row; without domains that never have one."""
    found = [row.get("accuracy/domains") for row in rows]
    known = [row if isinstance(row, Mapping) else {} for row in found]
    names = dict.fromkeys(name for row in known for name in row if number(row, name) is not None)
    return {name: [number(row, name) for row in known] for name in names}


def _only(ids: Any) -> int | None:
    """The id in a list of a single one."""
    return ids[0] if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], int) else None


def _has_accuracy(row: Row) -> bool:
    return number(row, "accuracy") is not None


def read_run(folder: Path) -> RunRecord:
    """Read a run folder. Raises `ConfigError` when it is none, in one sentence that says what was looked for."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"'{folder}' is not a folder; give the folder of a run.")
    if not any((folder / name).is_file() for name in MARKS):
        raise ConfigError(f"'{folder}' is not a run folder: it holds none of {', '.join(MARKS)}{_inside(folder)}.")
    problems: list[str] = []
    summary = _read_json(folder / "summary.json", problems)
    metrics = _read_metrics(folder / "metrics.jsonl", problems)
    config_text = _read_text(folder / "config.yaml", problems) or ""
    return RunRecord(
        folder=folder,
        status=_status(folder, summary),
        reason=" ".join((_read_text(folder / "FAILED", problems) or "").split()),
        summary=summary,
        config=_parse_yaml(config_text, problems),
        config_text=config_text,
        env=_read_json(folder / "env.json", problems),
        metrics=metrics,
        partition=_read_json(folder / "partition.json", problems),
        facts=_read_json(folder / "facts.json", problems),
        matrix=_find_matrix(folder, summary, metrics, problems),
        picture=next((p for p in (folder / f"partition.{kind}" for kind in ("png", "svg")) if p.is_file()), None),
        problems=tuple(problems),
    )


def _inside(folder: Path) -> str:
    """What to name instead of a folder that holds folders of runs."""
    try:
        found = sorted(path for path in folder.iterdir() if any((path / name).is_file() for name in MARKS))
    except OSError:
        return ""
    return f"; name the folders of runs in it, such as '{found[0]}'" if found else ""


def _status(folder: Path, summary: Row) -> str:
    """A run is done once its summary is written: its own page is made before the mark DONE."""
    if (folder / "DONE").exists():
        return "done"
    if (folder / "FAILED").exists():
        return "failed"
    return "done" if summary else "unfinished"


def _read_text(path: Path, problems: list[str]) -> str | None:
    if not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        problems.append(f"{path.name} cannot be read.")
        return None


def _read_json(path: Path, problems: list[str]) -> Mapping[str, Any]:
    text = _read_text(path, problems)
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    problems.append(f"{path.name} does not hold a JSON object.")
    return {}


def _read_metrics(path: Path, problems: list[str]) -> tuple[Row, ...]:
    rows, damaged = [], 0
    for line in (_read_text(path, problems) or "").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif line.strip():
            damaged += 1
    if damaged:
        problems.append(f"{path.name} has {damaged} line{'s' * (damaged > 1)} that cannot be read.")
    return tuple(rows)


def _parse_yaml(text: str, problems: list[str]) -> Mapping[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(text) if text else {}
    except (yaml.YAMLError, ValueError, OverflowError, AttributeError, RecursionError):  # as in `fedloom.config`
        found = None
    if isinstance(found, dict):
        return found
    problems.append("config.yaml does not hold a mapping.")
    return {}


def _find_matrix(folder: Path, summary: Row, metrics: tuple[Row, ...], problems: list[str]) -> Matrix:
    """From the summary, else the CSV file, else the stage rows: the latter two exist while a run goes on."""
    rows = summary.get("accuracy_matrix") or _read_matrix_csv(folder / "accuracy_matrix.csv", problems)
    if not rows:
        rows = [row.get("accuracy/tasks") for row in RunRecord(folder, metrics=metrics).stages]
    if not isinstance(rows, list):
        return []
    rows = [[number({"v": v}, "v") for v in row] for row in rows if isinstance(row, list)]
    width = max(map(len, rows), default=0)
    return [row + [None] * (width - len(row)) for row in rows] if width else []


def _read_matrix_csv(path: Path, problems: list[str]) -> Matrix:
    text = _read_text(path, problems)
    lines = list(csv.reader((text or "").splitlines()))
    if not lines:
        return []
    columns = [i for i, name in enumerate(lines[0]) if name.startswith("task_")]
    try:
        return [[float(line[i]) if line[i] else None for i in columns] for line in lines[1:]]
    except (ValueError, IndexError):
        problems.append(f"{path.name} cannot be read.")
        return []


def _dig(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree
