"""The page as a real browser shows it: every figure in sight, nothing asked of anyone, light and dark."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedloom.report.html import write_report

_spec = importlib.util.spec_from_file_location("report_browser", Path(__file__).with_name("browser.py"))
chromium = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(chromium)

pytestmark = pytest.mark.skipif(chromium.find() is None, reason=f"no browser is installed: {', '.join(chromium.NAMES)}")

LONG = "some.package.of.mine:AMethodWhoseNameGoesOnAndOnWithoutAnyBreakOrSpaceAtWhichALineCouldEndOnAPhone"
# Figures and pictures that nobody can see: without a size, or beside the page and beside what scrolls inside it.
UNSEEN = """
[...document.querySelectorAll('figure svg, img')].filter(node => {
  const box = node.getBoundingClientRect(), home = (node.closest('.pan') || node).getBoundingClientRect();
  const width = document.documentElement.clientWidth;
  return !(box.width > 9 && box.height > 4 && home.left >= 0 && home.right <= width + 0.5);
}).length
"""
# Letters of pictures in CSS pixels, the smallest.
LETTERS = """
Math.min(...[...document.querySelectorAll('figure svg:not(.mark) text')].map(node => {
  const svg = node.ownerSVGElement, scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  return scale * parseFloat(getComputedStyle(node).fontSize);
}))
"""
COLOURS = """
(() => {
  const of = (node, key) => getComputedStyle(node)[key].match(/[\\d.]+/g).slice(0, 3).map(Number);
  const text = document.querySelector('figure svg:not(.mark) text');
  return {
    page: of(document.body, 'backgroundColor'), ink: of(document.body, 'color'),
    card: of(document.querySelector('section'), 'backgroundColor'), drawn: of(text, 'fill'),
    muted: of(document.querySelector('.note'), 'color'),
  };
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium.Browser(chromium.find(), tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def write():
    """The writer of run folders, for the whole module."""
    spec = importlib.util.spec_from_file_location("report_folder", Path(__file__).with_name("run_folder.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.write_run


@pytest.fixture(scope="module")
def pages(tmp_path_factory, write):
    """Addresses of a page about one crowded run, and of one about several over seeds, of which one failed."""
    root = tmp_path_factory.mktemp("pages")
    runs = [crowded(write(root / "one", stages=10, rounds=2, clients=100))]
    runs += [
        write(root / f"{i}{s}", method=m, stages=2, rounds=2, seed=s) for i, m in enumerate(("a", LONG)) for s in (0, 1)
    ]
    for run in runs:
        Image.new("RGB", (1200, 400), "white").save(run / "partition.png")
    (runs[1] / "DONE").unlink()
    (runs[1] / "FAILED").write_text("RunError: it stopped.")
    made = {"one": write_report(runs[:1], root / "one.html"), "several": write_report(runs[1:], root / "several.html")}
    return {name: path.as_uri() for name, path in made.items()}


def crowded(folder):
    """100 clients, 345 classes, 12 experts, domains and tables with long names."""
    rng = np.random.default_rng(0)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["scope"] == "stage":
            row["accuracy/client_std"] = 0.125
            row["accuracy/domains"] = {f"domain_{k}_{LONG}": rng.uniform() for k in range(4)}
        else:
            row |= {"train/gate_entropy": 1.0} | {f"train/expert_{k}": rng.uniform() for k in range(12)}
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [f"class number {k}" for k in range(345)]
    (folder / "config.yaml").write_text(f"method: {{name: '{LONG}'}}\nmodel: {{words: {json.dumps(words)}}}\n")
    (folder / "partition.json").write_text(json.dumps({"clients": 100, "class_names": words, "notes": [LONG]}))
    big = {"title": "Overlap", "axes": ["client", "client"], "rows": [*range(100)], "columns": [*range(100)]}
    long = {
        "title": LONG,
        "axes": ["layer", "expert"],
        "rows": [LONG, "b"],
        "columns": [f"{k} {LONG}" for k in range(8)],
    }
    tables = [{**t, "values": rng.uniform(size=(len(t["rows"]), len(t["columns"]))).tolist()} for t in (big, long)]
    (folder / "facts.json").write_text(json.dumps({"tables": tables}))
    return folder


def opened(browser, url, width, **how):
    browser.visit(url, width, **how)
    browser.evaluate("document.querySelectorAll('details').forEach(node => { node.open = true })")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["one", "several"])
def test_every_figure_is_in_sight_and_nothing_is_wider_than_the_page(browser, pages, name, width):
    opened(browser, pages[name], width)
    assert browser.evaluate("document.querySelectorAll('figure svg:not(.mark)').length") > 6
    assert browser.evaluate("document.querySelectorAll('img').length") >= 1
    assert browser.evaluate(UNSEEN) == 0
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    cards = "[...document.querySelectorAll('section, figure, details, .tile')]"
    assert browser.evaluate(f"Math.max(...{cards}.map(node => node.getBoundingClientRect().right))") <= width
    assert browser.evaluate(LETTERS) >= (8 if width > 600 else 6), "letters that can be read"


@pytest.mark.parametrize("name", ["one", "several"])
def test_no_request_leaves_the_page_and_the_console_is_silent(browser, pages, name):
    opened(browser, pages[name], 1280)
    assert [url for url in browser.requests if not url.startswith("data:")] == [pages[name]]
    assert browser.complaints == []


def test_what_a_page_does_would_be_noticed(browser, tmp_path):
    page = tmp_path / "bad.html"
    page.write_text("<body><img src='missing.png'><script>console.error('x'); throw 1</script>")
    opened(browser, page.as_uri(), 1280)
    assert [url.rpartition("/")[2] for url in browser.requests] == ["bad.html", "missing.png"]
    assert len(browser.complaints) >= 2
    assert browser.evaluate("document.body.innerHTML = '<figure><svg width=0></svg></figure>'; " + UNSEEN) == 1


def contrast(a, b):
    """Ratio of relative luminances as the WCAG defines it, of two colours in 0..255."""
    light = []
    for colour in (a, b):
        parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        light.append(0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] + 0.05)
    return max(light) / min(light)


@pytest.mark.parametrize("dark", [False, True])
def test_texts_stand_out_in_light_and_in_dark(browser, pages, dark):
    browser.visit(pages["one"], 1280, dark=dark)
    found = browser.evaluate(COLOURS)
    assert (sum(found["page"]) < 150) == dark
    for text in ("ink", "muted", "drawn"):
        assert contrast(found[text], found["card"]) > 4.5, text


def test_what_went_wrong_is_the_first_thing_on_the_page(browser, pages):
    browser.visit(pages["several"], 390)
    box = browser.evaluate("document.querySelector('[role=alert]').getBoundingClientRect().toJSON()")
    assert box["top"] > 0 and box["bottom"] < 450
    assert browser.evaluate("document.querySelector('[role=alert]').innerText").startswith("a, seed 0 failed: RunError")


def test_paper_gets_the_configuration_but_not_every_round(browser, pages):
    browser.visit(pages["one"], 1280, dark=True)
    browser.call("Emulation.setEmulatedMedia", media="print", features=[])
    assert browser.evaluate("document.querySelector('pre').getBoundingClientRect().height") > 100
    seen = "[...document.querySelectorAll('summary')].filter(node => node.offsetHeight).map(node => node.innerText)"
    assert browser.evaluate(seen) == ["Configuration", "Environment", "Glossary"]
    assert browser.evaluate(COLOURS)["card"] == [255, 255, 255]
