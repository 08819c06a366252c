import io
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before `datasets` is imported: no test touches the network

import numpy as np
import pytest
from PIL import Image

from fedloom.data import from_arrays

MIRROR = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    folder = tmp_path / "fedloom-cache"
    monkeypatch.setenv("FEDLOOM_CACHE", str(folder))
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    return folder


@pytest.fixture
def mirror():
    if not MIRROR.is_dir():
        pytest.skip(f"no mirror of hub data sets at {MIRROR}")
    return MIRROR


@pytest.fixture
def png():
    def make(array):
        buffer = io.BytesIO()
        Image.fromarray(np.asarray(array, np.uint8)).save(buffer, format="PNG")
        return buffer.getvalue()

    return make


@pytest.fixture
def toy():
    """A source of `per_class` grey 4x4 images per class; pixel value = class, test split half as large."""

    def make(classes=6, per_class=20):
        def split(n):
            y = np.tile(np.arange(classes), n)
            x = np.broadcast_to(y.astype(np.uint8)[:, None, None, None], (len(y), 1, 4, 4)).copy()
            return x, y

        return from_arrays((*split(per_class), *split(max(1, per_class // 2))))

    return make
