"""Activation checkpointing of blocks."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fedloom.models.checkpointing import nested_blocks, set_checkpointing


class Block(nn.Module):
    """A block with statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3, momentum=0.5), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return nn.functional.dropout(self.linear(self.norm(x)) * scale, 0.5, self.training)


def test_statistics_dropout_and_keywords_are_those_of_one_pass() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain, x = Block(), torch.randn(5, 3)
        recomputing = copy.deepcopy(plain)
        set_checkpointing([recomputing], True)
        for module in (plain, recomputing):
            torch.manual_seed(1)
            module(x, scale=2.0).square().sum().backward()
    for a, b in zip(plain.parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    for a, b in zip(plain.buffers(), recomputing.buffers(), strict=True):
        assert torch.equal(a, b)


def test_buffers_stay_the_same_objects_and_copies_work() -> None:
    block = Block()
    set_checkpointing([block], True)
    kept = dict(block.named_buffers())
    block(torch.randn(4, 3)).sum().backward()
    assert all(b is kept[n] for n, b in block.named_buffers())
    twin = copy.deepcopy(block)
    twin(torch.ones(4, 3)).sum().backward()
    assert int(block.norm.num_batches_tracked) == 1 and int(twin.norm.num_batches_tracked) == 2
    set_checkpointing([block], False)
    set_checkpointing([block], False)
    assert "forward" not in block.__dict__


def test_blocks_of_a_foreign_network() -> None:
    net = nn.Module()
    net.stem = nn.Sequential(nn.Linear(3, 3), nn.ReLU())  # leaves: nothing to save
    net.body = nn.Sequential(Block(), nn.ModuleList([Block(), nn.Identity()]))
    net.wrapped = nn.Module()
    net.wrapped.layers = nn.ModuleList([Block()])
    assert nested_blocks(net) == [net.body[0], net.body[1][0], net.wrapped.layers[0]]
