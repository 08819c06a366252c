"""Several runs at a time: the same bits as one after the other, and nothing else is lost."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset

import fedloom
from fedloom import lifecycle
from fedloom.comparison import jobs
from fedloom.comparison.folders import own_memory
from fedloom.comparison.planned import plan
from fedloom.comparison.settings import by_section
from fedloom.comparison.studies import study
from fedloom.comparison.sweeps import plan_sweep
from fedloom.comparison.work import in_turn
from fedloom.core.errors import ConfigError
from fedloom.engine.experiment import Observer
from fedloom.engine.folder import RunFolder

SMALL = {
    "data": {"name": "sklearn/digits"},
    "model": {"name": "linear"},
    "stream": {"kind": "static"},
    "partition": {"kind": "iid", "clients": 2},
    "training": {"rounds": 1},
}
BROKEN = """
from fedloom.methods.fedavg import FedAvg, fedavg

class Broken(FedAvg):
    def client_update(self, *args):
        raise ValueError("bad luck")

def broken(*, local):
    made = fedavg(local=local)
    object.__setattr__(made, "__class__", Broken)
    return made
"""


class Notes(Observer):
    """Keeps what it is told between runs."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take a second."""
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    monkeypatch.setattr("fedloom.report.pareto.save", lambda *args: False)


def test_runs_side_by_side_are_those_of_one_after_the_other(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_method.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    alone = fedloom.compare(SMALL, ["fedavg", "fedprox+mu=1"], [0], out=tmp_path / "alone")
    methods, watching = ["fedavg", "fedprox+mu=1", "broken_method:broken"], Notes()
    done = fedloom.compare(SMALL, methods, [0], out=tmp_path / "c", jobs=2, observers=[watching])
    assert list(done.failed) == [("broken_method:broken", 0)] and "bad luck" in done.failed["broken_method:broken", 0]
    for label in methods[:2]:
        ours, theirs = (found.runs[label][0].summary for found in (done, alone))
        assert ours["state_sha256"] == theirs["state_sha256"]
        metrics = [found.summary["methods"][label]["metrics"] for found in (done, alone)]
        peak = metrics[0]["own_peak_rss_bytes"]["values"]["0"]
        assert peak >= ours["peak_rss_bytes"] > 0 and "own_peak_rss_bytes" not in metrics[1]
    assert "Peak memory" in done.markdown and "Peak memory" not in alone.markdown
    begun = [text for text in watching.told if text.startswith("run ") and " done in " not in text]
    assert begun[:2] == ["run 1 of 3: fedavg, seed 0", "run 2 of 3: fedprox+mu=1, seed 0"]
    assert begun[2].startswith("run 3 of 3: broken_method:broken, seed 0")
    ended = sorted(text for text in watching.told if " done in " in text)
    assert [text.partition(" done")[0] for text in ended] == begun[:2]
    assert ended[0].endswith(f"final accuracy {done.runs['fedavg'][0].summary['final_accuracy']:.3f}")


def test_a_job_makes_its_run_from_what_can_be_sent(quick: None, tmp_path: Path) -> None:
    """The job itself, without a process: own data, an own network, workers, and what was interrupted."""
    from torch import nn

    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    data = ((rng.normal(size=(60, 4)) + 4 * np.eye(3, 4)[y]).astype(np.float32), y)
    given = {"data": data, "model": nn.Linear(4, 3), "engine": None, "stream": {"kind": "static"}}
    whole = fedloom.compare(
        methods=["fedavg"], seeds=[0], out=tmp_path / "whole", partition=SMALL["partition"], **given
    ).runs["fedavg"][0]
    planned = plan(None, "fedavg", "0", out=tmp_path / "c", reference=None, partition=SMALL["partition"], **given)
    (key,) = planned.runs
    sent = jobs._sendable([planned], 2)
    task = jobs._task(planned, key, sent[key], 2)
    assert task.tree["engine"]["workers"] >= 1 and (tmp_path / "c").exists() is False
    (tmp_path / "c" / "runs").mkdir(parents=True)
    told: list[str] = []
    assert task(told.append) == (None, False)
    assert planned.open(key).summary["state_sha256"] == whole.summary["state_sha256"]
    assert own_memory(planned.path(key))["own_peak_rss_bytes"] > 0
    (planned.path(key) / "DONE").unlink()
    assert task(told.append) == (None, False) and planned.state(key) == "done"
    (planned.path(key) / "DONE").unlink()
    with RunFolder.open(planned.path(key)):
        assert task(told.append).held
    (planned.path(key) / "config.yaml").write_text("[")
    assert "can no longer be run" in str(task(told.append).error)


def test_every_run_of_a_sweep_gets_the_data_and_the_network_of_its_own_setting(quick: None, tmp_path: Path) -> None:
    """One after the other in this process, and as jobs that have only what is sent; `b again` has what `b` has."""
    from torch import nn

    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    one, other = (((rng.normal(size=(60, 4)) + far * np.eye(3, 4)[y]).astype(np.float32), y) for far in (4, 1))
    linear, deep = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    own = {"a": {"data": one}, "b": {"data": other}, "b again": {"data": other}, "c": {"data": one, "model": deep}}
    common = {"model": linear, "stream": {"kind": "static"}, **{key: SMALL[key] for key in ("partition", "training")}}
    alone = fedloom.sweep(None, ["fedavg"], [0], settings=own, out=tmp_path / "alone", **common)
    asked = study(None, ["fedavg"], [0], None, None, by_section(common), settings=own)
    plans = plan_sweep(asked, tmp_path / "s").plans
    (tmp_path / "s" / "runs").mkdir(parents=True)
    sent = jobs._sendable(list(plans.values()), 2)
    assert len(sent) == 3 and len({id(pickled) for pickled in sent.values()}) == 3
    for setting, planned in plans.items():
        (key,) = planned.runs
        assert jobs._task(planned, key, sent[key], 2)(lambda text: None) == (None, False)
        theirs = alone.comparisons[setting].runs["fedavg"][0].summary
        assert planned.open(key).summary["state_sha256"] == theirs["state_sha256"]


@pytest.mark.parametrize("part", ["data", "model"])
def test_what_is_not_what_the_key_stands_for_is_not_run(tmp_path: Path, part: str) -> None:
    from torch import nn

    y = np.arange(60) % 3
    data = (np.eye(3, 4, dtype=np.float32)[y], y)
    given = {"data": data, "model": nn.Linear(4, 3), "engine": None, "stream": {"kind": "static"}}
    named = {"out": tmp_path / "c", "reference": None, "partition": SMALL["partition"]}
    planned = plan(None, "fedavg", "0", **named, **given)
    (key,) = planned.runs
    other = {"data": (data[0] + 1, y), "model": nn.Sequential(nn.Linear(4, 3))}
    changed = {**planned.given, part: other[part]}
    error = jobs._task(planned, key, pickle.dumps(changed), 2)(lambda text: None).error
    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"what is to be run is not what the key {key[:12]} stands for: the data, the model")
    with pytest.raises(ConfigError, match="is not what the key"):
        dataclasses.replace(planned, given=changed).carry(key, [])
    assert planned.state(key) == "missing" and not planned.path(key).exists()


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"own_peak_rss_bytes": null}', '{"own_peak_rss_bytes": "much"}'])
def test_memory_that_was_not_written_down_is_not_known(tmp_path: Path, text: str) -> None:
    assert own_memory(tmp_path) == {}
    (tmp_path / "process.json").write_text(text)
    assert own_memory(tmp_path) == {}


@pytest.mark.parametrize("wanted", [0, -1, 1.0, True, None, "two", "²", "", "1e3", 513, "-2", [2]])
def test_jobs_that_are_no_number_are_refused(tmp_path: Path, wanted: Any) -> None:
    with pytest.raises(ConfigError, match=r"^jobs must be auto or a whole number in \[1, 512\], got "):
        fedloom.compare(SMALL, ["fedavg"], [0], out=tmp_path / "c", jobs=wanted)
    assert not (tmp_path / "c").exists()


class OwnData(Dataset):
    """A data set that another process could import, but not be sent."""

    def __init__(self) -> None:
        self.targets, self.rows = [0, 1] * 10, np.eye(20, 4, dtype=np.float32)
        self.hook = lambda: None

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> Any:
        return self.rows[i], self.targets[i]


def test_what_cannot_be_sent_to_another_process_is_refused_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch import nn

    def flat(num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

    given = {"stream": {"kind": "static"}, "partition": {"kind": "iid", "clients": 2}, "out": tmp_path / "c", "jobs": 2}
    words = r"jobs is 2, but the data or the model cannot be sent to other processes \(.+\); set jobs to 1, or pass"
    with pytest.raises(ConfigError, match=words):
        fedloom.compare(None, ["fedavg"], [0], data=OwnData(), **given)
    with pytest.raises(ConfigError, match=words):
        fedloom.compare(SMALL, ["fedavg"], [0], **{**given, "model": flat})
    monkeypatch.setattr(nn.Linear, "__module__", "__main__")
    monkeypatch.setattr("__main__.Linear", nn.Linear, raising=False)
    with pytest.raises(ConfigError, match=r"jobs is 2, but a part of the run is defined in the main program, where"):
        fedloom.compare(
            None,
            ["fedavg"],
            [0],
            data=(np.eye(20, 4, dtype=np.float32), np.arange(20) % 2),
            model=nn.Linear(4, 2),
            **given,
        )
    assert not (tmp_path / "c").exists()


def planned_of(out: Path, seeds: Any = (0, 1, 2, 3), **more: Any) -> Any:
    given = {"data": None, "model": None, "engine": None, **more}
    return plan(SMALL, ("fedavg", "fedprox"), seeds, out=out, reference=None, **given)


def test_auto_is_what_the_machine_has_cores_memory_and_runs_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = {"cores": 6, "free": 10**12, "peak": 10**9}
    monkeypatch.setattr("fedloom.environment.cores", lambda: machine["cores"])
    monkeypatch.setattr("fedloom.evaluate.cost.peak_rss_bytes", lambda: machine["peak"])
    monkeypatch.setattr(jobs, "_free_memory", lambda: machine["free"])
    planned = planned_of(tmp_path / "c")
    assert jobs._fitting([planned]) == (6, "for that many cores")
    assert jobs._fitting([planned_of(tmp_path / "c", **{"engine.threads": 2})])[0] == 3
    assert jobs._fitting([planned_of(tmp_path / "c", engine={"workers": 3})])[0] == 2
    machine["cores"] = 64
    assert jobs._fitting([planned]) == (8, "for no more are missing")
    machine["free"] = 3 * 10**9 + 5
    assert jobs._fitting([planned]) == (3, "for that much memory")
    folder = planned.path(next(iter(planned.runs)))
    folder.mkdir(parents=True)
    (folder / "process.json").write_text('{"own_peak_rss_bytes": 1500000000}')
    assert jobs._fitting([planned]) == (2, "for that much memory"), "the largest run so far"
    machine["free"] = 5
    assert jobs._fitting([planned])[0] == 1
    shutil.rmtree(folder)
    on_gpu = planned_of(tmp_path / "c")
    first = on_gpu.checked["fedavg"]
    first[0] = first[0]._replace(device="cuda")
    assert jobs._fitting([on_gpu]) == (1, "for they share a device")
    told: list[str] = []
    assert jobs.hands(" auto ", [on_gpu], lambda work: work([]), told.append).func is in_turn
    assert told == ["jobs: 1 at a time, for they share a device"]


def test_cores_are_shared_between_jobs_unless_workers_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.environment.cores", lambda: 16)

    def workers(number: int, **more: Any) -> int:
        planned = planned_of(tmp_path / "c", (0,), **more)
        return jobs._task(planned, next(iter(planned.runs)), b"", number).tree["engine"]["workers"]

    assert [workers(2), workers(5), workers(20)] == [8, 3, 1]
    assert workers(2, **{"engine.threads": 4}) == 2 and workers(2, engine={"workers": 5}) == 5
