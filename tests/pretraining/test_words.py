from __future__ import annotations

from fedloom.models.clip.packages import open_clip
from fedloom.pretraining.words import SENTENCE, TEMPLATES, phrases


def test_phrases_are_names_then_imagenet_then_the_first_whole_words() -> None:
    found = phrases(["goldfish", "my own thing", "goldfish"], 5)
    imagenet = open_clip().IMAGENET_CLASSNAMES
    assert found[:2] == ["goldfish", "my own thing"]
    assert len(found) == len(set(found)) and set(imagenet) <= set(found)
    extra = found[-5:]
    assert all(word.isascii() and word.isalpha() and len(word) >= 3 for word in extra)
    vocabulary = list(open_clip().SimpleTokenizer().encoder)
    ranks = [vocabulary.index(f"{word}</w>") for word in extra]
    assert ranks == sorted(ranks)
    assert phrases(["goldfish"], 0) == list(dict.fromkeys(["goldfish", *imagenet]))


def test_every_template_has_one_place_for_the_name() -> None:
    assert SENTENCE == "a photo of a {}." and len(set(TEMPLATES)) == len(TEMPLATES) == 12
    assert all(template.count("{}") == 1 for template in TEMPLATES)
