"""What a shell proposes after TAB. It is read off the folder, for a shell does not wait until torch is imported."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

HERE = Path(__file__).parent
METHODS, CLAIMS, RECIPES = HERE.parent / "methods", HERE.parent / "claims", HERE / "recipes"


def methods(incomplete: str) -> list[str]:
    """Names of the methods of the package, as `fedloom.methods.names` gives them."""
    return _beginning(incomplete, [path.stem for path in METHODS.glob("*.py") if _defines(path)])


def recipes(incomplete: str) -> list[str]:
    """Names of recipes, and YAML files and folders of the working folder."""
    head = incomplete.rpartition("/")[0]
    try:
        here = [path for path in Path(head or ".").iterdir() if path.is_dir() or path.suffix in (".yaml", ".yml")]
    except OSError:
        here = []
    files = [f"{head}/{path.name}" if head else path.name for path in here if not path.name.startswith(".")]
    names = [path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml")]
    return _beginning(incomplete, names) + [
        f"{name}/" if Path(name).is_dir() else name for name in _beginning(incomplete, files)
    ]


def entries(incomplete: str) -> list[str]:
    """Methods after the last comma of a list of them."""
    head, comma, last = incomplete.rpartition(",")
    return [f"{head}{comma}{name}" for name in methods(last)]


def claims(incomplete: str) -> list[str]:
    """Ids of the claims that `reproduce` tries, and `all`."""
    texts = [path.read_text(encoding="utf-8") for path in CLAIMS.glob("*.yaml")]
    found = [key for text in texts for key in re.findall(r"^  ([A-Z][0-9]+):", text, re.MULTILINE)]
    return _beginning(incomplete, [*found, "all"])


def listed(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of the kind that `fedloom list` is given before them."""
    kind = str(getattr(ctx.params.get("kind"), "value", ctx.params.get("kind")))
    known = {"methods": methods, "recipes": recipes, "claims": claims}
    return [name for name in known[kind](incomplete) if name != "all"] if kind in known else []


def among(*words: str) -> Callable[[str], list[str]]:
    """A completion from these words."""

    def complete(incomplete: str) -> list[str]:
        return _beginning(incomplete, words)

    return complete


def _beginning(incomplete: str, words: Sequence[str]) -> list[str]:
    return sorted(word for word in words if word.startswith(incomplete))


def _defines(path: Path) -> bool:
    return re.search(rf"^def {path.stem}\(", path.read_text(encoding="utf-8"), re.MULTILINE) is not None
