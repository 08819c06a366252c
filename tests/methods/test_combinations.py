"""Parts of different flagships in FedFMX: each by its numbers, switched off, and all of them at once."""

from __future__ import annotations

import shutil
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import entropy
from torch import nn

import fedloom
from fedloom import lifecycle
from fedloom.config import recipe_names, resolve, resolve_source
from fedloom.config.digest import config_hash
from fedloom.core import ConfigError, Context, Reply
from fedloom.core.payload import nbytes
from fedloom.core.seeds import generator
from fedloom.local.carries.routing_average import RoutingAverage
from fedloom.local.terms.gate import gate_probabilities
from fedloom.local.terms.routing_stability import RoutingStability
from fedloom.methods.channel_scores import MaskRule
from fedloom.methods.experts import MergeBySemantics
from fedloom.methods.fedfmx import fedfmx
from fedloom.methods.fisher_pool import FisherPool
from fedloom.methods.pruned_pool import PrunedPool
from fedloom.methods.routing_memory import CARRY
from fedloom.models.compact import prunable
from fedloom.models.experts import ExpertPool
from fedloom.models.spec import NetworkSpec
from fedloom.onnx_export import export_onnx
from fedloom.select.channels import group_mean
from methods.pruning import Hand, masked
from toys.federation import BlobSpec, experiment, local
from toys.running import resume, start

FMX = "fedloom.methods.fedfmx:fedfmx"
PARTS: dict[str, dict[str, Any]] = {
    "semantic": {"merge": "semantic", "align": 0.1},
    "stability": {"stability_weight": 0.5},
    "masks": {"keep_channels": 0.5},
}
ALL = {name: value for part in PARTS.values() for name, value in part.items()}
PLAN: dict[str, Any] = {"num_clients": 3, "num_stages": 2, "rounds": 2, "per_class": 15, "cohort": 1.0}
PLAN["spec"] = BlobSpec(residual=True)


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return start(tmp_path_factory.mktemp("parent") / "run", experiment(FMX, **PLAN))


@pytest.mark.parametrize("part", PARTS)
def test_a_borrowed_part_changes_the_parent_and_at_its_default_is_no_part_of_the_hash(
    part: str, parent: dict[str, Any], tmp_path: Path
) -> None:
    found = start(tmp_path / "run", experiment(FMX, options=PARTS[part], **PLAN))
    assert found["params_sha256"] != parent["params_sha256"]
    assert found["failed_clients"] == found["rejected_updates"] == 0

    def hashed(tree: dict[str, Any]) -> str:
        return config_hash(tree, "data", "cpu", "contiguous")

    plain, combined = (resolve({"method": {"name": "fedfmx", **given}}).as_dict() for given in ({}, PARTS[part]))
    later = ("align", "stability_weight", "keep_channels")
    before = {name: value for name, value in plain["method"].items() if name not in later}
    assert hashed(plain) == hashed({**plain, "method": before}) != hashed(combined)


def test_masks_that_keep_all_and_a_term_without_weight_leave_the_parent(parent: dict[str, Any], tmp_path: Path) -> None:
    whole = experiment(FMX, **PLAN)
    pool: Any = whole.method
    given = {field.name: getattr(pool, field.name) for field in fields(FisherPool)}
    masks = PrunedPool(**given, rule=MaskRule(1.0, group_mean))
    term, carry = RoutingStability("kl", 0.0, gate_probabilities), RoutingAverage(routing=gate_probabilities)
    loop = replace(pool.local, terms=(*pool.local.terms, term), carries={**pool.local.carries, CARRY: carry})
    for name, method in {"masks": masks, "term": replace(pool, local=loop)}.items():
        found = start(tmp_path / name, replace(whole, method=method, rebuild=None))
        assert found["params_sha256"] == parent["params_sha256"], name
        assert found["accuracy_matrix"] == parent["accuracy_matrix"] and found["bytes_up"] == parent["bytes_up"]


def test_the_semantic_merge_of_one_client_whose_gate_takes_every_expert_is_the_parents(tmp_path: Path) -> None:
    alone = {**PLAN, "num_clients": 1, "num_stages": 1}
    plain, semantic = (
        start(tmp_path / merge, experiment(FMX, options={"merge": merge, "inference_experts": "all"}, **alone))
        for merge in ("client", "semantic")
    )
    assert semantic["params_sha256"] == plain["params_sha256"] and semantic["bytes_up"] > plain["bytes_up"]


def test_a_pools_experts_that_clients_move_apart_are_merged_by_squared_sizes_and_the_rest_by_sizes() -> None:
    method: Any = fedfmx(local=local(), merge="semantic")
    assert isinstance(method.merge, MergeBySemantics)
    old = dict(method.module(BlobSpec()).named_parameters())
    old = {name: tensor.detach() for name, tensor in old.items()}
    drawn = generator(0, "delta")
    delta = {name: 0.1 * torch.randn(tensor.shape, generator=drawn) for name, tensor in old.items()}
    centroids = torch.randn(1, 4, 8, generator=drawn)
    statistics = {"count": torch.full((1, 4), 5.0), "centroid": centroids, "hidden": torch.zeros(1, 8)}
    ends = [{name: old[name] + sign * delta[name] for name in old} for sign in (1, -1)]
    ups = [{"params": end, "routing": {**statistics, "tokens": torch.ones(1)}} for end in ends]
    merged = method.merge([Reply(k, n, ups[k], {}) for k, n in enumerate((30.0, 10.0))], old, False)
    for name, value in merged.items():
        share = (30**2 - 10**2) / (30**2 + 10**2) if name.startswith(("bodies.", "heads.")) else (30 - 10) / 40
        torch.testing.assert_close(value, old[name] + share * delta[name], rtol=1e-5, atol=1e-6)


def test_one_expert_whose_head_reads_the_features_is_fedfip_without_contrast_and_private_channels() -> None:
    bare = {"experts": 1, "body": "identity", "beta": 0.0, "gamma": 0.0, "fisher_home": "reset"}
    ours = Hand("fedfmx", keep_channels=0.5, **bare)
    theirs = Hand("fedfip", keep=0.5, contrast_weight=0.0, react_max=0.0)
    for round in range(4):
        down = nbytes({"params": ours.down(0)["params"]}) - nbytes({"params": theirs.down(0)["params"]})
        stream = ours.table.widths(ours.table.kept(ours.mask))[1]
        assert down == 4 * (stream + 1), "the gate of one expert"
        ours.round([0, 1, 2], round)
        theirs.round([0, 1, 2], round)
        assert torch.equal(ours.mask, theirs.mask)
        torch.testing.assert_close(ours.server["scores"], theirs.server["scores"], rtol=2e-3, atol=1e-7)
        for name, tensor in theirs.server["params"].items():
            mine = name.replace("body.", "backbone.").replace("head.", "heads.")
            value = ours.server["params"][mine]
            torch.testing.assert_close(value[0] if "heads" in mine else value, tensor, rtol=0, atol=5e-4)
    assert int(ours.mask.sum()) == 16


def test_a_compact_pool_gives_what_gates_of_0_and_1_give() -> None:
    for body in ("mlp", "identity"):
        dense = prunable(ExpertPool(BlobSpec(residual=True).backbone(), 6, 3, body, chosen=2)).eval()
        mask = torch.arange(32) % 3 != 0
        kept = dense.channels.kept(mask)
        compact = dense.rebuild(dense.channels.widths(kept)).eval()
        compact.load_state_dict(dense.channels.gather(dense.state_dict(), kept))
        x = torch.randn(7, 2, generator=generator(0, "x"))
        with dense.gated(mask.float()):
            expected = dense(x)
        found = compact(x)
        for name in ("logits", "expert_logits", "router_logits", "routing"):
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
        assert compact.num_features == compact.moe_layers[0].hidden == len(kept["layers.0".join(("backbone.", ""))])


def test_a_masks_share_of_a_pool_is_all_that_travels_and_serves() -> None:
    hand = Hand("fedfmx", keep_channels=0.5)
    masked(hand)
    inner, stream = hand.table.widths(hand.table.kept(hand.mask))
    backbone = (2 * stream + stream) + 2 * stream * inner + inner + stream + 2 * (stream + inner + stream)
    gate, expert = 4 * stream + 4, (14 * stream + 14) + (14 * 6 + 6) + (6 * 6 + 6)
    statistics, counters, fisher = 2 * (stream + inner + stream), 3 * 8, 4 * 6 * 7
    model = 4 * (backbone + gate + 4 * expert + statistics) + counters
    assert nbytes(hand.down(0)) == model + 4 * fisher + 32 // 8
    update = hand.work(0)
    assert nbytes(update.up) == model + 4 * fisher + 4 * 32 and set(update.up) <= set(PrunedPool.reveals)
    assert hand.down(None).keys() == {"params", "buffers", "mask"}
    served: Any = hand.method.deployed(hand.down(None), {}, hand.ctx()).net.module
    assert served.active_parameters == backbone + gate + 2 * expert
    x = torch.randn(5, 2, generator=generator(0, "x"))
    scores = hand.method.predict(hand.down(None), {}, x, hand.ctx())
    torch.testing.assert_close(scores, served.eval()(x)["logits"].detach())


def test_what_is_pruned_keeps_its_values_on_the_server_and_can_return() -> None:
    hand = Hand("fedfmx", keep_channels=0.3, plan={"per_class": 20})
    masks = []
    for round in range(5):
        before, mask = hand.server["params"], hand.mask
        hand.round([0, 1], round)
        masks.append(mask)
        name = "backbone.block.one.weight"
        rows, columns = hand.table.split(mask)
        moved = hand.server["params"][name] != before[name]
        assert not moved[~rows].any() and not moved[:, ~columns].any() and moved[rows][:, columns].any()
        assert (hand.server["scores"]["channels"][~mask] > 0).any() or bool(mask.all())
    assert bool(masks[0].all()) and all(int(mask.sum()) == 10 for mask in masks[1:])
    gone = [j for j in range(32) if any(not a[j] and b[j] for a, b in pairwise(masks))]
    assert gone, "no channel came back"


def test_a_client_without_examples_sends_no_scores() -> None:
    hand = Hand("fedfmx", keep_channels=0.5, plan={"hollow": (2,)})
    updates = hand.round([0, 1, 2])
    assert "scores" in updates[0].up and "scores" not in updates[2].up
    assert int(hand.mask.sum()) == 16


class Watch:
    """A decision that notes the mean gate of every batch, beside the method's own."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, out: Any, batch: Any, ref: Any, carry: Any) -> dict[str, Any]:
        self.seen.append(out["router_logits"].double().softmax(1).mean(0))
        return {}


def stable(weight: float, **changes: Any) -> tuple[Any, Any, Watch]:
    """FedFMX with the term, its experiment, and the gates that training sees."""
    whole = experiment(FMX, options={"stability_weight": weight} if weight else {}, num_stages=3)
    watch, loop = Watch(), whole.method.local  # type: ignore[attr-defined]
    method = replace(whole.method, local=replace(loop, decisions=(*loop.decisions, watch), **changes))
    return method, whole, watch


def work(method: Any, whole: Any, state: Any, stage: int, round: int = 0) -> Any:
    net = whole.net()
    ctx: Context = whole.context(net, stage, round=round, client=0)
    server = method.init_server(ctx)
    return method.client_update(server, state, whole.plan.train(0, stage, round, "train"), ctx)


def test_a_client_remembers_the_running_mean_of_its_gate() -> None:
    method, whole, watch = stable(0.5)
    state = work(method, whole, {}, 0).state
    mean = watch.seen[0]
    for gate in watch.seen[1:]:
        mean = 0.9 * mean + 0.1 * gate
    assert len(watch.seen) > 5 and state["target"] == {} and int(state["task"]["stage"]) == 0
    torch.testing.assert_close(state["routing"]["gate"][0].double(), mean, rtol=1e-5, atol=1e-6)
    plain, _, _ = stable(0.0)
    assert work(plain, whole, {}, 0).state == {}


def test_the_target_is_the_mean_at_the_end_of_the_clients_task_before() -> None:
    method, whole, _ = stable(0.5)
    first = work(method, whole, {}, 0).state
    again = work(method, whole, first, 0, round=1).state
    assert again["target"] == {}, "the first task has none"
    later = work(method, whole, again, 1).state
    more = work(method, whole, later, 1, round=1).state
    for state in (later, more):
        assert torch.equal(state["target"]["gate"], again["routing"]["gate"])
    assert not torch.equal(more["routing"]["gate"], later["routing"]["gate"])
    away = work(method, whole, again, 2).state
    assert torch.equal(away["target"]["gate"], again["routing"]["gate"])


def test_the_term_is_the_divergence_of_the_batch_mean_and_is_silent_in_the_first_task() -> None:
    losses, target = {}, torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    state = {"routing": {"gate": target}, "target": {}, "task": {"stage": torch.tensor(0)}}
    for weight in (0.0, 2.0):
        method, whole, watch = stable(weight, batch_size=1000, epochs=1)
        losses[weight] = [work(method, whole, state if weight else {}, stage).metrics["loss"] for stage in (0, 1)]
    assert losses[2.0][0] == losses[0.0][0]
    divergence = entropy(watch.seen[1].numpy(), target[0].double().numpy())
    assert losses[2.0][1] - losses[0.0][1] == pytest.approx(2 * divergence, rel=1e-3) and divergence > 0.01


def test_a_larger_weight_keeps_the_gate_nearer_to_its_target() -> None:
    found = []
    target = torch.tensor([[0.7, 0.1, 0.1, 0.1]])
    state = {"routing": {"gate": target}, "target": {}, "task": {"stage": torch.tensor(0)}}
    for weight in (0.01, 10.0):
        method, whole, watch = stable(weight, epochs=10)
        work(method, whole, state, 1)
        found.append(entropy(watch.seen[-1].numpy(), target[0].double().numpy()))
    assert found[1] < 0.2 * found[0]


def test_all_parts_work_together_and_resume_to_the_same_bits(tmp_path: Path) -> None:
    options = {**ALL, "fisher_home": "client"}
    whole = start(tmp_path / "whole", experiment(FMX, options=options, **PLAN), checkpoint_keep=100)
    assert whole["failed_clients"] == whole["rejected_updates"] == 0
    assert whole["active_parameters"] < whole["parameters"] / 2
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    points = sorted((tmp_path / "cut" / "checkpoints").iterdir())
    for path in points[2:]:
        shutil.rmtree(path)
    cut = resume(tmp_path / "cut", experiment(FMX, options=options, **PLAN))
    assert cut["state_sha256"] == whole["state_sha256"]


class Undeclared(nn.Module):
    num_features = 8

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


def test_masks_that_cannot_be_are_refused_in_words() -> None:
    told = r"keep_channels 0.5 needs experts with a body.* set method.body to mlp, or method.fisher_home 'server'"
    with pytest.raises(ConfigError, match=told):
        fedfmx(local=local(), keep_channels=0.5, body="identity")
    method = fedfmx(local=local(), keep_channels=0.5)
    with pytest.raises(
        ConfigError, match="channels under group normalisation cannot be pruned one by one: take resnet8"
    ):
        method.module(NetworkSpec("resnet8_gn", 10, (1, 8, 8)))
    with pytest.raises(ConfigError, match="has no channels to prune; take a network with hidden layers"):
        method.module(NetworkSpec("linear", 10, (1, 8, 8)))
    with pytest.raises(ConfigError, match=r"Undeclared does not declare its channels.*take another network"):
        prunable(ExpertPool(Undeclared(), 3))


COMBINED = [name for name in recipe_names() if name.startswith("combined/")]


@pytest.mark.parametrize("name", COMBINED)
def test_a_combined_recipe_is_its_base_with_options_of_fedfmx_alone(name: str) -> None:
    ours, theirs = (resolve(resolve_source(source)[1]).as_dict() for source in (name, "quickstart"))
    method = ours.pop("method")
    theirs.pop("method")
    plain = resolve({"method": "fedfmx"}).method
    changed = {option for option, value in method.items() if value != plain[option]}
    assert ours == theirs and method["name"] == "fedfmx" and changed and changed <= ALL.keys()


def test_there_is_a_recipe_for_every_part_and_for_all() -> None:
    assert {f"combined/fedfmx-{part}" for part in (*PARTS, "all")} == set(COMBINED)


@pytest.mark.filterwarnings("ignore")  # the exporter and its libraries warn about their own internals on import
def test_a_run_with_all_parts_exports_the_compact_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    tiny = {"training": {"rounds": 2, "local_epochs": 1}, "partition": {"clients": 2}, "stream": {"tasks": 2}}
    done = fedloom.run("combined/fedfmx-all", out=tmp_path / "run", **tiny)
    path, checked = export_onnx(done.folder, tmp_path / "pool.onnx")
    assert 4 * done.summary["active_parameters"] < path.stat().st_size < 4 * done.summary["parameters"]
    assert "agrees with torch" in checked or "onnxruntime is not installed" in checked
