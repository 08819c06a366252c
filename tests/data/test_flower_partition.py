import builtins

import numpy as np
import pytest

from fedloom.core import ConfigError, DataError
from fedloom.data.flower_partition import FlowerPartition
from fedloom.data.partition import make_partition


def test_partitioner_is_adapted_and_repeatable():
    pytest.importorskip("flwr_datasets", reason="the extra `flower` is not installed")
    y = np.arange(60) % 3
    rule, notes = make_partition("flwr:DirichletPartitioner", {"options": {"alpha": 1.0, "min_partition_size": 1}})
    parts, _ = rule.split(y, 4, 5)
    rows = np.concatenate([parts.rows(c) for c in range(4)])
    assert notes == [] and sorted(rows.tolist()) == list(range(60))
    assert parts.digest() == rule.split(y, 4, 5)[0].digest() != rule.split(y, 4, 6)[0].digest()


def test_unknown_partitioner_and_refused_options_are_words():
    pytest.importorskip("flwr_datasets", reason="the extra `flower` is not installed")
    with pytest.raises(ConfigError, match="Did you mean 'IidPartitioner'"):
        FlowerPartition("IidPartitoner").split(np.arange(4), 2, 0)
    with pytest.raises(ConfigError, match="'flwr:IidPartitioner' refused its task"):
        FlowerPartition("IidPartitioner", {"beta": 1}).split(np.arange(4), 2, 0)
    with pytest.raises(DataError, match="made 3 partitions for 2 clients"):
        FlowerPartition("IidPartitioner", {"num_partitions": 3}).split(np.arange(6), 2, 0)


def test_missing_extra_is_named(monkeypatch):
    real = builtins.__import__

    def blocked(name, *args, **kwargs):
        if name.startswith("flwr_datasets"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(ConfigError, match=r"fedloom\[flower\]"):
        FlowerPartition("IidPartitioner").split(np.arange(4), 2, 0)
