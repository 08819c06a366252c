"""Which versions of Flower will do, and what is set before it is imported."""

from __future__ import annotations

import os

import pytest

from fedloom.core import ConfigError
from fedloom.engine.flower import compat


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    monkeypatch.setattr(compat, "_installed", versions.get)


def test_every_version_of_the_range_will_do(monkeypatch: pytest.MonkeyPatch):
    low, high = compat.OLDEST, compat.BELOW
    for text, number in [(f"{low[0]}.{low[1]}.0", low), ("1.42.0", (1, 42)), ("1.99.9.dev20260101", (1, 99))]:
        installed(monkeypatch, flwr=text)
        assert compat.require() == number and low <= number < high


@pytest.mark.parametrize("text", ["1.8.0", "0.17.0", "2.0.0", "2.0.0rc1", "unknown"])
def test_others_are_refused_with_the_range(text: str, monkeypatch: pytest.MonkeyPatch):
    installed(monkeypatch, flwr=text)
    low = ".".join(map(str, compat.OLDEST))
    with pytest.raises(
        ConfigError, match=rf"flwr {text} is installed, and FedLoom needs flwr >= {low} and < 2.0"
    ) as info:
        compat.require()
    assert info.value.exit_code == 2


def test_what_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    installed(monkeypatch)
    with pytest.raises(ConfigError, match=r"needs Flower; install the extra: pip install 'fedloom\[flower\]'"):
        compat.require()
    installed(monkeypatch, flwr="1.42.0")
    assert compat.require() == (1, 42)
    with pytest.raises(ConfigError, match=r"needs Ray; install the extra: pip install 'fedloom\[flower-sim\]'"):
        compat.require(ray=True)
    installed(monkeypatch, flwr="1.42.0", ray="2.55.1")
    assert compat.require(ray=True) == (1, 42)


def test_telemetry_and_update_checks_are_off_unless_the_user_wants_them(monkeypatch: pytest.MonkeyPatch):
    installed(monkeypatch, flwr="1.42.0")
    monkeypatch.setattr(os, "environ", {"FLWR_DISABLE_UPDATE_CHECK": "0"})
    compat.require()
    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "0" and os.environ["FLWR_DISABLE_UPDATE_CHECK"] == "0"


def test_messages_can_be_made_in_this_process():
    app = pytest.importorskip("flwr.app")
    compat.identify(5, 0)
    message = app.Message(app.RecordDict(), 3, "train")
    assert (message.metadata.dst_node_id, message.metadata.message_type) == (3, "train")
