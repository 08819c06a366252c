"""Plans of data with domains: streams in which domains arrive, per-domain test sets, counts, records and pictures."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedloom.core import ConfigError, DataError
from fedloom.data import from_arrays, make_plan
from fedloom.data.stream import domain_order
from toys.domains import NAMES, source

ARRIVING = {"kind": "domain_incremental", "domain_order": ["cartoon", "photo", "sketch", "art"]}
ORDER = (2, 0, 3, 1)


def plan_of(stream=None, **partition):
    partition = {"kind": "iid", "clients": 4} | partition
    return make_plan(source(), stream=ARRIVING | (stream or {}), partition=partition, rounds=2)


def test_a_stream_of_domains_has_a_task_of_all_classes_per_domain():
    plan = plan_of()
    assert plan.tasks == (tuple(range(6)),) * 4 and plan.task_domains == tuple((d,) for d in ORDER)
    assert plan.num_stages == 4 and plan.domains == NAMES
    for index, domain in enumerate(ORDER):
        stage = plan.stage(index)
        assert stage.classes == stage.seen == tuple(range(6)) and stage.domains == (domain,)
        assert stage.seen_domains == tuple(sorted(ORDER[: index + 1]))
        assert stage.old_domains == tuple(sorted(ORDER[:index])) and stage.old == (() if index == 0 else stage.seen)
        assert plan.stage(index, 0) == stage
        for client in range(4):
            data = plan.train(client, index, 0, "train")
            assert set(data.domains.tolist()) == {domain} and len(data) == 15
    rows = np.concatenate([plan.rows(c, s) for c in range(4) for s in range(4)])
    assert sorted(rows.tolist()) == list(range(240)), "every example is dealt once"


@pytest.mark.parametrize("kind", ["static", "class_incremental"])
def test_every_domain_is_there_from_the_start_of_other_streams(kind):
    plan = make_plan(source(), stream={"kind": kind}, partition={"kind": "iid", "clients": 4})
    everything = (0, 1, 2, 3)
    assert set(plan.task_domains) == {everything}
    for index in range(plan.num_stages):
        for stage in (plan.stage(index), plan.stage(index, 1)):
            assert stage.domains == stage.seen_domains == everything
            assert stage.old_domains == (everything if index else ())


def test_late_clients_have_no_domains_and_meet_them_in_order():
    plan = plan_of({"arrival": "shifted", "shift": 1})
    assert plan.num_stages == 5 and plan.stage(0, 1).domains == () == plan.stage(0, 1).classes
    assert [plan.stage(s, 1).domains for s in range(1, 5)] == [(d,) for d in ORDER]
    assert plan.stage(1).domains == (0, 2) and plan.stage(2).old_domains == (0, 2)
    counts = plan.domain_counts(1, 2)
    assert counts.sum(1).tolist() == [15, 0, 15, 0] and plan.domain_counts(1, 0).sum() == 0


def test_an_order_per_client_and_a_schedule_serve_domains_as_they_do_classes():
    own = plan_of({"arrival": "per_client"})
    for client in range(4):
        assert sorted(own.stage(s, client).domains for s in range(4)) == [(0,), (1,), (2,), (3,)]
    assert own.stage(0).domains == tuple(sorted({own.stage(0, c).domains[0] for c in range(4)}))
    given = plan_of({"arrival": {0: {0: 3, 2: 0}}, "stages": 3})
    assert [given.stage(s).domains for s in range(3)] == [(1,), (1,), (2,)]
    assert "no client ever works on tasks 1, 2" in given.notes


def test_counts_are_per_domain_and_class_and_count_a_kept_task_once():
    plan = plan_of({"arrival": "shifted", "shift": 1})
    total = sum(plan.domain_counts(c, 4) for c in range(4))
    assert total.dtype == torch.int64 and total.tolist() == [[10] * 6] * 4
    for client in range(4):
        for stage in range(5):
            counts = plan.domain_counts(client, stage)
            assert torch.equal(counts.sum(0), plan.label_counts(client, stage))
            assert torch.equal(plan.stage_counts(client, stage).sum(), torch.tensor(plan.size(client, stage)))
    plain = replace(source(), domains_train=None, domains_test=None, domain_names=())
    one_row = make_plan(plain, stream={"kind": "static"}, partition={"kind": "iid", "clients": 4}).domain_counts(2, 0)
    assert one_row.shape == (1, 6) and one_row.sum() == 60


@pytest.mark.parametrize("stream", [ARRIVING, {"kind": "static"}, {"tasks": 3}])
def test_test_sets_of_a_task_are_the_union_of_its_domains(stream):
    data = source()
    plan = make_plan(data, stream=stream, partition={"kind": "iid", "clients": 4})
    for task, classes in enumerate(plan.tasks):
        parts = [plan.test(task, domain) for domain in range(4)]
        for domain, part in enumerate(parts):
            assert len(part) == (5 * len(classes) if domain in plan.task_domains[task] else 0)
            assert set(part.domains.tolist()) <= {domain} and set(part.classes) <= set(classes)
        whole = plan.test(task)
        assert len(whole) == sum(map(len, parts))
        assert sorted(torch.cat([p.stored(torch.arange(len(p)))[0][:, 0] for p in parts]).tolist()) == sorted(
            whole.stored(torch.arange(len(whole)))[0][:, 0].tolist()
        )
    assert sum(len(plan.test(t)) for t in range(len(plan.tasks))) == len(data.y_test)


def test_a_domain_of_data_without_domains_is_refused():
    plain = replace(source(), domains_train=None, domains_test=None, domain_names=())
    plan = make_plan(plain, stream={"kind": "static"}, partition={"kind": "iid", "clients": 4})
    assert plan.domains == () and plan.stage(0).domains == () and plan.train(0, 0, 0, "train").domains is None
    with pytest.raises(ConfigError, match="there is no domain 1: the data have no domain labels"):
        plan.test(0, 1)
    with pytest.raises(DataError, match="'domain_incremental' goes from domain to domain, but the data have no domain"):
        make_plan(plain, stream={"kind": "domain_incremental"}, partition={"kind": "iid", "clients": 4})


def test_orders_of_domains():
    assert domain_order(NAMES, "natural", 0) == (0, 1, 2, 3)
    assert domain_order(NAMES, "seeded", 3) == domain_order(NAMES, "seeded", 3)
    assert len({domain_order(NAMES, "seeded", seed) for seed in range(20)}) > 5
    assert domain_order(NAMES, ["sketch", 0, "art", 2], 0) == (3, 0, 1, 2)
    assert domain_order(("1", "0"), ["1", "0"], 0) == (0, 1), "text is a name, whatever it looks like"


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("sorted", "must be seeded, natural or a list of domains, got 'sorted'"),
        ("naturl", "Did you mean 'natural'"),
        (["photo", "art", "cartoon"], "'sketch' is missing; list each of photo, art, cartoon, sketch exactly once"),
        (["photo", "art", "cartoon", "skech"], "'skech' is no domain"),
        (["photo", "photo", "cartoon", "sketch"], "'photo' is listed twice"),
        ([0, 1, 2, 4], "4 is no domain"),
        ([0, 1, 2, -1], "-1 is no domain"),
        ([0, 1, 2, True], "True is no domain"),
        ([0, 1, 2, "photo"], "'photo' is listed twice"),
    ],
)
def test_bad_orders_are_refused_in_words(order, message):
    with pytest.raises(ConfigError, match=message):
        domain_order(NAMES, order, 0)


def test_options_that_a_stream_cannot_use_are_noted():
    arriving = plan_of({"tasks": 3, "class_order": "natural"}).notes
    assert arriving == tuple(
        f"stream.{option} is not used: in a domain-incremental stream every domain is a task"
        for option in ("tasks", "class_order")
    )
    of_classes = make_plan(source(), stream={"tasks": 3, "domain_order": "natural"}, partition={"kind": "iid"}).notes
    assert of_classes == (
        "stream.domain_order is not used: every domain is there from the start of a class-incremental stream",
    )
    with pytest.raises(ConfigError, match="Did you mean 'domain_order'"):
        plan_of({"domains_order": "natural"})


def test_clients_that_do_not_hold_a_domain_are_away_in_its_task():
    plan = plan_of(kind="single", clients=4)
    for stage, domain in enumerate(ORDER):
        (holder,) = plan.participants(stage)
        assert plan.stage_counts(holder, stage).sum(1).tolist() == [60 * (d == domain) for d in range(4)]
    assert plan.notes[0].startswith("stage 0: 3 of 4 clients hold no examples")


def test_fingerprints_tell_orders_and_holders_apart_and_those_without_domains_are_as_before():
    base = plan_of()
    others = [
        plan_of({"domain_order": "natural"}),
        plan_of(kind="single"),
        plan_of(kind="k_domains", cover=2),
        make_plan(source(), stream={"kind": "static"}, partition={"kind": "iid", "clients": 4}),
    ]
    assert base.fingerprint() == plan_of().fingerprint()
    assert len({plan.fingerprint() for plan in [base, *others]}) == 5
    x = np.arange(120, dtype=np.float32).reshape(60, 2)
    plain = from_arrays((x, np.arange(60) % 6, x[:12], np.arange(12) % 6))
    known = make_plan(plain, stream={"tasks": 3}, partition={"clients": 4, "kind": "iid"})
    assert known.fingerprint() == "26151080499dae9f9af32e18444542e3902818d519da0fee38bae54bf202c354", (
        "runs on disk would not go on"
    )


def test_a_plan_with_domains_travels(tmp_path):
    plan = plan_of(kind="dirichlet_domain")
    again = pickle.loads(pickle.dumps(plan))
    assert again.fingerprint() == plan.fingerprint() and again.task_domains == plan.task_domains
    assert again.stage(2) == plan.stage(2)


def test_the_record_says_who_holds_which_domain():
    said = json.loads(json.dumps(plan_of(kind="single").describe()))
    assert said["domain_names"] == list(NAMES) and said["task_domains"] == [[d] for d in ORDER]
    assert said["test_examples_per_task"] == [30] * 4
    assert said["test_examples_per_task_and_domain"] == [{str(d): 30} for d in ORDER]
    first = said["stages"][0]
    assert first["domains"] == [2] == first["seen_domains"]
    held = [client["domains"] for client in first["clients"].values() if client["examples"]]
    assert held == [{"2": 60}]
    static = make_plan(source(), stream={"kind": "static"}, partition={"kind": "iid", "clients": 4}).describe()
    assert static["test_examples_per_task_and_domain"] == [{str(d): 30 for d in range(4)}]
    assert sum(sum(c["domains"].values()) for c in static["stages"][0]["clients"].values()) == 240
    plain = replace(source(), domains_train=None, domains_test=None, domain_names=())
    without = make_plan(plain, stream={"kind": "static"}, partition={"kind": "iid", "clients": 4}).describe()
    assert not [key for key in without if "domain" in key] and "domains" not in without["stages"][0]["clients"]["0"]


def test_a_picture_takes_names_for_names_whatever_signs_they_hold(tmp_path):
    odd = replace(source(), domain_names=("$\\frac$", "_a", "b$", "c"))
    plan = make_plan(odd, stream={"kind": "domain_incremental"}, partition={"kind": "iid", "clients": 4})
    assert plan.draw(tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("stream", "clients", "panels"),
    [
        ({"kind": "static"}, 4, ["class", "domain", "examples"]),
        ({"tasks": 3}, 4, ["class, in order of arrival", "domain", "examples"]),
        (ARRIVING, 4, ["class", "domain, in order of arrival", "examples"]),
        (ARRIVING | {"arrival": "shifted"}, 4, ["class", "domain, in order of arrival", "stage", "examples"]),
        ({"kind": "static"}, 40, ["class", "domain", "examples", "examples of a class on a client"]),
    ],
)
def test_a_picture_shows_who_holds_which_domains(tmp_path, monkeypatch, stream, clients, panels):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *args, **kw: drawn.append(figure))
    plan = make_plan(source(), stream=stream, partition={"kind": "k_domains", "clients": clients, "cover": 1})
    plan.draw(tmp_path / "plan.png")
    axes = drawn[0].axes
    assert [axis.get_xlabel() for axis in axes] == panels
    order = ORDER if "domain_order" in stream else range(4)
    assert [label.get_text() for label in axes[1].get_xticklabels()] == [NAMES[d] for d in order]
    if clients == 4:
        last = plan.num_stages - 1
        cells = [int(plan.domain_counts(c, last)[d].sum()) for c in range(4) for d in order]
        assert [int(text.get_text()) for text in axes[1].texts if text.get_fontweight() != "bold"] == [
            count for count in cells if count
        ]
