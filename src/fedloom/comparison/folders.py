"""The run folders of a comparison, read without trusting them: what is damaged is named, with the mend."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom.api import Run
from fedloom.build import build
from fedloom.config import read_yaml, resolve
from fedloom.config.layers import check_values
from fedloom.config.words import shown
from fedloom.core.errors import CheckpointError, FedloomError
from fedloom.evaluate.comparison import MEASURES

TEXTS = ("method", "dataset", "scenario", "data_view")  # of a summary, what a comparison repeats
PROCESS, MEMORY = "process.json", "own_peak_rss_bytes"  # what a run's own process was, and its peak memory there
LARGEST = 1e30  # of a measure; whose square can still be summed
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


def run_key(env: Mapping[str, Any]) -> str:
    """The name of a run's folder in `runs/`, from what env.json holds.

    It is `config_hash`; where the method or the network is a file of the user's own, the SHA-256 of that and of
    `method_source` and `model_source`, so that an edited file is another run.
    """
    found = [env[key] for key in ("method_source", "model_source") if env.get(key)]
    name = str(env["config_hash"])
    return hashlib.sha256("".join([name, *found]).encode()).hexdigest() if found else name


def mend(path: Path) -> str:
    """What to do about a run folder that cannot be used."""
    return f"move '{path}' away, and the same comparison makes the run anew"


def check_free(path: Path) -> None:
    """Raise `CheckpointError` when something lies where a run is to begin, other than what a killed start leaves."""
    if path.is_dir():
        names = {entry.name for entry in path.iterdir()}
        strange = any(not (n in (".lock", "env.json") or (n[0] == "." and n.endswith(".tmp"))) for n in names)
        taken = strange and "config.yaml" not in names  # with one another process begins the run right now
    else:
        taken = os.path.lexists(path)
    if taken:
        raise CheckpointError(f"'{path}' is in the way, for it is no run folder with a config.yaml; {mend(path)}")


def check_began(path: Path, key: str, given: Mapping[str, Any] | None = None) -> None:
    """Raise `CheckpointError` unless the folder holds the run that its name says.

    given: the user's own data and model, to check too that config.yaml is the one that the run began with.
    """
    try:
        env = json.loads((path / "env.json").read_text(encoding="utf-8"))
        known = run_key(env)
    except DAMAGED as error:
        raise CheckpointError(f"'{path / 'env.json'}' is missing or damaged; {mend(path)}") from error
    if known != key:
        raise CheckpointError(f"'{path}' holds another run, that of the key {known[:12]}; {mend(path)}")
    if given is None:
        return
    file = path / "config.yaml"
    try:
        found = build(resolve(read_yaml(file)), data=given["data"], model=given["model"]).hash
    except FedloomError as error:
        raise CheckpointError(f"'{file}' can no longer be run ({reason(error)}); {mend(path)}") from error
    if found != env["config_hash"]:
        raise CheckpointError(f"'{file}' has changed since the run began; {mend(path)}")


def finished(path: Path, method: str, seed: int, model: Any = None) -> Run:
    """The run of a folder that is done. Raises `CheckpointError` when its summary is damaged or of another run.

    model: the user's own network, where the run was given one.
    """
    file = path / "summary.json"
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        _check_summary(summary)
    except DAMAGED as error:
        raise CheckpointError(f"'{file}' is damaged ({reason(error)}); {mend(path)}") from error
    if (summary.get("method"), summary.get("seed")) != (method, seed):
        raise CheckpointError(f"'{file}' is of another run; {mend(path)}")
    return Run(path, summary, model)


def keep_memory(path: Path, peak: int | None) -> None:
    """Write down the peak memory of the process that the run of a folder had to itself, in bytes."""
    from fedloom.engine.files import write_json

    write_json(path / PROCESS, {MEMORY: peak})


def own_memory(path: Path) -> dict[str, int]:
    """`own_peak_rss_bytes` of the run of a folder; empty where it had no process to itself."""
    try:
        peak = json.loads((path / PROCESS).read_text(encoding="utf-8"))[MEMORY]
    except DAMAGED:
        return {}
    return {MEMORY: peak} if isinstance(peak, int) and _is_measure(peak) else {}


def reason(error: BaseException) -> str:
    """What an error says without its own mend, which is for a run by itself."""
    text = getattr(error, "strerror", None) or str(error)
    return text.partition("; ")[0] if isinstance(error, FedloomError) else text


def _check_summary(summary: Any) -> None:
    """Raise `ValueError` for what no run writes into its summary."""
    if not isinstance(summary, dict) or "final_accuracy" not in summary:
        raise ValueError("it holds no summary of a run")
    check_values(summary)
    for key in TEXTS:
        if not isinstance(summary.get(key), str | None):
            raise ValueError(f"{key} is {shown(summary[key])}")
    for key in MEASURES:
        if not _is_measure(summary.get(key)):
            raise ValueError(f"{key} is {shown(summary[key])}")
    matrix = summary.get("accuracy_matrix")
    rows = [] if matrix is None else matrix
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == len(rows[0]) for row in rows):
        raise ValueError("accuracy_matrix is no list of rows of one length")
    if not all(_is_measure(value) for row in rows for value in row):
        raise ValueError("accuracy_matrix holds what is no number")


def _is_measure(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST)
