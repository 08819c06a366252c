"""DapperFL: the fusion in numbers, a client's round against a loop by hand, recovery, and where it is FedAvg."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.core import ConfigError, PayloadError, Reply
from fedloom.core.payload import nbytes
from fedloom.local import SGD, LocalSGD, Phase
from fedloom.local.terms import CrossEntropy
from fedloom.local.terms.features_norm import FeaturesNorm, euclidean
from fedloom.methods.dapperfl import ABLATIONS, PRESETS, DapperFL, Fusion, dapperfl
from fedloom.methods.zero_filled import ZeroFilled
from fedloom.models.channels import unpack
from fedloom.select.channels import l1_scores
from fedloom.select.layerwise import layer_masks
from local.gated import examples, gated_context
from methods.pruning import Hand
from toys.federation import BlobSpec, experiment, local
from toys.running import start

DAPPER, AVG = "fedloom.methods.dapperfl:dapperfl", "fedloom.methods.fedavg:fedavg"
NEUTRAL = {"ratios": (0.0,), "gamma": 0.0, "alpha": 0.0, "alpha_min": 0.0}
PLAIN = SGD(lr=0.1, weight_decay=0.01)


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="dapperfl follows the public code")
        yield


def test_the_global_models_share_falls_to_its_least() -> None:
    shares = [round(Fusion().share(t), 4) for t in (1, 2, 3, 5, 10, 11)]
    assert shares == [0.9, 0.72, 0.576, 0.3686, 0.1208, 0.1]
    assert Fusion(0.0, 0.0).share(1) == 0.0 and Fusion(0.5, 0.9).share(3) == 0.9


def test_the_fusion_is_a_mean_of_two_models_and_exact_at_its_ends() -> None:
    old, new = (
        {"w": torch.tensor([1.0, 0.1]), "n": torch.tensor(3)},
        {"w": torch.tensor([2.0, 0.3]), "n": torch.tensor(5)},
    )
    found = Fusion(0.9)(old, new, 1)
    torch.testing.assert_close(found["w"], torch.tensor([1.1, 0.12]))
    assert found["n"] == 5
    assert torch.equal(Fusion(0.0, 0.0)(old, new, 4)["w"], new["w"]) and torch.equal(
        Fusion(1.0, 1.0)(old, new, 4)["w"], old["w"]
    )


@pytest.mark.parametrize(
    ("training", "plan"), [({"optimizer": PLAIN, "epochs": 3}, {}), ({"epochs": 1}, {"num_stages": 2})]
)
def test_with_nothing_fused_pruned_or_penalised_it_is_fedavg(training: Any, plan: Any, tmp_path: Path) -> None:
    given = {"spec": BlobSpec(residual=True), "rounds": 2, **plan}
    ours = start(tmp_path / "ours", experiment(DAPPER, options={**NEUTRAL, "training": training}, **given))
    theirs = start(tmp_path / "theirs", experiment(AVG, options={"training": training}, **given))
    assert ours["params_sha256"] == theirs["params_sha256"] and ours["accuracy_matrix"] == theirs["accuracy_matrix"]
    for name, change in (("gamma", 0.1), ("alpha_min", 0.5), ("ratios", (0.5,))):
        other = experiment(DAPPER, options={**NEUTRAL, name: change, "training": training}, **given)
        same = start(tmp_path / name, other)["params_sha256"] == theirs["params_sha256"]
        assert same is (name == "gamma" and training["epochs"] == 1)


def largest(groups: Sequence[torch.Tensor], counts: Sequence[int]) -> torch.Tensor:
    """Mask of the largest so many of every group."""
    masks = [torch.zeros(len(group), dtype=torch.bool) for group in groups]
    for mask, group, count in zip(masks, groups, counts, strict=True):
        mask[group.topk(count).indices] = True
    return torch.cat(masks)


def sent(ctx: Any, down: Any, data: Any, **options: Any) -> Any:
    method = dapperfl(local=LocalSGD(SGD(lr=0.05, momentum=0.9, weight_decay=0.01), epochs=3, batch_size=8), **options)
    return method.client_update(down, {}, data, ctx).up


def test_a_clients_round_is_that_of_a_loop_by_hand() -> None:
    """resnet8, round 2 (t = 3, a_t = 0.576), ratio 0.4; the pruned network as the dense one with gates of 0 and 1."""
    data = examples("resnet8", 24)
    ctx = gated_context("resnet8", client=2, round=2)
    down = ctx.init_state()
    up = sent(ctx, down, data, ratios=(0.0, 0.2, 0.4), gamma=0.3)
    module: Any = gated_context("resnet8").net.module.train()
    ahead = {n: t.clone() for n, t in module.state_dict().items()}
    table, classes = module.channels, ctx.class_mask("seen")

    def epoch(number: int, optimizer: Any, gates: torch.Tensor, gamma: float) -> None:
        for batch in data.epoch(number, 8):
            optimizer.zero_grad()
            with module.gated(gates):
                out = module(batch.x)
            loss = torch.nn.functional.cross_entropy(out["logits"] + classes, batch.y)
            (loss + gamma * out["feats"].square().sum(1).mean()).backward()
            for leaf in (module.head.weight, module.head.bias):
                leaf.grad[ctx.unseen] = 0
            optimizer.step()
            with torch.no_grad():
                module.head.weight[ctx.unseen] = down["params"]["head.weight"][ctx.unseen]
                module.head.bias[ctx.unseen] = down["params"]["head.bias"][ctx.unseen]

    def sgd() -> Any:
        return torch.optim.SGD(module.parameters(), 0.05, 0.9, weight_decay=0.01)

    epoch(0, sgd(), torch.ones(table.total, dtype=torch.float64), 0.0)
    fused = {n: 0.576 * ahead[n] + 0.424 * t if t.is_floating_point() else t for n, t in module.state_dict().items()}
    module.load_state_dict(fused)
    norms = [torch.stack([fused[w].abs().flatten(1).sum(1) for w in g.writers]).sum(0) for g in table.groups]
    mask = largest(norms, [-(-6 * size // 10) for size in table.sizes])
    optimizer = sgd()
    for number in (1, 2):
        epoch(number, optimizer, mask.double(), 0.3)
    assert torch.equal(unpack(up["mask"]["bits"], table.total), mask)
    assert [int(part.sum()) for part in table.split(mask)] == [-(-6 * size // 10) for size in table.sizes]
    expected = table.gather(module.state_dict(), table.kept(mask))
    for name, tensor in {**up["params"], **up["buffers"]}.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-10, msg=name)


def test_ratios_are_dealt_by_client_and_the_largest_channels_stay() -> None:
    hand = Hand("dapperfl", plan={"num_clients": 7})
    (inner, stream) = hand.table.sizes
    for client, ratio in enumerate((0.0, 0.2, 0.4, 0.6, 0.8, 0.0, 0.2)):
        up = hand.work(client).up
        mask = unpack(up["mask"]["bits"], 32)
        wide = [-(-round((1 - ratio) * 100) * size // 100) for size in (inner, stream)]
        assert [int(part.sum()) for part in hand.table.split(mask)] == wide
        assert up["params"]["body.block.one.weight"].shape == tuple(wide)
        assert set(up) == set(DapperFL.reveals)


def test_what_travels_up_is_the_small_network_and_the_bits_of_its_mask() -> None:
    hand = Hand("dapperfl", ratios=(0.5,))
    up, inner, stream = hand.work(1).up, 12, 4
    weights = 2 * stream + 2 * inner * stream + (stream + inner + stream) + 2 * (2 * stream + inner) + 6 * stream + 6
    assert nbytes(up) == 4 * (weights + 2 * (2 * stream + inner)) + 3 * 8 + 32 // 8
    assert nbytes(hand.down(1)) == nbytes(hand.ctx().init_state())


def test_the_network_is_pruned_by_the_fused_weights() -> None:
    """A share of 1 makes them those that were sent, whatever the first epoch does."""
    hand = Hand("dapperfl", ratios=(0.5,), alpha_min=1.0)
    scores = l1_scores(hand.server["params"], [g.writers for g in hand.table.groups])
    best = largest(hand.table.split(scores), (12, 4))
    assert torch.equal(unpack(hand.work(3).up["mask"]["bits"], 32), best)
    other = Hand("dapperfl", ratios=(0.5,), alpha=0.0, alpha_min=0.0)
    assert not torch.equal(unpack(other.work(3).up["mask"]["bits"], 32), best)


def test_the_server_recovers_what_was_pruned_and_averages_by_examples() -> None:
    hand = Hand("dapperfl", gamma=0.0)
    before = hand.server
    updates = hand.round([0, 1, 4])
    total = sum(hand.examples(k) for k in (0, 1, 4))
    for field in ("params", "buffers"):
        for name, old in before[field].items():
            expected = torch.zeros_like(old, dtype=torch.float64)
            for k in (0, 1, 4):
                kept = hand.table.kept(unpack(updates[k].up["mask"]["bits"], 32))
                whole = hand.table.scatter({name: updates[k].up[field][name]}, kept, {name: old})[name]
                expected += hand.examples(k) / total * whole.double()
            if old.is_floating_point():
                torch.testing.assert_close(hand.server[field][name], expected.float(), rtol=1e-6, atol=1e-7, msg=name)
            else:
                assert hand.server[field][name] == expected.round()


def test_entries_that_everybody_prunes_never_change() -> None:
    hand = Hand("dapperfl", ratios=(0.5,), alpha=1.0, alpha_min=1.0)
    first = hand.server
    for round in range(2):
        masks = [unpack(u.up["mask"]["bits"], 32) for u in hand.round([0, 1, 2, 3], round).values()]
        if round == 0:
            assert all(torch.equal(mask, masks[0]) for mask in masks)
            gone = masks[0].logical_not()
            for name, tensor in hand.server["params"].items():
                for dim, at in enumerate(hand.table.index(name, hand.table.kept(gone)) or ()):
                    if at is not None:
                        assert torch.equal(tensor.index_select(dim, at), first["params"][name].index_select(dim, at))
    assert not torch.equal(hand.server["params"]["head.weight"], first["params"]["head.weight"])


def test_a_part_that_does_not_fit_its_mask_is_refused_with_the_clients_name() -> None:
    hand = Hand("dapperfl", ratios=(0.5,))
    up = hand.work(1).up
    wrong = {**up, "mask": {"bits": torch.full_like(up["mask"]["bits"], 255)}}
    with pytest.raises(PayloadError, match="client 6"):
        hand.method.server_update(hand.server, [Reply(6, 1.0, wrong, {})], hand.ctx())


def test_one_epoch_prunes_what_it_sends_and_trains_no_more() -> None:
    hand = Hand("dapperfl", ratios=(0.5,), alpha_min=1.0, training={"epochs": 1})
    up = hand.work(0).up
    kept = hand.table.kept(unpack(up["mask"]["bits"], 32))
    for name, tensor in hand.table.gather(hand.server["params"], kept).items():
        assert torch.equal(up["params"][name], tensor)


def test_clients_without_examples_do_no_harm(tmp_path: Path) -> None:
    whole = experiment(DAPPER, spec=BlobSpec(residual=True), num_stages=1, hollow=(2,), num_clients=5, cohort=1.0)
    summary = start(tmp_path / "run", whole)
    assert summary["failed_clients"] == summary["rejected_updates"] == 0 and summary["final_accuracy"] > 0.5


def test_options_that_do_not_fit_are_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="cannot train in phases"):
        dapperfl(local=LocalSGD(phases=(Phase(("head.*",)),)))
    plain = dapperfl(local=local())
    assert plain.local.terms == (CrossEntropy(), FeaturesNorm(0.01)) and plain.ratios == (0.0, 0.2, 0.4, 0.6, 0.8)
    assert dapperfl(local=local(), **ABLATIONS["no-regulariser"]).local.terms == (CrossEntropy(),)
    assert dapperfl(local=local(), **ABLATIONS["no-pruning"]).ratios == (0.0,)
    assert dapperfl(local=local(), **ABLATIONS["no-fusion"]).fusion.share(1) == 0.0


def test_the_release_s_reading_says_so() -> None:
    said = r"follows the public code.*nothing is fused.*averaged as zeros.*the norm, not its square"
    with pytest.warns(UserWarning, match=said):
        method = dapperfl(local=local(), **PRESETS["code_2024"])
    assert isinstance(method, ZeroFilled) and method.local.terms == (CrossEntropy(), FeaturesNorm(0.01, euclidean))
    assert isinstance(dapperfl(local=local(), **PRESETS["paper"]), DapperFL)


def test_in_the_release_pruned_weights_are_averaged_as_zeros(quiet: None) -> None:
    hand = Hand("dapperfl", mode="official_quirks", ratios=(0.75, 0.25))
    updates = hand.round([0, 1])
    name = "body.block.two.weight"
    a, b = (updates[k].up["params"][name] for k in (0, 1))
    assert a.shape == b.shape == (8, 24)  # dense, with zeros: inputs of linear layers
    assert [int((~t.any(0)).sum()) for t in (a, b)] == [18, 6]
    q = hand.examples(0) / (hand.examples(0) + hand.examples(1))
    torch.testing.assert_close(hand.server["params"][name], q * a + (1 - q) * b)
    lost = ~a.any(0) & ~b.any(0)
    assert bool(lost.any()) and not hand.server["params"][name][:, lost].any()


def test_in_the_release_the_masks_are_those_of_the_first_epoch_and_hold_in_the_others(quiet: None) -> None:
    data, ctx = examples("resnet8", 24), gated_context("resnet8", client=1)
    down = ctx.init_state()
    training = LocalSGD(SGD(lr=0.05, momentum=0.9, weight_decay=0.01), epochs=3, batch_size=8)
    up = dapperfl(local=training, mode="official_quirks", ratios=(0.0, 0.5)).client_update(down, {}, data, ctx).up
    one = dataclasses.replace(training, epochs=1, terms=(CrossEntropy(), FeaturesNorm(0.01, euclidean)))
    first = one(down, data, ctx)
    masks = layer_masks(ctx.net.module, first.params, 0.5)
    for name, tensor in up["params"].items():
        if name in masks:
            assert not tensor[~masks[name]].any() and bool(tensor[masks[name]].all()), name
        elif name != "head.bias":
            assert not torch.equal(tensor, first.params[name]), name
    conv = up["params"]["backbone.blocks.1.conv2.weight"]
    assert float((conv != 0).double().mean()) == 0.25


def test_in_the_release_a_client_that_prunes_nothing_is_fedavgs(quiet: None, tmp_path: Path) -> None:
    options = {"mode": "official_quirks", "ratios": (0.0,), "gamma": 0.0, "training": {"optimizer": PLAIN}}
    ours = start(tmp_path / "ours", experiment(DAPPER, options=options, num_stages=1))
    theirs = start(tmp_path / "theirs", experiment(AVG, options={"training": {"optimizer": PLAIN}}, num_stages=1))
    assert ours["params_sha256"] == theirs["params_sha256"]


def test_a_run_tells_how_many_channels_each_client_keeps() -> None:
    hand = Hand("dapperfl", ratios=(0.0, 0.4, 0.9))
    (table,) = hand.method.facts(hand.server, {}, hand.ctx())
    assert table.rows == [0, 1, 2, 3] and table.columns == ["block.one of 24", "layers.0 of 8"]
    assert table.values == [[1.0, 1.0], [0.625, 0.625], [0.125, 0.125], [1.0, 1.0]], "15 and 5, 3 and 1"
    for client, row in zip(table.rows, table.values, strict=True):
        mask = unpack(hand.work(client).up["mask"]["bits"], 32)
        assert [float(part.double().mean()) for part in mask.split([24, 8])] == row
    assert Hand("dapperfl", ratios=(0.0, 0.0)).method.facts(hand.server, {}, hand.ctx()) == []


def test_in_the_release_a_run_tells_how_many_weights_of_each_layer_a_client_keeps(quiet: None) -> None:
    hand = Hand("dapperfl", mode="official_quirks", ratios=(0.4, 0.0))
    (table,) = hand.method.facts(hand.server, {}, hand.ctx())
    kept = {
        "body.layers.0": 1 / 2,
        "body.block.one": 5 / 8,
        "body.block.norm1": 14 / 24,
        "body.block.two": 14 / 24,
        "body.block.norm2": 5 / 8,
        "head": 5 / 8,
    }
    assert table.axes == ("client", "layer") and table.rows == [0, 1, 2, 3]
    assert dict(zip(table.columns, table.values[0], strict=True)) == pytest.approx(kept, abs=1e-6)
    assert table.values == [table.values[0], [1.0] * 6] * 2
    params = hand.work(0).up["params"]
    for name, share in kept.items():
        assert float((params[f"{name}.weight"] != 0).double().mean()) == pytest.approx(share)
    whole = Hand("dapperfl", mode="official_quirks", ratios=(0.0,))
    assert whole.method.facts(whole.server, {}, whole.ctx()) == []
