"""Words of a comparison: methods, options, seeds, switches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedloom.comparison.entries import reference, section, sections, seeds, split, switches
from fedloom.core.errors import ConfigError

ENDLESS: dict[str, Any] = {"name": "fedavg"}
ENDLESS["more"] = ENDLESS
DEEP: list[Any] = []
for _ in range(100):
    DEEP = [DEEP]


def test_a_word_is_a_name_a_preset_and_options_with_yaml_values() -> None:
    assert section("fedavg") == {"name": "fedavg"}
    assert section(" fedprox @ paper + mu = 1e-2 ") == {"name": "fedprox", "preset": "paper", "mu": 0.01}
    assert section("fedfmx+body=[32,16]+uniform=true") == {"name": "fedfmx", "body": [32, 16], "uniform": True}
    assert section("my.methods:fedx+kind=a+b") == {"name": "my.methods:fedx", "kind": "a+b"}
    assert section("fedprox+mu=1e+3+uniform=false") == {"name": "fedprox", "mu": 1000.0, "uniform": False}


def test_commas_inside_brackets_and_quotes_split_nothing() -> None:
    text = "fedavg,fedfmx+body=[32,16]+stop=1,x:y+name='a,b',fedprox"
    assert split(text, ",") == ["fedavg", "fedfmx+body=[32,16]+stop=1", "x:y+name='a,b'", "fedprox"]
    assert split("a]+b,c", ",") == ["a]+b", "c"]


def test_labels_are_the_words_the_keys_or_made_of_the_options() -> None:
    assert list(sections("fedavg, fedprox+mu=0.1")) == ["fedavg", "fedprox+mu=0.1"]
    found = sections([{"name": "fedfmx", "preset": "paper", "body": (8, 4), "stop": "all"}, "fedavg"])
    assert list(found) == ["fedfmx@paper+body=[8, 4]+stop=all", "fedavg"]
    assert sections({"ours": "fedprox+mu=1", "theirs": {"name": "fedavg"}}) == {
        "ours": {"name": "fedprox", "mu": 1},
        "theirs": {"name": "fedavg"},
    }


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ("", "methods is empty; name at least one"),
        ([], "methods is empty"),
        (5, "methods must be a list such as"),
        ([5], "an entry must be a word such as fedprox.mu=0.1 or a mapping, got 5"),
        ([{"mu": 1}], "an entry needs the name of a method"),
        ("fedavg,", "'' must read name, name@preset"),
        ("fedavg@", "'fedavg@' must read name, name@preset"),
        ("fedprox+mu", r"options of 'fedprox\+mu' are written \+option=value, got '\+mu'"),
        ("fedfmx+body=[32", r"the value of body in 'fedfmx\+body=\[32' is not valid YAML"),
        ("fedavg+name=fedprox", r"'fedavg\+name=fedprox' sets name as an option; write name@preset\+option=value"),
        ("fedprox@paper+preset=x", "sets preset as an option; write name@preset"),
        ("fedprox+mu=0.1+mu=0.2", r"options of 'fedprox\+mu=0.1\+mu=0.2': 'mu' is given twice; keep one of them"),
        ({"\ud800": "fedavg"}, "keys of methods must be text"),
        ([{"name": "fedavg", "note": "\ud800"}], "methods.note holds characters that are no text"),
        ({" ": "fedavg"}, "methods: a label is empty"),
        ({"a\0": "fedavg"}, r"methods: the label 'a\\x00' has control characters; write it in plain text"),
        ([ENDLESS], "methods.more.* is nested too deeply or refers to itself; write its values out"),
        ({"a": ENDLESS}, "methods.more.* refers to itself"),
        ([DEEP], "methods is nested too deeply"),
        ("fedavg, fedavg", "methods: 'fedavg' is given twice; keep one of them, or tell them apart by their options"),
    ],
)
def test_what_is_no_entry_is_refused_in_words(methods: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sections(methods)


def test_the_reference_is_the_first_label_unless_one_is_named() -> None:
    labels = sections({3: "fedavg", 4: "fedprox"})
    assert reference(None, labels) == "3" and reference(4, labels) == reference(" 4", labels) == "4"
    for wanted in (5, ["3"], {}, "", 3.0, DEEP):
        with pytest.raises(ConfigError, match=r"unknown reference '.*'.* Known: 3, 4|reference is nested too deeply"):
            reference(wanted, labels)


def test_seeds_are_whole_numbers() -> None:
    assert seeds("0, 2,10") == (0, 2, 10)
    assert seeds(range(3)) == seeds(np.arange(3)) == (0, 1, 2)
    assert all(type(seed) is int for seed in seeds(np.arange(3)))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("", "seeds is empty"),
        ((), "seeds is empty"),
        (3, "seeds must be a list of whole numbers such as 0,1,2, got 3"),
        ("0,x", "seeds must be whole numbers from 0, such as 0,1,2, got 'x'"),
        ("0,", "got ''"),
        ("-1", "got -1"),
        ([0, 1.5], "got 1.5"),
        ([True], "got True"),
        (DEEP, "seeds is nested too deeply"),
        ({0: 1}, "seeds must be a list of whole numbers"),
        ("1,2,1", "seeds: '1' is given twice; a seed counts once"),
    ],
)
def test_what_is_no_seed_is_refused_in_words(values: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        seeds(values)


def test_switches_are_those_that_the_method_declares() -> None:
    every = switches("fedfmx")
    assert every["top1"] == {"stop": 1} and len(every) > 3
    assert list(switches("fedfmx", "top2, no-rar")) == ["top2", "no-rar"]
    for wanted, words in (
        ("top3", "unknown switch of fedfmx 'top3'. Did you mean 'top"),
        ("top1,top1", "switches: 'top1' is given twice"),
        ([], "switches is empty; name some of no-fres"),
        (3, "switches must be a list of .*top1.*, got 3"),
        ({"top1": 1}, "switches must be a list of"),
        ([["top1"]], r"unknown switch of fedfmx '\['top1'\]'"),
        (DEEP, "switches is nested too deeply"),
    ):
        with pytest.raises(ConfigError, match=words):
            switches("fedfmx", wanted)
    with pytest.raises(ConfigError, match=r"method 'fedavg' declares no switches .*`fedloom compare --methods fedavg,"):
        switches("fedavg")
    with pytest.raises(ConfigError, match=r"unknown method 'fedfxm'. Did you mean 'fedfmx'"):
        switches("fedfxm")
