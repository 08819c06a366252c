from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.pretraining import run, text
from toys.pretraining import draw_folder, embeddings


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_folder(tmp_path_factory.mktemp("planted") / "colours")


@pytest.fixture
def fake_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentences are embedded by their words, without weights; ImageNet's 1,000 names are left out to save time."""
    monkeypatch.setattr(text, "embeddings", embeddings)
    monkeypatch.setattr(run, "phrases", lambda names, words: [*names, *map(str, range(words))])
