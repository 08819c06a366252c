"""Instructions and answers as the headers of messages. What a header says is checked before it is believed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import MetricRecord, RecordDict

from fedloom.core import Payload, PayloadError, RunError
from fedloom.core.payload import check_structure, nbytes
from fedloom.engine.flower.wire import Cut, unpack
from fedloom.engine.runtime import Answer, Done, Failed, Instruction, Measured, Probe, Work
from fedloom.engine.spool import Ref
from fedloom.evaluate.predict import Counts

WEIGHT = "/weight"  # among the metrics of a reply; a metric's name cannot begin so
WORD = re.compile(r"[0-9a-f]{8,64}")  # of a run; names a folder on every node
SAFE = re.compile(r"[^/\\\x00]{1,200}")  # what may become part of a file's name
KINDS: Mapping[str, type[Instruction]] = {"work": Work, "probe": Probe}


def tell(instruction: Instruction) -> dict[str, Any]:
    """An instruction in words of JSON."""
    kind = "work" if isinstance(instruction, Work) else "probe"
    return {"kind": kind, **instruction._asdict()}


def told(item: Mapping[str, Any]) -> Instruction:
    """The instruction of a header; `PayloadError` when it is none."""
    try:
        kind = KINDS[item["kind"]]
        found = kind(**{name: item[name] for name in kind._fields})
        given = [found.client, None if isinstance(found, Work) else found.domain]
        numbers = [found.stage, found.size, *(number for number in given if number is not None)]
        names = [found.start, found.version, found.exchange] if isinstance(found, Work) else [found.state]
    except (KeyError, TypeError) as error:
        raise PayloadError(f"the message holds no instruction that this version knows ({error})") from error
    if not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise PayloadError(f"the message's numbers must be whole and from 0 up, got {numbers}")
    if not all(name is None or (isinstance(name, str) and SAFE.fullmatch(name)) for name in names):
        raise PayloadError("the message names a state or an exchange that cannot be")
    return found


def counts_payload(counts: Counts) -> Payload:
    """Counts as a payload."""
    arrays = {name: getattr(counts, name) for name in ("total", "correct", "correct_within_task")}
    arrays["others"] = np.array([counts.unseen, counts.nan], np.int64)
    return {"counts": {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}}


def answer_of(
    item: Mapping[str, Any],
    content: RecordDict,
    todo: Instruction,
    *,
    cut: Cut | None,
    limit: int,
    classes: int,
    write: Callable[[Payload], Ref],
) -> Answer:
    """One answer of a reply; whatever is wrong with it makes it `Failed`.

    write: puts an upload where the server keeps replies. limit: bytes that an upload may have.
    """
    if "failed" in item:
        reason, trace = str(item["failed"])[:2000], str(item.get("trace", ""))[:20000]
        return Failed(todo.client, reason, trace, lost=bool(item.get("lost")))
    try:
        key = str(item["k"])
        payload = unpack(content, item["index"], cut).get(key)
        if payload is None:
            raise PayloadError("its payload did not come")
        if isinstance(todo, Probe):
            return Measured(todo.client, todo.task, _counts(payload, classes), todo.domain)
        if (size := nbytes(payload)) > limit:
            mend = "raise engine.reply_limit if the method needs it"
            raise PayloadError(f"the upload has {size} bytes, and the limit is {limit}; {mend}")
        check_structure(payload, "the upload")
        metrics, weight = _metrics(content, key)
        stored, seconds, visits = item["stored"] is not None, float(item["seconds"]), item["visits"]
        numbers = visits if isinstance(visits, list) else []
        if len(numbers) != 2 or not all(isinstance(n, int) and n >= 0 for n in numbers):
            raise PayloadError("its sample visits must be two whole numbers from 0 up")
        spoilt = str(item["spoilt"])[:200] if "spoilt" in item else None
        return Done(todo.client, write(payload), weight, metrics, stored, seconds, *visits, spoilt)
    except RunError:  # this machine's disk, say
        raise
    except Exception as error:  # a node may send anything
        return Failed(todo.client, f"its answer is damaged: {said(error)}", "", lost=True)


def said(error: Exception) -> str:
    """What is wrong with something that came, as part of a sentence."""
    return str(error) if isinstance(error, PayloadError) else f"{type(error).__name__}: {error}"


def metrics_at(key: str) -> str:
    """Name of the record that holds an answer's metrics; no field's record is called so."""
    return f"metrics/{key}"


def _metrics(content: RecordDict, key: str) -> tuple[dict[str, float], float]:
    record = content.get(metrics_at(key))
    if not isinstance(record, MetricRecord) or not isinstance(record.get(WEIGHT), int | float):
        raise PayloadError("its weight did not come")
    found = {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
    return found, found.pop(WEIGHT)


def _counts(payload: Payload, classes: int) -> Counts:
    tree = payload["counts"]
    arrays = [tree[name].numpy() for name in ("total", "correct", "correct_within_task")]
    others = [int(n) for n in tree["others"]]
    odd = any(a.shape != (classes,) or a.dtype != np.int64 or (a < 0).any() for a in arrays)
    if odd or len(others) != 2 or min(others) < 0 or any((a > arrays[0]).any() for a in arrays):
        raise PayloadError("its counts are none")
    return Counts(*(a.copy() for a in arrays), *others)
