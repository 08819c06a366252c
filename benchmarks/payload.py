"""What moving a large model costs: 11 M parameters, 10 clients, no local step.

By hand: for each client copy the global tensors into a module, copy them out, add them to a float64 sum; then
divide and round. The library does the same through its engine, with its checks; checkpoints are off and their cost
per round is measured apart. Peak memory is anonymous memory (what no file backs) up to the end of the last round, above
that before the run, in models: the network of the process, the old state, the new state and one float64 tensor.

    python benchmarks/payload.py [--pairs 5] [--rounds 6] [--json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from measure import median, memory_mb, run_json, show

CLIENTS = 10
MODEL_MB = 11_014_154 * 4 / 2**20


def network() -> Any:
    """A dense network of 11 M parameters."""
    from torch import nn

    from fedloom.core.seeds import seeded

    with seeded(0, "payload"):
        return nn.Sequential(
            nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2600), nn.ReLU(), nn.Linear(2600, 2114), nn.ReLU(),
            nn.Linear(2114, 10),
        )  # fmt: skip


class Peak:
    """Samples anonymous memory in a thread."""

    def __enter__(self) -> Peak:
        self.start, self.top, self.frozen, self._stop = memory_mb("Anonymous"), 0.0, False, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            if not self.frozen:
                self.top = max(self.top, memory_mb("Anonymous") - self.start)

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def by_hand(rounds: int) -> dict[str, float]:
    """Copy and average."""
    import torch

    torch.set_num_threads(1)
    module = network()
    weights, seconds = {name: tensor.clone() for name, tensor in module.state_dict().items()}, []
    for _ in range(rounds):
        began = time.perf_counter()
        total = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in weights.items()}
        for _ in range(CLIENTS):
            module.load_state_dict(weights)
            up = {name: tensor.clone() for name, tensor in module.state_dict().items()}
            for name, tensor in up.items():
                total[name].add_(tensor, alpha=1 / CLIENTS)
        weights = {name: tensor.float() for name, tensor in total.items()}
        seconds.append(time.perf_counter() - began)
    return {"seconds": median(seconds[1:]), "peak_models": 0.0}


def library(rounds: int, checkpoint: int = 0, peak: bool = False) -> dict[str, float]:
    """The engine, with local training of zero epochs."""
    from contextlib import nullcontext
    from dataclasses import replace

    import numpy as np

    from fedloom.build import build
    from fedloom.config import resolve
    from fedloom.engine.experiment import Observer
    from fedloom.engine.folder import RunFolder
    from fedloom.engine.loop import run

    rng = np.random.default_rng(0)
    data = rng.normal(size=(400, 64)).astype("float32"), rng.integers(0, 10, 400)
    tree = {
        "method": {"name": "fedavg"},
        "stream": {"kind": "static"},
        "partition": {"kind": "iid", "clients": CLIENTS},
        "training": {"rounds": rounds, "cohort": 1.0},
        "engine": {"workers": 1},
        "evaluate": {"personal": False},
    }

    class Clock(Observer):
        ends: list[float] = []  # one clock per process

        def round_done(self, row: Any) -> None:
            self.ends.append(time.perf_counter())
            if peak:
                watched.frozen = len(self.ends) == rounds

    job = build(resolve(tree), data=data, model=network)
    experiment = job.experiment
    method = replace(experiment.method, local=replace(experiment.method.local, epochs=0))
    experiment = replace(experiment, method=method)
    with (
        tempfile.TemporaryDirectory() as place,
        Peak() if peak else nullcontext() as watched,
        RunFolder.create(Path(place) / "run", job.config.as_dict(), {}) as folder,
    ):
        run(experiment, replace(job.options, checkpoint_every=checkpoint), folder, [Clock()])
    gaps = [after - before for before, after in zip(Clock.ends, Clock.ends[1:], strict=False)]
    return {"seconds": median(gaps), "peak_models": watched.top / MODEL_MB if peak else 0.0}


RUNNERS = {
    "by-hand": by_hand,
    "library": library,
    "library, memory": lambda rounds: library(rounds, peak=True),
    "library, checkpoints": lambda rounds: library(rounds, checkpoint=1),
}


def main() -> None:
    """Interleave the runners and print ratios of pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runner", choices=RUNNERS, help="run one of them alone and print its figures")
    options = parser.parse_args()
    if options.runner:
        print(json.dumps(RUNNERS[options.runner](options.rounds)))
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in RUNNERS}
    for _ in range(options.pairs):
        for name in RUNNERS:
            found[name].append(run_json(__file__, "--runner", name, "--rounds", options.rounds))
    hand, ours, saved = found["by-hand"], found["library"], found["library, checkpoints"]
    result = {
        "time_ratio": median(b["seconds"] / a["seconds"] for a, b in zip(hand, ours, strict=True)),
        "peak_models": median(one["peak_models"] for one in found["library, memory"]),
        "checkpoint_seconds": median(b["seconds"] - a["seconds"] for a, b in zip(ours, saved, strict=True)),
    }
    rows = [
        ("runner", "s/round"),
        *((name, f"{median(r['seconds'] for r in runs):.3f}") for name, runs in found.items()),
    ]
    show(f"median of {options.pairs} interleaved runs of {options.rounds} rounds", rows, result, options.json)
    if not options.json:
        print({name: round(value, 3) for name, value in result.items()})


if __name__ == "__main__":
    main()
