"""A server with a mask: what travels, what stays with a client, and which network serves whom."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedloom.core import ConfigError, Reply
from fedloom.core.payload import nbytes
from fedloom.engine.checkpoint import newest
from fedloom.merge.buffers import pooled_moments
from fedloom.methods.fedfip import fedfip
from fedloom.methods.subnetworks import MASKED
from fedloom.models.channels import unpack
from methods.pruning import Hand, masked, words
from toys.federation import BlobSpec, experiment, local
from toys.running import resume, start

NAME = "fedloom.methods.fedfip:fedfip"
PLAIN = {"contrast_weight": 0.0}


def marked(client: int, state: Any) -> Any:
    """A dense model in which every number is its own and tells the client."""
    count = iter(range(1, 100_000))

    def numbers(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        values = torch.tensor([next(count) for _ in range(tensor.numel())], dtype=tensor.dtype)
        return (values + 10_000 * (client + 1)).view(tensor.shape)

    return {field: {name: numbers(t) for name, t in tree.items()} for field, tree in state.items()}


@pytest.fixture
def hand() -> Iterator[Hand]:
    """A server with a mask, and client 0 with a shadow of its own and scores."""
    found = Hand("fedfip", keep=0.5, reactivation_threshold=0.5, react_max=1.0, **PLAIN)
    masked(found)
    scores = torch.arange(found.table.total, dtype=torch.float32)
    found.states[0] = {**marked(0, found.ctx().init_state()), "scores": {"channels": scores}}
    yield found


def test_a_client_is_sent_the_block_of_the_mask_and_its_bits(hand: Hand) -> None:
    down, kept = hand.down(0), hand.table.kept(hand.mask)
    assert set(down) == {"params", "buffers", "mask"}
    assert torch.equal(unpack(down["mask"]["bits"], 32), hand.mask) and down["mask"]["bits"].shape == (4,)
    for field in ("params", "buffers"):
        block = hand.table.gather(hand.server[field], kept)
        assert all(torch.equal(down[field][name], tensor) for name, tensor in block.items())
    inner, stream = hand.table.widths(kept)
    params = stream * 2 + 3 * stream + (stream * inner + 3 * inner) + (inner * stream + 3 * stream) + 6 * stream + 6
    assert nbytes(down) == 4 * (params + 2 * (2 * stream + inner)) + 3 * 8 + 32 // 8


def test_a_client_puts_the_block_into_its_shadow_and_opens_channels_of_its_own(hand: Hand) -> None:
    mask, mine, model = hand.own(0)
    assert torch.equal(mask, hand.mask) and bool(mine[mask].all()) and int(mine.sum()) > int(mask.sum())
    shadow, kept = hand.states[0], hand.table.kept(mask)
    for field in ("params", "buffers"):
        for name, tensor in model[field].items():
            inside = hand.table.scatter(
                {name: torch.ones_like(hand.down(0)[field][name], dtype=torch.bool)},
                kept,
                {name: torch.zeros_like(tensor, dtype=torch.bool)},
            )[name]
            assert torch.equal(tensor, torch.where(inside, hand.server[field][name], shadow[field][name])), name


def test_a_channel_that_becomes_shared_takes_the_servers_value(hand: Hand) -> None:
    mask, mine, model = hand.own(0)
    private = int((mine & ~mask).nonzero()[0])
    wider = mask.clone()
    wider[private] = True
    hand.server = {**hand.server, "mask": {"channels": wider}}
    _, _, after = hand.own(0)
    name, place = ("body.block.one.bias", private) if private < 24 else ("body.layers.0.bias", private - 24)
    assert model["params"][name][place] == hand.states[0]["params"][name][place] != hand.server["params"][name][place]
    assert after["params"][name][place] == hand.server["params"][name][place]


def test_a_channel_that_leaves_the_mask_stays_frozen_on_the_server_and_free_on_clients(hand: Hand) -> None:
    out = ~hand.mask
    before = hand.server
    updates = hand.round([0, 1], round=1)
    kept = hand.table.kept(out)
    for name, tensor in hand.server["params"].items():
        if (index := hand.table.index(name, kept)) and index[0] is not None:
            assert torch.equal(tensor[index[0]], before["params"][name][index[0]])
    own = hand.own(0)[1] & out
    inner, _ = hand.table.split(own)
    bias = "body.block.one.bias"
    assert not torch.equal(
        updates[0].state["params"][bias][inner], marked(0, hand.ctx().init_state())["params"][bias][inner]
    )


def test_no_number_of_a_private_channel_is_in_an_upload(hand: Hand) -> None:
    """Every weight is marked, and training does not move it, so what left the client can be told by its bytes."""
    still = dataclasses.replace(hand.method, local=dataclasses.replace(hand.method.local, epochs=0))
    hand.method = still
    up = hand.work(0, round=1).up
    mask, mine, model = hand.own(0)
    assert int((mine & ~mask).sum()) > 3
    shared = {f: hand.table.gather(model[f], hand.table.kept(mask)) for f in ("params", "buffers")}
    private = words({f: model[f] for f in ("params", "buffers")}) - words(shared)
    assert len(private) > 300
    assert not private & words(up)
    assert words(shared) <= words(up)


def test_what_trains_next_to_private_channels_shows_in_the_shared_block_alone(hand: Hand) -> None:
    update = hand.work(0, round=1)
    mask, mine, _ = hand.own(0)
    assert not (words({f: update.state[f] for f in ("params", "buffers")}) - words(update.up)) & words(update.up)
    ragged = {name: t.shape for name, t in update.up["params"].items()}
    inner, stream = hand.table.widths(hand.table.kept(mask))
    assert ragged["body.block.one.weight"] == (inner, stream) and ragged["head.weight"] == (6, stream)
    assert hand.table.widths(hand.table.kept(mine)) != (inner, stream)


def test_scores_decide_on_the_private_channels_anew_whenever_the_mask_has_moved(hand: Hand) -> None:
    first = hand.own(0)[1] & ~hand.mask
    masked(hand, 0.25, seed=1)
    second = hand.own(0)[1] & ~hand.mask
    assert not bool((second & hand.mask).any()) and not torch.equal(first, second)


def test_an_infinite_phi_gives_everybody_the_global_network_and_zero_every_channel_with_a_score(hand: Hand) -> None:
    for phi, width in ((torch.inf, int(hand.mask.sum())), (0.0, 32 - int(not hand.mask[0]))):
        method = dataclasses.replace(hand.method, reopen=dataclasses.replace(hand.method.reopen, phi=phi))
        served = method.deployed(hand.down(0), hand.states[0], hand.ctx(0))
        assert served.net.module.channels.total == width
    assert hand.mask[0]  # whose score is 0, so that all others are positive


def test_a_client_without_a_state_is_served_like_anybody() -> None:
    hand = Hand("fedfip", keep=0.5, **PLAIN)
    masked(hand)
    everybody, x = hand.down(None), torch.randn(5, 2)
    a = hand.method.predict(everybody, {}, x, hand.ctx()).clone()
    b = hand.method.predict(hand.down(3), {}, x, hand.ctx(3)).clone()
    assert torch.equal(a, b)
    assert hand.method.deployed(everybody, {}, hand.ctx()).net.module.channels.total == int(hand.mask.sum())


@pytest.mark.parametrize("groups", ["coupled", "internal", "conv_out"])
def test_the_network_that_serves_computes_what_gates_on_the_dense_one_do(groups: str) -> None:
    hand = Hand("fedfip", keep=0.5, groups=groups, **PLAIN)
    mask, x = masked(hand), torch.randn(5, 2)
    scores = hand.method.predict(hand.down(None), {}, x, hand.ctx())
    dense = hand.ctx()
    dense.bind(hand.server["params"], hand.server["buffers"])
    with dense.net.module.gated(mask.float()):
        torch.testing.assert_close(scores, dense.scores(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["local", "recal"])
def test_local_statistics_never_travel(kind: str) -> None:
    hand = Hand("fedfip", keep=0.5, batch_norm=kind, **PLAIN)
    updates = hand.round([0, 1], round=1)
    assert all(set(update.up) == {"params", "scores"} for update in updates.values())
    assert "buffers" not in hand.down(0) and "buffers" in hand.down(None)
    start_values = hand.ctx().init_state()["buffers"]
    assert all(torch.equal(t, start_values[n]) for n, t in hand.server["buffers"].items())
    mean = "body.layers.1.running_mean"
    own = [hand.own(k, 2)[2]["buffers"][mean] for k in (0, 1)]
    assert not torch.equal(*own) and torch.equal(own[0], updates[0].state["buffers"][mean])


@pytest.mark.parametrize("groups", ["coupled", "conv_out"])
def test_recalibration_gives_the_shared_network_the_statistics_of_all_examples(groups: str) -> None:
    hand = Hand("fedfip", keep=0.5, groups=groups, batch_norm="recal", **PLAIN)
    mask = masked(hand)
    hand.round([0, 1, 2], round=1)
    hand.server = {**hand.server, "mask": {"channels": mask}}
    names = [trip.exchange for trip in hand.method.plan(hand.ctx().stage)]
    assert names == ["train"] * 4 + ["recalibrate"]
    exchange, before = hand.method.exchanges()["recalibrate"], hand.server
    replies = []
    for k in range(3):
        data, ctx = hand.whole.plan.train(k, 0, None, "recalibrate"), hand.ctx(k, None)
        update = exchange.work(exchange.send(hand.server, k, ctx), {"x": {}}, data, ctx)
        assert update.state == {"x": {}} and set(update.up) == {"buffers"} and update.weight is None
        replies.append(Reply(k, float(len(data)), update.up, {}))
    new = exchange.absorb(hand.server, replies, hand.ctx())
    kept = hand.table.kept(mask)
    old = hand.table.gather(before["buffers"], kept)
    pooled = pooled_moments([r.up["buffers"] for r in replies], [r.weight for r in replies], old)
    assert new["params"] is before["params"]
    for name, tensor in hand.table.gather(new["buffers"], kept).items():
        assert torch.equal(tensor, pooled[name]), name
    outside = hand.table.kept(~mask)
    for name in ("body.layers.1.running_var", "body.block.norm1.running_var"):
        (index,) = hand.table.index(name, outside)
        assert torch.equal(new["buffers"][name][index], before["buffers"][name][index])
        assert not torch.equal(new["buffers"][name], before["buffers"][name])
    everything = torch.cat(
        [next(iter(hand.whole.plan.train(k, 0, None, "look").epoch(batch_size=999, shuffle=False))).x for k in range(3)]
    )
    stem = torch.nn.functional.linear(
        everything, *(before["params"][f"body.layers.0.{leaf}"] for leaf in ("weight", "bias"))
    )
    (index,) = hand.table.index("body.layers.1.running_mean", kept)
    torch.testing.assert_close(
        new["buffers"]["body.layers.1.running_mean"][index], stem.mean(0)[index], rtol=1e-4, atol=1e-5
    )


def test_nothing_is_kept_by_clients_where_nothing_can_be_their_own() -> None:
    assert Hand("fedfip", keep=1.0, **PLAIN).work(0).state == {}
    assert set(Hand("fedfip", keep=1.0, batch_norm="local", **PLAIN).work(0).state) == {"params", "buffers"}
    assert set(Hand("fedfip", keep=0.5, **PLAIN).work(0).state) == {"params", "buffers", "scores"}


def test_costs_are_those_of_the_layers_and_need_the_shape_of_an_input() -> None:
    hand = Hand("fedfip", keep=0.5, threshold="flops_aware", **PLAIN)
    # the stem 8 x 2, the block's layers 24 x 8 and 8 x 24, the head 6 x 8
    stream, inner = 2 + 24 + 24 + 6, 8 + 8
    assert hand.net.module.cost.tolist() == [inner] * 24 + [stream] * 8
    spec = SimpleNamespace(classifier=BlobSpec().classifier, num_classes=6, seed=0)
    with pytest.raises(ConfigError, match="needs the input's shape"):
        fedfip(local=local(), threshold="flops_aware").module(spec)
    assert not hasattr(fedfip(local=local()).module(spec), "cost")


def test_every_grouping_of_compact_networks_can_be_masked_instead(tmp_path: Path) -> None:
    """A run of several rounds in which clients open channels: the same model both ways, up to rounding."""

    def reached(folder: Path, entry: Any) -> Any:
        whole = experiment(NAME, options={"keep": 0.5, "reactivation_threshold": 0.1, "react_max": 0.5}, num_stages=1,
                           rounds=3, spec=BlobSpec(residual=True), cohort=1.0)  # fmt: skip
        method = whole.method if entry is None else dataclasses.replace(whole.method, entry=entry)
        summary = start(folder, dataclasses.replace(whole, method=method, rebuild=None))
        return newest(folder)[0], summary

    (compact, small), (dense, large) = reached(tmp_path / "compact", None), reached(tmp_path / "masked", MASKED)
    assert torch.equal(compact["mask"]["channels"], dense["mask"]["channels"])
    for field in ("params", "buffers"):
        for name, tensor in compact[field].items():
            torch.testing.assert_close(tensor, dense[field][name], rtol=1e-3, atol=1e-4)
    assert small["bytes_up"] == large["bytes_up"]
    assert small["active_parameters"] < small["parameters"] == large["active_parameters"]


def test_a_run_goes_on_where_it_stopped_with_every_clients_own_channels(tmp_path: Path) -> None:
    options = {"keep": 0.5, "reactivation_threshold": 0.1, "react_max": 0.5}
    given = {"spec": BlobSpec(residual=True), "num_stages": 2, "rounds": 2, "options": options}
    whole = start(tmp_path / "whole", experiment(NAME, **given))
    start(tmp_path / "cut", experiment(NAME, **given), checkpoint_keep=100)
    for late in sorted((tmp_path / "cut" / "checkpoints").iterdir())[2:]:
        for file in late.iterdir():
            file.unlink()
        late.rmdir()
    assert resume(tmp_path / "cut", experiment(NAME, **given))["state_sha256"] == whole["state_sha256"]
