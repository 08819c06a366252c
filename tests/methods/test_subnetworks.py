"""Parts of a network: compact and masked training agree step by step, and what a client shares in numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.core import Reply
from fedloom.core.seeds import generator
from fedloom.local import SGD, AdamW, LocalSGD
from fedloom.merge.buffers import frozen_buffers, mean_buffers
from fedloom.methods.subnetworks import COMPACT, ENTRIES, MASKED, OWNED, SHARED, SHARINGS, gathered, scattered, table
from fedloom.models.channels import Axis, Channels, Group, pack
from fedloom.models.groupings import by_layer, switched_off
from local.blobs import context
from local.gated import examples, gated_context, network
from toys.pruned import some

HEAVY = SGD(lr=0.05, momentum=0.9, weight_decay=0.05, nesterov=True)
OPTIMIZERS = {"sgd": HEAVY, "adamw": AdamW(lr=0.01, weight_decay=0.1)}


def trained(entry: Any, ctx: Any, state: Any, mask: Tensor, data: Any, local: LocalSGD) -> tuple[Any, dict[str, float]]:
    """The dense model after training the part in one of the two ways, as `Pruned.trained` does it."""
    part, inside = entry.enter(state, mask, ctx)
    end = entry.training(local)(part, data, inside, ref=entry.ref(part, mask, ctx))
    return entry.leave({"params": end.params, "buffers": end.buffers}, mask, state, ctx), end.metrics


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["toy", "small_cnn", "resnet8"])
def test_a_compact_network_and_one_with_channels_switched_off_train_alike_step_by_step(
    name: str, optimizer: str
) -> None:
    ctx = gated_context(name)
    state, mask = ctx.init_state(), some(table(ctx))
    for steps in (1, 2, 4):
        local = LocalSGD(OPTIMIZERS[optimizer], batch_size=4, clip_norm=0.5)
        data = examples(name, 4 * steps)
        (a, loss), (b, other) = (trained(e, ctx, state, mask, data, local) for e in (COMPACT, MASKED))
        assert loss["loss"] == pytest.approx(other["loss"], abs=1e-12)
        for field in ("params", "buffers"):
            for n in state[field]:
                torch.testing.assert_close(a[field][n], b[field][n], rtol=0, atol=1e-11, msg=f"{n} after {steps}")
        assert not torch.equal(a["params"]["head.weight"], state["params"]["head.weight"])


def test_rows_that_are_masked_train_as_gates_would_have_it() -> None:
    """conv_out: no compact network, so the reference is a loop by hand with gates on the layers' norms."""
    ctx = context(lambda: by_layer(network("resnet8")))
    state, mask, data = ctx.init_state(), some(table(ctx)), examples("resnet8", 12)
    end, _ = trained(MASKED, ctx, state, mask, data, LocalSGD(HEAVY, batch_size=4))
    module: Any = by_layer(network("resnet8")).train()
    optimizer = torch.optim.SGD(module.parameters(), 0.05, 0.9, weight_decay=0.05, nesterov=True)
    for batch in data.epoch(0, 4):
        optimizer.zero_grad()
        with module.gated(mask.double()):
            scores = module(batch.x)["logits"] + ctx.class_mask("seen")
        torch.nn.functional.cross_entropy(scores, batch.y).backward()
        module.head.weight.grad[ctx.unseen] = 0
        optimizer.step()
    kept = table(ctx).kept(mask)
    rows = table(ctx).gather(dict(module.named_parameters()), kept)
    for n, found in table(ctx).gather(end["params"], kept).items():
        if not n.startswith("head."):  # whose unseen rows decay here
            torch.testing.assert_close(found, rows[n].detach(), rtol=0, atol=1e-11, msg=n)


@pytest.mark.parametrize("entry", [COMPACT, MASKED])
def test_what_belongs_to_other_channels_is_kept_to_the_bit_and_nothing_given_is_altered(entry: Any) -> None:
    ctx = gated_context("resnet8", torch.float32)
    state, mask = ctx.init_state(), some(table(ctx))
    before = {f: {n: t.clone() for n, t in tree.items()} for f, tree in state.items()}
    end, _ = trained(
        entry, ctx, state, mask, examples("resnet8", 12, dtype=torch.float32), LocalSGD(HEAVY, batch_size=4)
    )
    moved = 0
    for field in ("params", "buffers"):
        for n, old in before[field].items():
            assert torch.equal(state[field][n], old)
            inside = torch.zeros_like(old, dtype=torch.bool)
            ones = table(ctx).gather({n: torch.ones_like(old, dtype=torch.bool)}, table(ctx).kept(mask))
            inside = table(ctx).scatter(ones, table(ctx).kept(mask), {n: inside})[n]
            assert torch.equal(end[field][n][~inside], old[~inside]), n
            moved += int((end[field][n] != old).sum())
    assert moved > 1000


def test_a_compact_network_is_that_small_and_the_dense_one_is_taken_as_it_is() -> None:
    ctx = gated_context("resnet8")
    state, mask, full = ctx.init_state(), some(table(ctx)), torch.ones(table(ctx).total, dtype=torch.bool)
    assert COMPACT.enter(state, full, ctx)[1] is ctx and MASKED.enter(state, mask, ctx)[1] is ctx
    part, inside = COMPACT.enter(state, mask, ctx)
    inside.bind(part["params"], part["buffers"])
    assert inside.net.module.channels.total == int(mask.sum()) < table(ctx).total
    assert torch.equal(COMPACT.within(mask), mask) and torch.equal(MASKED.within(mask), full)
    off, _ = MASKED.enter(state, mask, ctx)
    assert all(torch.equal(off["params"][n], t) for n, t in switched_off(state["params"], table(ctx), mask).items())
    assert ENTRIES == {"coupled": COMPACT, "internal": COMPACT, "conv_out": MASKED}
    assert SHARINGS == {"shared": SHARED, "owned": OWNED}


def test_gathering_and_scattering_a_model_are_inverse() -> None:
    ctx = gated_context("resnet8")
    state, kept = ctx.init_state(), table(ctx).kept(some(table(ctx)))
    zeros = {f: {n: torch.zeros_like(t) for n, t in tree.items()} for f, tree in state.items()}
    part = gathered(state, kept, table(ctx))
    there = scattered(part, kept, zeros, table(ctx))
    back = gathered(there, kept, table(ctx))
    assert all(torch.equal(back[f][n], t) for f, tree in part.items() for n, t in tree.items())
    alone = scattered({"params": part["params"]}, kept, state, table(ctx))
    assert all(alone["buffers"][n] is t for n, t in state["buffers"].items())


SQUARE = Channels(
    (Group("a", 3, (), (), ("w",)), Group("b", 3, (), (), ())), {"w": (Axis("a"), Axis("b")), "v": (Axis("a"),)}
)


def model(first: float) -> dict[str, dict[str, Tensor]]:
    return {"params": {"w": torch.arange(9.0).view(3, 3) + first}, "buffers": {"v": torch.arange(3.0) + first}}


def mask_of(rows: set[int], columns: set[int]) -> Tensor:
    return torch.tensor([i in rows for i in range(3)] + [j in columns for j in range(3)])


def test_the_shared_block_is_averaged_and_the_other_entries_stay_with_server_and_clients() -> None:
    shared, mine = mask_of({0, 1}, {0, 1}), mask_of({0, 1, 2}, {0, 1})
    ups = [SHARED.sent(model(first), shared, mine, SQUARE) for first in (0.0, 10.0)]
    assert ups[0]["params"]["w"].tolist() == [[0, 1], [3, 4]] and ups[1]["buffers"]["v"].tolist() == [10, 11]
    replies = [Reply(0, 3.0, ups[0], {}), Reply(1, 1.0, ups[1], {})]
    server = model(100.0)
    new = SHARED.merged(replies, server, shared, SQUARE, mean_buffers)
    expected = server["params"]["w"].clone()
    expected[:2, :2] = torch.tensor([[2.5, 3.5], [5.5, 6.5]])
    assert torch.equal(new["params"]["w"], expected)
    assert new["buffers"]["v"].tolist() == [2.5, 3.5, 102.0]
    assert server["params"]["w"][0, 0] == 100.0
    assert SHARED.merged(replies, server, shared, SQUARE, frozen_buffers)["buffers"]["v"].tolist() == [100, 101, 102]
    for first in (0.0, 10.0):
        client = scattered(gathered(new, SQUARE.kept(shared), SQUARE), SQUARE.kept(shared), model(first), SQUARE)
        outside = torch.ones(3, 3, dtype=torch.bool)
        outside[:2, :2] = False
        assert torch.equal(client["params"]["w"][outside], model(first)["params"]["w"][outside])


def test_with_owners_every_entry_is_the_mean_of_those_that_have_it() -> None:
    shared, server, rng = mask_of({0}, {0}), model(100.0), generator("owned")
    own = [mask_of({0, 2}, {0, 1}), mask_of({0, 1, 2}, {0}), mask_of({0, 2}, {0, 1})]
    models = [
        {"params": {"w": torch.rand(3, 3, generator=rng)}, "buffers": {"v": torch.rand(3, generator=rng)}} for _ in own
    ]
    ups = [OWNED.sent(m, shared, mine, SQUARE) for m, mine in zip(models, own, strict=True)]
    assert torch.equal(ups[1]["owned"]["bits"], pack(own[1])) and ups[1]["params"]["w"].shape == (3, 1)
    weights = [1.0, 2.0, 5.0]
    new = OWNED.merged([Reply(k, weights[k], up, {}) for k, up in enumerate(ups)], server, shared, SQUARE, mean_buffers)
    for i in range(3):
        for j in range(3):
            have = [k for k in range(3) if own[k][i] and own[k][3 + j]]
            mean = sum(weights[k] * models[k]["params"]["w"][i, j] for k in have) / max(
                1, sum(weights[k] for k in have)
            )
            expected = mean if have else server["params"]["w"][i, j]
            torch.testing.assert_close(new["params"]["w"][i, j], torch.as_tensor(expected))
    assert new["buffers"]["v"][1] == models[1]["buffers"]["v"][1]


def test_the_training_loop_of_a_mask_holds_the_norms_of_other_channels_still() -> None:
    assert COMPACT.training(LocalSGD()) == LocalSGD()
    (keep_off,) = MASKED.training(LocalSGD()).transforms
    first = replace(MASKED.training(LocalSGD()), transforms=())
    assert first == LocalSGD()
    ctx, mask = gated_context("toy"), torch.arange(8) < 5
    grads = {n: torch.ones_like(p) for n, p in ctx.init_state()["params"].items()}
    found = keep_off(grads, {}, MASKED.ref(ctx.init_state(), mask, ctx))
    assert found["body.layers.1.weight"].tolist() == found["body.layers.1.bias"].tolist() == [1.0] * 5 + [0.0] * 3
    assert found["body.layers.0.weight"].all() and list(found) == list(grads)
