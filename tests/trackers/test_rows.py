from __future__ import annotations

import pytest

from fedloom.trackers.rows import scalars, step

ROUND = {"stage": 1, "round": 0, "exchange": "train", "scope": "round"}


def test_numbers_keep_their_keys_and_parts_get_places_and_names() -> None:
    row = {
        **ROUND,
        "clients": 3,
        "degraded": True,
        "accuracy": None,
        "accuracy/tasks": [0.5, None, 0.25],
        "accuracy/domains": {"photo": 0.75, "sketch": None},
        "measures": None,
        "said": "text",
    }
    assert scalars(row) == {
        "clients": 3.0,
        "degraded": 1.0,
        "accuracy/tasks/0": 0.5,
        "accuracy/tasks/2": 0.25,
        "accuracy/domains/photo": 0.75,
    }


def test_another_exchange_of_a_round_has_keys_of_its_own() -> None:
    assert scalars({**ROUND, "exchange": "measure", "bytes_up": 8}) == {"measure/bytes_up": 8.0}
    assert scalars({**ROUND, "exchange": None, "accuracy": 0.5}) == {"accuracy": 0.5}


@pytest.mark.parametrize(
    ("place", "last", "expected"),
    [
        ({"stage": 0, "round": 0, "scope": "round"}, 0, 0),
        ({"stage": 2, "round": 1, "scope": "round"}, 10, 11),
        ({"stage": 2, "round": None, "scope": "stage"}, 14, 14),
        ({"stage": 2, "round": None, "scope": "round"}, 9, 10),  # before the rounds of its stage
        ({"stage": 2, "round": None, "scope": "round"}, 14, 14),  # after them
    ],
)
def test_steps_count_the_rounds_of_a_run(place: dict, last: int, expected: int) -> None:
    assert step(place, 5, last) == expected


def test_steps_never_fall() -> None:
    trips = [None, 0, 0, 1, None, 1, None]
    rows = [{"stage": s, "round": r, "scope": "round"} for s in range(3) for r in trips]
    last, found = 0, []
    for row in rows:
        found.append(last := step(row, 2, last))
    assert found == sorted(found) and found[-1] == 5
