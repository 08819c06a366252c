"""What a run does with clients that fail, updates that cannot be used and servers that break."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.core import PayloadError, RunError
from fedloom.engine.files import load_payload
from toys import faults
from toys.faults import Fault
from toys.federation import experiment
from toys.running import Notes, resume, rows, start

FAULTY, CONSTANTS, DRIFTING = "toys.faults:faulty", "toys.scripted:constants", "toys.scripted:drifting"
NAN = float("nan")
LINE = 1 + next(
    k for k, text in enumerate(Path(faults.__file__).read_text().splitlines()) if "broken on purpose" in text
)


def faulty(*faults: Fault, **plan: Any):
    return experiment(FAULTY, options={"faults": faults}, cohort=1.0, **plan)


def constants(values, weights=None, start_value=0.0, **plan: Any):
    options = {"values": tuple(values), "weights": weights, "start": start_value}
    small = {"num_clients": len(values), "num_stages": 1, "rounds": 1, "cohort": 1.0, **plan}
    return experiment(CONSTANTS, options=options, **small)


def merged(path: Path) -> list[float]:
    return load_payload(path / "model" / "model.safetensors")["params"]["w"].tolist()


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_one_nan_update_is_rejected_and_counted(bad: float, tmp_path: Path):
    notes = Notes()
    summary = start(tmp_path / "run", constants([1.0, 3.0, bad]), [notes])
    assert merged(tmp_path / "run") == [2.0]
    assert summary["rejected_updates"] == 1 and summary["degraded_rounds"] == 0
    told = "client 2 (stage 0, round 0, exchange 'train'): update rejected: 'params/w' holds NaN or infinite values"
    assert told in notes.notes


def test_nothing_but_nan_keeps_the_old_model_and_marks_the_round(tmp_path: Path):
    notes = Notes()
    summary = start(tmp_path / "run", constants([NAN, NAN], start_value=7.0), [notes])
    assert notes.notes[-1].startswith("no round has changed the model, because every update was rejected; lower")
    assert merged(tmp_path / "run") == [7.0]
    assert summary["rejected_updates"] == 2 and summary["degraded_rounds"] == 1
    assert rows(tmp_path / "run")[0]["degraded"] is True


@pytest.mark.parametrize(
    ("values", "weights", "end", "rejected", "degraded"),
    [
        ([1.0, 3.0], (0.0, 0.0), 7.0, 0, 1),
        ([1.0, 3.0], (0.0, 5.0), 3.0, 0, 0),
        ([1.0, 3.0], (-1.0, 5.0), 3.0, 1, 0),
        ([1.0, 3.0], (NAN, math.inf), 7.0, 2, 1),
        ([1.0, 5.0], (1.0, 3.0), 4.0, 0, 0),
    ],
)
def test_weights_by_hand(values, weights, end, rejected, degraded, tmp_path: Path):
    summary = start(tmp_path / "run", constants(values, weights, 7.0))
    assert merged(tmp_path / "run") == [end]
    assert (summary["rejected_updates"], summary["degraded_rounds"]) == (rejected, degraded)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nan", "'params/head.bias' holds NaN or infinite values"),
        ("inf", "'params/head.bias' holds NaN or infinite values"),
        ("nan_state", "'memory/body.layers.0.bias' of the client's state holds NaN or infinite values"),
        ("shape", "'params/head.bias' has shape (1,), expected (6,)"),
        ("dtype", "'params/head.bias' has dtype torch.float64, expected torch.float32"),
        ("extra", "'params/surprise' is not a tensor that the server holds"),
        ("negative", "the weight must be a finite number of at least 0, got -1.0"),
        ("nan_weight", "the weight must be a finite number of at least 0, got nan"),
    ],
)
def test_a_bad_update_is_rejected_by_name_and_changes_nothing_else(kind: str, words: str, tmp_path: Path):
    """The run equals one in which that client's update had weight zero, also in what the client remembers after."""
    notes = Notes()
    got = start(tmp_path / "bad", faulty(Fault(kind, 1, 1, 1), num_stages=3), [notes])
    assert got["rejected_updates"] == 1 and got["failed_clients"] == 0
    assert f"client 1 (stage 1, round 1, exchange 'train'): update rejected: {words}" in notes.notes
    raised = start(tmp_path / "raised", faulty(Fault("raise", 1, 1, 1), num_stages=3))
    assert got["state_sha256"] == raised["state_sha256"]
    bad = [row for row in rows(tmp_path / "bad") if row["stage"] == 1 and row["round"] == 1]
    assert [row["rejected"] for row in bad] == [1]
    with pytest.raises(RunError, match=r"client 1 .*update rejected.*on_client_failure is 'fail'"):
        start(tmp_path / "fail", faulty(Fault(kind, 1, 1, 1)), on_client_failure="fail")


@pytest.mark.parametrize("kind", ["nan", "nan_state", "shape", "negative"])
def test_a_client_whose_every_update_is_rejected(kind: str, tmp_path: Path):
    """The run goes on as if that client had failed each time, and still evaluates it with the state it began with."""
    got = start(tmp_path / "bad", faulty(Fault(kind, 1)))
    failing = start(tmp_path / "raise", faulty(Fault("raise", 1)))
    assert got["rejected_updates"] == 6 == failing["failed_clients"] and got["degraded_rounds"] == 0
    assert got["state_sha256"] == failing["state_sha256"]
    last = sorted((tmp_path / "bad" / "checkpoints").iterdir())[-1]
    named = json.loads((last / "meta.json").read_text())["progress"]["versions"]
    assert set(named) == {"0", "2", "3"}, "a rejected update leaves no client state"


def test_a_failure_that_comes_again_is_told_once_and_logged_each_time(tmp_path: Path):
    notes = Notes()
    start(tmp_path / "run", faulty(Fault("raise", 1)), [notes])
    assert [note for note in notes.notes if "client 1" in note] == [
        "client 1 (stage 0, round 0, exchange 'train') failed: ValueError: broken on purpose "
        f"(faults.py:{LINE}; traceback in {tmp_path / 'run' / 'log.txt'})"
    ]
    assert (tmp_path / "run" / "log.txt").read_text().count("failed: ValueError: broken on purpose") == 6


def test_batch_normalisation_on_a_single_example_is_told_with_its_mend(tmp_path: Path):
    notes = Notes()
    batches_of_one = {"training": {"batch_size": 1}}
    with pytest.raises(RunError, match="0 of 4 clients replied"):
        start(tmp_path / "run", experiment("toys.tally:tally", options=batches_of_one, cohort=1.0), [notes])
    words = "batch normalisation cannot train on a batch of one example; set partition.min_size and"
    assert [words in note for note in notes.notes] == [True] * 4


def test_an_upload_that_is_no_payload_fails_the_client(tmp_path: Path):
    notes = Notes()
    summary = start(tmp_path / "run", faulty(Fault("not_tensor", 1, 0, 0)), [notes])
    assert summary["failed_clients"] == 1
    assert any("the upload['params']['head.bias'] must be a tensor, got list" in note for note in notes.notes)


@pytest.mark.parametrize("workers", [1, 2])
def test_skip_goes_on_without_the_client(workers: int, tmp_path: Path):
    notes = Notes()
    summary = start(tmp_path / "run", faulty(Fault("raise", 1, None, 1)), [notes], workers=workers)
    assert summary["failed_clients"] == 3
    assert [row["failed"] for row in rows(tmp_path / "run") if row["round"] == 1] == [1, 1, 1]
    assert [row["failed"] for row in rows(tmp_path / "run") if row["round"] == 0] == [0, 0, 0]
    told = "client 1 (stage 0, round 1, exchange 'train') failed: ValueError: broken on purpose "
    assert f"{told}(faults.py:{LINE}; traceback in {tmp_path / 'run' / 'log.txt'})" in notes.notes
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "Traceback" in log and "faults.py" in log


def test_fail_ends_the_run_with_the_name_of_the_client(tmp_path: Path):
    with pytest.raises(RunError, match=r"client 1 \(stage 0, round 1, exchange 'train'\) failed: ValueError") as info:
        start(tmp_path / "run", faulty(Fault("raise", 1, 0, 1)), on_client_failure="fail")
    assert info.value.exit_code == 1
    assert rows(tmp_path / "run")[-1]["round"] == 0, "what was computed stays"


def test_retry_gives_the_result_of_a_run_without_the_fault(tmp_path: Path):
    whole = start(tmp_path / "whole", faulty())
    once = Fault("raise", 1, 1, 0, once=str(tmp_path / "happened"))
    again = start(tmp_path / "retry", faulty(once), on_client_failure="retry", retries=2)
    assert (tmp_path / "happened").exists()
    assert again["state_sha256"] == whole["state_sha256"] and again["failed_clients"] == 0
    assert rows(tmp_path / "retry") == rows(tmp_path / "whole")
    stubborn = start(tmp_path / "stubborn", faulty(Fault("raise", 1, 1, 0)), on_client_failure="retry", retries=2)
    assert stubborn["failed_clients"] == 1


@pytest.mark.parametrize("policy", ["skip", "retry", "fail"])
def test_a_run_whose_clients_all_fail_ends(policy: str, tmp_path: Path):
    with pytest.raises(RunError, match="broken on purpose") as info:
        start(tmp_path / "run", faulty(Fault("raise")), on_client_failure=policy, retries=1)
    assert info.value.exit_code == 1
    if policy != "fail":
        assert "0 of 4 clients replied, engine.min_replies is 1" in str(info.value)


def test_too_few_replies_end_the_run_and_what_was_done_is_checkpointed(tmp_path: Path):
    """Also when checkpoints are rare: the last committed round is saved before the run ends."""
    fault = Fault("raise", 2, 1, 1, once=str(tmp_path / "happened"))
    with pytest.raises(RunError, match=r"3 of 4 clients replied, engine.min_replies is 4"):
        start(tmp_path / "run", faulty(fault), min_replies=4, checkpoint_every=100)
    notes = Notes()
    end = resume(tmp_path / "run", faulty(fault), [notes], min_replies=4, checkpoint_every=100)
    assert notes.info["resumed_from"] == "stage 1, round 1"
    assert end["state_sha256"] == start(tmp_path / "whole", faulty())["state_sha256"]


def test_a_deadline_fails_those_that_have_not_begun(tmp_path: Path):
    summary = start(tmp_path / "run", faulty(Fault("sleep", stage=0, round=0), rounds=1), deadline=0.2)
    first = next(row for row in rows(tmp_path / "run") if row["round"] == 0)
    assert first["failed"] == 3 and summary["failed_clients"] == 3
    assert "the deadline passed before its turn" in (tmp_path / "run" / "log.txt").read_text()


def test_stages_without_participants_and_clients_without_data(tmp_path: Path):
    notes = Notes()
    summary = start(tmp_path / "idle", faulty(idle=(1,)), [notes])
    assert summary["degraded_rounds"] == 3 and summary["rounds"] == 6
    assert "stage 1, round 0, exchange 'train': no update to merge, state kept" in notes.notes
    never = start(tmp_path / "never", faulty(idle=(0, 1, 2)))
    assert never["degraded_rounds"] == never["rounds"] + 3 and never["bytes_up"] == 0, "nobody ever takes part"
    empty = start(tmp_path / "empty", faulty(empty=(1, 3)))
    hollow = start(tmp_path / "hollow", faulty(hollow=(1, 3)))
    assert {row["clients"] for row in rows(tmp_path / "empty")} == {2}
    assert {row["clients"] for row in rows(tmp_path / "hollow")} == {4}
    assert empty["params_sha256"] == hollow["params_sha256"], "a client without examples has no weight"
    assert all(math.isfinite(v) for row in rows(tmp_path / "hollow") for v in row.values() if isinstance(v, float))


def drifting(broken: str | None, **plan: Any):
    return experiment(DRIFTING, options={"values": (1.0,) * 4, "broken": broken}, **plan)


def test_a_server_that_breaks_is_named_with_its_place(tmp_path: Path):
    words = r"stage 0, round 0, exchange 'train': the server's update failed: KeyError: 'no such thing'"
    with pytest.raises(RunError, match=words):
        start(tmp_path / "server", drifting("server_update"))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_prediction_that_breaks_is_named_with_its_place(workers: int, tmp_path: Path):
    with pytest.raises(
        RunError, match="evaluation of the global view at stage 0 failed: IndexError: out of range"
    ) as e:
        start(tmp_path / "predict", drifting("predict"), workers=workers)
    assert "scripted.py" in e.value.__notes__[0]


def test_a_merge_that_is_not_finite_keeps_the_state(tmp_path: Path):
    notes = Notes()
    summary = start(tmp_path / "run", drifting("nan"), [notes])
    assert merged(tmp_path / "run") == [0.0] and summary["degraded_rounds"] == 6
    assert any("the merged state is unusable, state kept" in note for note in notes.notes)


def test_merge_errors_keep_their_own_words(tmp_path: Path):
    """A reply that breaks the rules only inside the merge: the message names client and tensor."""
    whole = drifting(None)

    def absorb(server, replies, ctx):
        raise PayloadError("client 3: 'w' is odd")

    object.__setattr__(whole.method, "server_update", absorb)
    with pytest.raises(PayloadError, match="client 3: 'w' is odd"):
        start(tmp_path / "run", whole)


def test_means_of_client_metrics_are_weighted_and_skip_nan(tmp_path: Path):
    from fedloom.engine.replies import means
    from fedloom.engine.runtime import Done

    def done(client, weight, **metrics):
        return Done(client, None, weight, metrics, False, 0.0)

    answers = [done(0, 1.0, loss=1.0, odd=NAN), done(1, 99.0, loss=0.0, own=5.0)]
    assert means(answers) == {"train/loss": 0.01, "train/own": 5.0}
    assert means([done(0, 0.0, loss=1.0)]) == {}


def test_the_visits_of_a_client_are_kept_between_rounds(tmp_path: Path):
    start(tmp_path / "run", faulty(num_stages=1, rounds=3))
    assert [row["train/visits"] for row in rows(tmp_path / "run") if row["round"] is not None] == [1.0, 2.0, 3.0]
    state = load_payload(next((tmp_path / "run" / "clients" / "2").glob("*.00003.*")))
    assert torch.equal(state["visits"]["count"], torch.tensor(3))


def test_a_client_may_clear_its_state(tmp_path: Path):
    plan = {"num_stages": 1, "rounds": 5, "cohort": 1.0}
    start(tmp_path / "run", experiment("toys.scripted:forgetful", options={"values": (1.0,) * 4}, **plan))
    assert [row["train/visits"] for row in rows(tmp_path / "run")] == [0.0, 1.0, 2.0, 0.0, 1.0]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_that_keeps_a_view_of_a_reply_is_not_overwritten_by_the_next_round(workers: int, tmp_path: Path):
    plan = {"num_stages": 2, "rounds": 5, "cohort": 1.0}
    start(tmp_path / "run", drifting("alias", **plan), workers=workers)
    assert merged(tmp_path / "run") == [10.0]
