import json
import re
from html.parser import HTMLParser

import pytest

from fedloom.core.errors import ConfigError
from fedloom.report.html import flatten, run_names, write_report
from fedloom.report.record import RunRecord

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Collects tags, attributes and text, and checks that tags are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.words, self.open = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "srcset", "action", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, data):
        self.words.append(data)


def page_of(folders, out):
    text = write_report(folders, out).read_text(encoding="utf-8")
    return text, Page(text)


def test_a_run_on_one_page(tmp_path, write_run):
    folder = write_run(tmp_path / "run", stages=3)
    (folder / "partition.png").write_bytes(b"\x89PNG")
    text, page = page_of([folder], folder / "report.html")
    for shown in ("71.2 %", "80.1 %", "22.3 pp", "−21.3 pp", "34.2 s", "512 MiB", "experts: 4", "2.14.1", ">2.2<"):
        assert shown in text
    assert page.tags.count("svg") == 3
    assert "not recorded" not in text
    assert not (folder / "report.html.partial").exists()


def test_nothing_is_fetched_and_nothing_runs(tmp_path, write_run):
    folder = write_run(tmp_path / "run")
    (folder / "partition.png").write_bytes(b"\x89PNG")
    text, page = page_of([folder], tmp_path / "report.html")
    assert {"script", "link", "iframe", "object", "embed", "base"}.isdisjoint(page.tags)
    assert all(link.startswith(("data:", "#")) for link in page.links)
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))


def test_user_text_is_escaped(tmp_path, write_run):
    evil = "<script>alert(1)</script>"
    folder = write_run(tmp_path / "run", method=evil)
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"dataset": evil, "scenario": evil, "domain_accuracy": {evil: 0.5}, "params_sha256": evil}
    told = {"title": evil, "axes": [evil, "client"], "rows": [evil], "columns": [evil, 0], "values": [[0, 1]]}
    (folder / "facts.json").write_text(json.dumps({"tables": [{**told, "note": evil}]}))
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text(f"method: '{evil}'\n")
    (folder / "env.json").write_text(json.dumps({evil: [evil]}))
    (folder / "partition.json").write_text(json.dumps({evil: evil}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"stage": 0, "round": 9, "scope": "round", "exchange": evil}) + "\n")
        file.write(json.dumps({"stage": 0, "scope": "stage", "accuracy/domains": {evil: 0.5}}) + "\n")
    for folders in ([folder], [folder, folder]):
        text, page = page_of(folders, tmp_path / "report.html")
        assert "script" not in page.tags
        assert evil not in text
        assert "&lt;script&gt;" in text


@pytest.mark.parametrize(
    "gone",
    ["summary.json", "config.yaml", "env.json", "metrics.jsonl", "partition.json", "accuracy_matrix.csv", "DONE"],
)
def test_any_file_may_be_missing(tmp_path, write_run, gone):
    folder = write_run(tmp_path / "run")
    (folder / gone).unlink()
    text, _ = page_of([folder], tmp_path / "report.html")
    assert ("not recorded" in text) == (gone not in ("accuracy_matrix.csv", "DONE"))
    assert "unfinished" not in text


def test_the_page_that_a_run_makes_of_itself_says_done(tmp_path, write_run):
    """It is written before the mark DONE; without a summary, or with FAILED, it says otherwise."""
    folder = write_run(tmp_path / "run")
    (folder / "DONE").unlink()
    assert 'class="status done"' in page_of([folder], tmp_path / "report.html")[0]
    (folder / "FAILED").touch()
    assert 'class="status failed"' in page_of([folder], tmp_path / "report.html")[0]
    (folder / "FAILED").unlink()
    (folder / "summary.json").unlink()
    assert 'class="status unfinished"' in page_of([folder], tmp_path / "report.html")[0]


def test_options_of_one_method_do_not_swamp_the_settings_that_differ(tmp_path, write_run):
    folders = [write_run(tmp_path / m, method=m, stages=2) for m in ("fedavg", "fedfmx")]
    with (folders[1] / "config.yaml").open("a") as file:
        file.write("only: {here: 1}\n")
    text, _ = page_of(folders, tmp_path / "report.html")
    settings, options = text.split("Options that only some of the runs have")
    assert "only.here" in options and "only.here" not in settings.split("Settings that differ")[1]


def test_the_legend_shows_marks_and_the_glossary_defines(tmp_path, write_run):
    folders = [write_run(tmp_path / m, method=m, stages=2) for m in ("a", "b")]
    text, page = page_of(folders, tmp_path / "report.html")
    legend = text.split('<ul class="legend">')[1].split("</ul>")[0]
    assert 'stroke-dasharray="none"' in legend and 'stroke-dasharray="7 3"' in legend
    assert "<circle" in legend and "<polygon" in legend
    assert {"Forgetting", "Backward transfer", "Clients, worst 10 %"} <= set(page.words)


@pytest.mark.parametrize("only", ["config.yaml", "summary.json", "metrics.jsonl"])
def test_a_single_file_is_enough(tmp_path, only):
    (tmp_path / only).write_text("")
    text, _ = page_of([tmp_path], tmp_path / "report.html")
    assert "not recorded" in text


def test_values_of_the_wrong_kind_are_no_traceback(tmp_path, write_run):
    folder = write_run(tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {key: "odd" for key in row if key not in ("stage", "scope")}
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({key: [None, {"a": 1}] for key in summary}))
    page_of([folder], tmp_path / "report.html")
    page_of([folder, folder], tmp_path / "report.html")


def test_several_runs_side_by_side(tmp_path, write_run):
    folders = [
        write_run(tmp_path / m, method=m, stages=2, seed=i) for i, m in enumerate(["fedavg", "fedfmx", "odd$m_"])
    ]
    text, page = page_of(folders, tmp_path / "report.html")
    assert "3 runs compared" in text
    assert "Settings that differ" in text
    assert re.search(r'<th scope="row">method.name</th><td>fedavg</td><td>fedfmx</td><td>odd\$m_</td>', text)
    assert "method.experts</th>" not in text
    assert page.tags.count("article") == 3
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_many_rounds_are_thinned_and_said_so(tmp_path, write_run):
    text, _ = page_of([write_run(tmp_path / "run", stages=2, rounds=150)], tmp_path / "report.html")
    assert "One in 2 of 300 rows is shown." in text
    assert len(re.findall(r'<th scope="row">\d+\.\d+</th>', text)) == 150


def test_accuracy_inside_stages_is_shown(tmp_path, write_run):
    folder = write_run(tmp_path / "run", stages=2, rounds=2)
    text, page = page_of([folder], tmp_path / "report.html")
    assert '<th scope="col">accuracy</th>' not in text
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"stage": 1, "round": 2, "scope": "round", "exchange": "train", "accuracy": 0.123}) + "\n"
        )
    text, page = page_of([folder], tmp_path / "report.html")
    assert '<th scope="col">accuracy</th>' in text
    assert "<td>12.3 %</td>" in text
    assert page.tags.count("svg") == 4


def with_domains(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        if row["scope"] == "stage":
            row["accuracy/domains"] = {"photo": 0.5, "sketch": 0.25}
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"domain_accuracy": {"photo": 0.5, "sketch": 0.25}, "domain_mean": 0.375, "domain_std": 0.125}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_domains_and_what_the_method_tells_are_shown(tmp_path, write_run):
    folder = with_domains(write_run(tmp_path / "run", stages=2))
    told = {"title": "Overlap", "axes": ["client", "client"], "rows": [0, 1], "columns": [0, 1]}
    tables = [{**told, "values": [[1.0, 0.25], [0.25, 1.0]], "note": "Jaccard index."}]
    (folder / "facts.json").write_text(json.dumps({"tables": tables}))
    text, page = page_of([folder], tmp_path / "report.html")
    assert page.tags.count("svg") == 3 + 1 + 2, "the curves of the domains and two marks of their legend"
    assert {"photo", "sketch", "Accuracy per domain", "Overlap"} <= set(page.words)
    assert "mean 37.5 %, deviation (ddof 0) 12.5 pp" in text
    assert '<td style="--v:1.000">1.00</td><td style="--v:0.100">0.25</td>' in text
    assert '<td style="--v:0.500">50.0 %</td>' in text
    assert "Jaccard index. Faintest: 0.25, strongest: 1.00." in text
    text, page = page_of([with_domains(write_run(tmp_path / "one", stages=1))], tmp_path / "report.html")
    assert "Accuracy per domain over stages" not in text and "Accuracy per domain" in page.words


def test_the_curves_of_a_single_stage_are_over_the_rounds_that_evaluated_domains(tmp_path, write_run):
    folder = with_domains(write_run(tmp_path / "one", stages=1))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[0] |= {"accuracy": 0.25, "accuracy/domains": {"photo": 0.25, "sketch": 0.25}}
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text, page = page_of([folder], tmp_path / "report.html")
    assert "Accuracy per domain over rounds" in text and {"photo", "sketch"} <= set(page.words)
    assert all("photo" not in picture for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL)), "a page's names"


def test_a_damaged_facts_file_is_a_problem_and_no_traceback(tmp_path, write_run):
    folder = write_run(tmp_path / "run")
    (folder / "facts.json").write_text('{"tables": [')
    assert "facts.json does not hold a JSON object." in page_of([folder], tmp_path / "report.html")[0]
    (folder / "facts.json").write_text('{"tables": [{"title": 3}]}')
    assert "1 table of facts.json cannot be read." in page_of([folder], tmp_path / "report.html")[0]


def test_accuracy_against_costs_is_drawn_where_runs_differ_in_them(tmp_path, write_run):
    folders = [write_run(tmp_path / m, method=m, stages=2) for m in ("a", "b")]
    text, _ = page_of(folders, tmp_path / "report.html")
    assert "Accuracy against" not in text
    summary = json.loads((folders[1] / "summary.json").read_text())
    (folders[1] / "summary.json").write_text(json.dumps({**summary, "flops_per_example": 10_000_000}))
    text, _ = page_of(folders, tmp_path / "report.html")
    assert "Accuracy against operations" in text and "Accuracy against traffic" not in text
    (folders[1] / "summary.json").write_text(json.dumps({**summary, "bytes_up": 7}))
    assert "Accuracy against traffic" in page_of(folders, tmp_path / "report.html")[0]


def test_own_views_that_differ_stand_side_by_side(tmp_path, write_run):
    folders = [with_domains(write_run(tmp_path / m, method=m, stages=2)) for m in ("a", "b")]
    assert "own views" not in page_of(folders, tmp_path / "report.html")[0]
    summary = json.loads((folders[1] / "summary.json").read_text())
    summary |= {"personal_domain_accuracy": {"photo": 0.75, "sketch": 0.5}, "personal_domain_mean": 0.625}
    (folders[1] / "summary.json").write_text(json.dumps(summary))
    text, _ = page_of(folders, tmp_path / "report.html")
    assert '<th scope="row">Domains, own views, mean</th><td>–</td><td>62.5 %</td>' in text


def test_names_differ(tmp_path):
    def named(method, seed, folder="x"):
        return RunRecord(tmp_path / folder, summary={"method": method, "seed": seed})

    assert run_names([named("a", 0), named("b", 0)]) == ["a", "b"]
    assert run_names([named("a", 0), named("a", 1)]) == ["a, seed 0", "a, seed 1"]
    assert run_names([named("a", 0, "x"), named("a", 0, "y")]) == ["a (x)", "a (y)"]
    assert len(set(run_names([named("a", 0), named("a", 0)]))) == 2


def test_bad_calls(tmp_path, write_run):
    with pytest.raises(ConfigError, match="at least one"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(ConfigError, match="not a run folder"):
        write_report([tmp_path], tmp_path / "report.html")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report([write_run(tmp_path / "run")], tmp_path / "no" / "report.html")


def test_flatten():
    tree = {"a": {"b": 1, "c": {}}, "d": [1, 2], "e": "x" * 300, "f": list(range(99)), "g": None}
    flat = flatten(tree)
    assert (flat["a.b"], flat["a.c"], flat["d"], flat["g"]) == ("1", "{}", "[1, 2]", "null")
    assert len(flat["e"]) < 200
    assert flat["f"].endswith("(99 entries)")
