"""What pictures with names of the user's have in common: their text, and how they get on the disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST = 36  # characters of a label in a legend


def plain(text: str, longest: int = LONGEST) -> str:
    """Text on one line that is neither read as mathematics nor left out of a legend, as one with a leading underscore
    would be.
    """
    text = " ".join(text.split())
    text = (text if len(text) <= longest else f"{text[: longest - 1]}…").replace("$", r"\$")
    return f"\u200b{text}" if text.startswith("_") else text


def save_svg(made: Figure, path: Path) -> None:
    """Write a figure, whole or not at all, the same bytes for the same picture."""
    partial = path.with_name(f".{path.name}.tmp")
    made.savefig(partial, format="svg", metadata={"Date": None})
    partial.replace(path)


def attempted(save: Callable[[Mapping[str, Any], Path], bool], content: Mapping[str, Any], path: Path) -> str:
    """Draw a picture; why that failed, "" if it did not, for the numbers are there without it."""
    try:
        save(content, path)
    except Exception as error:  # of a library that draws, or of the disk
        return f"{path.name} could not be drawn ({type(error).__name__}: {error})"
    return ""
