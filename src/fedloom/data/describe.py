"""A data plan as plain values, for `partition.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.data.plan import Plan
    from fedloom.data.text import Text

LISTED = 1000  # clients written out; beyond, a sample stands for them
SAMPLE = 100


def spread(count: int, most: int) -> Sequence[int]:
    """All of 0 .. count-1, or `most` of them at even distances."""
    return range(count) if count <= most else tuple(i * count // most for i in range(most))


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Rule, tasks and, per stage and client, the task, the size and the examples per class id and per domain id.

    Domains are told of where the data have any, and what the texts are where they are texts. With more than 1,000
    clients only the rule and 100 clients at even distances are written; `complete` says so.
    """
    complete = plan.num_clients <= LISTED
    clients = range(plan.num_clients) if complete else spread(plan.num_clients, SAMPLE)
    return {
        "data": plan.source.name,
        "data_sha256": plan.source.fingerprint,
        "fingerprint": plan.fingerprint(),
        "rule": _plain(plan.rule),
        "class_names": list(plan.source.class_names),
        **({"domain_names": list(plan.domains)} if plan.domains else {}),
        **({"text": _text(plan.source.text)} if plan.source.text else {}),
        "tasks": [list(task) for task in plan.tasks],
        **({"task_domains": [list(domains) for domains in plan.task_domains]} if plan.domains else {}),
        "clients": plan.num_clients,
        "complete": complete,
        "clients_listed": list(clients),
        "train_examples": len(plan.source.y_train),
        "test_examples_per_task": [len(plan.test(t)) for t in range(len(plan.tasks))],
        **({"test_examples_per_task_and_domain": _test_examples(plan)} if plan.domains else {}),
        "stages": [_stage(plan, s, clients) for s in range(plan.num_stages)],
        "notes": list(plan.notes),
    }


def _text(text: Text) -> dict[str, Any]:
    """What the texts are, without the tokeniser."""
    return {key: value for key, value in text.as_dict().items() if key != "tokenizer"}


def _test_examples(plan: Plan) -> list[dict[str, int]]:
    """Per task, the test examples of each of its domains by id."""
    return [{str(d): len(plan.test(task, d)) for d in own} for task, own in enumerate(plan.task_domains)]


def _stage(plan: Plan, index: int, clients: Sequence[int]) -> dict[str, Any]:
    stage = plan.stage(index)
    return {
        "stage": index,
        "classes": list(stage.classes),
        "seen": list(stage.seen),
        **({"domains": list(stage.domains), "seen_domains": list(stage.seen_domains)} if plan.domains else {}),
        "participants": len(plan.participants(index)),
        "clients": {str(c): _client(plan, c, index) for c in clients},
    }


def _client(plan: Plan, client: int, stage: int) -> dict[str, Any]:
    counts = plan.stage_counts(client, stage)
    found = {
        "task": plan.task_of(client, stage),
        "examples": plan.size(client, stage),
        "classes": _by_id(counts.sum(0)),
    }
    return {**found, "domains": _by_id(counts.sum(1))} if plan.domains else found


def _by_id(counts: Tensor) -> dict[str, int]:
    return {str(k): int(counts[k]) for k in counts.nonzero().flatten().tolist()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, int | float | str | bool | None) else repr(value)
