"""Totals of expert use and the metrics made from them."""

import math

import pytest
import torch

from fedloom.core import Batch, Forward
from fedloom.local.carries.routing import RoutingUse, routing_metrics, usage


def after(*outs):
    from types import SimpleNamespace

    carry = RoutingUse(3)
    value = carry.init({}, SimpleNamespace(net=SimpleNamespace(forward=Forward())))
    for out in outs:
        labels = torch.zeros(len(out["active"]), dtype=torch.long)
        value = carry.update(value, out, Batch(torch.empty(0), labels, labels), {})
    return carry.close(carry.close_epoch(value))


def out(active, fallback):
    active = torch.tensor(active)
    return {"active": active, "fallback": torch.tensor(fallback), "router_logits": torch.zeros(len(active), 3)}


def test_metrics_are_means_over_samples():
    value = after(out([[True, True, False]], [True]), out([[True, False, False]] * 3, [False] * 3))
    assert usage(value).tolist() == [1.0, 0.25, 0.0]
    metrics = routing_metrics(value)
    assert metrics["active_experts"] == pytest.approx(1.25)
    assert metrics["fallback_weights"] == pytest.approx(0.25)
    assert metrics["gate_entropy"] == pytest.approx(math.log(3))
    assert [metrics[f"expert_{k}_usage"] for k in range(3)] == [1.0, 0.25, 0.0]
    assert all(isinstance(v, float) for v in metrics.values())


def test_no_samples():
    assert set(routing_metrics(after()).values()) == {0.0}
