"""Instructions and answers in the headers of messages, and what is not believed of them."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")

from flwr.app import MetricRecord, RecordDict

from fedloom.core import PayloadError, RunError
from fedloom.core.payload import digest
from fedloom.engine.flower.telling import WEIGHT, answer_of, counts_payload, metrics_at, tell, told
from fedloom.engine.flower.wire import Packer
from fedloom.engine.runtime import Done, Failed, Measured, Probe, Work
from fedloom.engine.spool import Ref
from fedloom.evaluate.predict import Counts

WORK = Work(3, 1, 4, "train", "0001.00003.train", "0001.00004.train", 17)
CENSUS = Work(0, 0, None, "census", None, "0000.00000.census", 0)
PROBE = Probe(3, 2, 1, 1000, 1250, "0002.00001.train", 250)
CONTENT, INDEX = Packer().pack({"0": {"params": {"w": torch.arange(4.0)}, "none": {}}})
COUNTS = Counts(np.array([3, 0, 2]), np.array([1, 0, 2]), np.array([2, 0, 2]), 5, 1)


def taken(item: Any, records: dict[str, Any], todo: Any = WORK, **given: Any) -> tuple[Any, list[Any]]:
    """The answer, and the uploads that were written."""
    written: list[Any] = []

    def write(payload: Any) -> Ref:
        written.append(payload)
        return Ref("spool", tuple(sorted(payload)), (), None)

    options = {"cut": None, "limit": 100, "classes": 3, "write": write, **given}
    return answer_of(item, RecordDict(records), todo, **options), written


def good(**changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """An answer that is sound; with changes to what its header says."""
    metrics = MetricRecord({"loss": 0.5, "steps": 3, WEIGHT: 2.0})
    said = {"k": 0, "index": INDEX, "stored": None, "seconds": 0.25, "visits": [34, 5], **changes}
    return said, {**CONTENT, metrics_at("0"): metrics}


@pytest.mark.parametrize("instruction", [WORK, CENSUS, PROBE, PROBE._replace(state=None), PROBE._replace(domain=1)])
def test_instructions_come_back_as_they_were(instruction: Work | Probe):
    assert told(json.loads(json.dumps(tell(instruction)))) == instruction


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "other"}, {"kind": []}, {"stage": -1}, {"stage": "1"}, {"size": None}, {"client": -1}, {"client": 1.5},
        {"version": "../up"}, {"version": ""}, {"version": "a\0b"}, {"version": "a" * 201}, {"version": 3},
        {"start": "a/b"}, {"exchange": "a\\b"},
    ],
)  # fmt: skip
def test_instructions_that_cannot_be_are_refused(change: dict[str, Any]):
    with pytest.raises(PayloadError, match="the message"):
        told({**tell(WORK), **change})


@pytest.mark.parametrize("domain", [-1, "1", 0.5, []])
def test_a_probe_of_a_domain_that_cannot_be_is_refused(domain: Any):
    with pytest.raises(PayloadError, match="the message's numbers must be whole and from 0 up"):
        told({**tell(PROBE), "domain": domain})


@pytest.mark.parametrize("whole", [WORK, PROBE])
def test_an_instruction_that_lacks_something_is_refused(whole: Work | Probe):
    for name in tell(whole):
        with pytest.raises(PayloadError, match="holds no instruction that this version knows"):
            told({key: value for key, value in tell(whole).items() if key != name})


def test_an_upload_is_taken_with_its_weight_and_metrics():
    answer, (payload,) = taken(*good())
    metrics = {"loss": 0.5, "steps": 3.0}
    assert answer == Done(3, Ref("spool", ("none", "params"), (), None), 2.0, metrics, False, 0.25, 34, 5)
    assert digest(payload) == digest({"params": {"w": torch.arange(4.0)}, "none": {}}) and "none" in payload
    assert taken(*good(stored="ab"))[0].stored


def test_counts_come_back_as_they_were():
    records, index = Packer().pack({"0": counts_payload(COUNTS)})
    answer, written = taken({"k": 0, "index": index}, records, PROBE)
    assert answer == Measured(3, 1, COUNTS) and written == []
    assert taken({"k": 0, "index": index}, records, PROBE._replace(domain=0))[0] == Measured(3, 1, COUNTS, 0)
    with pytest.raises(AssertionError):
        assert taken({"k": 0, "index": index}, records, PROBE, classes=4)[0] == answer


@pytest.mark.parametrize("name", ["total", "correct", "correct_within_task", "others"])
def test_counts_that_cannot_be_are_damage(name: str):
    whole = counts_payload(COUNTS)["counts"]
    lists = {"negative": -whole[name] - 1, "short": whole[name][:1], "floats": whole[name].double() / 2}
    wrong = {**lists, "half": whole[name].bfloat16(), "more": whole[name] + 10} if name[0] == "c" else lists
    for kind, tensor in wrong.items():
        if (name, kind) == ("others", "floats"):
            continue
        records, index = Packer().pack({"0": {"counts": {**whole, name: tensor}}})
        answer, _ = taken({"k": 0, "index": index}, records, PROBE)
        assert isinstance(answer, Failed) and answer.lost, kind
    records, index = Packer().pack({"0": {"counts": {n: t for n, t in whole.items() if n != name}}})
    assert isinstance(taken({"k": 0, "index": index}, records, PROBE)[0], Failed)


def test_a_failure_is_told_in_the_words_of_the_node():
    answer, written = taken({"k": 0, "failed": "ValueError: no", "trace": "Traceback"}, {})
    assert answer == Failed(3, "ValueError: no", "Traceback") and written == []
    assert taken({"k": 0, "failed": "gone", "lost": True}, {})[0] == Failed(3, "gone", "", lost=True)
    long, _ = taken({"k": 0, "failed": "a" * 10**6, "trace": "b" * 10**6}, {})
    assert (len(long.reason), len(long.trace)) == (2000, 20000)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"index": None}, "the index of the message is damaged"),
        ({"k": 1}, "its payload did not come"),
        ({"seconds": None}, "TypeError"),
        ({"visits": [-1, 0]}, "its sample visits must be two whole numbers from 0 up"),
        ({"visits": [1, 3.5]}, "its sample visits must be two whole numbers from 0 up"),
        ({"visits": 3}, "its sample visits must be two whole numbers from 0 up"),
        ({"index": {**INDEX, "fields": {"0": ["params", ""]}}}, "the field '' was announced and did not come"),
    ],
)
def test_a_damaged_answer_is_a_failure_that_is_no_fault_of_the_method(change: dict[str, Any], words: str):
    answer, written = taken(*good(**change))
    assert answer.lost and words in answer.reason and answer.reason.startswith("its answer is damaged: ")
    assert written == []


def test_an_answer_says_how_many_examples_were_visited():
    assert taken(*good(visits=[0, 0]))[0].visits == 0
    item, records = good()
    del item["visits"]
    answer, written = taken(item, records)
    assert answer.lost and answer.reason == "its answer is damaged: KeyError: 'visits'" and written == []


def test_uploads_are_checked_before_they_are_kept():
    answer, written = taken(*good(), limit=15)
    assert answer.reason.endswith("16 bytes, and the limit is 15; raise engine.reply_limit if the method needs it")
    assert written == [] and isinstance(taken(*good(), limit=16)[0], Done)
    item, records = good(index={**INDEX, "fields": {"0": ["none", "params", "a/b"]}})
    answer, written = taken(item, {**records, "0/a/b": records["0/params"]})
    assert "a field's name must be text without '/', got 'a/b'" in answer.reason and written == []


def test_a_tensor_that_is_named_a_thousand_times_counts_a_thousand_times():
    item, records = good(index={**INDEX, "same": {f"0/params/w{k}": "0/params/w" for k in range(1000)}})
    answer, written = taken(item, records, limit=16_000)
    assert "the upload has 16016 bytes, and the limit is 16000" in answer.reason and written == []


@pytest.mark.parametrize("weight", [[1.0], None])
def test_a_weight_must_be_a_number(weight: Any):
    item, records = good()
    records[metrics_at("0")] = MetricRecord({"loss": 1.0} if weight is None else {WEIGHT: weight})
    assert "its weight did not come" in taken(item, records)[0].reason


def test_numbers_that_are_none_are_left_to_the_loop():
    item, records = good()
    records[metrics_at("0")] = MetricRecord({WEIGHT: math.nan, "loss": math.inf, "list": [1.0]})
    answer, _ = taken(item, records)
    assert math.isnan(answer.weight) and answer.metrics == {"loss": math.inf}


def test_a_field_may_be_called_metrics():
    records, index = Packer().pack({"0": {"metrics": {"w": torch.ones(2)}}})
    answer, (payload,) = taken(good(index=index)[0], {**records, metrics_at("0"): MetricRecord({WEIGHT: 1.0})})
    assert answer.weight == 1.0 and payload["metrics"]["w"].tolist() == [1.0, 1.0]


def test_a_full_disk_is_nobodys_damage():
    def full(payload: Any) -> Ref:
        raise RunError("no space left on device")

    with pytest.raises(RunError, match="no space left"):
        taken(*good(), write=full)


JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.sampled_from(["0", "params"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["0", "w", "0/params/w"]), inner)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(["k", "index", "stored", "seconds", "failed", "trace", "lost"])
INDICES = st.dictionaries(st.sampled_from(sorted(INDEX)), JSON).map(lambda damage: {**INDEX, **damage})


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(KEYS, JSON), st.one_of(st.just(INDEX), INDICES), st.sampled_from([WORK, PROBE]))
def test_nothing_that_a_header_says_does_more_than_fail_its_client(damage: Any, index: Any, todo: Any):
    item, records = good(index=index)
    answer, written = taken({**item, **damage}, records, todo)
    assert isinstance(answer, Failed | Done) and answer.client == 3
    assert len(written) == isinstance(answer, Done)
