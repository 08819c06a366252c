"""The site is built strictly, opens from disk, and its pages say of the code what the code says."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fedloom import __all__ as PUBLIC
from fedloom import core
from fedloom.config.describe import method_settings, tree_settings
from fedloom.evaluate.comparison import MEASURES
from fedloom.methods import ablations, names, presets

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def _loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages = _loaded(DOCS / "pages.py")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the extra 'docs' is not installed: pip install -e '.[docs]'")
    pytest.importorskip("mkdocstrings_handlers.python", reason="the extra 'docs' is not installed")
    pytest.importorskip("material", reason="the extra 'docs' is not installed")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    """A strict build refuses pages that are left out of the navigation; this names those that must be there."""
    home = (site / "index.html").read_text(encoding="utf-8")
    wanted = [f"methods/{name}.html" for name in names()] + ["configuration.html", "metrics.html", "api.html"]
    written = [
        path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md") if path.parent.name != "equations"
    ]
    for page in [*wanted, *map(Path.as_posix, written)]:
        assert (site / page).is_file(), page
        assert f'href="{page}"' in home, f"{page} is not in the navigation"
    assert not list(site.rglob("*.py*")) and not (site / "keys.yaml").exists()


def test_nothing_of_a_page_comes_from_elsewhere(site: Path) -> None:
    """Scripts, styles, pictures and fonts are files of the site; links may lead away."""
    loaded = re.compile(r"<(?:script|img|iframe)[^>]*\bsrc=[\"']?([^\"' >]+)|<link[^>]*\bhref=[\"']?([^\"' >]+)")
    for page in site.rglob("*.html"):
        for match in loaded.finditer(page.read_text(encoding="utf-8")):
            address = match[1] or match[2]
            assert not re.match(r"(https?:)?//", address), f"{page.name} loads {address}"
            if page.name != "404.html":  # which is served from any address, so its own are absolute
                assert (page.parent / address.partition("?")[0]).exists(), f"{page.name} misses {address}"


def test_the_search_index_knows_methods_and_options(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    said = {entry["location"].partition("#")[0]: "" for entry in index["docs"]}
    for entry in index["docs"]:
        said[entry["location"].partition("#")[0]] += entry["title"] + entry["text"]
    assert "reactivation_threshold" in said["methods/fedfip.html"]
    assert "partition.label_alpha" in said["configuration.html"]
    assert (site / "search" / "search_index.js").is_file(), "without a server the index is read as a script"


def test_a_search_in_pages_from_disk_finds(site: Path) -> None:
    """In a browser, without a server: the index loads, the worker's stand-in answers."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("no chromium on this machine")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000", "--dump-dom"]
    address = f"{(site / 'index.html').as_uri()}?q=Shapley"
    done = subprocess.run([browser, *flags, address], capture_output=True, text=True, check=False, timeout=60)
    found = re.findall(r'<a href="([^"#?]+)[^"]*" class="md-search-result__link"', done.stdout)
    assert any(address.endswith("/methods/fedfmx.html") for address in found), done.stderr[-500:]


def test_the_public_names_are_in_the_reference(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    ids = {name.rpartition(".")[2] for name in re.findall(r'id="(fedloom[\w.]*)"', text)}
    aliases = {"ClientId", "Payload", "__version__"}  # types and a number: they have no docstring of their own
    assert {*PUBLIC, *core.__all__} - aliases <= ids


@pytest.mark.parametrize("name", names())
def test_a_methods_page_tells_all_of_it(name: str) -> None:
    text = pages.method_page(name)
    for setting in method_settings(name):
        row = next(line for line in text.splitlines() if line.startswith(f"| `{setting.key.partition('.')[2]}` |"))
        assert row.endswith(f" `{setting.default}` |")
    for choice in (*presets(name), *ablations(name)):
        assert f"| `{choice}` |" in text
    assert "## How to cite" in text or name in ("joint", "moafcl")
    assert "## Findings" in text


@pytest.mark.parametrize("name", names())
def test_a_methods_equations_are_on_its_page(name: str) -> None:
    pytest.importorskip("latex2mathml", reason="the extra 'docs' is not installed: pip install -e '.[docs]'")
    text = pages.method_page(name).partition("## Equations")[2].partition("\n## ")[0]
    formulas = re.findall(r"<math.*?</math>", text, re.DOTALL)
    assert 0 < text.count("<math") == len(formulas)
    for formula in formulas:
        ElementTree.fromstring(formula)  # a stray & is no XML
    assert not re.search(r"\$`|`\$|```math", text), "a formula that is not closed"
    shown = re.sub(r"`[^`]*`", "", text)
    assert not re.search(r"\\\w+", shown), "a command that has no MathML"


def test_formulas_are_typeset_where_they_stand() -> None:
    pytest.importorskip("latex2mathml", reason="the extra 'docs' is not installed: pip install -e '.[docs]'")
    text = pages.typeset("Of $`x_1`$, not `$`:\n\n```math\n\\frac{1}{2}\n```\n\n```bash\nls\n```\n")
    assert text.startswith("Of <span><math") and '<div class="equation"><math' in text and "<mfrac>" in text
    assert "not `$`:" in text and "```bash\nls\n```" in text


def test_findings_are_linked_where_they_are() -> None:
    assert "](../findings.md#fedfmx" in pages.method_page("fedfmx")
    assert "](../results/vlm.md)" in pages.method_page("promptfl")
    assert "](../results/vlm.md)" not in pages.method_page("scaffold")


def test_a_citation_ends_with_the_papers_bracket() -> None:
    text = pages.method_page("fedbn")
    assert text.rstrip().endswith("(ICLR 2021, [arXiv 2102.07623](https://arxiv.org/abs/2102.07623)).")


def test_the_page_of_the_configuration_has_every_key_with_its_meaning() -> None:
    page = pages.configuration_page()
    for setting in (setting for group in tree_settings() for setting in group.settings):
        assert f"| `{setting.key}` | {setting.about} |" in page


def test_every_number_that_is_compared_is_defined() -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert set(MEASURES) <= {key for row in rows for key in re.findall(r"`([^`]+)`", row)}
