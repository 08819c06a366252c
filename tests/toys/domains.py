"""Data with domains, made by hand: every class is a corner, every domain moves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from fedloom.core import Forward
from fedloom.data import from_arrays, make_plan
from fedloom.data.source import Source
from fedloom.engine.experiment import Experiment
from fedloom.select.sampling import uniform_cohort
from toys.federation import BlobSpec, method_of

NAMES = ("photo", "art", "cartoon", "sketch")


def source(per_cell: int = 10, classes: int = 6, names: Sequence[str] = NAMES) -> Source:
    """`per_cell` training examples of every class in every domain, and half as many to test."""

    def split(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        y, d = (a.ravel() for a in np.meshgrid(np.arange(classes), np.arange(len(names)), indexing="ij"))
        y, d = np.tile(y, count), np.tile(d, count)
        angle = 2 * np.pi * y / classes + 0.4 * d
        noise = np.random.default_rng(len(y)).normal(size=(len(y), 2))
        return (3 * np.stack([np.cos(angle), np.sin(angle)], 1) + 0.5 * noise).astype(np.float32), y, d

    train, test = split(per_cell), split(max(1, per_cell // 2))
    made = from_arrays((*train[:2], *test[:2]))
    domains = {"domains_train": torch.from_numpy(train[2]), "domains_test": torch.from_numpy(test[2])}
    return replace(made, domain_names=tuple(names), **domains)


def arriving(name: str, *, options: Mapping[str, Any] = MappingProxyType({}), **partition: Any) -> Experiment:
    """An experiment in which the four domains arrive one after another; by default six clients hold some of each."""
    dealing = {"kind": "iid", "clients": 6, **partition}
    plan = make_plan(source(), stream={"kind": "domain_incremental"}, partition=dealing, rounds=2)
    return Experiment(method_of(name, **options), BlobSpec(6), Forward(), plan, uniform_cohort, 0, 1.0)
