"""FEDFIP: what a round makes of scores and signatures, what travels, who may be away, and where it is FedAvg."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from fedloom.core import ConfigError, Reply
from fedloom.core.payload import digest, is_finite, nbytes
from fedloom.engine.checkpoint import newest
from fedloom.engine.files import load_payload
from fedloom.engine.store import ClientStore
from fedloom.local.gate_fisher import gate_fisher
from fedloom.methods.fedfip import ABLATIONS, PRESETS, FedFIP, fedfip
from fedloom.models.channels import unpack
from fedloom.select.channels import signature
from methods.pruning import Hand, masked, words
from toys.federation import BlobSpec, experiment, local
from toys.running import start

FIP, AVG = "fedloom.methods.fedfip:fedfip", "fedloom.methods.fedavg:fedavg"
OPEN = {"keep": 0.5, "reactivation_threshold": 0.1, "react_max": 0.5}


def deep(name: str = FIP, **given: Any) -> Any:
    return experiment(name, **{"num_stages": 1, "rounds": 4, "spec": BlobSpec(residual=True), **given})


@pytest.mark.parametrize("kind", ["mean", "pooled"])
def test_with_every_channel_and_no_contrast_it_is_fedavg(kind: str, tmp_path: Path) -> None:
    plan = {"num_stages": 2, "rounds": 3}
    options = {"keep": 1.0, "contrast_weight": 0.0, "batch_norm": kind}
    ours = start(tmp_path / "ours", deep(options=options, **plan))
    theirs = start(tmp_path / "theirs", deep(AVG, options={"buffers": kind}, **plan))
    assert ours["params_sha256"] == theirs["params_sha256"]
    assert ours["accuracy_matrix"] == theirs["accuracy_matrix"] and ours["bytes_up"] == theirs["bytes_up"]
    assert ours["pass_visits"] == 0
    more = start(tmp_path / "more", deep(options={**options, "contrast_weight": 0.5}, **plan))
    assert more["params_sha256"] != theirs["params_sha256"]


def test_the_round_that_warms_up_is_fedavg_and_its_scores_make_the_mask_of_the_next() -> None:
    hand, plain = Hand("fedfip", keep=0.5), Hand("fedavg")
    hand.round([0, 1, 2])
    plain.round([0, 1, 2])
    for field in ("params", "buffers"):
        assert all(torch.equal(t, plain.server[field][n]) for n, t in hand.server[field].items())
    assert int(hand.mask.sum()) == 16
    assert torch.equal(unpack(hand.down(0)["mask"]["bits"], 32), hand.mask)


def test_the_mask_of_a_round_is_made_of_the_scores_of_the_round_before() -> None:
    hand, masks = Hand("fedfip", keep=0.5, threshold="raw_global", min_keep=0.0), []
    for round in range(3):
        masks.append(hand.mask)
        updates = hand.round([0, 1], round)
        weights = torch.tensor([hand.examples(k) for k in (0, 1)], dtype=torch.float64)
        ups = torch.stack([updates[k].up["scores"]["channels"].double() for k in (0, 1)])
        mean = (weights[:, None] / weights.sum() * ups).sum(0)
        torch.testing.assert_close(hand.server["scores"]["channels"].double(), mean, rtol=1e-6, atol=0)
        best = set(hand.server["scores"]["channels"].topk(16).indices.tolist())
        assert set(hand.mask.nonzero().flatten().tolist()) == best
        block = hand.table.widths(hand.table.kept(masks[-1]))
        assert all(u.up["params"]["body.block.one.weight"].shape == block for u in updates.values())
    assert bool(masks[0].all()) and not torch.equal(masks[1], masks[2])


def test_scores_are_taken_at_the_end_of_training_of_every_channel_with_the_clients_own_open() -> None:
    hand = Hand("fedfip", **OPEN)
    hand.round([0, 1])
    update = hand.work(0, round=1)
    _, mine, _ = hand.own(0, 1)
    ctx, data = hand.ctx(0, 1), hand.whole.plan.train(0, 0, 1, "train")
    ctx.bind(update.state["params"], update.state["buffers"])
    parts = data.by_domain()
    each = {k: gate_fisher(ctx, part, mine.float(), samples=512) for k, part in parts.items()}
    mixed = sum(len(parts[k]) / len(data) * each[k] for k in parts).float()
    torch.testing.assert_close(update.up["scores"]["channels"], mixed, rtol=1e-6, atol=0)
    assert update.state["scores"]["channels"] is update.up["scores"]["channels"]
    assert bool((mixed[~mine] > 0).any())  # what is closed can come back
    for k, fisher in each.items():
        share, _ = signature(fisher, hand.mask)
        torch.testing.assert_close(update.up["signatures"][str(k)], share[hand.mask].float())
        assert float(update.up["signatures"][str(k)].sum()) == pytest.approx(1, abs=1e-6)
    assert update.up["domains"]["counts"].tolist() == [len(parts[0]), len(parts[1])]


def test_bytes_of_a_round_are_those_of_the_formula() -> None:
    """up 4 (P + B + C + K_i |M|), down 4 (P + B + K |M|) + ceil(C / 8); counters and counts are 8 bytes each."""
    hand = Hand("fedfip", **OPEN)
    hand.round([0, 1])
    widths = hand.table.widths(hand.table.kept(hand.mask))
    inner, stream, total = *widths, int(hand.mask.sum())
    weights = 2 * stream + 2 * inner * stream + (stream + inner + stream) + 2 * (2 * stream + inner) + 6 * stream + 6
    statistics, counters = 2 * (2 * stream + inner), 3 * 8
    down, up = hand.down(0, 1), hand.work(0, 1).up
    assert nbytes(down) == 4 * (weights + statistics + 2 * total) + counters + 32 // 8
    assert nbytes(up) == 4 * (weights + statistics + 32 + 2 * total) + counters + 2 * 8
    assert set(up) <= set(FedFIP.reveals) and total == 16


def test_no_word_of_a_private_slice_leaves_the_client() -> None:
    hand = Hand("fedfip", **OPEN)
    hand.round([0, 1])
    hand.round([0, 1], 1)
    update = hand.work(0, 2)
    mask, mine, _ = hand.own(0, 2)
    assert bool((mine & ~mask).any())
    model = {field: update.state[field] for field in ("params", "buffers")}
    block = {field: hand.table.gather(model[field], hand.table.kept(mask)) for field in model}
    private = words(model) - words(block)
    assert len(private) > 100 and not private & words(update.up) and words(block) <= words(update.up)


def test_nothing_is_measured_or_sent_that_nobody_needs() -> None:
    bare = Hand("fedfip", keep=1.0, contrast_weight=0.0)
    assert set(bare.work(0).up) == {"params", "buffers"}
    assert bare.whole.plan.train(0, 0, 0, "train").visits.passes == 0
    assert set(Hand("fedfip", keep=1.0).work(0).up) == {"params", "buffers", "signatures", "domains"}
    assert set(Hand("fedfip", contrast_weight=0.0).work(0).up) == {"params", "buffers", "scores"}
    warm = Hand("fedfip", warmup_rounds=3)
    assert [set(warm.work(0, t).up) == {"params", "buffers"} for t in range(3)] == [True, True, False]


def test_prototypes_start_at_the_first_mean_of_signatures_and_follow_the_mask() -> None:
    hand = Hand("fedfip", keep=0.5, prototype_momentum=0.5)
    values = hand.server["prototypes"]["values"]
    assert values.shape == (2, 32) and not values.any()
    for round in range(3):
        old, mask = hand.server["prototypes"]["values"], hand.mask
        updates = hand.round([0, 1, 3], round)
        new = hand.server["prototypes"]["values"]
        for k in range(2):
            n = torch.tensor([float(u.up["domains"]["counts"][k]) for u in updates.values()])
            mean = torch.zeros(32)
            mean[mask] = sum(w * u.up["signatures"][str(k)] for w, u in zip(n / n.sum(), updates.values(), strict=True))
            moved = mean if round == 0 else 0.5 * old[k] + 0.5 * mean
            inside = torch.where(hand.mask, moved, 0)
            torch.testing.assert_close(new[k], inside / inside.sum(), rtol=1e-5, atol=1e-7)
    assert torch.equal(hand.down(0)["prototypes"]["values"], new[:, hand.mask])
    assert "prototypes" not in hand.down(None)


def test_the_contrast_is_silent_until_two_domains_have_prototypes() -> None:
    with_it, without = Hand("fedfip", contrast_weight=5.0), Hand("fedfip", contrast_weight=0.0)
    model = ("params", "buffers")
    first = [{f: h.work(0).up[f] for f in model} for h in (with_it, without)]
    assert digest(first[0]) == digest(first[1])
    with_it.round([0, 1])
    without.round([0, 1])
    second = [{f: h.work(0, 1).up[f] for f in model} for h in (with_it, without)]
    assert digest(second[0]) != digest(second[1])
    one = with_it.server["prototypes"]["values"].clone()
    one[1] = 0
    with_it.server = {**with_it.server, "prototypes": {"values": one}}
    assert digest({f: with_it.work(0, 1).up[f] for f in model}) == digest(second[1])


@pytest.mark.parametrize(("mode", "moves"), [("exact", True), ("norm", True), ("bn", True), ("detach", False)])
def test_a_constant_signature_moves_no_weight_and_every_other_form_does(mode: str, moves: bool) -> None:
    ends = []
    for weight in (0, 2):
        hand = Hand("fedfip", keep=0.75, contrast_weight=2.0, contrast_mode=mode)
        hand.round([0, 1])
        if not weight:
            silent = dataclasses.replace(hand.method.local, terms=hand.method.local.terms[:1])
            hand.method = dataclasses.replace(hand.method, local=silent)
        ends.append(digest({"params": hand.work(0, 1).up["params"]}))
    assert (ends[0] != ends[1]) is moves


def test_masks_freeze_at_their_share_of_the_run(tmp_path: Path) -> None:
    start(tmp_path / "run", deep(options={"keep": 0.5, "freeze": 0.5}, rounds=6), checkpoint_keep=100)
    points = sorted((tmp_path / "run" / "checkpoints").iterdir())
    masks = [load_payload(point / "server.safetensors")["mask"]["channels"].tolist() for point in points]
    assert [sum(mask) for mask in masks] == [16] * 6
    assert masks[0] != masks[1] != masks[2] == masks[3] == masks[4] == masks[5]


def test_a_client_that_was_away_takes_the_block_first_and_keeps_its_private_slices() -> None:
    hand = Hand("fedfip", **OPEN)
    hand.round([0, 1])
    hand.round([0, 1], 1)
    away = hand.states[0]
    for round in (2, 3):
        hand.round([1, 2], round)
    assert hand.states[0] is away
    mask, mine, model = hand.own(0, 3)
    kept = hand.table.kept(mask)
    for name, tensor in model["params"].items():
        part = hand.table.gather({name: tensor}, kept)[name]
        assert torch.equal(part, hand.table.gather({name: hand.server["params"][name]}, kept)[name])
        own = hand.table.scatter({name: torch.zeros_like(part)}, kept, {name: tensor - away["params"][name]})[name]
        assert not own.any(), name
    assert torch.equal(mine, mask | hand.method.reopen(away["scores"]["channels"], mask, hand.table.sizes))


def test_optimiser_state_is_new_in_every_round_so_a_round_depends_on_what_is_sent_and_kept_alone() -> None:
    hand = Hand("fedfip", **OPEN)
    hand.round([0, 1])
    assert digest(hand.work(0, 1).up) == digest(hand.work(0, 1).up)


@pytest.mark.parametrize("kind", ["mean", "recal"])
def test_clients_that_hold_nothing_or_miss_a_domain_do_no_harm(kind: str, tmp_path: Path) -> None:
    options = {**OPEN, "batch_norm": kind}
    whole = deep(options=options, hollow=(2,), num_clients=5, cohort=1.0)
    summary = start(tmp_path / "run", whole)
    assert summary["failed_clients"] == summary["rejected_updates"] == 0
    server, _ = newest(tmp_path / "run")
    assert int(server["mask"]["channels"].sum()) == 16
    assert all(is_finite(t) for tree in server.values() for t in tree.values())


def test_a_client_of_one_domain_has_one_signature_and_the_others_prototypes_stay() -> None:
    hand = Hand("fedfip", keep=0.5)
    hand.round([0, 1])
    data, ctx = hand.whole.plan.train(0, 0, 1, "train"), hand.ctx(0, 1)
    (here, _) = data.by_domain().values()
    update = hand.method.client_update(hand.down(0, 1), hand.states[0], here, ctx)
    assert set(update.up["signatures"]) == {"0"} and update.up["domains"]["counts"].tolist() == [len(here), 0]
    before = hand.server["prototypes"]["values"]
    new = hand.method.server_update(hand.server, [Reply(0, 1.0, update.up, {})], hand.ctx(None, 1))
    torch.testing.assert_close(
        new["prototypes"]["values"][1], hand.method.prototypes.under(before, new["mask"]["channels"])[1]
    )
    assert not torch.equal(new["prototypes"]["values"][0], before[0])


def test_data_without_domains_are_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="domain"):
        fedloom.run("quickstart", method="fedfip", out=tmp_path / "run", training={"rounds": 1})


def test_a_client_that_diverges_is_rejected_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = FedFIP.client_update

    def diverged(self: FedFIP, down: Any, state: Any, data: Any, ctx: Any) -> Any:
        update = work(self, down, state, data, ctx)
        if ctx.client != 1 or "scores" not in update.up:
            return update
        bad = {"channels": torch.full_like(update.up["scores"]["channels"], torch.nan)}
        return update._replace(up={**update.up, "scores": bad}, state={**update.state, "scores": bad})

    monkeypatch.setattr(FedFIP, "client_update", diverged)
    summary = start(tmp_path / "run", deep(options=OPEN, cohort=1.0, rounds=2))
    server, progress = newest(tmp_path / "run")
    assert summary["rejected_updates"] == 2 and 1 not in progress.versions
    assert all(is_finite(t) for tree in server.values() for t in tree.values())
    kept = ClientStore(tmp_path / "run" / "clients").load(0, progress.versions[0])
    assert kept is not None and bool(kept["scores"]["channels"].isfinite().all())


def test_personal_and_global_networks_are_both_measured(tmp_path: Path) -> None:
    summary = start(tmp_path / "run", deep(options=OPEN, cohort=1.0))
    assert summary["active_parameters"] < summary["parameters"]
    assert summary["personal_domain_accuracy"].keys() == summary["domain_accuracy"].keys() == {"here", "there"}
    assert summary["personal_domain_accuracy"] != summary["domain_accuracy"]


def test_presets_and_ablations_are_what_they_say() -> None:
    stable = fedfip(local=local(), **PRESETS["stable"])
    refresh = stable.rule.refresh
    assert (refresh.warmup, refresh.every, refresh.freeze, stable.rule.ema) == (5, 5, 0.5, 0.9)
    assert fedfip(local=local(), **PRESETS["paper"]) == fedfip(local=local())
    whole = fedfip(local=local())
    assert (whole.rule.keep, whole.reopen.phi, whole.prototypes.momentum, whole.contrast.weight) == (
        0.8,
        1.0,
        0.5,
        0.01,
    )
    assert fedfip(local=local(), **ABLATIONS["no-dsfp"]).rule.keep == 1
    assert len(fedfip(local=local(), **ABLATIONS["no-dsr"]).local.terms) == 1
    assert fedfip(local=local(), **ABLATIONS["no-sa"]).sharing is not whole.sharing


def test_owned_channels_are_merged_among_their_owners() -> None:
    hand = Hand("fedfip", aggregate="owned", **OPEN)
    hand.round([0, 1])
    own = {k: hand.own(k, 1)[1] for k in (0, 1)}
    before = hand.server["params"]["body.block.one.bias"]
    updates = hand.round([0, 1], 1)
    after = hand.server["params"]["body.block.one.bias"]
    q = hand.examples(0) / (hand.examples(0) + hand.examples(1))
    for j in range(24):
        have = [k for k in (0, 1) if own[k][j]]
        values = [updates[k].state["params"]["body.block.one.bias"][j] for k in have]
        expected = {0: before[j], 1: values[0] if values else 0}.get(len(have))
        expected = q * values[0] + (1 - q) * values[1] if len(have) == 2 else expected
        torch.testing.assert_close(after[j], torch.as_tensor(expected), rtol=1e-5, atol=1e-6)
    assert any(bool(own[k][j]) and not bool(own[1 - k][j]) for k in (0, 1) for j in range(24))
    assert all(torch.equal(unpack(u.up["owned"]["bits"], 32), own[k]) for k, u in updates.items())


def test_a_hand_made_mask_is_what_everybody_trains() -> None:
    hand = Hand("fedfip", keep=0.5, react_max=0.0)
    mask = masked(hand)
    update = hand.work(2, 1)
    assert torch.equal(hand.own(2, 1)[1], mask)
    inner, stream = hand.table.widths(hand.table.kept(mask))
    assert update.up["params"]["head.weight"].shape == (6, stream)
    assert update.up["params"]["body.block.two.weight"].shape == (stream, inner)


def test_pooled_statistics_are_refused_where_entries_are_means_over_owners() -> None:
    with pytest.raises(ConfigError, match=r"method.batch_norm is pooled, but method.aggregate owned takes means"):
        fedfip(local=local(), aggregate="owned", batch_norm="pooled")
