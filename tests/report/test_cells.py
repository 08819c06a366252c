import pytest

from fedloom.report.cells import MOST, MOST_MAPS, domain_cells, fact_cells, fact_groups
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
    assert [cell.style for _, (cell,) in found.rows] == ["--v:0.250", ""]


def test_bars_above_one_are_measured_by_the_longest(tmp_path):
    (found,) = drawn(tmp_path, table(values=[[5.0], [20.0]]))
    assert texts(found) == [["stem", "5"], ["body", "20"]]
    assert [cell.style for _, (cell,) in found.rows] == ["--v:0.250", "--v:1.000"]


def test_several_columns_are_shaded_from_the_smallest_to_the_largest(tmp_path):
    (found,) = drawn(tmp_path, table(columns=["a", "b"], values=[[-0.5, 0.5], [None, 0.0]]))
    assert found.kind == "heat" and found.note == "Of all. Faintest: -0.50, strongest: 0.50."
    assert texts(found) == [["stem", "−0.50", "0.50"], ["body", "–", "0.00"]]
    assert [[cell.style for cell in row] for _, row in found.rows] == [["--v:0.100", "--v:1.000"], ["", "--v:0.550"]]
    (same,) = drawn(tmp_path, table(columns=["a", "b"], values=[[1.0, 1.0], [1.0, 1.0]]))
    assert {cell.style for _, row in same.rows for cell in row} == {"--v:1.000"}


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


def layer(k, values, **changes):
    rows, columns = list(range(len(values))), list(range(len(values[0])))
    whole = {"title": f"Routing, layer {k}", "axes": ["client", "expert"], "rows": rows, "columns": columns}
    return {**whole, "values": values, "note": "Means over tokens.", "group": "Routing", **changes}


def test_tables_of_a_group_are_maps_with_one_scale(tmp_path):
    tables = [layer(0, [[0.0, 0.5], [None, 0.25]]), table(), layer(1, [[1.0, 0.0005]])]
    record = RunRecord(tmp_path, facts={"tables": tables})
    assert [cells.title for cells in fact_cells(record)] == ["Shares"]
    (group,) = fact_groups(record)
    first, second = group.maps
    assert (group.title, first.title, second.title) == ("Routing", "layer 0", "layer 1")
    assert [cell.style for _, row in first.rows for cell in row] == ["--v:0.100", "--v:0.550", "", "--v:0.325"]
    assert [cell.style for _, row in second.rows for cell in row] == ["--v:1.000", "--v:0.100"]
    assert texts(second) == [["0", "1", "0.0005"]] and first.head == ["client \\ expert", "0", "1"]
    assert group.note == (
        "A row per client, a column per expert. Means over tokens. Faintest: 0, strongest: 1; a cell tells its value "
        "to the pointer."
    )


def test_groups_come_in_their_order_and_clients_of_one_domain_side_by_side(tmp_path):
    other = layer(0, [[0.1], [0.2]], group="Margin", title="first", rows=[0, 1])
    record = RunRecord(tmp_path, facts={"tables": [other, layer(0, [[0.5]])]}, partition=PARTITION)
    margin, routing = fact_groups(record)
    assert (margin.title, routing.title) == ("Margin", "Routing")
    assert [label for label, _ in margin.maps[0].rows] == ["1 · photo", "0 · sketch"]
    assert [row[0].text for _, row in margin.maps[0].rows] == ["0.2", "0.1"]


def test_of_a_large_group_some_maps_at_even_distances_are_drawn(tmp_path):
    tables = [layer(k, [[float(k)] * 50]) for k in range(24)]
    (group,) = fact_groups(RunRecord(tmp_path, facts={"tables": tables}))
    assert [found.title for found in group.maps] == [f"layer {k}" for k in range(0, 24, 2)]
    assert len(group.maps) == MOST_MAPS and len(group.maps[0].head) == 1 + MOST
    assert "12 of 24 tables are shown, at even distances." in group.note
    assert "40 of 50 experts are shown, at even distances." in group.note
    assert "strongest: 22;" in group.note, "of what is drawn"
