"""Pages that mkdocs makes of the code: one per method, and the reference of the configuration.

A hook of mkdocs (see mkdocs.yml). Nothing is told here that the code tells: a method's page is its module's docstring,
its factory's docstring (what each option means), the schema of its options, `PRESETS` and `ABLATIONS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
METHODS, FINDINGS = "Methods", "Findings"  # sections of the navigation


@cache
def heads() -> Mapping[str, tuple[str, str]]:
    """Method -> (its name as published, what it is), the first line of its module's docstring."""
    from fedloom.methods import summaries

    lines = {name: line.partition(":") for name, line in summaries()}
    return {name: (title, _sentence(about.strip())) for name, (title, _, about) in lines.items()}


def method_page(name: str) -> str:
    """Markdown: what the method is, equations, options, presets, switches, findings, how to cite."""
    from fedloom.comparison.entries import declared_switches
    from fedloom.methods import documentation, presets

    title, about = heads()[name]
    text = documentation(name).partition("\n")[2]
    parts = [
        f"# {title}",
        about,
        f"```bash\nfedloom list methods {name}\nfedloom run RECIPE --method {name}\n```",
        text.strip(),
        _equations(name),
        _options(name),
        _choices("Presets", "preset", presets(name), f"`--set method.preset=NAME`, in a comparison `{name}@NAME`."),
        _choices("Switches", "switch", declared_switches(name), f"What `fedloom ablate {name} RECIPE` takes away."),
        _findings(name),
        _citation(text),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _equations(name: str) -> str:
    """What docs/equations says of a method."""
    path = DOCS / "equations" / f"{name}.md"
    return f"## Equations\n\n{typeset(path.read_text(encoding='utf-8')).strip()}" if path.is_file() else ""


def typeset(text: str) -> str:
    """Markdown whose formulas, fenced as `math` or between $` and `$, are MathML, which browsers show by themselves."""
    from latex2mathml.converter import convert

    def block(match: re.Match[str]) -> str:
        return f'<div class="equation">{convert(match[1].strip(), display="block")}</div>'

    text = re.sub(r"^```math\n(.*?)^```$", block, text, flags=re.DOTALL | re.MULTILINE)
    # In a span, for Markdown takes <math> at the beginning of a line for the beginning of a block.
    return re.sub(r"\$`(.+?)`\$", lambda match: f"<span>{convert(match[1])}</span>", text)


def methods_index() -> str:
    """Markdown: a table of all methods with links."""
    rows = [[f"[{title}]({name}.md)", f"`{name}`", about] for name, (title, about) in heads().items()]
    text = "Every method runs on every recipe whose network it can train, under the same data plan, cohorts and seeds."
    return f"# Methods\n\n{text}\n\n{table(['method', 'name', 'what it is'], rows)}\n"


def configuration_page() -> str:
    """Markdown: every key of the configuration with its meaning, values and default."""
    from fedloom.config.describe import tree_settings

    parts = [_CONFIGURATION]
    for group in tree_settings():
        rows = [[f"`{s.key}`", s.about, _values(s.allowed), _default(s.default)] for s in group.settings]
        parts += [f"## {group.title or 'The rest'}", group.about]
        parts += [table(["key", "meaning", "values", "default"], rows)] if rows else []
    return "\n\n".join(part for part in parts if part) + "\n"


_CONFIGURATION = """# Configuration

One tree of typed values. A key is set with `--set key=value` on the command line (values are YAML), as a keyword in
Python (`training={"rounds": 3}`), or in a YAML file. An unknown key is refused with the closest match, and so is a
value out of range. `fedloom run RECIPE --dry-run` shows the values of a run, `config.yaml` in a run's folder those that
it had.

A section that has a choice (`kind`, `name`) has the keys of that choice alone. The options of a method are on its
[page](methods/index.md)."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _options(name: str) -> str:
    from fedloom.config.describe import method_settings

    rows = [
        [f"`{s.key.removeprefix('method.')}`", s.about, _values(s.allowed), _default(s.default)]
        for s in method_settings(name)
    ]
    told = table(["option", "meaning", "values", "default"], rows) if rows else "The method has none."
    return f"## Options\n\n{told}"


def _choices(title: str, what: str, known: Mapping[str, Mapping[str, Any]], about: str) -> str:
    rows = [
        [f"`{key}`", ", ".join(f"`{k}: {_plain(v)}`" for k, v in given.items()) or "the defaults"]
        for key, given in known.items()
    ]
    return f"## {title}\n\n{about}\n\n{table([what, 'options'], rows)}" if rows else ""


def _findings(name: str) -> str:
    """Links to where results of the method stand: its claims, and the tables in which it has a row."""
    title = heads()[name][0]
    claims = (DOCS / "findings.md").read_text(encoding="utf-8")
    found = [line.removeprefix("## ") for line in claims.splitlines() if line.startswith(f"## {title}")]
    links = [f"- [Claims of the paper: {head}](../findings.md#{_slug(head)})" for head in found]
    row = re.compile(rf"^\| *`?{name}\b(?![-_])|`{name}[`@+]", re.MULTILINE)
    tables = [page for page in _results() if row.search(page.read_text(encoding="utf-8"))]
    links += [f"- [{_heading(page)}](../results/{page.name})" for page in tables]
    return "## Findings\n\n" + ("\n".join(links) or "No results with this method are in the repository yet.")


def _results() -> list[Path]:
    return sorted((DOCS / "results").glob("*.md"))


def _heading(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _citation(text: str) -> str:
    """The paper, as the docstring's `Source` names it: its title in quotes, or its name, and the bracket behind it."""
    source = re.search(r"^Source: (.+?)(?=\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    if source is None:
        return ""
    said = " ".join(source[1].split())
    paper = re.match(r'[^"(]+"[^"]+" \([^)]*\)|[^"(]+ \(arXiv [^)]*\)', said)
    if paper is None:
        return f"## Source\n\n{_sentence(said.partition('. ')[0].rstrip('.'))}."
    linked = re.sub(r"arXiv (\d{4}\.\d{5}(?:v\d+)?)", r"[arXiv \1](https://arxiv.org/abs/\1)", paper[0])
    return f"## How to cite\n\n{linked}."


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _values(allowed: str) -> str:
    return allowed.replace(" | ", ", ")


def _default(value: str | None) -> str:
    return "required" if value is None else f"`{value}`"


def _plain(value: Any) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value)


def _slug(heading: str) -> str:
    from markdown.extensions.toc import slugify

    return str(slugify(heading, "-"))


def pages() -> dict[str, str]:
    """Path below docs -> Markdown of every page that is made."""
    methods = {f"methods/{name}.md": method_page(name) for name in heads()}
    return {"methods/index.md": methods_index(), **methods, "configuration.md": configuration_page()}


def on_config(config: Any) -> Any:
    """Of mkdocs: put every method and every page of results into the navigation."""
    sections = {title: section for item in config.nav for title, section in item.items()}
    by_title = sorted(((title, name) for name, (title, _) in heads().items()), key=lambda pair: pair[0].lower())
    sections[METHODS] += [{title: f"methods/{name}.md"} for title, name in by_title]
    sections[FINDINGS] += [{_heading(page): f"results/{page.name}"} for page in _results()]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Of mkdocs: add the pages."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files
