import json
import pickle
import time
import tracemalloc

import numpy as np
import pytest
import torch

from fedloom.core import ConfigError, DataError
from fedloom.data import from_arrays, make_plan


def plan_of(source, stream=None, partition=None, **options):
    return make_plan(
        source, stream={"tasks": 3} | (stream or {}), partition={"clients": 4} | (partition or {}), **options
    )


def test_stages_and_tasks(toy):
    plan = plan_of(toy(), {"class_order": "natural"}, rounds=2)
    assert plan.tasks == ((0, 1), (2, 3), (4, 5)) and plan.num_stages == 3
    assert (plan.num_classes, plan.num_clients, plan.rounds) == (6, 4, 2)
    stage = plan.stage(1)
    assert (stage.index, stage.count, stage.rounds) == (1, 3, 2)
    assert stage.classes == (2, 3) and stage.seen == (0, 1, 2, 3)
    assert plan.stage(1, 0) == stage


def test_every_training_example_is_dealt_once(toy):
    plan = plan_of(toy(), partition={"alpha": 0.3})
    rows = np.concatenate([plan.rows(c, s) for c in range(4) for s in range(3)])
    assert sorted(rows.tolist()) == list(range(120))
    for client in range(4):
        for stage in range(3):
            batches = plan.train(client, stage, 0, "train")
            assert len(batches) == plan.size(client, stage)
            assert set(batches.labels.tolist()) <= set(plan.stage(stage, client).classes)


def test_batches_depend_on_every_part_of_their_key(toy):
    plan = plan_of(toy(per_class=60), partition={"kind": "iid"})

    def order(client=0, stage=0, round=0, exchange="train", seed=0):
        one = plan if seed == 0 else plan_of(toy(per_class=60), partition={"kind": "iid"}, seed=seed)
        return torch.cat([b.index for b in one.train(client, stage, round, exchange).epoch(0, 8)]).tolist()

    base = order()
    assert base == order() and sorted(base) == list(range(30))
    others = [order(client=1), order(stage=1), order(round=1), order(exchange="measure"), order(seed=1)]
    assert all(o != base for o in others)


def test_inputs_are_normalised_and_test_sets_follow_tasks(toy):
    source = toy()
    plan = plan_of(source, {"class_order": "natural"})
    batch = next(plan.test(2).epoch(0, 100, shuffle=False))
    assert sorted(set(batch.y.tolist())) == [4, 5] and len(batch.y) == 20
    want = (batch.y.float() / 255 - source.mean[0]) / source.std[0]
    assert torch.allclose(batch.x[:, 0, 0, 0], want, atol=1e-5)
    assert sum(len(plan.test(t)) for t in range(3)) == len(source.y_test)


def test_label_counts_add_up_over_stages_without_counting_a_kept_task_twice(toy):
    plan = plan_of(toy(), {"tasks": 2, "arrival": "shifted", "shift": 1}, {"kind": "iid"})
    assert plan.num_stages == 3
    late = plan.label_counts(1, 0)
    assert late.dtype == torch.int64 and late.sum() == 0
    assert torch.equal(plan.label_counts(0, 2), plan.label_counts(0, 1))
    total = sum(plan.label_counts(c, 2) for c in range(4))
    assert total.tolist() == [20] * 6


def test_late_clients_have_no_classes_and_do_not_take_part(toy):
    plan = plan_of(toy(), {"arrival": "shifted", "shift": 2, "class_order": "natural"}, {"kind": "iid"})
    assert [list(plan.participants(s)) for s in range(5)] == [
        [0, 3],
        [0, 1, 3],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]
    assert plan.stage(0, 1).classes == () and plan.size(1, 0) == 0 and len(plan.train(1, 0, 0, "train")) == 0
    assert plan.stage(2).classes == (0, 1, 2, 3, 4, 5) and plan.stage(4).classes == (4, 5)
    assert plan.stage(1).seen == (0, 1, 2, 3) and plan.notes == ()


def test_per_client_order_makes_all_seen_when_it_arrived_anywhere(toy):
    plan = plan_of(toy(), {"arrival": "per_client"}, {"clients": 6, "kind": "iid"})
    arrived = {plan.task_of(c, 0) for c in range(6)}
    assert plan.stage(0).seen == tuple(sorted(c for t in arrived for c in plan.tasks[t]))
    assert {plan.stage(0, c).classes for c in range(6)} == {plan.tasks[t] for t in arrived}


@pytest.mark.parametrize("arrival", ["synchronous", "shifted", "per_client"])
def test_old_classes_are_those_seen_before_the_stage(toy, arrival):
    plan = plan_of(toy(), {"arrival": arrival}, {"clients": 6, "kind": "iid"})
    before = ()
    for index in range(plan.num_stages):
        for client in (None, *range(6)):
            assert plan.stage(index, client).old == before
        before = plan.stage(index).seen
    last = plan.stage(plan.num_stages - 1)
    assert bool(set(last.old) & set(last.classes)) == (arrival != "synchronous"), "a task may be new to some alone"


def test_schedule_client_that_only_evaluates_is_noted(toy):
    plan = plan_of(toy(), {"arrival": {0: {0: 0, 2: 1}, 1: {1: 0}}, "stages": 4}, {"clients": 3, "kind": "iid"})
    assert [list(plan.participants(s)) for s in range(4)] == [[0], [0, 1], [0, 1], [0, 1]]
    assert "the schedule gives no task to client 2: evaluation only" in plan.notes
    assert "no client ever works on task 2" in plan.notes


def test_static_stream_has_one_task(toy):
    plan = make_plan(toy(), stream={"kind": "static", "tasks": 4}, partition={"clients": 2, "kind": "iid"})
    assert plan.tasks == (tuple(range(6)),) and plan.num_stages == 1
    assert plan.notes == ("stream.tasks is not used: a static stream has one task of all classes",)


def test_empty_clients_are_reported_and_left_out(toy):
    plan = plan_of(toy(per_class=4), partition={"alpha": 0.01, "clients": 20})
    for stage in range(3):
        empty = [c for c in range(20) if plan.size(c, stage) == 0]
        assert empty and not set(empty) & set(plan.participants(stage))
        assert any(n.startswith(f"stage {stage}: {len(empty)} of 20 clients hold no examples") for n in plan.notes)


def test_fingerprint_names_data_and_assignment(toy):
    base = plan_of(toy())
    assert base.fingerprint() == plan_of(toy()).fingerprint()
    changed = [
        plan_of(toy(), seed=1),
        plan_of(toy(per_class=21)),
        plan_of(toy(), partition={"alpha": 0.4}),
        plan_of(toy(), {"class_order": "natural"}),
        plan_of(toy(), {"arrival": "shifted"}),
        plan_of(toy(), augment="flip"),
    ]
    assert len({p.fingerprint() for p in [base, *changed]}) == 7


def test_plan_travels_by_reference(toy):
    plan = plan_of(toy(per_class=200), {"arrival": "per_client"})
    blob = pickle.dumps(plan)
    again = pickle.loads(blob)
    assert len(blob) < 30_000 and again.fingerprint() == plan.fingerprint()
    first, second = (next(p.train(1, 2, 0, "train").epoch(0, 9)) for p in (plan, again))
    assert torch.equal(first.x, second.x) and torch.equal(first.y, second.y)


def test_many_registered_clients_cost_what_few_cost(toy):
    source = toy()

    def peak(clients):
        tracemalloc.start()
        plan = make_plan(source, stream={"tasks": 3}, partition={"kind": "shared", "clients": clients, "per_client": 8})
        for client in range(0, clients, clients // 10):
            next(plan.train(client, 1, 0, "train").epoch(0, 4))
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert plan.participants(1) == range(clients) and plan.size(clients - 1, 2) == 8
        return found

    peak(100)
    assert peak(100_000) < 1.5 * peak(100)


def test_description_is_json_and_a_sample_beyond_a_thousand(toy):
    plan = plan_of(toy(), {"class_order": "natural"}, {"kind": "iid"})
    said = json.loads(json.dumps(plan.describe()))
    assert said["complete"] and said["clients_listed"] == [0, 1, 2, 3] and said["test_examples_per_task"] == [20] * 3
    counts = [said["stages"][0]["clients"][str(c)]["classes"] for c in range(4)]
    assert sum(c.get("0", 0) for c in counts) == 20 and said["stages"][1]["seen"] == [0, 1, 2, 3]
    assert said["rule"]["partition"] == {"kind": "iid", "clients": 4}
    many = plan_of(toy(), partition={"kind": "shared", "clients": 5000}).describe()
    assert not many["complete"] and len(many["clients_listed"]) == 100 == len(many["stages"][0]["clients"])


@pytest.mark.parametrize(
    ("stream", "partition"),
    [
        ({"tasks": 3}, {"clients": 1, "kind": "iid"}),
        ({"tasks": 6, "arrival": "per_client"}, {"clients": 40}),
        ({"kind": "static"}, {"clients": 300, "kind": "shared", "per_client": 5}),
    ],
)
def test_picture_is_drawn(toy, tmp_path, stream, partition):
    path = make_plan(toy(), stream=stream, partition=partition).draw(tmp_path / "plan.png")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


@pytest.mark.parametrize(
    ("stream", "clients", "panels"),
    [
        ({"tasks": 3}, 4, ["class, in order of arrival", "examples"]),
        ({"tasks": 3, "arrival": "shifted"}, 4, ["class, in order of arrival", "stage", "examples"]),
        ({"kind": "static"}, 4, ["class", "examples"]),
        ({"tasks": 3}, 40, ["class, in order of arrival", "examples", "examples of a class on a client"]),
    ],
)
def test_a_picture_shows_what_tells_something(toy, tmp_path, monkeypatch, stream, clients, panels):
    """No timetable where all clients are in step; a scale where cells are too many for numbers."""
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *args, **kw: drawn.append(figure))
    make_plan(toy(), stream=stream, partition={"clients": clients}).draw(tmp_path / "plan.png")
    assert [axis.get_xlabel() for axis in drawn[0].axes] == panels


def test_plan_of_a_large_partition_is_quick():
    y = np.arange(50_000) % 100
    source = from_arrays((np.zeros((50_000, 1), np.float32), y, np.zeros((100, 1), np.float32), np.arange(100)))
    start = time.perf_counter()
    make_plan(source, stream={"tasks": 10}, partition={"clients": 1000, "alpha": 0.1, "min_size": 2})
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    ("stream", "partition", "options", "error", "message"),
    [
        ({"tasks": 7}, {}, {}, ConfigError, "stream.tasks is 7 but there are 6 classes"),
        ({"class_order": [0, 1, 2, 3, 4]}, {}, {}, ConfigError, "class 5 is missing"),
        ({"kind": "domain"}, {}, {}, ConfigError, "unknown stream.kind 'domain'"),
        ({"taks": 2}, {}, {}, ConfigError, "Did you mean 'tasks'"),
        ({}, {"alpha": 0}, {}, ConfigError, "partition.alpha"),
        ({}, {"clients": 0}, {}, ConfigError, "partition.clients must be an integer of at least 1"),
        ({}, {"clients": 121}, {}, DataError, "only 120 training examples"),
        ({}, {"clients": 30, "min_size": 2}, {}, DataError, "needs 60 examples but the task has 40"),
        ({}, {}, {"rounds": 0}, ConfigError, "training.rounds must be an integer of at least 1, got 0"),
        ({}, {}, {"augment": "mixup"}, ConfigError, "unknown data.augment 'mixup'"),
    ],
)
def test_bad_input_is_refused_in_words(toy, stream, partition, options, error, message):
    with pytest.raises(error, match=message):
        plan_of(toy(), stream, partition, **options)


def test_augmentation_needs_images():
    source = from_arrays((np.zeros((8, 3)), np.arange(8) % 2))
    with pytest.raises(ConfigError, match="needs images"):
        make_plan(source, stream={"tasks": 2}, partition={"clients": 2}, augment="flip")
