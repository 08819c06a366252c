"""Tables on prompts, routing and messages: numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fedloom.core import Table
from fedloom.core.payload import nbytes
from fedloom.methods.duet_facts import expert_routing, prompt_pool, sent_by_component
from fedloom.methods.duet_stages import COMPONENTS

SENT = {"shared adapters": "*_adapters.*.shared.*", "local adapters": "*_adapters.*", "prompt": "context"}


def by_title(tables: list[Table]) -> dict[str, Table]:
    return {table.title: table for table in tables}


def usage() -> torch.Tensor:
    """Three clients, two tasks, four prompts; the second client takes part in task 1 alone, the third never."""
    counts = torch.zeros(3, 2, 4, dtype=torch.int64)
    counts[0, 0, :2], counts[0, 1, 0], counts[1, 1, 3] = 3, 4, 2
    return counts


def test_prompts_are_told_per_task_and_client_as_shares():
    found = by_title(prompt_pool(usage()))
    first, second = found["Prompts sent, task 0"], found["Prompts sent, task 1"]
    assert (first.rows, first.columns, first.group) == ([0, 1], [0, 1, 3], "Prompts sent")
    assert first.values == [[0.5, 0.5, 0.0], [None, None, None]]
    assert second.values == [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    most = found["Most used prompts"]
    assert most.rows == [0, 1, 3]
    assert [row[0] for row in most.values] == pytest.approx([7 / 12, 3 / 12, 2 / 12], abs=1e-6)


def test_the_pool_by_task_has_the_entropy_of_a_client_and_the_divergence_over_clients():
    table = by_title(prompt_pool(usage()))["Use of the prompt pool"]
    assert (table.rows, table.columns[0]) == ([0, 1], "share of the pool in use")
    assert table.values[0] == pytest.approx([0.5, math.log(2), 0.0], abs=1e-6), "one client, two prompts in turn"
    assert table.values[1] == pytest.approx([0.5, 0.0, math.log(2)], abs=1e-6), "two clients with one prompt each"
    assert f"at most {math.log(4):.2f}" in table.note


def test_of_a_large_pool_the_most_used_prompts_are_shown_and_of_many_clients_the_first():
    counts = torch.arange(64).repeat(50, 1, 1)
    found = by_title(prompt_pool(counts))
    assert found["Prompts sent, task 0"].columns == list(range(48, 64))
    assert len(found["Prompts sent, task 0"].rows) == 40
    assert found["Most used prompts"].rows == list(range(63, 47, -1))
    assert prompt_pool(torch.zeros(2, 2, 4, dtype=torch.int64)) == []


def routing() -> dict[int, dict[str, torch.Tensor]]:
    """Two clients, two layers, two experts."""
    halves = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    sides = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    return {0: {"image": sides, "text": sides.flip(1)}, 4: {"image": sides.flip(1), "text": halves}}


def test_experts_by_layer_have_entropies_divergences_and_overlaps():
    tables = by_title(expert_routing(routing()))
    table = tables["Experts by layer"]
    first = dict(zip(table.columns, table.values[0], strict=True))
    apart = math.log(2)  # between (1, 0) and (0, 1)
    near = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) - math.log(2) / 2  # between (0, 1) and (1/2, 1/2)
    want = {
        "entropy, pictures": 0.0,
        "divergence over clients, pictures": apart,
        "entropy, texts": math.log(2) / 2,
        "divergence over clients, texts": near,
        "divergence of pictures and texts": (apart + near) / 2,
        "overlap of pictures and texts": (0.0 + 0.5) / 2,
    }
    assert first == pytest.approx(want, abs=1e-6)
    second = dict(zip(table.columns, table.values[1], strict=True))
    assert second["divergence of pictures and texts"] == 0 and second["overlap of pictures and texts"] == 1
    shares = tables["Routing of pictures and texts, layer 1 of 2"]
    assert shares.rows == ["pictures", "texts"] and shares.values == [[0.5, 0.5], [0.25, 0.75]]


def test_towers_of_different_depth_meet_at_their_last_layers_and_one_tower_is_told_alone():
    deep = {"image": torch.tensor([[1.0, 0.0], [0.5, 0.5]]), "text": torch.tensor([[0.5, 0.5]])}
    table = by_title(expert_routing({0: deep}))["Experts by layer"]
    row = dict(zip(table.columns, table.values[0], strict=True))
    assert len(table.rows) == 1 and row["overlap of pictures and texts"] == 1
    alone = by_title(expert_routing({0: {"image": deep["image"]}, 1: {}}))
    assert alone["Experts by layer"].columns == ["entropy, pictures", "divergence over clients, pictures"]
    assert alone["Routing of pictures and texts, layer 1 of 2"].rows == ["pictures"]
    assert expert_routing({}) == expert_routing({3: {}}) == []


def vit_b_16() -> dict[str, torch.Tensor]:
    """What Fed-Duet trains around a ViT-B/16, without storage: per block 8 adapters, a shared one, router and noise."""
    found = {"context": (16, 512), "fusion.attention": (66_048,)}
    for tower, width in (("image", 768), ("text", 512)):
        for block in range(12):
            at = f"{tower}_adapters.{block}"
            for name, hidden in (("shared.0", 512), *((f"local.{e}", 64) for e in range(8))):
                shapes = {"down.weight": (hidden, width), "down.bias": (hidden,), "up.weight": (width, hidden)}
                found |= {f"{at}.{name}.{part}": shape for part, shape in (shapes | {"up.bias": (width,)}).items()}
            found |= {f"{at}.router.{part}": (width, 8) for part in ("choice", "noise")}
    return {name: torch.empty(shape, device="meta") for name, shape in found.items()}


def test_bytes_by_component_are_those_of_the_specification_for_vit_b_16():
    params = vit_b_16()
    adapters = {n: t for n, t in params.items() if ".shared." in n or ".router." in n}
    sent = {
        "adapters, up": {"params": adapters, "summary": {"feature": torch.zeros(512), "loss": torch.zeros(1)}},
        "end of a task, up": {"params": params},
        "prompts, down": {"prompts": {"shared": torch.zeros(8, 16, 512)}},
    }
    table = sent_by_component(sent, COMPONENTS)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.values]
    found = dict(zip(table.rows, rows, strict=True))
    numbers = {"shared adapters": 15_756_288, "routers": 245_760}
    for name, count in numbers.items():
        assert found[name]["adapters, up"] == pytest.approx(4 * count / 1000)
    assert found["local adapters"] == pytest.approx(
        {"adapters, up": 0.0, "end of a task, up": 4 * 15_863_808 / 1000, "prompts, down": 0.0}
    )
    assert found["local prompt"]["end of a task, up"] == pytest.approx(4 * 8192 / 1000)
    assert found["fusion"]["end of a task, up"] == pytest.approx(4 * 66_048 / 1000)
    assert found["prompts"]["prompts, down"] == pytest.approx(4 * 65_536 / 1000)
    assert found["summary"]["adapters, up"] == pytest.approx(4 * 513 / 1000)
    assert found["all"]["adapters, up"] == pytest.approx(4 * (16_002_048 + 513) / 1000)


def test_every_byte_is_counted_once_whatever_the_patterns():
    sent = {
        "up": {"params": {"image_adapters.0.shared.0.w": torch.zeros(3), "image_adapters.0.local.0.w": torch.zeros(5)}},
        "down": {"params": {"context": torch.zeros(2, dtype=torch.float64)}, "clients": {"context": torch.zeros(7)}},
    }
    table = sent_by_component(sent, SENT)
    assert table.rows == ["shared adapters", "local adapters", "prompt", "clients", "all"]
    assert table.values == [[0.012, 0.0], [0.02, 0.0], [0.0, 0.016], [0.0, 0.028], [0.032, 0.044]]
    assert table.values[-1] == [nbytes(sent[kind]) / 1000 for kind in table.columns]
    assert sent_by_component(sent, {}).rows == ["params", "clients", "all"], "what no pattern fits"
