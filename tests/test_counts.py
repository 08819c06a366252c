"""What the summary of a pruned run counts is what others count: torch-pruning, torch's counter, a serialiser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch.utils.flop_counter import FlopCounterMode

import fedloom
from fedloom.build import build
from fedloom.config import read_yaml, resolve, resolve_source
from fedloom.core.payload import items
from fedloom.engine.files import load_payload
from fedloom.models.channels import channels_of, unpack

SHORT: dict[str, Any] = {"training.rounds": 2, "engine.workers": 1}


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> fedloom.Run:
    """Two rounds of FEDFIP at half of the channels: one with all of them, one with the first mask."""
    method = {"name": "fedfip", "keep": 0.5, "contrast_every": 50, "fisher_samples": 32}
    return fedloom.run("quickstart-domains", method=method, out=tmp_path_factory.mktemp("half") / "run", **SHORT)


def test_a_pruned_run_has_fewer_parameters_and_sends_fewer_bytes(halved: fedloom.Run, tmp_path: Path):
    dense = fedloom.run("quickstart-domains", method="fedavg", out=tmp_path / "dense", **SHORT).summary
    assert dense["active_parameters"] == dense["parameters"] == halved.summary["parameters"]
    assert halved.summary["active_parameters"] < 0.45 * dense["parameters"]
    assert halved.summary["bytes_up"] < 0.9 * dense["bytes_up"]
    assert halved.summary["flops_per_example"] < 0.5 * dense["flops_per_example"]
    assert set(halved.summary["domain_accuracy"]) == {"rotated", "inverted", "noisy", "blurred"}


def test_parameters_and_operations_are_those_of_torch_pruning(halved: fedloom.Run):
    prune = pytest.importorskip("torch_pruning")
    module = build(resolve(resolve_source("quickstart-domains")[1])).experiment.spec.classifier().eval()
    channels, x = channels_of(module), torch.zeros(1, 1, 8, 8)
    mask = unpack(load_payload(halved.folder / "model" / "model.safetensors")["mask"]["bits"], channels.total)
    assert not bool(mask.all())
    graph = prune.DependencyGraph().build_dependency(module, x)
    for group, part in zip(channels.groups, channels.split(mask), strict=True):
        layer = module.get_submodule(group.writers[0].removesuffix(".weight"))
        drop = (~part).nonzero().flatten().tolist()
        if drop:
            graph.get_pruning_group(layer, prune.prune_conv_out_channels, idxs=drop).prune()
    assert prune.utils.count_ops_and_params(module, x)[1] == halved.summary["active_parameters"]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(x)
    assert counter.get_total_flops() == halved.summary["flops_per_example"]


def test_bytes_are_those_of_the_serialised_payloads(halved: fedloom.Run):
    """Every upload of the run's first round, carried out again and serialised."""
    made = build(resolve(read_yaml(halved.folder / "config.yaml"))).experiment
    net, total = made.net(), 0
    server = made.method.init_server(made.context(net, 0))
    for client in made.plan.participants(0):
        ctx = made.context(net, 0, round=0, client=client)
        down, data = made.method.send(server, client, ctx), made.plan.train(client, 0, 0, "train")
        up = made.method.client_update(down, made.method.init_client(ctx), data, ctx).up
        blob = save({f"{field}/{name}": tensor.contiguous() for field, name, tensor in items(up)})
        total += len(blob) - 8 - int.from_bytes(blob[:8], "little")
    first = next(row for row in halved.metrics if row["scope"] == "round" and row["round"] == 0)
    assert first["bytes_up"] == total
