"""Policies for batch-norm statistics."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedloom.core import ConfigError, PayloadError, Reply
from fedloom.merge.buffers import BUFFER_POLICIES, buffer_policy, pooled_moments

BIAS = 0.5  # torch's running variance is unbiased: over two values it is twice the biased one


def statistics(*values: float) -> dict[str, Tensor]:
    """Buffers of BatchNorm1d(1) that has seen the values once, with momentum 1; the variance made biased."""
    norm = nn.BatchNorm1d(1, momentum=1.0)
    norm(torch.tensor(values).unsqueeze(1))
    buffers = {name: b.clone() for name, b in norm.named_buffers()}
    buffers["running_var"] *= BIAS
    return buffers


def replies(weights: tuple[float, float] = (2.0, 2.0)) -> list[Reply]:
    both = (statistics(-1.0, 1.0), statistics(9.0, 11.0))
    return [Reply(i, n, {"buffers": b}, {}) for i, (n, b) in enumerate(zip(weights, both, strict=True))]


OLD = {"running_mean": torch.zeros(1), "running_var": torch.ones(1), "num_batches_tracked": torch.tensor(0)}


def test_pooled_is_the_variance_of_all_values_together() -> None:
    merged = BUFFER_POLICIES["pooled"](replies(), OLD)
    assert merged["running_mean"].item() == 5.0 and merged["running_var"].item() == 26.0
    assert merged["num_batches_tracked"].item() == 1 and list(merged) == list(OLD)
    everything = torch.tensor([-1.0, 1.0, 9.0, 11.0])
    assert merged["running_var"].item() == everything.var(correction=0).item()


def test_plain_mean_loses_the_variance_between_clients() -> None:
    merged = BUFFER_POLICIES["mean"](replies(), OLD)
    assert merged["running_mean"].item() == 5.0 and merged["running_var"].item() == 1.0


def test_frozen_and_local_leave_the_servers() -> None:
    assert BUFFER_POLICIES["frozen"](replies(), OLD) == OLD
    local = [Reply(0, 3.0, {"params": {}}, {}), Reply(1, 1.0, {"buffers": {}}, {})]
    for policy in BUFFER_POLICIES.values():
        merged = policy(local, OLD)
        assert all(merged[name] is OLD[name] for name in OLD)


@pytest.mark.parametrize("policy", ["mean", "pooled"])
def test_weights_and_uniform(policy: str) -> None:
    merged = BUFFER_POLICIES[policy](replies((3.0, 1.0)), OLD)
    assert merged["running_mean"].item() == 2.5
    if policy == "pooled":
        assert merged["running_var"].item() == pytest.approx(0.75 * 0.25 * 100 + 1)
    assert BUFFER_POLICIES[policy](replies((3.0, 1.0)), OLD, uniform=True)["running_mean"].item() == 5.0


def test_pooled_keeps_small_variances_far_from_zero() -> None:
    tree = {"bn.running_mean": torch.tensor([1e6]), "bn.running_var": torch.tensor([1e-6])}
    merged = pooled_moments([tree] * 3, [1, 2, 3], {n: torch.zeros(1) for n in tree})
    assert torch.equal(merged["bn.running_mean"], tree["bn.running_mean"])
    assert torch.equal(merged["bn.running_var"], tree["bn.running_var"])


def test_pooled_refuses_half_a_pair_and_bad_values() -> None:
    half = {"running_mean": torch.zeros(1)}
    with pytest.raises(PayloadError, match="client 4 sent only one of 'running_mean' and 'running_var'"):
        pooled_moments([half], [1], OLD, who=[4])
    bad = {**OLD, "running_var": torch.tensor([float("inf")])}
    with pytest.raises(PayloadError, match="client 4: 'running_var' holds NaN"):
        pooled_moments([bad], [1], OLD, who=[4])
    with pytest.raises(PayloadError, match="client 4: 'other' is not a tensor"):
        pooled_moments([{"other": torch.zeros(1)}], [1], OLD, who=[4])


def test_unpaired_running_mean_is_averaged() -> None:
    old = {"running_mean": torch.zeros(1)}
    trees = [{"running_mean": torch.tensor([v])} for v in (1.0, 4.0)]
    assert pooled_moments(trees, [2, 1], old)["running_mean"].item() == 2.0


def test_unknown_policy() -> None:
    assert buffer_policy("pooled") is BUFFER_POLICIES["pooled"]
    with pytest.raises(ConfigError, match=r"unknown buffer policy 'pool'\. Did you mean 'pooled'"):
        buffer_policy("pool")
