import subprocess
import sys

import pytest
import torch
from torch import nn

from fedloom.evaluate import cost


class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 2), nn.Linear(3, 2)

    def active_parameters(self):
        return cost.parameters(self.one)


def test_parameters_count_shared_and_frozen_ones_once():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    net[0].bias.requires_grad_(False)
    assert cost.parameters(net) == 16 + 4 + 8 + 4
    assert cost.active_parameters(net) == cost.parameters(net)


def test_active_parameters_are_the_modules_own_word():
    assert (cost.parameters(HalfUsed()), cost.active_parameters(HalfUsed())) == (16, 8)


def test_flops_count_a_multiply_add_as_two():
    net, x = nn.Linear(5, 3), torch.ones(1, 5)
    assert cost.flops_per_example(lambda: net(x)) == 2 * 5 * 3
    conv = nn.Conv2d(2, 4, 3, padding=1)
    assert cost.flops_per_example(lambda: conv(torch.ones(1, 2, 8, 8))) == 2 * 64 * 2 * 4 * 9


def test_peak_memory_sees_a_living_child():
    before = cost.peak_rss_bytes()
    assert before > 20 * 2**20
    code = "b = bytearray(120 * 2**20); b[::4096] = b'x' * len(b[::4096]); print('ready', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        child.stdout.readline()
        during = cost.peak_rss_bytes()
        child.communicate(b"\n")
    assert during >= 120 * 2**20 + 20 * 2**20
    assert cost.peak_rss_bytes() >= 120 * 2**20 + 20 * 2**20


def test_peaks_of_workers_are_added():
    assert cost.peak_rss_bytes([2**40, 2**40]) > 2**41


def test_no_resource_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    assert cost.peak_rss_bytes() is None


@pytest.mark.parametrize("unit", ["darwin", "linux"])
def test_units(monkeypatch, unit):
    monkeypatch.setattr(cost.sys, "platform", unit)
    assert cost.peak_rss_bytes() > 0
