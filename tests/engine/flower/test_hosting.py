"""Lists of clients as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core.errors import ConfigError
from fedloom.engine.flower.hosting import parse_clients, spread


@pytest.mark.parametrize(
    ("text", "clients"),
    [
        ("0-4,7", (0, 1, 2, 3, 4, 7)),
        ("7,0-4", (0, 1, 2, 3, 4, 7)),
        ("3", (3,)),
        (3, (3,)),
        ("3-3", (3,)),
        (" 0 - 1 , 9 ", (0, 1, 9)),
        ("09", (9,)),
    ],
)
def test_numbers_and_ranges_in_rising_order(text: str | int, clients: tuple[int, ...]) -> None:
    assert parse_clients(text, 10) == clients


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "clients is empty; name the clients of this node"),
        ("  ", "clients is empty"),
        ("4-0", "clients '4-0': the range 4-0 runs backwards; write 0-4"),
        ("0-10", "there is no client 10; the run has 10, numbered from 0 to 9"),
        ("999999999", "there is no client 999999999"),
        ("0-4,3", "client 3 is named twice; name it once"),
        ("3,3", "client 3 is named twice"),
        ("8,0-9", "client 8 is named twice"),
        ("0-4;7", "'0-4;7' is no client; write 3 or 0-4"),
        ("0,,1", "'' is no client"),
        ("-1", "'-1' is no client"),
        ("1.5", "'1.5' is no client"),
        ("all", "'all' is no client"),
        ("²", "'²' is no client"),
        ("9" * 5000, "is no client"),
        ("0," * 6000, "has 12000 characters, at most 10000 are read"),
    ],
)
def test_refusals_say_what_is_wrong(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_clients(text, 10)
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 200


def test_blocks_are_contiguous_and_even() -> None:
    assert spread(10, 2) == ["0-4", "5-9"]
    assert spread(5, 3) == ["0", "1-2", "3-4"]
    assert spread(3, 3) == ["0", "1", "2"]
    assert spread(1, 1) == ["0"]


@pytest.mark.parametrize(("total", "nodes"), [(2, 3), (2, 0), (0, 1), (2, -1)])
def test_every_node_gets_a_client(total: int, nodes: int) -> None:
    with pytest.raises(ConfigError, match=f"got {nodes}"):
        spread(total, nodes)


@given(st.integers(1, 200), st.integers(1, 20))
def test_blocks_hold_every_client_once(total: int, nodes: int) -> None:
    blocks = [parse_clients(text, total) for text in spread(total, min(nodes, total))]
    assert [client for block in blocks for client in block] == list(range(total))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
