"""One process or several: who does what, what happens to those that die, and what is left afterwards."""

from __future__ import annotations

import ast
import dataclasses
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom.engine
from fedloom.core import ConfigError, RunError
from fedloom.engine import serial
from toys.faults import Fault
from toys.federation import experiment
from toys.running import Notes, Patient, rows, start

FAULTY = "toys.faults:faulty"
TESTS = Path(__file__).resolve().parents[1]


def refuse_to_build() -> Any:
    raise RuntimeError("no such data here")


def end_at_once() -> Any:
    os._exit(7)


def whole(*faults: Fault, **plan: Any):
    return experiment(FAULTY, options={"faults": faults}, cohort=1.0, **plan)


def test_the_work_of_a_process_that_dies_is_repeated(tmp_path: Path):
    notes, plan = Patient(), {"num_stages": 1, "rounds": 20}
    fault = Fault("kill_worker", once=str(tmp_path / "happened"))
    summary = start(tmp_path / "run", whole(fault, **plan), [notes], workers=2)
    assert (tmp_path / "happened").exists(), "the second process never took part"
    assert "a worker process died; its work is repeated by the others" in notes.notes
    one = start(tmp_path / "one", whole(**plan))
    assert summary["state_sha256"] == one["state_sha256"] and summary["failed_clients"] == 0


def test_an_answer_that_cannot_be_read_is_worked_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    read, broken = serial.receive, []

    def receive(pipe: Any) -> Any:
        answer = read(pipe)
        if answer is not None and not broken:  # the first message says that the process is ready
            broken.append(answer)
            raise pickle.UnpicklingError("invalid load key")
        return answer

    monkeypatch.setattr(serial, "receive", receive)
    notes, plan = Patient(), {"num_stages": 1, "rounds": 20}
    summary = start(tmp_path / "run", whole(**plan), [notes], workers=2)
    assert broken, "the second process never took part"
    told = "a worker process could not be understood (UnpicklingError: invalid load key); its work is repeated"
    assert any(note.startswith(told) for note in notes.notes)
    monkeypatch.undo()
    assert summary["state_sha256"] == start(tmp_path / "one", whole(**plan))["state_sha256"]


@pytest.mark.parametrize(
    ("build", "words"), [(refuse_to_build, "RuntimeError: no such data here"), (end_at_once, "it ended while starting")]
)
def test_a_process_that_cannot_start_is_told_and_done_without(build, words: str, tmp_path: Path):
    notes, plan = Patient(), {"num_stages": 1}
    broken = dataclasses.replace(whole(**plan), rebuild=build)
    summary = start(tmp_path / "run", broken, [notes], workers=2)
    assert summary["state_sha256"] == start(tmp_path / "one", whole(**plan))["state_sha256"]
    assert [n for n in notes.notes if "could not start" in n] == [
        f"a worker process could not start ({words}); its share is done by the others"
    ]


def test_what_cannot_be_sent_to_other_processes_is_refused_in_one_sentence(tmp_path: Path):
    threads = torch.get_num_threads()
    secret = dataclasses.replace(whole(), rebuild=lambda: whole())
    with pytest.raises(
        ConfigError, match=r"set engine.workers to 1, or pass module-level functions instead of lambdas"
    ):
        start(tmp_path / "lambda", secret, workers=2)
    never = dataclasses.replace(whole(), rebuild=None, why_not="the model is a lambda")
    with pytest.raises(ConfigError, match=r"engine.workers is 2, but the model is a lambda; set engine.workers to 1"):
        start(tmp_path / "none", never, workers=2)
    assert torch.get_num_threads() == threads
    assert start(tmp_path / "alone", secret, workers=1)["rounds"] == 6, "one process needs nothing of the kind"


def test_threads_are_those_of_the_experiment_and_put_back(tmp_path: Path):
    before, inside = torch.get_num_threads(), []

    class Sees(Notes):
        def client_done(self, done: int, total: int) -> None:
            inside.append(torch.get_num_threads())

    small = {"num_stages": 1, "rounds": 1, "per_class": 8}
    start(tmp_path / "run", dataclasses.replace(whole(**small), threads=2), [Sees()])
    assert set(inside) == {2} and torch.get_num_threads() == before
    with pytest.raises(RunError):
        start(tmp_path / "fails", dataclasses.replace(whole(Fault("raise"), **small), threads=2))
    assert torch.get_num_threads() == before
    broken = dataclasses.replace(whole(), threads=2, spec=None)
    with pytest.raises(AttributeError):
        start(tmp_path / "broken", broken)
    assert torch.get_num_threads() == before


def test_nothing_is_left_of_the_processes(tmp_path: Path):
    start(tmp_path / "run", whole(), workers=3)
    assert list((tmp_path / "run" / ".spool").iterdir()) == []
    assert start(tmp_path / "one", whole())["rounds"] == 6


def test_the_largest_client_is_handed_out_first_and_answers_come_in_order(tmp_path: Path):
    from fedloom.engine.serial import Workforce

    plan = whole().plan
    sizes = {c: plan.size(c, 0) for c in range(4)}
    assert len(set(sizes.values())) > 1
    order: list[int] = []
    made = whole()
    with Workforce(made, tmp_path, 1, print) as force:
        from fedloom.engine.runtime import Done, Work

        work = [Work(c, 0, 0, "train", None, "v", sizes[c]) for c in range(4)]
        server = made.method.init_server(force.runtime.context(0))

        def down(client):
            order.append(client)
            return made.method.send(server, client, None)

        answers = force.carry_out(work, down)
    assert order == sorted(sizes, key=lambda c: (-sizes[c], c))
    assert [a.client for a in answers] == [0, 1, 2, 3] and all(isinstance(a, Done) for a in answers)


def test_two_runs_in_one_process_do_not_leak_into_each_other(tmp_path: Path):
    """Another learning rate, another width of clients, then the first again."""
    from fedloom.local import SGD

    def go(name: str, lr: float) -> str:
        options = {"training": {"optimizer": SGD(lr=lr)}}
        return start(tmp_path / name, experiment("toys.slim:slim", options=options))["state_sha256"]

    first = go("a", 0.1)
    assert go("b", 0.2) != first
    assert go("c", 0.1) == first


def test_a_script_without_a_main_guard_may_use_two_processes(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(TESTS)!r})
        from pathlib import Path
        from toys.federation import experiment
        from toys.running import Patient, start
        print("imported")
        notes = Patient()
        plan = dict(num_stages=1, cohort=1.0)
        summary = start(Path({str(tmp_path / "run")!r}), experiment("toys.tally:tally", **plan), [notes], workers=2)
        print(summary["state_sha256"], notes.notes, notes.shared)
        """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    first, last = done.stdout.splitlines()
    one = start(tmp_path / "one", experiment("toys.tally:tally", num_stages=1, cohort=1.0))
    assert (first, last) == ("imported", f"{one['state_sha256']} [] True")


def test_observers_hear_of_every_client(tmp_path: Path):
    notes = Notes()
    start(tmp_path / "run", whole(num_stages=1), [notes])
    assert notes.info == {"stages": 1, "rounds": 2, "clients": 4, "workers": 1, "resumed_from": None}
    assert notes.clients == [(k, 4) for k in range(1, 5)] * 3
    assert [row["exchange"] for row in rows(tmp_path / "run")] == ["census", "train", "train"]


def test_the_engine_never_polls():
    """No sleeping, no waiting for a while and looking again: 20 rounds of tiny clients must not take seconds."""
    for path in sorted(Path(next(iter(fedloom.engine.__path__))).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr not in ("sleep", "poll"), f"{path.name}:{node.lineno}"
                timed = node.args or node.keywords
                assert not (node.func.attr in ("wait", "acquire", "get") and timed and "timeout" in ast.dump(node)), (
                    path
                )
