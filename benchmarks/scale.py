"""Do time and memory depend on how many clients are registered, or on how many rounds have passed?

Linear model, clients that read 50 examples each by index, 10 sampled a round, 30 rounds; each size runs in a process of
its own, sizes interleaved. Peak memory is the resident peak of that process; growth is resident memory at the end
less that after round 5.

    python benchmarks/scale.py [--pairs 5] [--rounds 30] [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import time

from measure import median, memory_mb, run_json, run_sampled, show

SIZES = (100, 10_000, 100_000)


def one(clients: int, rounds: int) -> dict[str, float]:
    """Seconds per round after the first five, peak memory and growth with this many registered clients."""
    import numpy as np

    from fedloom.build import build
    from fedloom.config import resolve

    rng = np.random.default_rng(0)
    data = rng.normal(size=(5000, 64)).astype("float32"), rng.integers(0, 10, 5000)
    tree = {
        "method": {"name": "fedavg"},
        "stream": {"kind": "static"},
        "partition": {"kind": "shared", "clients": clients, "per_client": 50},
        "model": {"name": "linear"},
        "training": {"rounds": rounds, "cohort": 10},
        "engine": {"workers": 1},
    }

    began = time.perf_counter()
    ends = run_sampled(build(resolve(tree), data=data), lambda: (time.perf_counter(), memory_mb()))
    return {
        "seconds": (ends[-1][0] - ends[4][0]) / (len(ends) - 5),
        "start_up": ends[0][0] - began,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "growth": ends[-1][1] - ends[4][1],
    }


def main() -> None:
    """Interleave the sizes and print ratios between the ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--clients", type=int, help="run one size alone and print its figures")
    options = parser.parse_args()
    if options.clients:
        print(json.dumps(one(options.clients, options.rounds)))
        return
    found: dict[int, list[dict[str, float]]] = {size: [] for size in SIZES}
    for _ in range(options.pairs):
        for size in SIZES:
            found[size].append(run_json(__file__, "--clients", size, "--rounds", options.rounds))

    def ratio(key: str) -> float:
        return median(large[key] / small[key] for small, large in zip(found[SIZES[0]], found[SIZES[-1]], strict=True))

    result = {
        "time_ratio": ratio("seconds"),
        "memory_ratio": ratio("peak"),
        "growth_mb": max(median(one["growth"] for one in runs) for runs in found.values()),
    }
    rows = [("registered clients", "s/round", "start-up s", "peak MB", "growth MB")]
    for size, runs in found.items():
        columns = [(key, digits) for key, digits in (("seconds", 4), ("start_up", 2), ("peak", 0), ("growth", 2))]
        rows.append((f"{size:,}", *(f"{median(one[key] for one in runs):.{digits}f}" for key, digits in columns)))
    show(f"median of {options.pairs} interleaved runs of {options.rounds} rounds", rows, result, options.json)
    if not options.json:
        print({name: round(value, 3) for name, value in result.items()})


if __name__ == "__main__":
    main()
