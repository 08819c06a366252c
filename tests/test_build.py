"""Configuration -> experiment."""

from __future__ import annotations

import pickle
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedloom import build as build_module
from fedloom.build import build, device, experiment, experiment_from_dict, load_data, method, visits
from fedloom.config import resolve
from fedloom.core.errors import ConfigError, DataError
from fedloom.local import LocalSGD
from fedloom.methods import ablations, fedprox, load, names, presets, summaries
from fedloom.methods.fedavg import FedAvg
from fedloom.own_model import identity, own_spec

DIGITS = {
    "stream": {"kind": "class_incremental", "tasks": 2},
    "partition": {"kind": "iid", "clients": 3},
    "model": {"name": "linear"},
    "training": {"rounds": 1},
}
STATIC = {"stream": {"kind": "static"}, "partition": {"kind": "iid", "clients": 2}}


class Logits(nn.Module):
    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(4, 5), nn.Linear(5, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(x).relu())


class Features(nn.Module):
    num_features = 5

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).relu()


def arrays(count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 4)).astype(np.float32), np.arange(count) % 3


def same_values(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_every_section_arrives() -> None:
    tree = resolve(
        DIGITS,
        {
            "method": {"name": "fedprox", "mu": 0.3},
            "training": {"local_epochs": 2, "batch_size": 7, "clip_norm": 1.5, "cohort": 2,
                         "optimizer": {"lr": 0.2, "momentum": 0.5}, "schedule": {"name": "cosine", "floor": 0.1}},
            "engine": {"threads": 2, "on_client_failure": "retry(3)", "min_replies": 2, "deadline": 9.0, "workers": 2},
            "evaluate": {"every": 3, "personal": False},
            "checkpoint": {"every": 4, "keep": 5},
            "seed": 11,
        },
    )  # fmt: skip
    made = build(tree)
    loop = made.experiment.method.local
    assert (loop.epochs, loop.batch_size, loop.clip_norm) == (2, 7, 1.5)
    assert (loop.optimizer.lr, loop.optimizer.momentum) == (0.2, 0.5)
    assert (loop.schedule.name, loop.schedule.floor) == ("cosine", 0.1)
    assert loop.terms[1].mu == 0.3
    assert (made.experiment.seed, made.experiment.cohort, made.experiment.threads) == (11, 2, 2)
    options = made.options
    assert (options.workers, options.on_client_failure, options.retries) == (2, "retry", 3)
    assert (options.min_replies, options.deadline, options.evaluate_every, options.personal) == (2, 9.0, 3, False)
    assert (options.checkpoint_every, options.checkpoint_keep, options.config_hash) == (4, 5, made.hash)
    assert (made.experiment.plan.num_clients, made.experiment.plan.num_stages) == (3, 2)


def test_adamw_arrives() -> None:
    tree = resolve(DIGITS, {"training": {"optimizer": {"name": "adamw", "betas": [0.8, 0.9]}}})
    assert build_module.local(tree).optimizer.betas == (0.8, 0.9)


def test_what_the_machine_decides_is_written_down() -> None:
    made = build(resolve(DIGITS, {"model": {"name": "auto"}}))
    assert made.config.model.name == "digits_cnn"
    assert made.config.engine.device == str(device("auto"))
    assert made.config.training.memory_format in ("contiguous", "channels_last")
    again = build(resolve(made.config.as_dict()))
    assert again.hash == made.hash
    assert again.config == made.config


def test_the_layout_that_the_model_declares_is_taken() -> None:
    made = build(resolve(DIGITS, {"model": {"name": "small_cnn"}}))
    assert made.config.training.memory_format == made.experiment.spec.backbone().memory_format
    asked = build(resolve(DIGITS, {"model": {"name": "small_cnn"}, "training": {"memory_format": "contiguous"}}))
    assert asked.experiment.forward.memory_format == torch.contiguous_format


def test_rebuild_makes_the_same_experiment_in_another_process() -> None:
    first = experiment(resolve(DIGITS, {"method": "fedfmx"}))
    second = pickle.loads(pickle.dumps(first.rebuild))()
    assert second.plan.fingerprint() == first.plan.fingerprint()
    assert second.method == first.method
    assert (second.forward, second.spec, second.cohort, second.seed) == (
        first.forward,
        first.spec,
        first.cohort,
        first.seed,
    )


def test_experiment_takes_a_mapping() -> None:
    assert experiment(DIGITS).plan.num_clients == 3


def test_devices() -> None:
    assert device("cpu") == torch.device("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"engine\.device is cuda, but this machine has no CUDA device"):
            device("cuda")
    with pytest.raises(ConfigError, match="this machine has"):
        device("cuda:99")


@pytest.mark.parametrize(
    ("layer", "error", "sentence"),
    [
        ({"stream": {"tasks": 11}}, ConfigError, "stream.tasks is 11 but there are 10 classes"),
        ({"stream": {"class_order": [0, 1]}}, ConfigError, "class 2 is missing"),
        ({"partition": {"clients": 5000}}, DataError, "partition.clients is 5000 but there are only"),
        ({"model": {"name": "resnet9"}}, ConfigError, "unknown model 'resnet9'"),
        ({"model": {"name": "mlp", "options": {"hiden": [3]}}}, ConfigError, "Did you mean 'hidden'"),
        ({"data": {"name": "digitz"}}, DataError, "unknown data set 'digitz'"),
        ({"model": {"name": "no_such_module:net"}}, ConfigError, "module 'no_such_module' cannot be imported"),
        ({"model": {"name": "object:Net-1"}}, ConfigError, "pass model= again"),
    ],
)
def test_what_does_not_fit_the_data_is_refused(layer: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as caught:
        build(resolve(DIGITS, layer))
    assert sentence in str(caught.value)


def test_a_data_root_without_the_data_set_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=str(tmp_path / "uoft-cs" / "cifar10")):
        build(resolve(DIGITS, {"data": {"name": "uoft-cs/cifar10", "root": str(tmp_path)}}))


def test_workers_auto_is_one_for_short_runs_and_all_cores_for_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert build(resolve(DIGITS)).options.workers == 1
    long = {"training": {"rounds": 1_000_000}}
    assert build(resolve(DIGITS, long)).options.workers == 8
    assert build(resolve(DIGITS, long, {"engine": {"threads": 2}})).options.workers == 4
    alone = {"partition": {"kind": "iid", "clients": 1}}
    assert build(resolve(DIGITS, long, alone)).options.workers == 1, "one client leaves nothing to share"
    assert build(resolve(DIGITS, long, {"method": "joint"})).options.workers == 1


def test_visits_counts_examples() -> None:
    made = build(resolve(DIGITS, {"training": {"rounds": 2, "local_epochs": 3, "cohort": 1.0}}))
    assert visits(made.config, made.experiment.plan) == pytest.approx(2 * 3 * len(made.source.y_train))
    one = build(resolve(DIGITS, {"training": {"rounds": 2, "local_epochs": 3, "cohort": 1}}))
    assert visits(one.config, one.experiment.plan) == pytest.approx(2 * 3 * len(made.source.y_train) / 3)


def test_a_view_of_the_plan_costs_what_the_plan_does() -> None:
    made, plain = (build(resolve(DIGITS, {"method": name})) for name in ("joint", "fedavg"))
    assert made.experiment.plan.num_clients == 1 and plain.experiment.plan.num_clients == 3
    assert visits(made.config, made.experiment.plan) == visits(plain.config, plain.experiment.plan) > 0


def test_one_pooled_client_need_not_answer_for_many() -> None:
    def asked(method: str) -> int:
        return build(resolve({"method": method, "engine": {"min_replies": 3}})).options.min_replies

    assert (asked("fedavg"), asked("joint")) == (3, 1)


def test_methods_are_the_files_of_the_package() -> None:
    assert {"fedavg", "fedprox", "fedfmx"} <= set(names())
    assert [name for name, _ in summaries()] == names()
    assert all(about for _, about in summaries())
    assert load("fedprox").__name__ == "fedprox"
    assert "paper" in presets("fedavg") and ablations("fedavg") == {}


@pytest.mark.parametrize(("attribute", "find"), [("PRESETS", presets), ("ABLATIONS", ablations)])
def test_what_a_module_declares_must_be_options_by_name(
    attribute: str, find: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ({"one": 3}, ["one"]):
        monkeypatch.setattr(fedprox, attribute, value, raising=False)
        with pytest.raises(ConfigError, match=f"'fedprox': {attribute} of its module must map names to mappings"):
            find("fedprox")


def test_a_method_outside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
        from dataclasses import dataclass
        from fedloom.methods.fedavg import FedAvg
        from fedloom.local import LocalSGD

        PRESETS = {"paper": {}, "loud": {"volume": 11}}
        ABLATIONS = {"silent": {"volume": 0}}

        @dataclass(frozen=True)
        class Mine(FedAvg):
            volume: int = 1

        def factory(*, local: LocalSGD, volume: int = 1, part: object = print) -> Mine:
            return Mine(local, volume=volume)

        def nothing():
            return 3

        def unresolvable(*, local: LocalSGD, part: "NoSuchType" = 1):
            return None

        number = 3
        """),
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tree = resolve({"method": {"name": "mine:factory", "preset": "loud"}})
    assert tree.method == {"name": "mine:factory", "preset": "loud", "volume": 11}
    assert method(tree).volume == 11
    assert ablations("mine:factory") == {"silent": {"volume": 0}}
    assert method(resolve({"method": {"name": "mine:Mine", "volume": 4}})).volume == 4
    for name, sentence in (
        ("mine:nope", "module 'mine' has no attribute 'nope'"),
        ("mine:factry", "Did you mean 'factory'?"),
        ("mine:number", "must be a function or a class"),
        ("mine:unresolvable", "a type in its signature cannot be resolved"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            resolve({"method": {"name": name}})
    with pytest.raises(ConfigError, match="made a int, not a fedloom Method"):
        method(resolve({"method": {"name": "mine:nothing"}}))


def test_a_broken_module_is_told_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_method.py").write_text("raise RuntimeError('two\\nlines')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"\(RuntimeError: two, broken_method.py:1\); correct that line"):
        resolve({"method": {"name": "broken_method:x"}})
    (tmp_path / "slip.py").write_text("def x(:\n")
    with pytest.raises(ConfigError, match=r"\(SyntaxError: .*, slip.py:1\); correct that line"):
        resolve({"method": {"name": "slip:x"}})
    with pytest.raises(ConfigError, match=r"No module named 'nowhere'\); run from its folder or install it"):
        resolve({"method": {"name": "nowhere:x"}})
    (tmp_path / "needy.py").write_text("import nowhere\n")
    with pytest.raises(ConfigError, match=r"needy.py:1\); install 'nowhere' or correct the import"):
        resolve({"method": {"name": "needy:x"}})


def test_own_arrays_are_found_again_by_content() -> None:
    first = build(resolve(STATIC), data=arrays())
    assert first.config.data.name == f"stored:{first.source.fingerprint}"
    assert first.config.model.name == "mlp"
    again = build(resolve(first.config.as_dict()))
    assert again.hash == first.hash
    x, y = arrays()
    assert build(resolve(STATIC), data=(x + 1, y)).hash != first.hash


def test_own_classifier_and_backbone() -> None:
    torch.manual_seed(0)
    given = Logits()
    made = build(resolve(STATIC), data=arrays(), model=given)
    assert same_values(made.experiment.spec.classifier(), given)
    assert made.experiment.spec.classifier().class_rows == {"last.weight": 0, "last.bias": 0}
    with pytest.raises(ConfigError, match="the model is a classifier"):
        build(resolve(STATIC, {"method": "fedfmx"}), data=arrays(), model=given)
    pool = build(resolve(STATIC, {"method": "fedfmx"}), data=arrays(), model=Features)
    assert pool.experiment.spec.features
    assert same_values(pool.experiment.spec.classifier(), pool.experiment.spec.classifier())


def test_a_factory_is_seeded_and_gets_what_it_asks_for() -> None:
    a, b = (own_spec(Logits, 3, (4,), seed) for seed in (0, 1))
    assert same_values(a.make(), a.make())
    assert not same_values(a.make(), b.make())
    assert own_spec(Logits, 7, (4,), 0).make().last.out_features == 7


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (nn.Linear(4, 9), r"returned a tensor of shape \[2, 9\]"),
        (nn.Linear(5, 3), r"Linear fails on inputs of shape \[2, 4\]"),
        (lambda: 3, "the factory returned a int"),
        (3, "model must be a name"),
    ],
)
def test_a_model_that_does_not_fit_is_told_what_was_expected(model: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        own_spec(model, 3, (4,), 0)


def test_identity_tells_models_apart() -> None:
    torch.manual_seed(0)
    one, other = Logits(), Logits()
    assert identity(one) == identity(one)
    assert identity(one) != identity(other)
    assert identity(Logits).startswith("object:")


def test_a_model_that_cannot_travel_says_why() -> None:
    made = build(resolve(STATIC, {"engine": {"workers": 2}}), data=arrays(), model=lambda: Logits())
    assert made.experiment.rebuild is None
    assert "cannot be sent to other processes" in made.experiment.why_not
    assert build(resolve(STATIC), data=arrays(), model=Logits()).experiment.rebuild is not None


def test_experiment_from_dict_takes_data_and_model() -> None:
    model = Logits()
    made = build(resolve(STATIC), data=arrays(), model=model)
    again = experiment_from_dict(made.config.as_dict(), made.source, model)
    assert again.plan.fingerprint() == made.experiment.plan.fingerprint()


def test_names_as_data_are_refused() -> None:
    with pytest.raises(DataError, match="names go to"):
        build(resolve(STATIC), data="sklearn/digits")


def needy(*, local: LocalSGD) -> FedAvg:
    """A method that reads domains."""

    class Needy(FedAvg):
        needs_domains = True

    return Needy(local)


def test_a_method_that_needs_domains_is_refused_data_without_them() -> None:
    config = resolve(DIGITS, {"method": {"name": "test_build:needy"}})
    with pytest.raises(ConfigError) as caught:
        build(config)
    assert str(caught.value) == (
        "method 'test_build:needy' needs the domain of every example, and data.name 'sklearn/digits' has none; name "
        "the column that tells it with data.domain, or take a data set with domains"
    )
    source = load_data(config)
    ids = {f"domains_{split}": torch.arange(len(getattr(source, f"y_{split}"))) % 2 for split in ("train", "test")}
    known = replace(source, domain_names=("even", "odd"), **ids)
    assert build(config, data=known).experiment.plan.domains == ("even", "odd")
