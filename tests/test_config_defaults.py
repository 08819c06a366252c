import pytest

from fedloom.config import resolve
from fedloom.config.defaults import defaults
from fedloom.core.errors import ConfigError


def test_defaults_keep_what_was_chosen_and_nothing_else():
    chosen = {"method": {"name": "fedprox", "mu": 0.5}, "partition": {"kind": "iid", "clients": 3}, "seed": 7}
    tree = resolve(chosen, {"training.optimizer": {"name": "adamw", "lr": 0.125}}).as_dict()
    usual = defaults(tree)
    plain = resolve({"method": "fedprox", "partition": "iid", "training.optimizer": "adamw"}).as_dict()
    assert usual == plain
    assert usual["method"]["mu"] != 0.5 and usual["training"]["optimizer"]["lr"] != 0.125 and usual["seed"] == 0


def test_a_method_that_is_not_at_hand_has_no_defaults():
    with pytest.raises(ConfigError, match="nowhere"):
        defaults({"method": {"name": "nowhere.to:be_found"}})


def test_a_tree_that_says_nothing_has_the_defaults_of_everything():
    assert defaults({"method": "odd"}) == defaults({}) == resolve({}).as_dict()
