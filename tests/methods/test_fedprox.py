from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedloom.core import Context
from fedloom.core.context import Net
from fedloom.core.moe import expert_names, gate_names, moe_layers
from toys.federation import experiment, expert_spec
from toys.running import start

FEDPROX, FEDAVG = "fedloom.methods.fedprox:fedprox", "fedloom.methods.fedavg:fedavg"


def ended(tmp_path: Path, name: str, **options):
    return start(tmp_path / str(len(list(tmp_path.iterdir()))), experiment(name, spec=expert_spec(), options=options))


@pytest.mark.parametrize("scope", ["all", "gate", "experts", "shared"])
def test_without_a_weight_it_is_fedavg_bit_for_bit(tmp_path: Path, scope: str):
    plain = ended(tmp_path, FEDAVG)
    assert ended(tmp_path, FEDPROX, mu=0.0, scope=scope)["params_sha256"] == plain["params_sha256"]


@pytest.mark.parametrize("scope", ["gate", "experts", "shared"])
def test_a_scope_holds_its_part_and_no_other(scope: str):
    held, free = (distances(mu, scope) for mu in (5.0, 0.0))
    layers = moe_layers(expert_spec().classifier())
    gates, experts = gate_names(layers), expert_names(layers)
    parts = {"gate": gates, "experts": experts, "shared": free.keys() - gates - experts}
    for part, names in parts.items():
        ratio = norm(held, names) / norm(free, names)
        assert ratio < 0.7 if part == scope else ratio > 0.75, (part, ratio)


def norm(found: dict[str, float], names) -> float:
    return sum(found[name] ** 2 for name in names) ** 0.5


def distances(mu: float, scope: str) -> dict[str, float]:
    """How far one client moves each tensor."""
    made = experiment(FEDPROX, options={"mu": mu, "scope": scope, "training": {"epochs": 4}}, spec=expert_spec())
    net = Net(lambda: made.method.module(made.spec))
    ctx = Context(net=net, stage=made.plan.stage(0), num_classes=6, num_clients=4, round=0, client=0)
    down = ctx.init_state()
    up = made.method.client_update(down, {}, made.plan.train(0, 0, 0, "train"), ctx).up
    return {name: float(torch.dist(up["params"][name], tensor)) for name, tensor in down["params"].items()}
