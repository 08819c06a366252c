from __future__ import annotations

import dataclasses

import pytest
import torch

from fedloom.core import ConfigError, Stage
from fedloom.core.seeds import generator
from fedloom.local import SGD, AdamW, LocalSGD, Schedule
from local.blobs import context, data, logits, plain_loop
from toys.federation import BlobSpec

SETTINGS = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.05},
    {"lr": 0.05, "momentum": 0.9},
    {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.01, "nesterov": True},
]


@pytest.mark.parametrize("given", SETTINGS)
def test_sgd_is_torchs_sgd_step_for_step(given: dict):
    start = [torch.randn(3, 2, generator=generator(1)), torch.randn((), generator=generator(2))]
    ours, theirs = [t.clone() for t in start], [torch.nn.Parameter(t.clone()) for t in start]
    step, torchs = SGD(**given).start(ours), torch.optim.SGD(theirs, **given)
    for k in range(6):
        grads = [torch.randn(t.shape, generator=generator(3, k, i)) for i, t in enumerate(start)]
        before = [g.clone() for g in grads]
        factor = 0.5**k
        torchs.param_groups[0]["lr"] = given["lr"] * factor
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g.clone()
        torchs.step()
        step(grads, factor)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-6, atol=1e-7)
        assert all(torch.equal(a, b) for a, b in zip(before, grads, strict=True)), "gradients belong to the caller"


def test_adamw_is_torchs_adamw():
    given = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    start = torch.randn(3, 2, generator=generator(1))
    ours, theirs = start.clone(), torch.nn.Parameter(start.clone())
    step, torchs = AdamW(**given).start([ours]), torch.optim.AdamW([theirs], **given)
    for k in range(5):
        grad = torch.randn(3, 2, generator=generator(3, k))
        theirs.grad = grad.clone()
        torchs.step()
        step([grad], 1.0)
    assert torch.equal(ours, theirs.detach())


@pytest.mark.parametrize("given", SETTINGS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_local_training_is_the_loop_that_everybody_writes(given: dict, clip: float | None):
    ctx, batches = context(seen=range(6)), data(classes=6)
    end = LocalSGD(SGD(**given), epochs=2, batch_size=8, clip_norm=clip)(ctx.init_state(), batches, ctx)
    module = BlobSpec().classifier()
    loss = lambda m, b: torch.nn.functional.cross_entropy(logits(m(b.x)), b.y)  # noqa: E731
    plain_loop(module, batches, torch.optim.SGD(module.parameters(), **given), loss, epochs=2, clip=clip)
    for name, p in module.named_parameters():
        torch.testing.assert_close(end.params[name], p.detach(), rtol=1e-5, atol=1e-6)
    for name, b in module.named_buffers():
        torch.testing.assert_close(end.buffers[name], b)
    assert end.steps == 2 * batches.steps(8)


def factors(schedule: Schedule, rounds: int = 4, stages: int = 1) -> list[float]:
    ctx = context()
    found = []
    for s in range(stages):
        for r in range(rounds):
            here = dataclasses.replace(ctx, stage=Stage(s, stages, rounds, (0,), (0,)), round=r)
            found.append(schedule.factor(here, 0, 1))
    return found


def test_a_schedule_follows_the_round_not_the_number_of_times_a_client_took_part():
    """Halving each round, active in the first and third round: 1.0, then 0.25."""
    ctx, batches, before = context(), data(), SGD(lr=1.0)
    loop = LocalSGD(before, Schedule("step", gamma=0.5), batch_size=32)
    state = ctx.init_state()
    lr = [factors(loop.schedule)[k] for k in (0, 2)]
    assert lr == [1.0, 0.25]
    full, quarter = (loop(state, batches, dataclasses.replace(ctx, round=r)) for r in (0, 2))
    for name, start in state["params"].items():
        moved = full.params[name] - start
        torch.testing.assert_close(quarter.params[name] - start, 0.25 * moved, rtol=1e-4, atol=1e-6)
    assert any((full.params[n] != s).any() for n, s in state["params"].items())
    assert any((quarter.params[n] != s).any() for n, s in state["params"].items())


def test_shapes_of_schedules_by_hand():
    assert factors(Schedule()) == [1, 1, 1, 1]
    assert factors(Schedule("step", gamma=0.1, step_size=2)) == pytest.approx([1, 1, 0.1, 0.1])
    assert factors(Schedule("exponential", gamma=0.5)) == [1, 0.5, 0.25, 0.125]
    assert factors(Schedule("cosine")) == pytest.approx([1, 0.853553, 0.5, 0.146447], abs=1e-6)
    assert factors(Schedule("linear", floor=0.2)) == pytest.approx([1, 0.8, 0.6, 0.4])
    assert factors(Schedule("constant", warmup=3)) == pytest.approx([0.25, 0.5, 0.75, 1])
    assert factors(Schedule("exponential", gamma=0.5), 2, 2) == [1, 0.5, 0.25, 0.125], "per round of the whole run"
    assert factors(Schedule("exponential", gamma=0.5, per="stage"), 2, 2) == [1, 0.5, 1, 0.5]
    per_step = Schedule("linear", per="step")
    assert [per_step.factor(context(), k, 4) for k in range(4)] == [1, 0.75, 0.5, 0.25]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SGD(lr=0.0), "optimizer.lr must be a finite number above 0, got 0.0"),
        (lambda: SGD(lr=float("nan")), "optimizer.lr .* got nan"),
        (lambda: AdamW(lr=-1.0), "optimizer.lr .* got -1.0"),
        (lambda: SGD(momentum=1.0), r"momentum must be in \[0, 1\), got 1.0"),
        (lambda: SGD(momentum=float("nan")), "momentum"),
        (lambda: SGD(weight_decay=-0.1), "weight_decay .* got -0.1"),
        (lambda: SGD(nesterov=True), "nesterov needs a momentum above 0"),
        (lambda: AdamW(betas=(0.9, 1.0)), "betas"),
        (lambda: AdamW(eps=0.0), "eps must be above 0"),
        (lambda: Schedule("cosin"), "unknown schedule 'cosin'. Did you mean 'cosine'"),
        (lambda: Schedule(per="epoch"), "schedule.per must be round, stage or step, got 'epoch'"),
        (lambda: Schedule(step_size=0), "step_size >= 1"),
        (lambda: Schedule(floor=1.5), r"floor in \[0, 1\]"),
        (lambda: Schedule(gamma=float("nan")), "gamma > 0"),
    ],
)
def test_bad_options_are_refused_by_name(make, words: str):
    with pytest.raises(ConfigError, match=words):
        make()


def test_adamw_refuses_half_precision_and_stays_finite_in_full():
    """float16 parameter [1, 1], gradient [0, 1e-5], eps 1e-8: the square underflows and Adam divides by zero."""
    with pytest.raises(ConfigError, match=r"float16 .* training.precision to bf16"):
        AdamW(eps=1e-8).start([torch.ones(2, dtype=torch.float16)])
    param = torch.ones(2)
    AdamW(eps=1e-8).start([param])([torch.tensor([0.0, 1e-5])], 1.0)
    assert torch.isfinite(param).all()
