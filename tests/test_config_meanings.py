"""What options and keys mean is told for every one of them, once."""

from __future__ import annotations

import pytest

from fedloom.config.describe import method_settings, tree_settings
from fedloom.config.meanings import explained, option_meanings, told
from fedloom.config.options import schema
from fedloom.methods import names


@pytest.mark.parametrize("name", names())
def test_every_option_of_a_method_has_a_meaning(name: str) -> None:
    settings = method_settings(name)
    assert [setting.key for setting in settings] == [f"method.{key}" for key in schema(name).model_fields]
    assert [setting.key for setting in settings if len(setting.about) < 4] == []


def test_an_option_that_a_factory_does_not_explain_is_fedavgs() -> None:
    shared = option_meanings("fedavg")
    assert option_meanings("fedprox")["buffers"] == shared["buffers"]
    assert option_meanings("fedheal")["buffers"] != shared["buffers"]


def test_every_key_of_the_configuration_has_one_meaning() -> None:
    settings = [setting for group in tree_settings() for setting in group.settings]
    assert [setting.key for setting in settings if len(setting.about) < 4] == []
    assert told().keys() <= {setting.key for setting in settings}, "keys that are no longer there"


def test_a_sections_text_does_not_repeat_what_keys_mean() -> None:
    groups = {group.title: group for group in tree_settings()}
    assert groups["data"].about == "Where examples come from."


def test_texts_are_split_at_the_names_they_explain() -> None:
    found = explained("Where: things\nlie. a, b: two of\n    them. See c; d: last.", ["a", "b", "c", "d"])
    assert found.about == "Where: things lie."
    assert found.meanings == {"a": "two of them. See c", "b": "two of them. See c", "d": "last"}
    assert explained("Nothing here.", []) == ("Nothing here.", {})
    assert explained("A note (as so.) a: one.", ["a"]).about == "A note (as so.) a: one."
