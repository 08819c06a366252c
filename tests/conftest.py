"""Tests never reach the network and share no cache with the user."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_CACHE = tempfile.mkdtemp(prefix="fedloom-tests-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", FLWR_TELEMETRY_ENABLED="0", FEDLOOM_CACHE=_CACHE)

import numpy as np  # noqa: E402 - the environment is read at import
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture
def no_global_draws() -> Iterator[None]:
    """Code under test draws from named streams only: the global generators end as they began."""
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    yield
    assert torch.equal(before[0], torch.get_rng_state()), "the global torch generator was used"
    assert np.array_equal(before[1], np.random.get_state()[1]), "the global numpy generator was used"  # noqa: NPY002
    assert before[2] == random.getstate(), "the global random generator was used"


@pytest.fixture(autouse=True)
def no_module_outlives_its_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module that a test wrote and imported is forgotten: the next test may write another of the same name."""
    before, folder = set(sys.modules), tmp_path_factory.getbasetemp()
    yield
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and folder in Path(file).parents:
            del sys.modules[name]
