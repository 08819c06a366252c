import pytest

from fedloom.report.cells import MOST, domain_cells, fact_cells
from fedloom.report.record import RunRecord

PARTITION = {
    "domain_names": ["photo", "sketch"],
    "stages": [
        {"clients": {"0": {"domains": {"1": 5}}, "1": {"domains": {"0": 9, "1": 2}}, "2": {"domains": {}}}},
        {"clients": {"0": {"domains": {"0": 4}}, "1": {"domains": {"1": 3}}}},
    ],
}


def table(**changes):
    whole = {
        "title": "Shares",
        "axes": ["group", ""],
        "rows": ["stem", "body"],
        "columns": ["share"],
        "values": [[0.25], [None]],
        "note": "Of all.",
    }
    return {**whole, **changes}


def drawn(tmp_path, *tables, **known):
    return fact_cells(RunRecord(tmp_path, facts={"tables": list(tables)}, **known))


def texts(cells):
    return [[label, *(cell.text for cell in row)] for label, row in cells.rows]


def test_one_column_is_drawn_as_bars_in_per_cent(tmp_path):
    (found,) = drawn(tmp_path, table())
    assert (found.kind, found.title, found.head, found.note) == ("bars", "Shares", ["group", "share"], "Of all.")
    assert texts(found) == [["stem", "25.0 %"], ["body", "–"]]
    assert [cell.ink for _, (cell,) in found.rows] == ["0.250", ""]


def test_bars_above_one_are_measured_by_the_longest(tmp_path):
    (found,) = drawn(tmp_path, table(values=[[5.0], [20.0]]))
    assert texts(found) == [["stem", "5"], ["body", "20"]]
    assert [cell.ink for _, (cell,) in found.rows] == ["0.250", "1.000"]


def test_several_columns_are_shaded_from_the_smallest_to_the_largest(tmp_path):
    (found,) = drawn(tmp_path, table(columns=["a", "b"], values=[[-0.5, 0.5], [None, 0.0]]))
    assert found.kind == "heat" and found.note == "Of all. Faintest: -0.50, strongest: 0.50."
    assert texts(found) == [["stem", "−0.50", "0.50"], ["body", "–", "0.00"]]
    assert [[cell.ink for cell in row] for _, row in found.rows] == [["0.100", "1.000"], ["", "0.550"]]
    (same,) = drawn(tmp_path, table(columns=["a", "b"], values=[[1.0, 1.0], [1.0, 1.0]]))
    assert {cell.ink for _, row in same.rows for cell in row} == {"1.000"}


def test_clients_stand_by_their_main_domain_and_domains_have_names(tmp_path):
    shown = table(axes=["client", "domain"], rows=[0, 1, 2], columns=[1, 7], values=[[0.1, 0.2], [0.3, 0.4], [0.5, 0]])
    (found,) = drawn(tmp_path, shown, partition=PARTITION)
    assert found.head == ["client \\ domain", "sketch", "7"]
    assert [label for label, _ in found.rows] == ["2", "1 · photo", "0 · sketch"]
    assert [row[0].text for _, row in found.rows] == ["0.50", "0.30", "0.10"]
    (square,) = drawn(
        tmp_path,
        table(axes=["client", "client"], rows=[0, 1], columns=[0, 1], values=[[1.0, 0.2], [0.3, 0.9]]),
        partition=PARTITION,
    )
    assert square.head == ["client", "1", "0"]
    assert texts(square) == [["1 · photo", "0.90", "0.30"], ["0 · sketch", "0.20", "1.00"]]


def test_of_many_clients_some_at_even_distances_are_drawn(tmp_path):
    ids = list(range(100))
    values = [[r / 100 + c for c in ids] for r in ids]
    (found,) = drawn(tmp_path, table(axes=["client", "client"], rows=ids, columns=ids, values=values))
    assert len(found.rows) == len(found.head) - 1 == MOST and found.wide
    assert [found.rows[k][0] for k in (0, 1, MOST - 1)] == ["0", "2", "97"]
    assert "40 of 100 clients are shown" in found.note


@pytest.mark.parametrize(
    "entry", [None, 5, [], {}, table(values=[[0.5]]), table(rows={"a": 1}), table(values=[[10**400], [0]]), {"x": 1}]
)
def test_what_is_no_table_is_told_and_the_others_are_drawn(tmp_path, entry):
    good, bad = drawn(tmp_path, entry, table())
    assert good.title == "Shares" and bad.note == "1 table of facts.json cannot be read."


def test_facts_of_any_other_form_draw_nothing(tmp_path):
    assert fact_cells(RunRecord(tmp_path)) == []
    assert drawn(tmp_path, table(rows=[], values=[])) == []
    assert [cells.rows for cells in fact_cells(RunRecord(tmp_path, facts={"tables": "odd"}))] == [[]]
    clients = {"0": {"domains": [1]}, "1": {"domains": {"x": 1}}}
    odd = {"domain_names": 5, "stages": [None, {"clients": [1]}, {"clients": clients}]}
    (found,) = drawn(tmp_path, table(axes=["client", "domain"], rows=[0, 1]), partition=odd)
    assert [label for label, _ in found.rows] == ["0", "1"]


def test_domains_are_drawn_with_their_spread(tmp_path):
    summary = {
        "domain_accuracy": {"photo": 0.9, "sketch": None},
        "domain_mean": 0.9,
        "domain_std": 0.0,
        "domain_worst": 0.9,
    }
    found = domain_cells(RunRecord(tmp_path, summary=summary))
    assert texts(found) == [["photo", "90.0 %"], ["sketch", "–"]]
    assert found.note == "Global view: mean 90.0 %, deviation (ddof 0) 0.0 pp, worst 90.0 %."
    own = {"personal_domain_accuracy": {"photo": 0.5, "sketch": 0.25}, "personal_domain_mean": 0.375}
    found = domain_cells(RunRecord(tmp_path, summary={**summary, **own}))
    assert found.head == ["domain", "global view", "own views"]
    assert texts(found) == [["photo", "90.0 %", "50.0 %"], ["sketch", "–", "25.0 %"]]
    assert "Own views: mean 37.5 %, deviation (ddof 0) –, worst –." in found.note
    same = {"personal_domain_accuracy": summary["domain_accuracy"]}
    assert domain_cells(RunRecord(tmp_path, summary={**summary, **same})).head == ["domain", "global view"]
    for nothing in ({}, {"domain_accuracy": None}, {"domain_accuracy": [1]}):
        assert domain_cells(RunRecord(tmp_path, summary=nothing)) is None
