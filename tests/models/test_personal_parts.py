"""Which parameters a scope names."""

from __future__ import annotations

import pytest
from torch import nn

from fedloom.core import ConfigError
from fedloom.models.personal_parts import personal_names
from toys.federation import BlobSpec, expert_spec

HEAD = {"head.weight", "head.bias"}
EXPERTS = {f"experts.{name}" for name in ("up", "up_bias", "down", "down_bias")}


def test_the_head_is_what_has_a_row_per_class():
    assert set(personal_names(BlobSpec().classifier(), "head", "m")) == HEAD
    assert set(personal_names(expert_spec().classifier(), "head", "m")) == HEAD


def test_the_last_layer_has_its_gate_and_all_experts_have_none():
    net = expert_spec().classifier()
    last = {f"backbone.blocks.1.{name}" for name in (*EXPERTS, "router.weight")}
    assert set(personal_names(net, "last_moe", "m")) == HEAD | last
    every = {f"backbone.blocks.{k}.{name}" for k in (0, 1) for name in EXPERTS}
    assert set(personal_names(net, "experts", "m")) == HEAD | every


def test_frozen_parameters_are_left_out_and_names_come_in_the_networks_order():
    net = expert_spec().classifier()
    net.head.weight.requires_grad_(False)
    found = personal_names(net, "last_moe", "m")
    assert "head.weight" not in found
    assert list(found) == [name for name, _ in net.named_parameters() if name in found]


def test_scopes_without_anything_in_them_are_refused_in_words():
    with pytest.raises(ConfigError, match="'pfl_moe with scope experts' needs a network with mixture-of-experts"):
        personal_names(BlobSpec().classifier(), "experts", "pfl_moe")
    with pytest.raises(ConfigError, match="scope is head, and Linear has no trainable parameter in it"):
        personal_names(nn.Linear(2, 2), "head", "pfl_moe")


def test_without_rows_per_class_the_head_is_the_child_of_that_name():
    net = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    assert set(personal_names(net, "head", "m")) == HEAD
