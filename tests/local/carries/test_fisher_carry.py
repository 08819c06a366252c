"""The running Fisher: statistic, average, cadences, homes."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from fedloom.core import Batch, ConfigError, Forward
from fedloom.local.carries.fisher import CADENCES, HOMES, SAMPLES, BatchFisher, fisher_sums, fold
from fedloom.local.parts import Carry

EXPERTS, CLASSES, DIM = 3, 4, 5


def noise(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def outputs(batch=6, seed=0, active=None):
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.rand(*shape, generator=rng, dtype=torch.float64)

    active = torch.ones(batch, EXPERTS, dtype=torch.bool) if active is None else active
    weights = draw(batch, EXPERTS) * active
    return {
        "features": draw(EXPERTS, batch, DIM),
        "delta_sq": draw(EXPERTS, batch, CLASSES),
        "active": active,
        "weights": weights,
    }


def context(stage=0):
    return SimpleNamespace(net=SimpleNamespace(forward=Forward()), stage=SimpleNamespace(index=stage))


def run(carry, start, epochs, stage=0):
    """epochs: lists of outputs. Returns the closed value."""
    ref = {"fisher": start}
    value = carry.init(ref, context(stage))
    for epoch in epochs:
        for out in epoch:
            labels = torch.zeros(out["active"].shape[0], dtype=torch.long)
            value = carry.update(value, out, Batch(torch.empty(0), labels, labels), ref)
        value = carry.close_epoch(value)
    return carry.close(value)


def blank(carry):
    return carry.blank(torch.zeros(EXPERTS, CLASSES, DIM, dtype=torch.float64))


def mean_square(out, mask=None):
    """G by explicit outer products."""
    ones = torch.ones(*out["features"].shape[:2], 1, dtype=torch.float64)
    inputs = torch.cat([out["features"], ones], -1).square()
    outer = torch.einsum("kbc,kbd->kbcd", out["delta_sq"], inputs)
    mask = out["active"].double() if mask is None else mask
    return torch.einsum("kbcd,bk->kcd", outer, mask) / mask.sum(0).clamp(min=1e-30)[:, None, None]


def joined(batches):
    """Several batches as one."""
    return {k: torch.cat([b[k] for b in batches], int(k in ("features", "delta_sq"))) for k in batches[0]}


def test_sums_equal_autograd_of_each_sample():
    rng = torch.Generator().manual_seed(0)
    features = torch.randn(2, 4, DIM, generator=rng, dtype=torch.float64)
    head = torch.randn(2, CLASSES, DIM + 1, generator=rng, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 3, 1, 1])
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    inputs = torch.cat([features, torch.ones(2, 4, 1, dtype=torch.float64)], -1)
    want = torch.zeros_like(head)
    for k in range(2):
        for b in range(4):
            loss = F.cross_entropy((head[k] @ inputs[k, b])[None], labels[b : b + 1])
            want[k] = want[k] + mask[b, k] * torch.autograd.grad(loss, head)[0][k].square()
    delta_sq = ((inputs @ head.mT).softmax(-1) - F.one_hot(labels, CLASSES)).detach().square()
    sums, counts = fisher_sums(features, delta_sq, mask)
    assert torch.allclose(sums, want, atol=1e-12)
    assert counts.tolist() == [3.0, 2.0]


def test_fold_skips_experts_without_samples():
    fisher = torch.ones(2, 1, 1)
    folded = fold(fisher, torch.full((2, 1, 1), 6.0), torch.tensor([3.0, 0.0]), 0.9)
    assert folded.flatten().tolist() == pytest.approx([0.9 + 0.1 * 2, 1.0])


def test_every_batch_moves_the_average():
    carry, first, second = BatchFisher(0.9), outputs(seed=1), outputs(seed=2)
    got = run(carry, blank(carry), [[first, second]])["experts"]
    assert torch.allclose(got, 0.9 * 0.1 * mean_square(first) + 0.1 * mean_square(second))


def test_an_inactive_expert_keeps_its_fisher():
    active = torch.tensor([[True, False, True]] * 6)
    carry = BatchFisher(0.9)
    start = {"experts": torch.full((EXPERTS, CLASSES, DIM + 1), 2.0, dtype=torch.float64)}
    got = run(carry, start, [[outputs(active=active)]])["experts"]
    assert (got[1] == 2.0).all() and (got[0] != 2.0).all()
    assert (start["experts"] == 2.0).all()


@pytest.mark.parametrize("name", list(SAMPLES))
def test_which_samples_count(name):
    active = torch.tensor([[True, True, False]] * 3 + [[True, False, False]] * 3)
    out = outputs(active=active)
    masks = {"active": active.double(), "all": torch.ones(6, 3, dtype=torch.float64), "weighted": out["weights"]}
    carry = BatchFisher(0.5, SAMPLES[name])
    got = run(carry, blank(carry), [[out]])["experts"]
    assert torch.allclose(got, 0.5 * mean_square(out, masks[name]))
    assert (got[2] == 0).all() == (name != "all")


def test_epoch_and_round_average_before_they_move():
    batches = [outputs(seed=s, batch=4) for s in range(4)]
    first, later = mean_square(joined(batches[:2])), mean_square(joined(batches[2:]))
    epochs = [batches[:2], batches[2:]]
    carry = CADENCES["epoch"](0.8, SAMPLES["active"])
    got = run(carry, blank(carry), epochs)
    assert got.keys() == {"experts"}
    assert torch.allclose(got["experts"], 0.8 * 0.2 * first + 0.2 * later)
    carry = CADENCES["round"](0.8, SAMPLES["active"])
    got = run(carry, blank(carry), epochs)
    assert got.keys() == {"experts"}
    assert torch.allclose(got["experts"], 0.2 * (first + later) / 2)


def test_task_cadence_moves_once_per_stage():
    carry = CADENCES["task"](0.8, SAMPLES["active"])
    first, second, third = (outputs(seed=s) for s in range(3))
    value = run(carry, blank(carry), [[first]])
    value = run(carry, value, [[second]])
    assert (value["experts"] == 0).all()
    value = run(carry, value, [[third]], stage=1)
    stage_mean = (mean_square(first) + mean_square(second)) / 2
    assert torch.allclose(value["experts"], 0.2 * stage_mean)
    assert int(value["stage"]) == 1
    value = run(carry, value, [], stage=4)
    assert torch.allclose(value["experts"], 0.8 * 0.2 * stage_mean + 0.2 * mean_square(third))
    assert (value["counts"] == 0).all()


def test_task_statistics_of_clients_pool_by_examples():
    carry = CADENCES["task"](0.8, SAMPLES["active"])
    small, large = outputs(seed=1, batch=2), outputs(seed=2, batch=6)
    pair = [run(carry, blank(carry), [[out]]) for out in (small, large)]
    merged = {k: (2 * pair[0][k] + 6 * pair[1][k]) / 8 for k in ("experts", "sums", "counts")}
    after = run(carry, {**merged, "stage": pair[0]["stage"]}, [], stage=1)["experts"]
    assert torch.allclose(after, 0.2 * mean_square(joined([small, large])))


@pytest.mark.parametrize("name", list(CADENCES))
def test_work_without_a_batch_changes_nothing(name):
    carry = CADENCES[name](0.9, SAMPLES["active"])
    start = {**blank(carry), "experts": noise(EXPERTS, CLASSES, DIM + 1)}
    got = run(carry, start, [])
    assert got.keys() == start.keys()
    assert all(torch.equal(got[k], start[k]) for k in start)
    assert isinstance(carry, Carry)


def test_the_update_sees_the_value_from_before():
    carry = BatchFisher(0.9)
    value = carry.init({"fisher": blank(carry)}, context())
    before = value["experts"]
    labels = torch.zeros(6, dtype=torch.long)
    carry.update(value, outputs(), Batch(torch.empty(0), labels, labels), {})
    assert (before == 0).all()


def test_homes():
    zeros, down, kept = {"experts": torch.zeros(1)}, {"experts": torch.ones(1)}, {"experts": torch.full((1,), 2.0)}
    server, client, reset = (HOMES[name]() for name in ("server", "client", "reset"))
    assert server.on_server(zeros) == {"fisher": zeros}
    assert server.start({"fisher": down}, {"fisher": kept}, zeros) is down
    assert server.finish(kept) == ({}, {"fisher": kept})
    assert client.on_server(zeros) == {} and client.start({}, {}, zeros) is zeros
    assert client.start({}, {"fisher": kept}, zeros) is kept
    assert client.finish(kept) == ({"fisher": kept}, {})
    assert reset.on_server(zeros) == {} and reset.start({}, {"fisher": kept}, zeros) is zeros
    assert reset.finish(kept) == ({}, {})


@pytest.mark.parametrize("rho", [1.0, -0.1, float("nan")])
def test_bad_rho(rho):
    with pytest.raises(ConfigError, match=r"rho must be in \[0, 1\)"):
        BatchFisher(rho)
