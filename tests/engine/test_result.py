"""What a finished run says of the network that is served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedloom.core import Batches, Context, Payload, PayloadError, Reply, Update
from fedloom.core.batches import Inputs
from fedloom.engine.experiment import Experiment
from fedloom.engine.result import deployed
from fedloom.merge.by_index import take_part
from fedloom.merge.mean import replies_mean
from toys.federation import experiment
from toys.running import start
from toys.slim import Slim

LAYERS = 2 * 8 + 8 + 8 * 6 + 6  # of `SlimNet` in its whole width, 6 classes


@dataclass(frozen=True)
class Halved(Slim):
    """Served with every second unit; the view is the whole model."""

    def deployed(self, down: Payload, state: Payload, ctx: Context) -> Context:
        small = ctx.rebuild(self.width // 2)
        small.bind({name: take_part(tensor, self.index(1)[name]) for name, tensor in down["params"].items()})
        return small

    def predict(self, down: Payload, state: Payload, x: Inputs, ctx: Context) -> Tensor:
        whole = down["params"]["body.bias"].shape[0] == self.width
        return (self.deployed(down, state, ctx) if whole else self._fitting(down, ctx)).scores(x)


@dataclass(frozen=True)
class Renamed(Slim):
    """Its view calls the parameters otherwise."""

    def init_server(self, ctx: Context) -> Payload:
        return {"weights": ctx.init_state()["params"]}

    def send(self, server: Payload, client: int | None, ctx: Context) -> Payload:
        return server

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        return Update(state, {"weights": self.local({"params": down["weights"], "buffers": {}}, data, ctx).params})

    def server_update(self, server: Payload, replies: list[Reply], ctx: Context) -> Payload:
        return {"weights": replies_mean(replies, "weights", server["weights"])}

    def predict(self, down: Payload, state: Payload, x: Inputs, ctx: Context) -> Tensor:
        ctx.bind(down["weights"])
        return ctx.scores(x)


@dataclass(frozen=True)
class Narrow(Slim):
    """Its global view is half a model, of which only `predict` knows how to run it."""

    def units(self, client: int | None) -> Tensor:
        return super().units(1 if client is None else client)


def run(kind: type[Slim], path: Path) -> tuple[dict, Experiment]:
    whole = experiment("toys.slim:slim")
    whole = Experiment(kind(whole.method.local), whole.spec, whole.forward, whole.plan, whole.sampler, cohort=0.5)
    return start(path, whole), whole


def test_a_smaller_network_is_counted_as_it_is_served(tmp_path: Path):
    summary, _ = run(Halved, tmp_path / "half")
    plain, _ = run(Slim, tmp_path / "plain")
    assert summary["parameters"] == plain["parameters"] == plain["active_parameters"] == LAYERS
    assert summary["active_parameters"] == 2 * 4 + 4 + 4 * 6 + 6
    assert summary["flops_per_example"] == plain["flops_per_example"] / 2 == 2 * (2 * 4 + 4 * 6)
    assert summary["params_sha256"] == plain["params_sha256"], "what is trained and merged is the dense model"
    assert summary["final_accuracy"] != plain["final_accuracy"]


@pytest.mark.parametrize("kind", [Renamed, Narrow])
def test_a_view_that_is_no_network_by_itself_is_counted_as_the_methods_own(kind: type[Slim], tmp_path: Path):
    summary, whole = run(kind, tmp_path / "run")
    assert summary["parameters"] == summary["active_parameters"] == LAYERS
    ctx = whole.context(whole.net(), 2, exchange="evaluate")
    view = whole.method.send(whole.method.init_server(ctx), None, ctx)
    assert deployed(whole.method, view, {}, ctx) is None
    assert summary["flops_per_example"] > 0 and summary["final_accuracy"] > 0.2


def test_what_a_methods_own_deployment_raises_is_not_hidden():
    @dataclass(frozen=True)
    class Broken(Slim):
        def deployed(self, down: Payload, state: Payload, ctx: Context) -> Context:
            raise PayloadError("it does not fit")

    whole = experiment("toys.slim:slim")
    with pytest.raises(PayloadError, match="it does not fit"):
        deployed(Broken(whole.method.local), {"params": {}}, {}, whole.context(whole.net(), 0))


def test_the_network_that_is_served_holds_the_values_of_the_view():
    whole = experiment("fedloom.methods.fedavg:fedavg")
    ctx = whole.context(whole.net(), 2)
    view = {
        "params": {n: torch.full_like(t, 0.5) for n, t in ctx.init_state()["params"].items()},
        "buffers": ctx.init_state()["buffers"],
    }
    found = deployed(whole.method, view, {}, ctx)
    assert found is ctx and all(bool((p == 0.5).all()) for p in found.net.module.parameters())
