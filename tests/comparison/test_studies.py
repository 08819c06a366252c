"""What a call and a file ask for, put together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.comparison.studies import over, slugs, study, variants
from fedloom.core.errors import ConfigError

FILE = """
recipe: quickstart
methods: [fedavg, fedprox+mu=0.1]
seeds: [3, 4]
metric: forgetting
set: {training.rounds: 2, training: {optimizer: {lr: 0.1}}}
grid: {training.optimizer.lr: [0.1, 0.01], partition.alpha: [0.5, 0.1]}
"""


def asked(recipe: Any, methods: Any = None, seeds: Any = None, given: Any = None, **more: Any) -> Any:
    return study(recipe, methods, seeds, more.pop("reference", None), more.pop("metric", None), given or {}, **more)


def file(tmp_path: Path, text: str = FILE) -> Path:
    (tmp_path / "study.yaml").write_text(text)
    return tmp_path / "study.yaml"


def test_a_file_names_everything(tmp_path: Path) -> None:
    for path in (file(tmp_path), str(file(tmp_path))):
        found = asked(path)
        assert (found.recipe, found.methods, found.seeds) == ("quickstart", ["fedavg", "fedprox+mu=0.1"], [3, 4])
        assert (found.reference, found.metric) == (None, "forgetting")
        assert found.given["training"] == {"rounds": 2, "optimizer": {"lr": 0.1}}
    assert list(found.settings) == [
        "lr=0.1, alpha=0.5",
        "lr=0.1, alpha=0.1",
        "lr=0.01, alpha=0.5",
        "lr=0.01, alpha=0.1",
    ]
    assert found.settings["lr=0.01, alpha=0.5"] == {
        "training": {"optimizer": {"lr": 0.01}}, "partition": {"alpha": 0.5},
    }  # fmt: skip


def test_what_the_call_names_goes_over_the_file(tmp_path: Path) -> None:
    given = {"training": {"rounds": 5}, "engine": "flower", "data": None}
    found = asked(file(tmp_path), "joint", "1", given, reference="joint", metric="domain_mean")
    assert (found.methods, found.seeds, found.reference, found.metric) == ("joint", "1", "joint", "domain_mean")
    assert found.given == {
        "training": {"rounds": 5, "optimizer": {"lr": 0.1}}, "engine": {"name": "flower"}, "data": None, "model": None,
    }  # fmt: skip
    other = asked(file(tmp_path, FILE.replace("grid:", "# ")), grid={"seed": [1]})
    assert list(other.settings) == ["seed=1"]


def test_a_recipe_is_no_file_of_a_study(tmp_path: Path) -> None:
    plain = file(tmp_path, "training: {rounds: 1}\nmethod: fedavg\n")
    for recipe in ("quickstart", plain, {"methods": 1}, None):
        found = asked(recipe, ["fedavg"])
        assert found.recipe is recipe and found.seeds == (0, 1, 2) and not found.settings


def test_what_is_neither_recipe_nor_file_is_told_before_what_it_lacks(tmp_path: Path) -> None:
    for recipe, words in (
        (tmp_path / "none.yaml", "does not exist"),
        ("\0.yaml", "cannot be read: embedded null byte"),
        ("quikstart", "unknown recipe 'quikstart'. Did you mean 'quickstart'"),
        (f"{tmp_path}/", "is a folder; name a YAML file"),
    ):
        with pytest.raises(ConfigError, match=words):
            asked(recipe)


def test_a_recipe_beside_the_file_is_found_from_there(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("training: {rounds: 1}")
    assert asked(file(tmp_path, "recipe: mine.yaml\nmethods: fedavg")).recipe == str(tmp_path / "mine.yaml")
    assert asked(file(tmp_path, "methods: fedavg")).recipe == "quickstart"
    assert asked(file(tmp_path, "methods: fedavg\nrecipe: {seed: 1}")).recipe == {"seed": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("methods: [a]\nseed: 1", r"study.yaml': unknown key 'seed'. Did you mean 'seeds'\?"),
        ("methods: [a]\nsettngs: {}", r"unknown key 'settngs'. Did you mean 'settings'\?"),
        ("methods: [a]\nset: [1]", r"set must be a mapping of keys to values, got \[1\]"),
        ("methods: [a]\nset: false", "set must be a mapping of keys to values, got False"),
        ("methods: [a]\nset: {mu: 1}", r"unknown key 'mu'."),
        ("methods: [a]\nset: {training.round: 1, 5: 2}", r"unknown key '5'"),
        ("methods: [a]\nrecipe: 5", r"recipe must be the name of a recipe or of a YAML file, got 5"),
        ("methods: [a]\nsettings: {x: {}}\ngrid: {seed: [1]}", "settings and grid are both given"),
        ("methods: [a]\nsettings: []", "settings must be a mapping of labels"),
        ("methods: [a]\nsettings: {' ': {}}", "settings: a label is empty"),
        ("methods: [a]\nsettings: {x: 5}", "setting x: it must be a mapping of keys to values, got 5"),
        ("methods: [a]\nsettings: {x: {seeds: 5}}", r"setting x: unknown key 'seeds'"),
        ("methods: [a]\nsettings: {x: {}, 'x ': {}}", "settings: 'x' is given twice; keep one of them"),
        ('methods: [a]\nsettings: {"a\\eb": {}}', r"settings: the label 'a\\x1bb' has control characters"),
        (
            "methods: [a]\ngrid: {training: [{rounds: 1}], training.rounds: [2]}",
            "training.rounds is a part of training",
        ),
        ('methods: [a]\ngrid: {data.name: ["x\\ny", x y]}', "grid: 'name=x y' is given twice"),
        ("methods: [a]\ngrid: 5", "grid must be a mapping of dotted keys to lists of values, got 5"),
        ("methods: [a]\ngrid: {partition.alpha: 0.5}", r"grid: partition.alpha must be a list of values such as"),
        ("methods: [a]\ngrid: {partition.alpha: []}", r"grid: partition.alpha must be a list of values such as"),
        ("methods: [a]\ngrid: {partition.alpha: [1, 1]}", "grid: 'alpha=1' is given twice; each value counts once"),
        ("methods: [a]\ngrid: {alpha: [1]}", r"setting alpha=1: unknown key 'alpha'"),
        ("methods: [a]\nmethods: [b]", "the key 'methods' is given twice"),
    ],
)
def test_slips_in_a_file_are_told_in_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        asked(file(tmp_path, text))


def test_a_comparison_has_one_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"names settings, and a comparison has one; call `fedloom sweep` with it"):
        asked(file(tmp_path)).alone()
    assert asked("quickstart", "fedavg").alone().methods == "fedavg"


def test_sections_go_over_sections_and_own_objects_stay() -> None:
    low = {"training": {"rounds": 1, "optimizer": "adamw"}, "data": {"augment": "flip"}, "model": "linear"}
    own = (np.ones(2), np.zeros(2))
    found = over(low, {"training.rounds": 2, "data": own, "model": None, "tracker": None})
    assert found.pop("data") is own
    assert found == {
        "training": {"rounds": 2, "optimizer": {"name": "adamw"}}, "data.augment": "flip", "model": {"name": "linear"},
        "tracker": None, "engine": None,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="unknown key 'tell'"):
        over({}, {"tell": 1})


def test_keys_of_a_grid_are_as_short_as_tells_them_apart() -> None:
    grid = {"training.optimizer.name": ["sgd"], "model.name": ["linear"], "seed": [1], "method.body": [[8, 4]]}
    (label,) = variants(None, grid)
    assert label == "optimizer.name=sgd, model.name=linear, seed=1, body=[8, 4]"


def test_a_grid_without_end_is_refused_before_it_is_made() -> None:
    grid = {f"method.k{k}": list(range(1000)) for k in range(10)}
    with pytest.raises(
        ConfigError, match="grid makes 1000000000000000000000000000000 settings, and 10000 are the most"
    ):
        variants(None, grid)
    assert len(variants(None, {"seed": list(range(2500)), "model.name": ["a", "b"]})) == 5000


def test_every_setting_has_a_folder_of_its_own() -> None:
    found = slugs(["alpha 0.5", "Alpha 0.5", "alpha: 0.5", "runs", "é", "../x", "lr=0.1, alpha=[1]", "w" * 200])
    assert list(found.values()) == [
        "alpha-0.5", "Alpha-0.5-2", "alpha-0.5-3", "runs-2", "setting", "x", "lr=0.1-alpha=-1", "w" * 80,
    ]  # fmt: skip


def test_an_own_object_goes_over_another() -> None:
    for key in ("data", "model"):
        one, other = object(), object()
        assert over({key: one}, {key: other})[key] is other and over({key: one}, {"seed": 1})[key] is one
        found = over({key: one, f"{key}.name": "x"}, {key: other, "training.rounds": 2})
        assert (found[key], found[f"{key}.name"], found["training"]) == (other, "x", {"rounds": 2})
