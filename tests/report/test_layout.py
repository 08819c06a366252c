"""Tables are as narrow as can be."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.report.layout import GAP, aligned, layout, parts

CELLS = [["Method", "final accuracy, %", "partition.alpha=0.25"], ["a", "50.0", "1"], ["longer", "5.0", "22"]]


def test_heads_are_wrapped_between_words_alone():
    assert layout(CELLS)[0] == [["Method"], ["final", "accuracy, %"], ["partition.alpha=0.25"]]
    assert layout(CELLS)[1] == [6, 11, 20]


def test_plain_lines_end_at_their_columns():
    lines = aligned(CELLS)
    assert lines[1] == "Method  accuracy, %  partition.alpha=0.25" and lines[0].strip() == "final"
    assert lines[2:] == ["a              50.0                     1", "longer          5.0                    22"]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 100))
def test_parts_hold_every_column_once_in_order_and_fit_where_one_column_does(sizes: list[int], width: int):
    cells = [["m", *("x" * size for size in sizes)], ["label", *("y" * size for size in sizes)]]
    found = parts(cells, width)
    assert [k for part in found for k in part] == list(range(1, len(sizes) + 1))
    widths = layout(cells)[1]
    for part in found:
        taken = sum(widths[k] + GAP for k in [0, *part])
        assert taken <= width or len(part) == 1


@pytest.mark.parametrize("width", [20, 43])
def test_no_part_could_have_taken_the_next_column(width: int):
    found, widths = parts(CELLS, width), layout(CELLS)[1]
    for part, following in pairwise(found):
        assert sum(widths[k] + GAP for k in [0, *part, following[0]]) > width
