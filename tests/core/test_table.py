import math

import pytest

from fedloom.core import PayloadError, Table


def test_a_table_holds_numbers_where_its_labels_say():
    table = Table("t", ("client", "domain"), [3, 5], ["a"], [[0.5], [None]])
    assert (table.rows[1], table.columns[0], table.values) == (5, "a", [[0.5], [None]])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"values": [[0.5]]}, r"rows of \[1\] values where its labels ask for \[1, 1\]"),
        ({"values": [[0.5], [0.5, 0.1]]}, r"rows of \[1, 2\]"),
        ({"values": [[0.5], [math.nan]]}, "finite numbers or None, got"),
        ({"values": [[0.5], ["x"]]}, "finite numbers or None"),
        ({"values": [[True], [0.5]]}, "finite numbers or None"),
        ({"values": [0.5, 0.5]}, "lists of labels and values"),
        ({"rows": "ab"}, "lists of labels and values"),
        ({"axes": ("client",)}, "two axes"),
        ({"axes": ("client", [])}, "texts for its words"),
        ({"group": 1}, "texts for its words"),
        ({"rows": [0, {}]}, "texts or ids for its labels"),
    ],
)
def test_a_table_that_cannot_be_drawn_is_refused_by_its_title(given, words):
    whole = {"title": "shares", "axes": ("client", ""), "rows": [0, 1], "columns": ["a"], "values": [[0.5], [0.2]]}
    assert Table(**whole).title == "shares"
    with pytest.raises(PayloadError, match=f"the table 'shares' .*{words}"):
        Table(**{**whole, **given})
