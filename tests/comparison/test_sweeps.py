"""Sweeps on small runs: one folder of runs, a comparison per setting, a table over them."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom import lifecycle
from fedloom.core.errors import ConfigError, Interrupted, RunError
from fedloom.engine.experiment import Observer
from fedloom.report.comparison import read_comparison, run_folders

SMALL = {
    "data": {"name": "sklearn/digits"},
    "model": {"name": "linear"},
    "stream": {"kind": "static"},
    "partition": {"kind": "dirichlet", "clients": 2},
    "training": {"rounds": 1},
}
SETTINGS = {"even": {"partition": {"kind": "iid"}}, "a 0.1": {"partition.alpha": 0.1}}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take a second."""
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    monkeypatch.setattr("fedloom.report.pareto.save", lambda *args: False)
    monkeypatch.setattr("fedloom.report.sweep_picture.save", lambda *args: False)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """(partition, method, seed) of every run that is started or resumed, in order."""
    found: list[tuple[str, str, int]] = []
    real = lifecycle._carry_out

    def watch(built: Any, *args: Any) -> Any:
        config = built.config
        found.append((config.partition.kind, config.method["name"], config.seed))
        return real(built, *args)

    monkeypatch.setattr(lifecycle, "_carry_out", watch)
    return found


def small(out: Path, **more: Any) -> fedloom.Sweep:
    given = {"methods": ["fedavg", "fedprox+mu=1"], "seeds": [0, 1], "settings": SETTINGS, **more}
    return fedloom.sweep(SMALL, out=out, **given)


def test_a_sweep_compares_methods_in_every_setting(tmp_path: Path, begun: list[Any]) -> None:
    done = small(tmp_path / "s")
    assert len(begun) == 8 and len(list((tmp_path / "s" / "runs").iterdir())) == 8
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [
        "a-0.1", "even", "runs", "sweep.csv", "sweep.json", "sweep.md", "sweep.tex",
    ]  # fmt: skip
    assert json.loads((tmp_path / "s" / "sweep.json").read_text()) == done.summary and done.summary["complete"]
    for setting, folder in (("even", "even"), ("a 0.1", "a-0.1")):
        told, content = done.summary["settings"][setting], read_comparison(tmp_path / "s" / folder)
        assert told["folder"] == folder and content == done.comparisons[setting].summary
        assert content["title"] == f"Comparison of 2 methods, {setting}"
        for label, result in told["results"].items():
            measured = content["methods"][label]["metrics"]["final_accuracy"]
            assert (result["mean"], result["low"], result["n"]) == (measured["mean"], measured["low"], 2)
            assert result["p_t"] is result["p_holm"] is None, "two seeds have no p in any table"
        assert all((path / "DONE").exists() for path in run_folders(tmp_path / "s" / folder, content).values())
    alone = fedloom.compare(SMALL, ["fedavg"], [0], partition={"kind": "iid"}, out=tmp_path / "alone")
    same = done.comparisons["even"].runs["fedavg"][0]
    assert alone.runs["fedavg"][0].summary["state_sha256"] == same.summary["state_sha256"]
    lines = list(csv.DictReader((tmp_path / "s" / "sweep.csv").read_text().splitlines()))
    assert [(line["setting"], line["label"]) for line in lines] == [
        (setting, label) for setting in SETTINGS for label in ("fedavg", "fedprox+mu=1")
    ]
    assert [float(line["mean"]) for line in lines] == [row["mean"] for row in done.table()]
    assert done.markdown == (tmp_path / "s" / "sweep.md").read_text() == done._repr_markdown_()
    assert "over even, a 0.1" in repr(done)


def test_best_and_ranks_are_by_the_means(tmp_path: Path) -> None:
    methods = ["fedavg", "fedavg+uniform=true", "joint", "fedavg@paper"]
    done = small(tmp_path / "s", methods=methods, seeds=[0], metric="final_accuracy")
    federations = [label for label in methods if label != "joint"]
    ranks = {label: [] for label in federations}
    for setting in done.summary["settings"].values():
        means = {label: setting["results"][label]["mean"] for label in federations}
        assert setting["best"] == [label for label in federations if means[label] == max(means.values())]
        assert setting["results"]["joint"]["rank"] is None and setting["results"]["joint"]["mean"] > 0
        for label in federations:
            above = sum(mean > means[label] for mean in means.values())
            ranks[label].append(above + (1 + list(means.values()).count(means[label])) / 2)
    assert done.summary["mean_rank"] == pytest.approx({label: sum(r) / 2 for label, r in ranks.items()})
    assert done.summary["pooled"] == ["joint"], "a reference, which nothing is ranked against"
    assert done.summary["mean_rank"]["fedavg"] == done.summary["mean_rank"]["fedavg@paper"], "the same runs"


def test_only_what_is_missing_is_run_again(tmp_path: Path, begun: list[Any]) -> None:
    first = small(tmp_path / "s")
    gone = sorted((tmp_path / "s" / "runs").iterdir())[::2]
    expected = {json.loads((path / "summary.json").read_text())["state_sha256"] for path in gone}
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "s" / "runs").glob("*/summary.json")}
    for path in gone:
        shutil.rmtree(path)
    begun.clear()
    again = small(tmp_path / "s")
    assert len(begun) == len(gone) == 4
    assert {json.loads((path / "summary.json").read_text())["state_sha256"] for path in gone} == expected
    kept = {path: stamp for path, stamp in stamps.items() if path.parent not in gone}
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in kept.items()) and len(kept) == 4
    assert again.table() == first.table()
    begun.clear()
    small(tmp_path / "s", settings=None, grid={"partition.kind": ["iid"], "partition.clients": [2]})
    assert not begun, "the runs of a setting by another name"


def test_settings_that_are_the_same_share_their_runs(tmp_path: Path, begun: list[Any]) -> None:
    done = small(tmp_path / "s", seeds=[0], settings={"a": {}, "b": {"training.rounds": 1}})
    assert len(begun) == 2 and len(done.comparisons["b"].runs["fedavg"]) == 1
    assert json.loads((tmp_path / "s" / "b" / "compare.json").read_text())["complete"]


class StopIn(Observer):
    """Stops the run that begins as the given one, as Ctrl-C does."""

    def __init__(self, number: int):
        self.left = number

    def started(self, info: Any) -> None:
        self.left -= 1

    def round_done(self, row: Any) -> None:
        if self.left == 0:
            raise KeyboardInterrupt


def test_an_interrupted_sweep_goes_on(tmp_path: Path, begun: list[Any]) -> None:
    with pytest.raises(
        Interrupted, match=r"interrupted in run 4 of 4: a 0.1, fedprox.mu=1, seed 0; what is done stays"
    ):
        small(tmp_path / "s", seeds=[0], observers=[StopIn(4)])
    content = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert not content["complete"] and [s["missing"] for s in content["settings"].values()] == [0, 1]
    table = (tmp_path / "s" / "sweep.md").read_text()
    assert "- a 0.1: 1 run is missing; see a-0.1/compare.md." in table and "| – |" in table
    begun.clear()
    assert small(tmp_path / "s", seeds=[0]).summary["complete"]
    assert begun == [("dirichlet", "fedprox", 0)]


def test_a_setting_without_runs_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom.methods.fedavg import FedAvg

    real = FedAvg.client_update

    def work(self: Any, down: Any, state: Any, data: Any, ctx: Any) -> Any:
        if len(data) > limit[0]:
            raise ValueError("bad luck")
        return real(self, down, state, data, ctx)

    monkeypatch.setattr(FedAvg, "client_update", work)
    limit = [10**9]
    settings = {"one": {"partition.clients": 2}, "two": {"partition.clients": 3}}
    whole = small(tmp_path / "w", seeds=[0], methods=["fedavg"], settings=settings)
    limit[0] = 0
    shutil.rmtree(whole.comparisons["two"].runs["fedavg"][0].folder)
    done = small(tmp_path / "w", seeds=[0], methods=["fedavg"], settings=settings)
    assert list(done.comparisons) == ["one"] and list(done.failed) == [("two", "fedavg", 0)]
    assert "1 runs failed" in repr(done) and done.summary["settings"]["two"]["results"] == {}
    with pytest.raises(RunError, match=r"no run ended well; fedavg, seed 1: .*bad luck"):
        small(tmp_path / "w", seeds=[1], methods=["fedavg"], settings=settings)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"settings": None}, "a sweep needs settings: name them under settings or grid of a file, or give --grid"),
        (
            {"settings": {"even": {}, "b": {"partition.alfa": 1}}},
            "setting b: unknown key 'partition.alfa'. Did you mean",
        ),
        ({"settings": {"a": {"partition.alfa": 1}}}, "setting a: unknown key 'partition.alfa'"),
        ({"settings": {"a": {"seed": 1}}}, "setting a: seed is set for every run by the seeds of the comparison"),
        ({"methods": ["fedavg", "fedprx"]}, "^unknown method 'fedprx'. Did you mean 'fedprox'"),
        ({"out": ""}, "out is empty; name a folder"),
        ({"out": __file__}, "test_sweeps.py', which is a file; name a folder"),
        ({"out": f"{__file__}/x"}, "is no usable path: Not a directory"),
        ({"jobs": "many"}, "jobs must be auto or a whole number"),
        ({"mu": 1}, "unknown key 'mu'"),
    ],
)
def test_a_slip_costs_nothing(tmp_path: Path, begun: list[Any], given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        small(**{"out": tmp_path / "s", **given})
    assert not begun and not (tmp_path / "s").exists()


def test_the_default_folder_is_named_by_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(json.dumps(SMALL))
    (tmp_path / "study.yaml").write_text(
        "recipe: mine.yaml\nmethods: fedavg\nseeds: 5\nset: {method.uniform: true, partition.alpha: 1}\n"
        "settings: {x: {partition.alpha: 0.2}, y: {partition.alpha: 0.3}}"
    )
    with pytest.raises(ConfigError, match="seeds must be a list of whole numbers such as 0,1,2, got 5"):
        fedloom.sweep("study.yaml")
    done = fedloom.sweep("study.yaml", seeds=[5])
    assert done.folder == Path("runs/mine/sweep") and done.summary["recipe"] == "mine"
    assert done.summary["set"] == {"method.uniform": True}, "without what every setting sets itself"
    assert [setting["set"] for setting in done.summary["settings"].values()] == [
        {"partition.alpha": 0.2}, {"partition.alpha": 0.3},
    ]  # fmt: skip
    assert done.summary["settings"]["x"]["scenario"] == "static; dirichlet, alpha 0.2"
