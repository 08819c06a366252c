"""One recipe on every engine: start-up, seconds per round, and bytes on the wire against those of summary.json.

Small: the quickstart with fewer rounds, in serial, over the in-process grid, in Flower's Ray simulation (where Ray is
installed) and on a loopback federation with TLS and two SuperNodes (`--loopback`). Large: 11 M parameters, 10 clients,
one local step each, serial against the in-process grid in interleaved pairs.

Framing is what a message holds beside its tensors: its header, and 128 bytes and a name per tensor.

    python benchmarks/engines.py [--pairs 5] [--rounds 6] [--loopback] [--json]
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import median, run_json, show
from payload import CLIENTS, network

SMALL = {"stream": {"kind": "static"}, "evaluate": {"personal": False}}
ENGINES = {
    "serial": {"name": "serial", "workers": 1},
    "grid": {"name": "flower", "runtime": "grid"},
    "simulation": {"name": "flower", "runtime": "simulation", "workers": 2},
}


def clock() -> Any:
    """An observer that keeps when rounds ended."""
    from fedloom.engine.experiment import Observer

    class Clock(Observer):
        ends: list[float] = []  # one clock per process

        def round_done(self, row: Any) -> None:
            self.ends.append(time.perf_counter())

    return Clock()


def gaps(ends: list[float]) -> float:
    """Median seconds between the ends of rounds."""
    return median(after - before for before, after in itertools.pairwise(ends))


def wire(folder: Path, summary: Any) -> dict[str, float]:
    """Bytes of training messages against those of the summary; framing in KiB per message.

    Down, clients of one node share what they are sent, and the summary counts each of them.
    """
    file = folder / "traffic.json"
    if not file.exists():
        return {}
    found = json.loads(file.read_text())["train"]
    return {
        "up": found["tensor_bytes_received"] / summary["bytes_up"],
        "down": found["tensor_bytes_sent"] / summary["bytes_down"],
        "framing": (found["framing_bytes_sent"] + found["framing_bytes_received"]) / 2048 / found["messages_sent"],
    }


def small(engine: str, rounds: int) -> dict[str, float]:
    """The quickstart's clients and network for some rounds, here or on a loopback federation."""
    import fedloom

    began, watch = time.perf_counter(), clock()
    tree = {**SMALL, "training.rounds": rounds}
    with tempfile.TemporaryDirectory() as place:
        if engine == "loopback":
            from fedloom.deploy.demo import run_demo

            run = fedloom.load_run(run_demo("quickstart", tree, out=f"{place}/run", observers=[watch]))
        else:
            run = fedloom.run(
                "quickstart", engine=ENGINES[engine], out=f"{place}/run", observers=[watch], verbose=False, **tree
            )
        rest = wire(run.folder, run.summary)
        return {"startup": watch.ends[0] - began, "seconds": gaps(watch.ends), **rest}


def large(engine: str, rounds: int) -> dict[str, float]:
    """A dense network of 11 M parameters; every client makes one step on one batch."""
    import numpy as np

    from fedloom.build import build
    from fedloom.config import resolve
    from fedloom.engine.folder import RunFolder
    from fedloom.engine.start import carry_out

    rng = np.random.default_rng(0)
    data = rng.normal(size=(32 * CLIENTS * 5 // 4, 64)).astype("float32"), rng.integers(0, 10, 32 * CLIENTS * 5 // 4)
    tree = {
        "method": {"name": "fedavg"},
        "stream": {"kind": "static"},
        "partition": {"kind": "iid", "clients": CLIENTS},
        "training": {"rounds": rounds, "batch_size": 32},
        "engine": ENGINES[engine],
        "evaluate": {"personal": False},
    }
    began, watch = time.perf_counter(), clock()
    job = build(resolve(tree), data=data, model=network)
    with (
        tempfile.TemporaryDirectory() as place,
        RunFolder.create(Path(place) / "run", job.config.as_dict(), {}) as folder,
    ):
        options = replace(job.options, checkpoint_every=0)
        carry_out(job.experiment, options, folder, [watch], {"config": {}, "model": {}})
        return {"startup": watch.ends[0] - began, "seconds": gaps(watch.ends)}


def main() -> None:
    """Run every engine in a process of its own and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--loopback", action="store_true", help="also start a federation on this machine")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runner", help="run one of them alone and print its figures, such as small:grid")
    options = parser.parse_args()
    if options.runner:
        size, _, engine = options.runner.partition(":")
        print(json.dumps({"small": small, "large": large}[size](engine, options.rounds)))
        return
    engines = [name for name in ENGINES if name != "simulation" or importlib.util.find_spec("ray")]
    engines += ["loopback"] if options.loopback else []
    found = {name: run_json(__file__, "--runner", f"small:{name}", "--rounds", options.rounds) for name in engines}
    pairs = []
    for _ in range(options.pairs):
        both = [run_json(__file__, "--runner", f"large:{name}", "--rounds", 6) for name in ("serial", "grid")]
        pairs.append((both[0]["seconds"], both[1]["seconds"]))
    result = {
        "small": found,
        "large_serial_seconds": median(a for a, _ in pairs),
        "large_grid_seconds": median(b for _, b in pairs),
        "large_ratio": median(b / a for a, b in pairs),
    }
    rows = [("engine", "first round after", "s/round", "up/counted", "down/counted", "framing per message")]
    for name, one in found.items():
        cells = [f"{one['up']:.4f}", f"{one['down']:.4f}", f"{one['framing']:.1f} KiB"] if "up" in one else ["-"] * 3
        rows.append((name, f"{one['startup']:.1f} s", f"{one['seconds']:.3f}", *cells))
    show(f"the quickstart's clients, static, {options.rounds} rounds", rows, result, False)
    big = [(name, f"{result[f'large_{name}_seconds']:.3f}") for name in ("serial", "grid")]
    title = f"11 M parameters, 10 clients, median of {options.pairs} interleaved pairs"
    show(title, [("engine", "s/round"), *big, ("ratio", f"{result['large_ratio']:.2f}")], result, options.json)


if __name__ == "__main__":
    main()
