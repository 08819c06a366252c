"""What pictures with names of the user's have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.report.drawn import attempted, plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\n b", "a b"), ("$x$", r"\$x\$"), ("_a", "\u200b_a"), ("a" * 9, "aaaa…"), ("$" * 9, r"\$\$\$\$…")],
)
def test_text_is_shown_as_it_is_and_cut(text: str, shown: str) -> None:
    assert plain(text, 5) == shown


def test_a_picture_that_fails_is_told_in_one_sentence(tmp_path: Path) -> None:
    def broken(content: object, path: Path) -> bool:
        raise OSError("no space")

    assert attempted(broken, {}, tmp_path / "a.svg") == "a.svg could not be drawn (OSError: no space)"
    assert attempted(lambda content, path: False, {}, tmp_path / "a.svg") == ""
