"""Instructions and answers as the headers of messages. What a header says is checked before it is believed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import MetricRecord, RecordDict

from fedloom.core import Payload, PayloadError
from fedloom.core.payload import nbytes
from fedloom.engine.flower.wire import Cut, unpack
from fedloom.engine.runtime import Answer, Done, Failed, Instruction, Measured, Probe, Work
from fedloom.engine.spool import Ref
from fedloom.evaluate.predict import Counts

WEIGHT = "/weight"  # among the metrics of a reply; a metric's name cannot begin so
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
        numbers = [found.stage, found.size, *([] if found.client is None else [found.client])]
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
    try:
        if "failed" in item:
            return Failed(todo.client, str(item["failed"])[:2000], str(item.get("trace", ""))[:20000])
        key = str(item["k"])
        payload = unpack(content, item["index"], cut).get(key)
        if payload is None:
            raise PayloadError("the answer's payload did not come")
        if isinstance(todo, Probe):
            return Measured(todo.client, todo.task, _counts(payload, classes))
        if (size := nbytes(payload)) > limit:
            mend = "raise engine.reply_limit if the method needs it"
            raise PayloadError(f"the upload has {size} bytes, and the limit is {limit}; {mend}")
        metrics, weight = _metrics(content, key)
        return Done(todo.client, write(payload), weight, metrics, item["stored"] is not None, float(item["seconds"]))
    except (PayloadError, KeyError, TypeError, ValueError, AttributeError) as error:
        text = str(error) if isinstance(error, PayloadError) else f"{type(error).__name__}: {error}"
        return Failed(todo.client, f"its answer is damaged: {text}", "")


def _metrics(content: RecordDict, key: str) -> tuple[dict[str, float], float]:
    record = content.get(f"{key}/metrics")
    if not isinstance(record, MetricRecord) or not isinstance(record.get(WEIGHT), int | float):
        raise PayloadError("the answer's weight did not come")
    found = {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
    return found, found.pop(WEIGHT)


def _counts(payload: Payload, classes: int) -> Counts:
    tree = payload["counts"]
    arrays = [tree[name].numpy() for name in ("total", "correct", "correct_within_task")]
    others = [int(n) for n in tree["others"]]
    if any(a.shape != (classes,) or a.dtype != np.int64 or (a < 0).any() for a in arrays) or len(others) != 2:
        raise PayloadError("the answer's counts are none")
    return Counts(*(a.copy() for a in arrays), *others)
