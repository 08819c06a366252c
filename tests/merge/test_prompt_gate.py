"""The gate over prompts: its numbers, Adam against torch's own, and what it learns with each target."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.core.seeds import generator
from fedloom.merge.prompt_gate import (
    OVER,
    TARGETS,
    Feedback,
    client_weights,
    gate_loss,
    initial,
    initial_optimizer,
    running_loss,
    scores,
    spread,
    step,
)
from fedloom.select.dispatch import ByGate

WIDTH, POOL, CLIENTS = 6, 8, 5
KINDS = ("weight", "bias")


def batch(seed: int = 0, clients: int = CLIENTS) -> dict[str, Tensor]:
    rng = generator("gate batch", seed)
    targets = (torch.rand(clients, POOL, generator=rng) < 0.4).float()
    return {
        "summaries": torch.randn(clients, WIDTH, generator=rng),
        "targets": targets,
        "losses": torch.rand(clients, generator=rng) + 0.2,
    }


def gate(seed: int = 0) -> dict[str, Tensor]:
    return initial(WIDTH, POOL, hidden=16, seed=seed)


def as_module(tree: dict[str, Tensor], dropout: float = 0.0) -> nn.Module:
    hidden, out = (nn.Linear(*reversed(tree[f"{name}.weight"].shape)) for name in ("hidden", "out"))
    net = nn.Sequential(hidden, nn.ReLU(), nn.Dropout(dropout), out)
    net.load_state_dict({f"{i}.{kind}": tree[f"{n}.{kind}"] for i, n in ((0, "hidden"), (3, "out")) for kind in KINDS})
    return net


def test_the_gate_of_vit_b16_has_295488_parameters_and_reads_the_joint_width():
    assert sum(tensor.numel() for tensor in initial(512, 64).values()) == 295_488
    assert initial(8, 64)["hidden.weight"].shape == (512, 8)


def test_the_start_is_a_function_of_the_seed():
    before = torch.random.get_rng_state()
    first, again, other = gate(1), gate(1), gate(2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name]) for name in first)


def test_zero_logits_cost_log_2():
    logits, losses = torch.zeros(3, POOL), torch.tensor([0.5, 1.0, 2.0])
    for targets in (torch.zeros(3, POOL), torch.ones(3, POOL), batch(clients=3)["targets"]):
        assert gate_loss(logits, targets, losses).item() == pytest.approx(math.log(2), rel=1e-6)
    still = {name: torch.zeros_like(tensor) for name, tensor in gate().items()}
    told = step(still, initial_optimizer(still), **batch(), rng=generator("zero"))[2]
    assert told == pytest.approx(math.log(2), rel=1e-6)


def test_weights_of_clients_in_numbers():
    found = client_weights(torch.tensor([0.5, 1.0, 2.0]))
    assert found.tolist() == pytest.approx([1.714, 0.857, 0.429], abs=5e-4)
    assert client_weights(torch.tensor([-1.0, 0.0])).tolist() == pytest.approx([1, 1])
    assert client_weights(torch.tensor([7.0])).tolist() == pytest.approx([1])


def test_the_loss_is_that_of_its_formula():
    given, tree = batch(), gate()
    logits = scores(tree, given["summaries"])
    total = 0.0
    inverse = [1 / (loss.item() + 1e-6) for loss in given["losses"]]
    for c in range(CLIENTS):
        w, each = inverse[c] / (sum(inverse) / CLIENTS), 0.0
        for k in range(POOL):
            p, y = 1 / (1 + math.exp(-logits[c, k].item())), given["targets"][c, k].item()
            each -= (y * math.log(p) + (1 - y) * math.log(1 - p)) / POOL
        total += w * each / CLIENTS
    assert gate_loss(logits, given["targets"], given["losses"]).item() == pytest.approx(total, rel=1e-5)
    assert step(tree, initial_optimizer(tree), **given, rng=generator("d"), dropout=0.0)[2] == pytest.approx(total)


def test_a_mask_takes_the_mean_over_its_entries_alone():
    logits, targets, losses = torch.randn(2, 4, generator=generator("mask")), torch.zeros(2, 4), torch.ones(2)
    mask = torch.tensor([[True, False, True, False], [False] * 4])
    expected = nn.functional.softplus(logits[0, [0, 2]]).mean() / 2
    torch.testing.assert_close(gate_loss(logits, targets, losses, mask), expected)


def test_scores_are_those_of_the_network_without_dropout():
    tree, summaries = gate(), batch()["summaries"]
    torch.testing.assert_close(scores(tree, summaries), as_module(tree, 0.2).eval()(summaries).detach())


def test_steps_are_those_of_torchs_adam():
    tree = gate()
    net = as_module(tree)
    adam = torch.optim.Adam(net.parameters(), lr=1e-2, foreach=False)
    optimizer = initial_optimizer(tree)
    for turn in range(5):
        given = batch(turn)
        tree, optimizer, loss = step(tree, optimizer, **given, rng=generator(turn), lr=1e-2, dropout=0.0)
        adam.zero_grad()
        theirs = gate_loss(net(given["summaries"]), given["targets"], given["losses"])
        theirs.backward()
        adam.step()
        assert loss == pytest.approx(theirs.item(), rel=1e-4)
    for ours, param in zip(tree.values(), net.parameters(), strict=True):
        torch.testing.assert_close(ours, param.detach(), rtol=1e-4, atol=1e-5)


def test_dropout_scales_what_it_keeps_and_follows_its_generator():
    given, tree = batch(clients=1), gate()
    state, steps = initial_optimizer(tree), {}
    for seed in (1, 2):
        steps[seed], again = (step(tree, state, **given, rng=generator(seed), dropout=0.5) for _ in range(2))
        assert all(torch.equal(steps[seed][0][name], again[0][name]) for name in tree)
    assert steps[1][2] != steps[2][2]
    kept = {name: torch.zeros_like(value) for name, value in tree.items()}
    kept["hidden.bias"], kept["out.bias"] = torch.ones(16), torch.zeros(POOL)
    kept["out.weight"] = torch.full((POOL, 16), 1 / 16)
    logits = [logit_of(step(kept, state, **given_zero(), rng=generator(i), dropout=0.2)[2]) for i in range(400)]
    assert sum(logits) / 400 == pytest.approx(1.0, abs=0.02)  # without dropout: 1


def given_zero() -> dict[str, Tensor]:
    """One client with targets 0, so that the loss is softplus of the one logit that all prompts share."""
    return {"summaries": torch.zeros(1, WIDTH), "targets": torch.zeros(1, POOL), "losses": torch.ones(1)}


def logit_of(loss: float | None) -> float:
    assert loss is not None
    return math.log(math.expm1(loss))


def test_a_gate_that_is_stored_and_loaded_goes_on_with_the_same_bits(tmp_path):
    from safetensors.torch import load_file, save_file

    tree, optimizer, file = gate(), initial_optimizer(gate()), tmp_path / "gate.safetensors"
    for turn in range(6):
        tree, optimizer, _ = step(tree, optimizer, **batch(turn), rng=generator("resume", turn))
        if turn == 2:
            save_file({f"gate/{n}": t for n, t in tree.items()} | {f"adam/{n}": t for n, t in optimizer.items()}, file)
    stored = load_file(file)
    again, moments = ({n.split("/")[1]: t for n, t in stored.items() if n.startswith(f)} for f in ("gate", "adam"))
    for turn in range(3, 6):
        again, moments, _ = step(again, moments, **batch(turn), rng=generator("resume", turn))
    assert moments["step"].item() == 6
    assert all(torch.equal(again[name], tree[name]) for name in tree)
    assert all(torch.equal(moments[name], optimizer[name]) for name in optimizer)


def test_clients_without_finite_numbers_are_left_out():
    tree, optimizer, given = gate(), initial_optimizer(gate()), batch()
    spoilt = {name: tensor.clone() for name, tensor in given.items()}
    spoilt["losses"][0], spoilt["summaries"][1, 2], spoilt["targets"][2, 3] = math.nan, math.inf, math.nan
    mask = torch.ones(CLIENTS, POOL, dtype=torch.bool)
    rest = {name: tensor[3:] for name, tensor in given.items()}
    ours = step(tree, optimizer, **spoilt, mask=mask, rng=generator("left"))
    theirs = step(tree, optimizer, **rest, rng=generator("left"))
    assert ours[2] == pytest.approx(theirs[2])
    for name in tree:
        torch.testing.assert_close(ours[0][name], theirs[0][name])


@pytest.mark.parametrize("given", [batch(clients=0), {**batch(), "losses": torch.full((CLIENTS,), math.inf)}])
def test_without_clients_nothing_changes(given):
    tree, optimizer = gate(), initial_optimizer(gate())
    new, state, loss = step(tree, optimizer, **given, rng=generator("none"))
    assert loss is None and state["step"].item() == 0
    assert all(torch.equal(new[name], tree[name]) for name in tree)


def test_nothing_is_changed_in_place():
    tree, optimizer, given = gate(), initial_optimizer(gate()), batch()
    before = [{n: t.clone() for n, t in part.items()} for part in (tree, optimizer, given)]
    step(tree, optimizer, **given, rng=generator("pure"))
    for part, old in zip((tree, optimizer, given), before, strict=True):
        assert all(torch.equal(part[name], tensor) for name, tensor in old.items())


def test_targets_in_numbers():
    held = spread(torch.tensor([[0, 2], [1, 3], [0, 1]]), 4)
    assert held.tolist() == [[True, False, True, False], [False, True, False, True], [True, True, False, False]]
    mass = spread(torch.tensor([[0, 2], [1, 3], [0, 1]]), 4, torch.tensor([[0.5, 0.25], [0.125, 0.5], [0.0, 1.0]]))
    told = Feedback(held, torch.tensor([1.0, 2.0, 0.5]), torch.tensor([0.0, 1.5, 0.75]), mass)
    assert torch.equal(TARGETS["dispatched"](told), held.float())
    assert TARGETS["attention"](told).tolist() == [[0.5, 0, 0.25, 0], [0, 0.125, 0, 0.5], [0, 1, 0, 0]]
    assert TARGETS["better"](told).tolist() == [[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]]
    assert OVER["all"](held) is None and torch.equal(OVER["dispatched"](held), held)
    with pytest.raises(ValueError, match="attention"):
        TARGETS["attention"](Feedback(held, told.losses, told.usual))


def test_the_running_loss_starts_at_the_first_and_passes_over_what_is_not_finite():
    usual = torch.tensor([0.0, 2.0, 2.0, 0.0])
    found = running_loss(usual, torch.tensor([3.0, 1.0, math.nan, math.inf]), rate=0.25)
    assert found.tolist() == [3.0, 1.75, 2.0, 0.0]


def learnt(target: str, over: str, rounds: int = 150) -> list[set[int]]:
    """The three best prompts of two kinds of clients, of which one does better with 0-2 and the other with 3-5."""
    kinds, usual = torch.arange(8) % 2, torch.zeros(8)
    good = torch.stack([torch.arange(POOL) < 3, (torch.arange(POOL) >= 3) & (torch.arange(POOL) < 6)])
    base = nn.functional.normalize(torch.randn(2, WIDTH, generator=generator(0, "kinds")), dim=1)
    tree, choose = initial(WIDTH, POOL, hidden=64), ByGate(explore=0.5)
    optimizer: Any = initial_optimizer(tree)
    for turn in range(rounds):
        told, rng = scores(tree, base)[kinds] if turn else None, generator(0, "noise", turn)
        rows = [choose(None if told is None else told[c], POOL, 3, generator(0, turn, c)) for c in range(8)]
        held = spread(torch.stack(rows), POOL)
        losses = 1.5 - 0.8 * (held & good[kinds]).sum(1) / 3 + 0.1 * torch.randn(8, generator=rng).clamp(-1, 1)
        summaries = base[kinds] + 0.05 * torch.randn(8, WIDTH, generator=rng)
        feedback = Feedback(held, losses, usual, held * torch.where(good[kinds], 0.3, 0.05))
        given = {"targets": TARGETS[target](feedback), "losses": losses, "mask": OVER[over](held)}
        tree, optimizer, _ = step(tree, optimizer, summaries, **given, rng=generator(0, "step", turn), lr=1e-2)
        usual = running_loss(usual, losses)
    return [set(row.sort(descending=True).indices[:3].tolist()) for row in scores(tree, base)]


@pytest.mark.parametrize("target", ["attention", "better"])
def test_the_gate_learns_which_prompts_suit_whom(target):
    assert learnt(target, "dispatched") == [{0, 1, 2}, {3, 4, 5}]


def test_over_what_was_dispatched_alone_the_default_target_says_yes_to_everything():
    tree, optimizer, given = gate(), initial_optimizer(gate()), batch()
    held = given["targets"].bool()
    for turn in range(400):
        tree, optimizer, loss = step(tree, optimizer, **given, mask=held, rng=generator(turn), lr=1e-2)
    assert loss < 0.01 and (scores(tree, given["summaries"])[held] > 4).all()
