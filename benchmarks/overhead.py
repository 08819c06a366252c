"""FedAvg against a bare PyTorch loop that makes the same SGD steps.

The job: 5,000 colour images of 32 x 32 in 10 classes, 100 clients, Dirichlet 0.5, 10 clients a round, batch 32, SGD
0.05, one local epoch, 20 rounds, a CNN of 545 k parameters. Pixels are random: only time is measured, and the raw loops
take the partition, the cohorts and the start weights from the library, so all make the same number of steps. Figures
per round leave out the first five rounds, in which second processes are still starting. Checkpoints, which a bare loop
has not, are off; what one a round costs is measured apart.

    python benchmarks/overhead.py [--pairs 5] [--rounds 20] [--json]
"""

from __future__ import annotations

import time

STARTED = time.perf_counter()

import argparse  # noqa: E402 - the start-up clock starts before everything else
import json  # noqa: E402
import multiprocessing  # noqa: E402
import os  # noqa: E402
from typing import Any  # noqa: E402

from measure import median, run_json, run_sampled, show, tree_cpu_seconds  # noqa: E402

WARM = 5  # rounds before the steady state
JOB = {
    "stream": {"kind": "static"},
    "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 100},
    "model": {"name": "small_cnn"},
    "training": {
        "rounds": 20, "cohort": 10, "local_epochs": 1, "batch_size": 32,
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.0},
    },
    "evaluate": {"personal": False},
}  # fmt: skip


def images() -> tuple[Any, ...]:
    """Random images and labels, the same in every process."""
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (3, 32, 32)
    train, test = rng.integers(0, 256, (5000, *shape), np.uint8), rng.integers(0, 256, (1000, *shape), np.uint8)
    return train, rng.integers(0, 10, 5000), test, rng.integers(0, 10, 1000)


def built(rounds: int, layout: str, workers: Any) -> Any:
    """The library's experiment for this job."""
    from fedloom.build import build
    from fedloom.config import resolve

    changes = {"training": {"rounds": rounds, "memory_format": layout}, "engine": {"workers": workers}}
    return build(resolve(JOB, {"method": {"name": "fedavg"}}, changes), data=images())


def library(rounds: int, layout: str, workers: Any, checkpoint: int = 0) -> dict[str, Any]:
    """Run the library and clock the end of every round."""
    job = built(rounds, layout, workers)
    ends = run_sampled(job, lambda: (time.perf_counter() - STARTED, tree_cpu_seconds()), checkpoint_every=checkpoint)
    return clocked(ends)


def clocked(ends: list[tuple[float, float]]) -> dict[str, Any]:
    """Start-up (to the end of round 1), all rounds, and wall and CPU seconds per round in the steady state."""
    count = len(ends) - WARM
    return {
        "start_up": ends[0][0],
        "whole": ends[-1][0],
        "wall": (ends[-1][0] - ends[WARM - 1][0]) / count,
        "cpu": (ends[-1][1] - ends[WARM - 1][1]) / count,
    }


class Raw:
    """The bare loop: one module, `torch.optim.SGD`, index batches, a running average."""

    def __init__(self, rounds: int):
        import torch

        job = built(rounds, "contiguous", 1)
        plan, experiment = job.experiment.plan, job.experiment
        self.module = experiment.method.module(experiment.spec)
        self.cohorts = [list(experiment.draw(0, r, "cohort")) for r in range(rounds)]
        self.indices = {c: plan.train(c, 0, 0, "train")._indices for c in {c for row in self.cohorts for c in row}}
        x, y, _, _ = images()
        self.x = (torch.from_numpy(x).float() / 255 - 0.5) / 0.25
        self.y = torch.from_numpy(y)
        self.weights = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}

    def client(self, client: int, seed: int) -> dict[str, Any]:
        """One local epoch from the global weights."""
        import torch
        import torch.nn.functional as F

        self.module.load_state_dict(self.weights)
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05)
        rows = self.indices[client]
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        for batch in order.split(32):
            optimizer.zero_grad()
            out = self.module(self.x[rows[batch]])
            F.cross_entropy(out["logits"], self.y[rows[batch]]).backward()
            optimizer.step()
        return {name: tensor.clone() for name, tensor in self.module.state_dict().items()}

    def share(self, clients: list[int], seed: int) -> tuple[dict[str, Any], int]:
        """Weighted sum of some clients' results, and their number of examples."""
        total, count = {}, 0
        for client in clients:
            n = len(self.indices[client])
            for name, tensor in self.client(client, seed).items():
                total[name] = total[name].add_(tensor, alpha=n) if name in total else tensor.mul_(n)
            count += n
        return total, count


def raw_one_process(rounds: int, threads: int) -> dict[str, Any]:
    """The bare loop in one process."""
    import torch

    torch.set_num_threads(threads)
    raw, ends = Raw(rounds), []
    for r, cohort in enumerate(raw.cohorts):
        total, count = raw.share(cohort, r)
        raw.weights = {name: tensor / count for name, tensor in total.items()}
        ends.append((time.perf_counter() - STARTED, tree_cpu_seconds()))
    return clocked(ends)


def raw_two_processes(rounds: int) -> dict[str, Any]:
    """The bare loop with a second process, forked once, that takes every other client."""
    import torch

    torch.set_num_threads(1)
    raw, ends = Raw(rounds), []
    here, there = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=serve, args=(raw, there), daemon=True)
    process.start()
    for r, cohort in enumerate(raw.cohorts):
        by_size = sorted(cohort, key=lambda client: -len(raw.indices[client]))
        here.send((by_size[1::2], r, raw.weights))
        total, count = raw.share(by_size[::2], r)
        other, more = here.recv()
        raw.weights = {name: (tensor + other[name]) / (count + more) for name, tensor in total.items()}
        ends.append((time.perf_counter() - STARTED, tree_cpu_seconds()))
    result = clocked(ends)
    process.kill()
    return result


def serve(raw: Raw, pipe: Any) -> None:
    """The second process of the bare loop."""
    while True:
        clients, seed, raw.weights = pipe.recv()
        pipe.send(raw.share(clients, seed))


RUNNERS = {
    "raw-t1": lambda rounds: raw_one_process(rounds, 1),
    "raw-t2": lambda rounds: raw_one_process(rounds, 2),
    "raw-p2": raw_two_processes,
    "ours-1": lambda rounds: library(rounds, "contiguous", 1),
    "ours-2": lambda rounds: library(rounds, "contiguous", 2),
    "ours-2-model-layout": lambda rounds: library(rounds, "model", 2),
    "ours-auto": lambda rounds: library(rounds, "model", "auto"),
    "ours-1-checkpoints": lambda rounds: library(rounds, "contiguous", 1, checkpoint=1),
}


def main() -> None:
    """Interleave the runners and print ratios of pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runner", choices=RUNNERS, help="run one of them alone and print its figures")
    options = parser.parse_args()
    if options.runner:
        print(json.dumps(RUNNERS[options.runner](options.rounds)))
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in RUNNERS}
    for _ in range(options.pairs):
        for name in RUNNERS:
            env = {"OMP_NUM_THREADS": "2" if name == "raw-t2" else "1"}
            found[name].append(run_json(__file__, "--runner", name, "--rounds", options.rounds, env=env))

    def ratio(ours: str, raw: list[str], key: str) -> float:
        pairs = range(options.pairs)
        return median(found[ours][k][key] / min(found[name][k][key] for name in raw) for k in pairs)

    result = {
        "cpu_ratio_same_layout": ratio("ours-1", ["raw-t1"], "cpu"),
        "wall_ratio_all_cores": ratio("ours-2", ["raw-t2", "raw-p2"], "wall"),
        "wall_ratio_model_layout": ratio("ours-2-model-layout", ["raw-t2"], "wall"),
        "start_up_seconds": median(one["start_up"] for one in found["ours-auto"]),
        "whole_run_ratio_model_layout": ratio("ours-2-model-layout", ["raw-t2"], "whole"),
        "checkpoint_cpu_seconds": median(
            b["cpu"] - a["cpu"] for a, b in zip(found["ours-1"], found["ours-1-checkpoints"], strict=True)
        ),
        "cores": len(os.sched_getaffinity(0)),
    }
    rows = [("runner", "wall s/round", "CPU s/round", "start-up s", "whole run s")]
    for name, runs in found.items():
        rows.append(
            (name, *(f"{median(one[key] for one in runs):.3f}" for key in ("wall", "cpu", "start_up", "whole")))
        )
    show(f"median of {options.pairs} interleaved runs of {options.rounds} rounds", rows, result, options.json)
    if not options.json:
        print({name: round(value, 3) for name, value in result.items()})


if __name__ == "__main__":
    main()
