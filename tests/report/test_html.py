import json
import os
import re
from html.parser import HTMLParser

import pytest
from scipy import stats

from fedloom.core.errors import ConfigError
from fedloom.evaluate.comparison import budget, compared
from fedloom.report import html
from fedloom.report.html import write_report

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
    assert page.tags.count("svg") == 4
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
    assert page.tags.count("svg") == 5


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
    assert page.tags.count("svg") == 4 + 1 + 2, "the curves of the domains and two marks of their legend"
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


def test_bad_calls(tmp_path, write_run):
    with pytest.raises(ConfigError, match="at least one"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(ConfigError, match="not a run folder"):
        write_report([tmp_path], tmp_path / "report.html")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report([write_run(tmp_path / "run")], tmp_path / "no" / "report.html")


def test_a_device_is_not_replaced_by_a_page(tmp_path, write_run):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe' cannot be written: it is no file; name one with --out"):
        write_report([write_run(tmp_path / "run")], tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("value", [1e308, -1e308])
@pytest.mark.parametrize("name", ["summary.json", "partition.json", "metrics.jsonl"])
def test_numbers_beyond_all_measure_leave_a_page(tmp_path, write_run, name, value):
    def grown(found):
        if isinstance(found, dict):
            kept = ("stage", "round", "exchange", "scope")
            return {key: part if key in kept else grown(part) for key, part in found.items()}
        if isinstance(found, list):
            return [grown(part) for part in found]
        return value if isinstance(found, int | float) else found

    file = write_run(tmp_path / "run") / name
    file.write_text("\n".join(json.dumps(grown(json.loads(line))) for line in _documents(file)))
    assert "</html>" in write_report([tmp_path / "run"], tmp_path / "page.html").read_text()


def _documents(file):
    return file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]


def seeded(root, write_run, methods=("fedavg", "fedfmx"), seeds=3):
    """Folders of runs over seeds, each with an accuracy of its own."""
    folders = []
    for i, method in enumerate(methods):
        for seed in range(seeds):
            folder = write_run(root / f"{method}{seed}", method=method, stages=2, rounds=1, seed=seed)
            summary = json.loads((folder / "summary.json").read_text())
            summary |= {"final_accuracy": 0.5 + 0.125 * i + 0.0625 * seed, "flops_per_example": 1000 * (i + 1)}
            (folder / "summary.json").write_text(json.dumps(summary))
            (folder / "partition.png").write_bytes(b"\x89PNG" + bytes([seed]))
            (folder / "partition.json").write_text(json.dumps({"fingerprint": f"plan {seed}"}))
            folders.append(folder)
    return folders


def test_runs_over_seeds_are_one_column_with_an_interval(tmp_path, write_run):
    text, page = page_of(seeded(tmp_path, write_run), tmp_path / "report.html")
    half = stats.t.ppf(0.975, 2) * stats.sem([0.5, 0.5625, 0.625])
    cells = f"<td>56.2 ± {100 * half:.1f} %</td><td>68.8 ± {100 * half:.1f} %</td>"
    assert f'<th scope="row">Final accuracy</th>{cells}' in text
    assert '<th scope="row">Seeds</th><td>0, 1, 2</td><td>0, 1, 2</td>' in text
    assert "6 runs compared" in text and page.tags.count("article") == 6
    assert "shaded: the 95 % Student-t interval" in text
    assert text.count("data:image/png") == 3, "a picture of the data per seed, not per run"


def test_a_run_that_failed_or_goes_on_is_told_of_first(tmp_path, write_run):
    folders = seeded(tmp_path, write_run, methods=("fedavg",))
    (folders[1] / "DONE").unlink()
    (folders[1] / "FAILED").write_text("RunError: client <3> failed.\n")
    (folders[2] / "DONE").unlink()
    (folders[2] / "summary.json").unlink()
    text, _ = page_of(folders, tmp_path / "report.html")
    first, second = re.findall("<p>([^<]*)</p>", text.split('role="alert"')[1].split("</div>")[0])
    failed = "fedavg, seed 1 failed: RunError: client &lt;3&gt; failed. It is left out of means."
    assert first == f"{failed} `fedloom resume {folders[1]}` goes on with it."
    assert second.startswith("fedavg, seed 2 is unfinished, 2 stages evaluated so far. It is left out of means.")
    assert '<th scope="row">Final accuracy</th><td>50.0 %</td>' in text
    text, _ = page_of(folders[1:2], tmp_path / "report.html")
    assert text.index("This run failed: RunError: client &lt;3&gt; failed. `fedloom resume") < text.index('tiles"')
    assert "left out of means" not in text
    assert 'role="alert"' not in page_of(folders[:1], tmp_path / "report.html")[0]


def write_comparison(folder, write_run, missing=()):
    """A comparison's folder, with the numbers of its runs."""
    keys, summaries = {}, {}
    for run in seeded(folder / "runs", write_run):
        summary = json.loads((run / "summary.json").read_text())
        found = summaries.setdefault(summary["method"], {})
        if (summary["method"], summary["seed"]) not in missing:
            found[summary["seed"]] = summary
        keys.setdefault(summary["method"], {})[str(summary["seed"])] = run.name
    methods = {
        label: {
            "method": {"name": label, "preset": "paper"},
            "runs": keys[label],
            "missing": {str(seed): None for name, seed in missing if name == label},
            **found,
        }
        for label, found in compared(summaries, "fedavg").items()
    }
    content = {
        "title": f"Comparison of {len(methods)} methods",
        "recipe": "quickstart",
        "dataset": "sklearn/digits",
        "scenario": None,
        "settings": {},
        "reference": "fedavg",
        "seeds": [0, 1, 2],
        "complete": not missing,
        "methods": methods,
        "budget": budget(summaries, "fedavg"),
    }
    (folder / "compare.json").write_text(json.dumps(content))
    return folder


def test_a_comparison_is_shown_by_its_table_and_its_methods(tmp_path, write_run):
    text, page = page_of([write_comparison(tmp_path, write_run)], tmp_path / "report.html")
    assert (
        "<h1>Comparison of 2 methods, quickstart</h1>" in text
        and '<p class="sub">sklearn/digits · class incremental · 6 runs</p>' in text
    )
    assert text.index("<td>56.2 ± 15.5</td>") < text.index("Accuracy over all seen classes")
    assert "Accuracy against training</text>" in text and "Accuracy against traffic" not in text, "all send as much"
    assert page.tags.count("article") == 6 and "fedfmx, seed 2" in page.words


def test_names_that_a_comparison_and_a_run_share_are_numbered(tmp_path, write_run):
    write_comparison(tmp_path, write_run)
    found = html._find([tmp_path, tmp_path / "runs" / "fedavg0"])
    assert [(group.name, len(group.records)) for group in found.groups] == [
        ("1. fedavg", 3), ("2. fedfmx", 3), ("3. fedavg", 1),
    ]  # fmt: skip
    assert len(found.contents) == 1


def test_a_comparison_that_is_not_complete_says_so_first(tmp_path, write_run):
    folder = write_comparison(tmp_path, write_run, missing=[("fedfmx", 1), ("fedfmx", 2)])
    text, page = page_of([folder], tmp_path / "report.html")
    assert text.index("4 of 6 runs have ended") < text.index("<section")
    assert "<h1>Comparison of 2 methods, quickstart</h1>" in text
    assert page.tags.count("article") == 4 and "fedfmx, seed 0" not in page.words


def write_sweep(folder, write_run, **missing):
    """A sweep's folder with a comparison per setting; missing: setting -> (method, seed) of runs that are not there."""
    settings = {}
    for k, (label, absent) in enumerate(missing.items()):
        home = folder / f"s{k}"
        home.mkdir(parents=True)
        write_comparison(home, write_run, absent)
        runs = {"missing": len(absent), "folder": home.name, "results": {}, "best": [], "set": {}}
        settings[label] = {**runs, "dataset": "sklearn/digits", "scenario": None, "complete": not absent}
    content = {
        "title": f"Sweep of 2 methods over {len(settings)} settings", "recipe": "quickstart", "set": {},
        "reference": "fedavg", "metric": "final_accuracy", "lower_is_better": False, "seeds": [0, 1, 2],
        "complete": False, "methods": ["fedavg", "fedfmx"], "settings": settings, "mean_rank": {},
    }  # fmt: skip
    (folder / "sweep.json").write_text(json.dumps(content))
    return folder


EVERY = [(method, seed) for method in ("fedavg", "fedfmx") for seed in range(3)]


def test_a_sweep_is_shown_by_its_table_then_the_comparisons_of_its_settings(tmp_path, write_run):
    folder = write_sweep(tmp_path / "s", write_run, even=[*EVERY[1:3], *EVERY[4:]], skewed=EVERY[1:], later=EVERY)
    text, page = page_of([folder], tmp_path / "report.html")
    assert "<h1>Sweep of 2 methods over 3 settings, quickstart</h1>" in text
    assert text.index("Cells: final accuracy") < text.index("<h3>Comparison of 2 methods")
    assert "later: 6 runs are missing" in text and "2 of 6 runs have ended" in text
    assert page.tags.count("article") == 3 and {"fedavg, even", "fedfmx, even", "fedavg, skewed"} <= {*page.words}
    both = html._find([folder, folder / "s0" / "runs" / "fedavg0"])
    assert [group.name for group in both.groups] == [
        "fedavg, even", "fedfmx, even", "fedavg, skewed", "fedavg",
    ]  # fmt: skip


def test_sweeps_that_cannot_be_shown_are_refused_in_words(tmp_path, write_run):
    folder = write_sweep(tmp_path / "s", write_run, later=EVERY)
    with pytest.raises(ConfigError, match=r"no run of the sweep .* has ended; go on with the same `fedloom sweep`"):
        write_report([folder], tmp_path / "report.html")
    whole = json.loads((folder / "sweep.json").read_text())
    places = [{**whole, "settings": {"later": {**whole["settings"]["later"], "folder": f}}} for f in ("..", "a/b", 3)]
    for damage in ("{", "[]", "{}", '{"settings": {"x": {}}}', *map(json.dumps, places)):
        (folder / "sweep.json").write_text(damage)
        with pytest.raises(ConfigError, match=r"sweep.json' is damaged .*; call `fedloom sweep` again"):
            write_report([folder], tmp_path / "report.html")


def test_settings_that_are_not_the_default_are_listed(tmp_path, write_run):
    folder = write_run(tmp_path / "run", stages=2)
    usual = {"method": {"name": "fedfmx", "experts": 2}, "data": {"name": "sklearn/digits", "root": "/x"}, "seed": 0}
    out = tmp_path / "report.html"
    text = write_report([folder], out, defaults=lambda tree: usual).read_text()
    listed = text.split("Settings that are not the default")[1].split("</section>")[0]
    assert re.findall(r'<th scope="row">([^<]*)</th><td>([^<]*)</td><td>([^<]*)</td>', listed) == [
        ("method.experts", "2", "4")
    ]
    text = write_report([folder], out, defaults=lambda tree: tree).read_text()
    assert "Every setting has its default." in text

    def missing(tree):
        raise ConfigError("no such method")

    text = write_report([folder], out, defaults=missing).read_text()
    assert "Settings that are not the default" not in text
