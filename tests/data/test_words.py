"""Class names as words: where they come from, and what is said where there are none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fedloom.core import DataError
from fedloom.data.words import class_words

IDS = ("n01443537", "n01629819", "n07749582")
FISH = {"n01443537": "goldfish, Carassius auratus", "n01629819": ["fire salamander", "newt"], "n07749582": "lemon"}


def test_names_are_words_with_spaces_and_the_hubs_crab_is_spelt_out() -> None:
    assert class_words(["aquarium_fish", "cra", "  Red__maple tree", "7"]) == (
        "aquarium fish",
        "crab",
        "Red maple tree",
        "7",
    )


def test_wordnet_ids_get_the_first_lemma_of_timm() -> None:
    pytest.importorskip("timm")
    assert class_words(IDS) == ("goldfish", "European fire salamander", "lemon")
    with pytest.raises(
        DataError, match=r"timm does not know 'n99999999'; give their words with model.options.class_words"
    ):
        class_words(["n99999999"], data="parquet:x")


def test_wordnet_ids_without_timm_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm.data", None)
    with pytest.raises(DataError, match=r"data.name 'zh-plus/tiny-imagenet' names its classes by WordNet ids such as "):
        class_words(IDS, data="zh-plus/tiny-imagenet")
    assert class_words([*IDS, "cat"]) == (*IDS, "cat"), "names, not ids alone"


def test_a_file_beside_the_data_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("zh-plus/tiny-imagenet", "own/train"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "zh-plus/tiny-imagenet/class_words.json").write_text(json.dumps(FISH), encoding="utf-8")
    (tmp_path / "own/class_words.json").write_text(json.dumps(FISH), encoding="utf-8")
    wanted = ("goldfish", "fire salamander", "lemon")
    for name in ("zh-plus/tiny-imagenet", "tiny-imagenet", "domains:tiny-imagenet,pacs"):
        assert class_words(IDS, data=name, root=str(tmp_path)) == wanted
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    assert class_words(IDS, data="zh-plus/tiny-imagenet") == wanted
    (tmp_path / "own/train.parquet").write_bytes(b"")
    for name in (f"folder:{tmp_path}/own", f"parquet:{tmp_path}/own/train.parquet"):
        assert class_words(IDS, data=name) == wanted
    with pytest.raises(DataError, match=r"'.*class_words.json' has no word for class 'cat' and 1 more; add it"):
        class_words(["n07749582", "cat", "dog"], data=f"folder:{tmp_path}/own")


def test_the_users_words_win_as_a_list_a_mapping_or_a_file(tmp_path: Path) -> None:
    names = ("a", "b_c")
    assert class_words(names, ["dog, wild", "big_cat"]) == ("dog, wild", "big cat"), "a list holds words, each whole"
    assert class_words(names, {"b_c": ["cat", "tiger"], "a": "dog, wild", "z": ""}) == ("dog", "cat")
    for content in (["dog", "cat"], {"a": "dog", "b_c": "cat"}):
        (tmp_path / "w.json").write_text(json.dumps(content), encoding="utf-8")
        assert class_words(names, str(tmp_path / "w.json")) == ("dog", "cat")
    (tmp_path / "w.json").write_text('["dog", "cat"]', encoding="utf-8-sig")
    assert class_words(names, str(tmp_path / "w.json")) == ("dog", "cat"), "with the byte order mark of some editors"
    words = class_words(names, {"a": "x, y", "b_c": "u"})
    assert class_words(names, list(words)) == words, "words that were found are found again"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["dog"], "has 1 words and the data have 2 classes; give one for each"),
        ({"a": "dog"}, "model.options.class_words has no word for class 'b'; add it"),
        (["dog", ""], "the word of class 'b' must be a text, got ''"),
        (["dog", "c\ud800t"], "the word of class 'b' has characters that are no text"),
        (["dog", 3], "the word of class 'b' must be a text, got 3"),
        ({"a": [], "b": "cat"}, "the word of class 'a' must be a text, got ''"),
        (3, "must be a list of words in class order, a mapping name -> words or a path"),
        ("/nowhere/w.json", "cannot read '/nowhere/w.json' \\(No such file or directory\\)"),
    ],
)
def test_words_that_cannot_be_used_are_refused(given: object, words: str) -> None:
    with pytest.raises(DataError, match=words):
        class_words(["a", "b"], given)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text("a: dog", encoding="utf-8")
    with pytest.raises(DataError, match=r"model.options.class_words: cannot read '.*w.json' \(no JSON"):
        class_words(["a"], str(tmp_path / "w.json"))
