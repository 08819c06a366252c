"""Adapter for the partitioners of flwr-datasets."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedloom.core import ConfigError, DataError
from fedloom.core.errors import unknown
from fedloom.data.parts import Listed, Parts


@dataclass(frozen=True)
class FlowerPartition:
    """A partitioner class of `flwr_datasets.partitioner` by name; `options` go to its constructor.

    `num_partitions`, `partition_by` and `seed` are filled in where the class takes them and `options` do not
    name them. The partitioner sees a data set with the columns "label" and "row".
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    overlaps = False

    def split(self, y: np.ndarray, clients: int, seed: int) -> tuple[Parts, list[str]]:
        """See `fedloom.data.partition.Partition.split`; warnings of the partitioner become notes."""
        module = _partitioners()
        classes = {n: c for n, c in vars(module).items() if inspect.isclass(c) and n != "Partitioner"}
        if self.name not in classes:
            raise ConfigError(unknown("flwr-datasets partitioner", self.name, classes))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rows = self._rows(classes[self.name], y, clients, seed)
        return Listed.of(rows), list(dict.fromkeys(f"{self.name}: {w.message}" for w in caught))

    def _rows(self, kind: type[Any], y: np.ndarray, clients: int, seed: int) -> list[np.ndarray]:
        from datasets import Dataset

        takes = inspect.signature(kind).parameters
        filled = {"num_partitions": clients, "partition_by": "label", "seed": seed % 2**32}
        arguments = {k: v for k, v in filled.items() if k in takes} | dict(self.options)
        try:
            partitioner = kind(**arguments)
            partitioner.dataset = Dataset.from_dict({"label": y.tolist(), "row": list(range(len(y)))})
            count = partitioner.num_partitions
            parts = [np.asarray(partitioner.load_partition(i)["row"], np.int64) for i in range(min(count, clients))]
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(f"partition.kind 'flwr:{self.name}' refused its task: {reason}") from error
        if count != clients:
            raise DataError(
                f"partition.kind 'flwr:{self.name}' made {count} partitions for {clients} clients; make them equal"
            )
        return parts


def _partitioners() -> Any:
    try:
        import flwr_datasets.partitioner
    except ImportError as error:
        raise ConfigError(
            "partition.kind 'flwr:...' needs flwr-datasets; install the extra: pip install 'fedloom[flower]'"
        ) from error
    return flwr_datasets.partitioner
