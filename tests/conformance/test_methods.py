"""Every method of the package and every toy keeps the protocol and gives the same bits however it is run."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom.methods
from conformance.watched import Watched
from fedloom.core import ConfigError, Method
from fedloom.core.payload import digest
from fedloom.engine.checkpoint import newest
from fedloom.engine.experiment import Experiment, Options
from fedloom.engine.files import load_payload
from fedloom.engine.folder import RunFolder
from fedloom.engine.store import ClientStore
from fedloom.local import SGD, AdamW, LocalSGD
from fedloom.local.terms import CrossEntropy, Proximal
from toys.federation import experiment, method_of
from toys.running import Patient, resume, rows, start


def _found(folder: Path, package: str) -> list[str]:
    """Modules that hold a function of their own name, as the registry finds them."""
    found = []
    for path in sorted(folder.glob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        if any(isinstance(node, ast.FunctionDef) and node.name == path.stem for node in body):
            found.append(f"{package}.{path.stem}:{path.stem}")
    return found


METHODS = _found(Path(fedloom.methods.__file__).parent, "fedloom.methods")
TOYS = _found(Path(__file__).parents[1] / "toys", "toys")
EVERY = [pytest.param(name, id=name.partition(":")[2]) for name in METHODS + TOYS]
pytestmark = pytest.mark.usefixtures("no_global_draws")


def trains(name: str) -> bool:
    """Whether the method has anything to exchange."""
    return bool(method_of(name).exchanges())


def test_the_file_system_is_the_registry():
    assert [name.partition(":")[2] for name in METHODS] == fedloom.methods.names()
    assert {name.partition(":")[2] for name in TOYS} == {"tally", "slim", "prompt", "stacked"}
    assert {"fedavg", "fedprox"} <= set(fedloom.methods.names())


@pytest.mark.parametrize("name", EVERY)
def test_keeps_the_protocol_call_by_call(name: str, tmp_path: Path):
    plain = experiment(name)
    watched = Watched(plain.method)
    seen = start(tmp_path / "watched", dataclasses.replace(plain, method=watched, rebuild=None), evaluate_every=1)
    free = start(tmp_path / "free", plain, evaluate_every=1)
    assert seen["state_sha256"] == free["state_sha256"], "calls that are repeated leave a trace"
    assert watched.seen["up"] == seen["bytes_up"] == free["bytes_up"]
    assert sum(row["bytes_up"] for row in rows(tmp_path / "free")) == free["bytes_up"]
    assert (free["bytes_up"] > 0) == trains(name)
    unnamed = watched.seen["uploads"] - set(plain.method.reveals)
    assert not unnamed, f"`reveals` says nothing of {unnamed}"
    assert free["rejected_updates"] == free["failed_clients"] == free["degraded_rounds"] == 0


@pytest.mark.parametrize("name", EVERY)
def test_same_bits_whatever_carries_it_out(name: str, tmp_path: Path):
    first = start(tmp_path / "one", experiment(name))
    assert start(tmp_path / "again", experiment(name))["state_sha256"] == first["state_sha256"]
    often = start(tmp_path / "often", experiment(name), evaluate_every=1, personal=False, checkpoint_every=0)
    assert often["state_sha256"] == first["state_sha256"]
    other = start(tmp_path / "other", experiment(name, seed=1))
    assert (other["state_sha256"] != first["state_sha256"]) == trains(name)
    assert rows(tmp_path / "one") == rows(tmp_path / "again")
    assert rows(tmp_path / "one", "stage") == rows(tmp_path / "again", "stage")


@pytest.mark.parametrize("name", EVERY)
def test_same_bits_with_two_processes(name: str, tmp_path: Path):
    plan = {"rounds": 2, "per_class": 20, "num_clients": 6, "cohort": 1.0}
    one = start(tmp_path / "one", experiment(name, **plan))
    slow = Patient()
    two = start(tmp_path / "two", experiment(name, **plan), [slow], workers=2)
    assert two["state_sha256"] == one["state_sha256"] and two["params_sha256"] == one["params_sha256"]
    assert two["accuracy_matrix"] == one["accuracy_matrix"]
    assert rows(tmp_path / "one") == rows(tmp_path / "two")
    assert rows(tmp_path / "one", "stage") == rows(tmp_path / "two", "stage")
    assert slow.shared or slow.info["clients"] == 1 or not trains(name), "the second process did nothing"


@pytest.mark.parametrize("name", EVERY)
def test_resumes_from_any_round(name: str, tmp_path: Path):
    whole = start(tmp_path / "whole", experiment(name))
    start(tmp_path / "cut", experiment(name), checkpoint_keep=100)
    points = sorted((tmp_path / "cut" / "checkpoints").iterdir())
    for path in points[len(points) // 2 :]:
        shutil.rmtree(path)
    cut = resume(tmp_path / "cut", experiment(name), checkpoint_keep=100)
    assert cut["state_sha256"] == whole["state_sha256"]
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert rows(tmp_path / "cut", "stage") == rows(tmp_path / "whole", "stage")


@pytest.fixture(scope="module", autouse=True)
def vision_language_models():
    """Imported before a test begins: open_clip draws a global random number, which is not to be blamed on a method."""
    with contextlib.suppress(ImportError):
        import open_clip  # noqa: F401


@pytest.fixture(scope="module")
def over_grid():
    """Starts, or goes on with, a run over the in-process grid: `(folder, experiment, **options)`.

    Of the module: Flower draws a global random number when it is imported, which is not to be blamed on a test.
    """
    pytest.importorskip("flwr")
    from fedloom.engine.flower import inprocess

    def carry_out(path: Path, experiment: Experiment, *, go_on: bool = False, **options: Any) -> dict[str, Any]:
        folder = RunFolder.open(path) if go_on else RunFolder.create(path, {"toy": True}, {})
        with folder:
            return inprocess.run(experiment, Options(**options), folder, [], {"config": {}, "model": {}})

    return carry_out


SAME = (
    "state_sha256", "params_sha256", "accuracy_matrix", "bytes_up", "bytes_down", "sample_visits",
    "per_client_accuracy_worst10",
)  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_same_bits_over_a_grid(name: str, tmp_path: Path, over_grid):
    for plan in ({}, {"num_clients": 7, "cohort": 1.0, "per_class": 60}):
        one, two = tmp_path / f"serial {len(plan)}", tmp_path / f"grid {len(plan)}"
        first = start(one, experiment(name, **plan), evaluate_every=1)
        second = over_grid(two, experiment(name, **plan), evaluate_every=1)
        assert [second[key] for key in SAME] == [first[key] for key in SAME]
        assert second["failed_clients"] == second["rejected_updates"] == 0
        assert rows(two) == rows(one) and rows(two, "stage") == rows(one, "stage")
        last = "checkpoints/stage0003-trip00000/server.safetensors"
        assert digest(load_payload(one / last)) == digest(load_payload(two / last)) == second["state_sha256"]


def planned(name: str) -> list[list[Any]]:
    whole = experiment(name)
    return [list(whole.method.plan(whole.plan.stage(k))) for k in range(whole.plan.num_stages)]


@pytest.mark.parametrize("name", EVERY)
def test_resumes_over_a_grid_from_any_checkpoint(name: str, tmp_path: Path, over_grid):
    whole = over_grid(tmp_path / "whole", experiment(name), checkpoint_keep=100)
    points = sorted((tmp_path / "whole" / "checkpoints").iterdir())
    assert len(points) == sum(max(1, len(trips)) for trips in planned(name))
    for k, point in enumerate(points):
        cut = shutil.copytree(tmp_path / "whole", tmp_path / str(k))
        for later in points[k + 1 :]:
            shutil.rmtree(cut / "checkpoints" / later.name)
        again = over_grid(cut, experiment(name), go_on=True, checkpoint_keep=100)
        assert [again[key] for key in SAME] == [whole[key] for key in SAME], point.name
        assert again["failed_clients"] == 0
        assert rows(cut) == rows(tmp_path / "whole") and rows(cut, "stage") == rows(tmp_path / "whole", "stage")


@pytest.mark.parametrize("name", EVERY)
def test_is_a_frozen_value(name: str):
    method = method_of(name)
    assert isinstance(method, Method) and dataclasses.is_dataclass(method)
    assert method.__dataclass_params__.frozen
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.local = None
    copy = pickle.loads(pickle.dumps(method))
    assert copy == method and repr(copy) == repr(method)
    made = pickle.loads(pickle.dumps(experiment(name).rebuild))()
    assert made.method == method
    a, b = (e.method.init_server(e.context(e.net(), 0)) for e in (made, experiment(name)))
    assert digest(a) == digest(b)


@pytest.mark.parametrize("name", EVERY)
def test_names_its_source(name: str):
    doc = inspect.getdoc(importlib.import_module(name.partition(":")[0])) or ""
    assert "Source:" in doc, "the docstring of a method's module says where it comes from"


@pytest.mark.parametrize("name", EVERY)
def test_unseen_rows_keep_their_initial_values(name: str, tmp_path: Path):
    """With weight decay, momentum and Nesterov, and with AdamW, after a run whose last classes never arrive."""
    for optimizer in (SGD(lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True), AdamW(lr=0.01, weight_decay=0.5)):
        try:
            whole = experiment(name, options={"training": {"optimizer": optimizer, "clip_norm": 1.0}})
        except ConfigError as error:  # a method may be defined for SGD alone
            assert isinstance(optimizer, AdamW) and "optimizer" in str(error)
            continue
        first = whole.method.init_server(whole.context(whole.net(), 0))
        folder = tmp_path / type(optimizer).__name__
        start(folder, whole, checkpoint_keep=100)
        ctx = whole.context(whole.net(), 1)
        server = load_payload(folder / "checkpoints" / "stage0002-trip00000" / "server.safetensors")
        assert len(ctx.unseen) == 2
        for (field, tensor), dim in whole.method.class_rows(ctx).items():
            a, b = (state[field][tensor].index_select(dim, ctx.unseen) for state in (first, server))
            assert torch.equal(a, b), f"{field}/{tensor} moved with {optimizer}"
        assert (digest(first) != digest(server)) == trains(name)


def test_fedprox_without_its_term_is_fedavg(tmp_path: Path):
    fedavg = start(tmp_path / "avg", experiment("fedloom.methods.fedavg:fedavg"))
    none = start(tmp_path / "mu0", experiment("fedloom.methods.fedprox:fedprox", options={"mu": 0.0}))
    some = start(tmp_path / "mu1", experiment("fedloom.methods.fedprox:fedprox", options={"mu": 0.1}))
    assert none["state_sha256"] == fedavg["state_sha256"] != some["state_sha256"]


def test_one_client_with_one_epoch_is_plain_sgd(tmp_path: Path):
    """FedAvg over one client is the client's own training, step by step."""
    whole = experiment("fedloom.methods.fedavg:fedavg", num_clients=1, num_stages=1, rounds=1, cohort=1)
    summary = start(tmp_path / "run", whole)
    ctx = whole.context(whole.net(), 0, round=0, client=0)
    loop: LocalSGD = dataclasses.replace(whole.method.local, terms=(CrossEntropy(), Proximal(0.0)))
    end = loop(ctx.init_state(), whole.plan.train(0, 0, 0, "train"), ctx)
    assert summary["params_sha256"] == digest({"params": end.params, "buffers": end.buffers})


@pytest.mark.parametrize("name", EVERY)
def test_a_method_without_personal_views_predicts_alike_for_everybody(name: str, tmp_path: Path):
    """What `personal: False` promises: a client's state, and what it is sent, do not show in its predictions."""
    whole = experiment(name)
    if whole.method.personal:
        pytest.skip("its clients have views of their own")
    start(tmp_path / "run", whole)
    server, progress = newest(tmp_path / "run")
    last = whole.plan.num_stages - 1
    x = next(iter(whole.plan.test(0).epoch(batch_size=16, shuffle=False))).x
    net, store = whole.net(), ClientStore(tmp_path / "run" / "clients")

    def scores(client: int | None) -> torch.Tensor:
        ctx = whole.context(net, last, exchange="evaluate", client=client)
        kept = store.load(client, progress.versions.get(client)) if client is not None else None
        state = whole.method.init_client(ctx) if kept is None else kept
        return whole.method.predict(whole.method.send(server, client, ctx), state, x, ctx).detach().clone()

    assert bool(progress.served) == trains(name)
    for client in progress.served:
        assert torch.equal(scores(client), scores(None))
