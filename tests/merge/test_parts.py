"""Different merges for different parts of a tree."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch

from fedloom.core import ConfigError, PayloadError
from fedloom.merge.mean import weighted_mean
from fedloom.merge.parts import ByPrefix, Selected

FIRST = partial(weighted_mean, rules={"*": "first"})


def test_each_name_goes_to_its_longest_prefix() -> None:
    merge = ByPrefix((("", weighted_mean), ("head.", FIRST), ("head.x.", partial(weighted_mean, rules={"*": "max"}))))
    trees = [{n: torch.tensor([v]) for n in ("a", "head.w", "head.x.w")} for v in (1.0, 3.0)]
    merged = merge(trees, [1, 1], {n: torch.zeros(1) for n in ("head.w", "a", "head.x.w")})
    assert {n: t.item() for n, t in merged.items()} == {"head.w": 1.0, "a": 2.0, "head.x.w": 3.0}
    assert list(merged) == ["head.w", "a", "head.x.w"]
    assert (
        pickle.loads(pickle.dumps(merge))(
            trees, [1, 1], {"a": torch.zeros(1), "head.w": torch.zeros(1), "head.x.w": torch.zeros(1)}
        ).keys()
        == merged.keys()
    )


def test_names_without_a_merge_and_unknown_names() -> None:
    merge = ByPrefix((("a.", weighted_mean),))
    with pytest.raises(ConfigError, match="no merge for 'b'"):
        merge([{"b": torch.zeros(1)}], [1], {"b": torch.zeros(1)})
    with pytest.raises(PayloadError, match=r"client 2: 'a\.y' is not a tensor"):
        merge([{"a.y": torch.zeros(1)}], [1], {"a.x": torch.zeros(1)}, who=[2])
    with pytest.raises(ConfigError, match="prefixes must differ"):
        ByPrefix((("a", weighted_mean), ("a", weighted_mean)))


def test_selected_is_a_view() -> None:
    cut = Selected({"a": torch.zeros(1), "b": torch.ones(1)}, ["b", "c"])
    assert list(cut) == ["b"] and len(cut) == 1 and cut["b"].item() == 1.0
    with pytest.raises(KeyError):
        cut["a"]
