"""The sections `stream` and `partition` for data with domains."""

import pytest

from fedloom.config import resolve
from fedloom.config.describe import tree_settings
from fedloom.core import ConfigError


@pytest.mark.parametrize("kind", ["k_domains", "dirichlet_domain", "single"])
def test_defaults_are_those_of_the_rules(kind: str):
    from fedloom.data.partition import KINDS

    tree = resolve({"partition": {"kind": kind}}).partition.model_dump()
    assert {k: v for k, v in tree.items() if k not in ("kind", "clients")} == vars(KINDS[kind]())


@pytest.mark.parametrize("order", ["seeded", "natural", ["photo", 1, "sketch", "art"]])
def test_a_stream_of_domains_takes_an_order_and_an_arrival(order):
    tree = resolve({"stream": {"kind": "domain_incremental", "domain_order": order, "arrival": "shifted", "shift": 2}})
    assert tree.stream.domain_order == order and resolve(tree.as_dict()) == tree


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"stream": {"kind": "domain_incremental", "tasks": 3}}, "unknown key 'stream.tasks'"),
        ({"stream": {"kind": "domain_incremental", "domain_order": "sorted"}}, "list of domains by name or id"),
        ({"stream": {"kind": "domain_incremental", "domain_order": [1.5]}}, "list of domains by name or id"),
        ({"stream": {"kind": "domain_incremental", "domain_order": []}}, "list of domains by name or id"),
        ({"partition": {"kind": "single", "cover": 2}}, "unknown key 'partition.cover'"),
        ({"partition": {"kind": "k_domains", "share": 0.0}}, "partition.share"),
        ({"partition": {"kind": "k_domains", "domains_min": 0}}, "partition.domains_min"),
        ({"partition": {"kind": "dirichlet_domain", "label_alpha": 0.0}}, "partition.label_alpha"),
        ({"partition": {"kind": "k_domain"}}, "Did you mean 'k_domains'"),
    ],
)
def test_what_a_kind_cannot_use_is_refused(tree, message):
    with pytest.raises(ConfigError, match=message):
        resolve(tree)


def test_the_kinds_are_listed_with_their_options():
    groups = {group.title: group for group in tree_settings()}
    listed = {setting.key: setting.default for setting in groups["partition.kind=k_domains"].settings}
    assert listed["partition.domains_min"] == "2" and listed["partition.cover"] == "null"
    assert groups["stream.kind=domain_incremental"].about.startswith("Domains of the data arrive one after another")
    assert {"partition.kind=dirichlet_domain", "partition.kind=single"} <= groups.keys()
