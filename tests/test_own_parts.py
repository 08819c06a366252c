"""Factories of methods and models that the user wrote: whatever they do is told in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedloom import api
from fedloom.build import build
from fedloom.core.errors import CheckpointError, ConfigError, FedloomError
from fedloom.core.moe import need_moe_layers
from fedloom.models import backbone
from fedloom.models.moe_lm.block import MoEBlock
from fedloom.models.moe_lm.layers import find_layers
from fedloom.models.weights import read_state
from fedloom.own_model import own_spec

METHODS = """
from fedloom.methods.fedavg import fedavg

def raising(*, local): raise KeyError("zz")
def keywords(**kwargs): return fedavg(**kwargs)
def wrong_default(*, local, rate: float = "x"): return fedavg(local=local)
def named(*, local, name: str = "x"): return fedavg(local=local)
def bad_type(*, local, a: "1/0" = 3): return fedavg(local=local)
def number(): return 3
def leaving(*, local): raise SystemExit(0)
def sets(*, local, plain=frozenset("cab"), typed: frozenset[str] = frozenset("zqr")):
    assert isinstance(plain, frozenset) and isinstance(typed, frozenset)
    return fedavg(local=local)
"""
REFUSED = [
    ("raising", "refuses its options: KeyError, own_methods.py:4"),
    ("wrong_default", "the default of 'rate' is 'x'"),
    ("named", "has a parameter 'name', which is a key of the section itself"),
    ("bad_type", "a type in its signature cannot be resolved"),
    ("number", "made a int, not a fedloom Method"),
    ("leaving", "refuses its options: SystemExit, own_methods.py:10: 0"),
]


def data() -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(0).normal(size=(30, 4)), np.arange(30) % 3


def built(**given: Any) -> Any:
    given = {"method": "fedavg", "model": "linear", "stream": {"kind": "static"}} | given
    _, config, x, model = api.configure(None, data=data(), **given)
    return build(config, data=x, model=model)


@pytest.fixture
def own_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_methods.py").write_text(METHODS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("own_methods")
@pytest.mark.parametrize(("name", "sentence"), REFUSED)
def test_bad_factories_of_methods(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(method=f"own_methods:{name}")
    assert sentence in str(caught.value)


@pytest.mark.usefixtures("own_methods")
def test_keywords_get_the_loop_and_sets_keep_one_order() -> None:
    assert built(method="own_methods:keywords").experiment.method.local is not None
    options = built(method="own_methods:sets").config.method
    assert (options["plain"], options["typed"]) == (["a", "b", "c"], ["q", "r", "z"])


def raising(num_classes: int) -> nn.Module:
    raise KeyError("zz")


def needing(num_classes: int, depth: int) -> nn.Module:
    return nn.Linear(4, num_classes)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: raising, "the factory raising fails when called with num_classes"),
        (lambda: needing, "arguments besides num_classes, input_shape and vocab_size come from model.options"),
        (lambda: nn.LazyLinear(3), "a lazy layer"),
        (lambda: nn.Linear(4, 3).requires_grad_(False), "has no trainable parameter"),
        (lambda: nn.Identity(), "has no trainable parameter"),
        (lambda: nn.Linear(4, 3, device="meta"), "holds no floating-point values"),
        (lambda: 3, "model must be a name"),
    ],
)
def test_bad_models(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(model=make())
    assert sentence in str(caught.value)


@pytest.mark.parametrize("width", ["abc", 1e9, None, True, 10**9])
def test_options_of_models_have_a_type_and_an_end(width: Any) -> None:
    with pytest.raises(ConfigError, match=r"model\.options\.width of digits_cnn must be"):
        backbone("digits_cnn", input_shape=(1, 8, 8), width=width)


def test_a_file_that_holds_no_weights(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_text("root:x:0:0")
    with pytest.raises(ConfigError, match="damaged or no file of weights") as caught:
        read_state(tmp_path / "w.pt")
    assert "weights_only" not in str(caught.value)
    with pytest.raises(ConfigError, match="no file"):
        read_state("x" * 300)


@pytest.mark.parametrize("value", [3, [1], lambda: None])
@pytest.mark.parametrize("section", ["method", "engine"])
def test_sections_of_another_type(section: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{section} must be a name or a mapping"):
        api.configure(None, **{section: value})


@pytest.mark.parametrize("opening", [api.resume, api.load_run])
def test_run_folders_that_are_none(opening: Any, tmp_path: Path) -> None:
    for value in (3, None, [1], "", "x" * 300, "~nosuchuser/x"):
        with pytest.raises(FedloomError):
            opening(value)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        opening(tmp_path / "file")


@pytest.mark.parametrize("text", ["[]", "{}", "{", "3"])
def test_a_damaged_summary_says_how_to_write_it_again(text: str, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(text)
    (tmp_path / "DONE").touch()
    with pytest.raises(CheckpointError, match=r"to write it again delete .*DONE"):
        api.resume(tmp_path)


def test_a_run_that_is_done_loses_the_mark_of_an_earlier_failure(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"final_accuracy": 0.5}')
    for name in ("DONE", "FAILED"):
        (tmp_path / name).touch()
    assert api.resume(tmp_path).summary["final_accuracy"] == 0.5
    assert (tmp_path / "DONE").exists() and not (tmp_path / "FAILED").exists()


def test_options_of_data_that_arrays_do_not_use_are_noted() -> None:
    _, config, x, _ = api.configure(None, data=data(), **{"data.image_size": 8, "stream.kind": "static"})
    assert "data.image_size is not used by data 'arrays'" in build(config, data=x).experiment.plan.notes


def test_a_model_beyond_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")

    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", full)
    with pytest.raises(ConfigError, match="does not fit into memory"):
        built()


LEAVING = """
import sys
from dataclasses import dataclass
from fedloom.methods.fedavg import FedAvg

@dataclass(frozen=True)
class Left(FedAvg):
    where: str = ""
    def exchanges(self):
        if self.where == "exchanges": sys.exit(0)
        return super().exchanges()
    def plan(self, stage):
        if self.where == "plan": sys.exit(0)
        return super().plan(stage)
    def module(self, spec):
        if self.where == "module": sys.exit(0)
        return super().module(spec)
    def send(self, server, client, ctx):
        if self.where == "send" and client is not None: sys.exit(0)
        return super().send(server, client, ctx)

def left(*, local, where: str = "module"): return Left(local, where=where)
"""


@pytest.mark.parametrize("where", ["exchanges", "plan", "module", "send"])
def test_a_method_that_calls_sys_exit_never_passes_for_a_run_that_ended_well(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "left_methods.py").write_text(LEAVING)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = {"method": {"name": "left_methods:left", "where": where}, "model": "linear", "stream": {"kind": "static"}}
    with pytest.raises(FedloomError, match="SystemExit: 0"):
        api.run(data=data(), out=tmp_path / "run", **given)
    assert not (tmp_path / "run" / "DONE").exists()


class OwnMixture(nn.Module):
    """A backbone whose experts are found by its attribute `moe_layers`."""

    num_features = 8

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.input, self.block = nn.Linear(input_shape[0], 8), MoEBlock(8, 8, 3, 2)
        self.moe_layers = find_layers(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.input(x))


def test_a_backbone_of_ones_own_tells_its_experts() -> None:
    module = own_spec(OwnMixture, 3, (4,), 0).classifier()
    assert [layer.name for layer in need_moe_layers(module, "fedmoe")] == ["backbone.inner.block"]
    out = module(torch.randn(5, 4))
    assert out["routing"].shape == (1, 5, 3) and bool((out["selected"].sum(2) == 2).all())


class MixedClassifier(nn.Module):
    """A classifier of one's own with experts, which returns logits alone."""

    def __init__(self):
        super().__init__()
        self.block, self.head = MoEBlock(4, 8, 3), nn.Linear(4, 2)
        self.moe_layers = find_layers(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.block(x))


def test_a_classifier_of_ones_own_tells_its_routing() -> None:
    module = own_spec(MixedClassifier(), 2, (4,), 0).classifier()
    assert [layer.name for layer in need_moe_layers(module, "fedmoe")] == ["block"]
    out = module(torch.randn(5, 4))
    assert out["logits"].shape == (5, 2) and out["routing"].shape == (1, 5, 3)
