"""What the benchmarks share: CPU time and memory of a process tree, medians, and how results are printed."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any


def descendants(pid: int) -> list[int]:
    """Living descendants of a process (Linux)."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in file.read_text().split()]
        except OSError:
            continue
        found += [one for child in children for one in (child, *descendants(child))]
    return found


def tree_cpu_seconds() -> float:
    """User and system seconds of this process and its living descendants."""
    tick = os.sysconf("SC_CLK_TCK")
    total = time.process_time()
    for pid in descendants(os.getpid()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / tick
    return total


def memory_mb(kind: str = "Rss") -> float:
    """Resident memory of this process in MB: "Rss" (all) or "Anonymous" (not backed by a file)."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"no {kind} in /proc/self/smaps_rollup")


def median(values: Iterable[float]) -> float:
    """Median."""
    return statistics.median(values)


def run_json(script: str, *arguments: object, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a script in a process of its own and return the JSON of its last line."""
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_sampled(job: Any, sample: Callable[[], Any], *, experiment: Any = None, **options: Any) -> list[Any]:
    """Carry out a built run in a temporary folder and return what `sample` gave at the end of each round.

    experiment: in place of the built one. options: changes of how the run is carried out.
    """
    from fedloom.engine.experiment import Observer
    from fedloom.engine.folder import RunFolder
    from fedloom.engine.loop import run

    samples = []

    class Clock(Observer):
        def round_done(self, row: Any) -> None:
            samples.append(sample())

    with (
        tempfile.TemporaryDirectory() as place,
        RunFolder.create(Path(place) / "run", job.config.as_dict(), {}) as folder,
    ):
        run(experiment or job.experiment, replace(job.options, **options), folder, [Clock()])
    return samples


def show(title: str, rows: list[tuple[str, ...]], result: Mapping[str, Any], as_json: bool) -> None:
    """Print a table, and with `as_json` the result as one last line."""
    print(title)
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if as_json:
        print(json.dumps(result))
