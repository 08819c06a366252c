"""What a finished run leaves: the global model, the accuracy matrix, and the measured part of the summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedloom.core import Batches, Context, Payload, Stage
from fedloom.core.batches import Inputs
from fedloom.core.payload import digest
from fedloom.core.seeds import seeded
from fedloom.engine.checkpoint import Progress
from fedloom.engine.experiment import Experiment
from fedloom.engine.facts import save_facts
from fedloom.engine.files import save_payload, write_bytes
from fedloom.engine.folder import RunFolder
from fedloom.engine.runtime import Runtime, deployed
from fedloom.evaluate.cost import active_parameters, flops_per_example, parameters
from fedloom.evaluate.domain import domain_summary
from fedloom.evaluate.matrix import AccuracyMatrix


def conclude(
    experiment: Experiment, runtime: Runtime, folder: RunFolder, server: Payload, progress: Progress
) -> dict[str, Any]:
    """Write model/, accuracy_matrix.csv and facts.json and return the summary's measured fields."""
    last = experiment.plan.num_stages - 1
    ctx = runtime.context(last, exchange="evaluate")
    view = experiment.method.send(server, None, ctx)
    _save_model(folder, view)
    save_facts(experiment, runtime.store, folder, server, progress, ctx)
    matrix = AccuracyMatrix.from_lists(progress.matrix, progress.test_counts)
    write_bytes(folder.path / "accuracy_matrix.csv", matrix.to_csv().encode())
    row = progress.last_stage_row
    return {
        "clients": experiment.plan.num_clients,
        "stages": experiment.plan.num_stages,
        "rounds": progress.rounds,
        "final_accuracy": matrix.final_accuracy,
        "average_incremental_accuracy": matrix.average_incremental_accuracy,
        "forgetting": matrix.forgetting,
        "backward_transfer": matrix.backward_transfer,
        "accuracy_matrix": progress.matrix,
        "per_client_accuracy_mean": row.get("accuracy/client_mean"),
        "per_client_accuracy_worst10": row.get("accuracy/client_worst10"),
        **_domains(row),
        "measures": row.get("measures"),
        "bytes_up": progress.bytes_up,
        "bytes_down": progress.bytes_down,
        "sample_visits": progress.sample_visits,
        "pass_visits": progress.pass_visits,
        "wall_seconds": progress.wall_seconds,
        "train_seconds": progress.train_seconds,
        "rejected_updates": progress.rejected_updates,
        "failed_clients": progress.failed_clients,
        "degraded_rounds": progress.degraded_rounds,
        "accuracy_within_task": row.get("accuracy/within_task"),
        "unseen_examples": row.get("unseen"),
        "data_view": experiment.method.data_view,
        "params_sha256": digest(global_model(view)),
        "state_sha256": digest(server),
        **_costs(experiment, runtime, view, ctx),
    }


def global_model(view: Payload) -> Payload:
    """Parameters and buffers of the global view; the whole view for methods that name theirs otherwise."""
    found = {field: view[field] for field in ("params", "buffers") if field in view}
    return found or view


def arrived(stage: Stage) -> dict[str, list[int]]:
    """The ids of the classes and domains of a stage, as the record of a model holds them."""
    classes = {"seen": stage.seen, "old": stage.old, "current": stage.classes}
    domains = {"seen": stage.seen_domains, "old": stage.old_domains, "current": stage.domains}
    return {
        **{key: list(ids) for key, ids in classes.items()},
        **{f"{key}_domains": list(ids) for key, ids in domains.items()},
    }


def _save_model(folder: RunFolder, view: Payload) -> None:
    save_payload(folder.path / "model" / "model.safetensors", view, {"format": "fedloom"})


def _domains(row: Mapping[str, Any]) -> dict[str, Any]:
    """Accuracy per domain and its summary, of the global view and of the clients' own; None without domains."""
    found: dict[str, Any] = {}
    for prefix, key in (("", "accuracy/domains"), ("personal_", "accuracy/domains_personal")):
        accuracy = row.get(key)
        summary = {"domain_accuracy": accuracy, **domain_summary(accuracy or {})}
        found |= {f"{prefix}{name}": value for name, value in summary.items()}
    return found


def _costs(experiment: Experiment, runtime: Runtime, view: Payload, ctx: Context) -> dict[str, Any]:
    method, sample = experiment.method, _one_example(experiment)
    with seeded(experiment.seed, "flops"):
        state = method.init_client(ctx)
        served = deployed(method, view, state, ctx) or ctx
        return {
            "parameters": parameters(runtime.net.module),
            "active_parameters": active_parameters(served.net.module),
            "flops_per_example": None
            if sample is None
            else flops_per_example(lambda: method.predict(view, state, sample, ctx)),
        }


def _one_example(experiment: Experiment) -> Inputs | None:
    for task in range(len(experiment.plan.tasks)):
        data: Batches = experiment.plan.test(task)
        for batch in data.part(0, 1).epoch(batch_size=1, shuffle=False):
            return batch.x
    return None
