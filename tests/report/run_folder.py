"""A synthetic run folder with the files and rows that an engine writes."""

import json
from pathlib import Path

import numpy as np


def write_run(folder: Path, *, method="fedfmx", stages=4, rounds=3, clients=20, seed=0) -> Path:
    """Write a plausible finished run; accuracies fall as stages pass."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    metrics, matrix = [], []
    for stage in range(stages):
        metrics += [_round(rng, stage, r, clients) for r in range(rounds)]
        row = [float(np.clip(0.92 - 0.09 * (stage - j) + rng.normal(0, 0.02), 0, 1)) for j in range(stage + 1)]
        matrix.append(row + [None] * (stages - stage - 1))
        metrics.append(_stage(stage, row, clients))
    summary = _summary(method, stages, rounds, clients, seed, matrix)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text(
        f"method: {{name: {method}, experts: 4}}\ndata: {{name: sklearn/digits}}\nseed: {seed}\n"
    )
    (folder / "env.json").write_text(json.dumps({"python": "3.12.1", "torch": "2.14.1", "cpu": {"cores": 2}}))
    (folder / "partition.json").write_text(json.dumps({"kind": "dirichlet", "clients": clients}))
    header = ["stage", *(f"task_{j}" for j in range(stages)), *(f"examples_{j}" for j in range(stages))]
    lines = [[t, *("" if v is None else v for v in row), *[90] * stages] for t, row in enumerate(matrix)]
    (folder / "accuracy_matrix.csv").write_text("\n".join(",".join(map(str, line)) for line in [header, *lines]) + "\n")
    (folder / "DONE").touch()
    return folder


def _round(rng, stage, round_, clients):
    return {
        "stage": stage,
        "round": round_,
        "exchange": "train",
        "scope": "round",
        "clients": clients // 2,
        "failed": int(round_ == 1),
        "rejected": 0,
        "degraded": False,
        "bytes_up": 120_000,
        "bytes_down": 140_000,
        "sample_visits": 640,
        "seconds": 1.25,
        "train/loss": float(1.8 * np.exp(-0.6 * round_) + 0.2 + rng.uniform(0, 0.1)),
    }


def _stage(stage, row, clients):
    mean = float(np.mean(row))
    return {
        "stage": stage,
        "round": None,
        "exchange": None,
        "scope": "stage",
        "accuracy": mean,
        "accuracy/current": row[-1],
        "accuracy/within_task": min(1.0, mean + 0.08),
        "accuracy/tasks": row,
        "accuracy/client_mean": mean + 0.01,
        "accuracy/client_worst10": mean - 0.2,
        "accuracy/weighted": mean,
        "accuracy/clients": clients,
        "unseen": 0,
        "seen_classes": 2 * (stage + 1),
    }


def _summary(method, stages, rounds, clients, seed, matrix):
    many = stages > 1
    return {
        "method": method,
        "preset": "paper",
        "dataset": "sklearn/digits",
        "scenario": "class_incremental",
        "engine": "serial",
        "seed": seed,
        "clients": clients,
        "stages": stages,
        "rounds": rounds * stages,
        "final_accuracy": 0.712,
        "average_incremental_accuracy": 0.801,
        "forgetting": 0.223 if many else None,
        "backward_transfer": -0.213 if many else None,
        "accuracy_matrix": matrix,
        "per_client_accuracy_mean": 0.722,
        "per_client_accuracy_worst10": 0.512,
        "bytes_up": 120_000 * rounds * stages,
        "bytes_down": 140_000 * rounds * stages,
        "sample_visits": 640 * rounds * stages,
        "parameters": 88_418,
        "active_parameters": 51_200,
        "flops_per_example": 1_234_567,
        "wall_seconds": 34.2,
        "train_seconds": 51.9,
        "peak_rss_bytes": 512 * 2**20,
        "rejected_updates": 0,
        "failed_clients": stages,
        "params_sha256": "ab" * 32,
        "state_sha256": "cd" * 32,
    }
