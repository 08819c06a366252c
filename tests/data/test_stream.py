import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core import ConfigError
from fedloom.data.stream import class_order, count_tasks, make_arrival, split_classes, table


@pytest.mark.parametrize(
    ("classes", "tasks", "sizes"),
    [(10, 3, [3, 3, 4]), (345, 10, [34] * 9 + [39]), (345, 5, [69] * 5), (11, 4, [2, 2, 2, 5]), (5, 5, [1] * 5)],
)
def test_remainder_goes_to_the_last_task(classes, tasks, sizes):
    assert [len(t) for t in split_classes(classes, tasks)] == sizes


@given(st.integers(1, 60), st.data())
def test_tasks_are_disjoint_and_complete(classes, data):
    tasks = data.draw(st.integers(1, classes))
    order = class_order(classes, "seeded", data.draw(st.integers(0, 9)))
    cut = split_classes(classes, tasks, order)
    assert len(cut) == tasks and sorted(c for t in cut for c in t) == list(range(classes))
    assert all(list(t) == sorted(t) for t in cut)


def test_class_orders():
    assert class_order(4, "natural", 0) == (0, 1, 2, 3)
    assert class_order(4, [3, 1, 0, 2], 0) == (3, 1, 0, 2)
    assert class_order(50, "seeded", 0) == class_order(50, "seeded", 0) != class_order(50, "seeded", 1)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 1, 2], "class 3 is missing"),
        ([0, 1, 2, 2], "class 2 is listed twice"),
        ([0, 1, 2, 7], "class 7 is no class id"),
        ("seded", "Did you mean 'seeded'"),
    ],
)
def test_bad_class_order_names_the_class(order, message):
    with pytest.raises(ConfigError, match=message):
        class_order(4, order, 0)


def test_task_counts():
    assert count_tasks("fine", {"coarse": 3, "fine": 5}, "x") == 5 and count_tasks(7, {}, "x") == 7
    with pytest.raises(ConfigError, match=r"'fine' is not defined for 'x' \(defined: none\)"):
        count_tasks("fine", {}, "x")
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        count_tasks(0, {}, "x")
    with pytest.raises(ConfigError, match="use at most 3"):
        split_classes(3, 4)


def test_synchronous_and_shifted_tables():
    same = make_arrival("synchronous", tasks=3, clients=2, seed=0)
    assert table(same, range(2)) == [[0, 1, 2], [0, 1, 2]]
    late = make_arrival("shifted", tasks=2, clients=4, shift=2, seed=0)
    assert table(late, range(4)) == [[0, 1, 1, 1], [None, 0, 1, 1], [None, None, 0, 1], [0, 1, 1, 1]]
    assert [sorted(late.current(s)) for s in range(4)] == [[0], [0, 1], [0, 1], [1]]


def test_shift_beyond_the_clients_adds_no_empty_stage():
    assert make_arrival("shifted", tasks=2, clients=2, shift=5, seed=0).stages == 3


def test_per_client_orders_are_permutations():
    own = make_arrival("per_client", tasks=6, clients=5, seed=1)
    rows = table(own, range(5))
    assert all(sorted(r) == list(range(6)) for r in rows) and len({tuple(r) for r in rows}) > 1
    assert rows == table(make_arrival("per_client", tasks=6, clients=5, seed=1), range(5))
    assert own.current(2) == {r[2] for r in rows}


def test_explicit_schedule_keeps_a_task_until_the_next():
    # Client 0 starts tasks at stages 0 and 3, client 1 at stage 1, client 2 never.
    plan = make_arrival({"0": {0: 0, 3: 1}, 1: {"1": 0}}, tasks=2, clients=3, stages=5, seed=0)
    assert table(plan, range(3)) == [[0, 0, 0, 1, 1], [None, 0, 0, 0, 0], [None] * 5]
    assert [sorted(plan.current(s)) for s in range(5)] == [[0], [0], [0], [0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("arrival", "message"),
    [
        ("shiftd", "Did you mean 'shifted'"),
        ({0: {1: 0}}, "nobody has a task before stage 1"),
        ({5: {0: 0}}, r"client must be in 0..2, got 5"),
        ({0: {0: 9}}, r"task must be in 0..1, got 9"),
        ({0: {"x": 0}}, "stage must be in 0, got 'x'"),
        ({0: 3}, "client 0 must map stages to tasks"),
        ({}, "empty schedule"),
    ],
)
def test_bad_arrivals_are_refused(arrival, message):
    with pytest.raises(ConfigError, match=message):
        make_arrival(arrival, tasks=2, clients=3, seed=0)


def test_shift_must_be_positive():
    with pytest.raises(ConfigError, match=r"stream.shift must be an integer of at least 1"):
        make_arrival("shifted", tasks=2, clients=3, shift=0, seed=0)
