import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core import ConfigError, DataError
from fedloom.data.dirichlet import Dirichlet, repair
from fedloom.data.partition import (
    Iid,
    QuantitySkew,
    Shared,
    check_clients,
    make_partition,
    on_domains,
    partition_task,
)
from fedloom.data.quantity_label import QuantityLabel

RULES = [
    Iid(),
    Dirichlet(0.1),
    Dirichlet(5.0, variant="plain"),
    Dirichlet(0.01, min_size=1),
    QuantitySkew(0.2),
    QuantitySkew(0.05, min_size=1),
    QuantityLabel(2),
    QuantityLabel(2, "pilora_shards"),
    QuantityLabel(2, "glfc_classes"),
    Shared(7),
]


def held(parts):
    return [parts.rows(c) for c in range(len(parts))]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@settings(max_examples=15, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=12, max_size=80), clients=st.integers(1, 12), seed=st.integers(0, 99)
)
def test_every_rule_is_sound(rule, labels, clients, seed):
    y = np.array(labels)
    parts, notes = rule.split(y, clients, seed)
    again, _ = rule.split(y, clients, seed)
    rows = held(parts)
    assert len(parts) == clients and all(isinstance(n, str) for n in notes)
    assert parts.digest() == again.digest()
    assert [parts.size(c) for c in range(clients)] == [len(r) for r in rows]
    assert list(parts.holders()) == [c for c in range(clients) if len(rows[c])]
    for part in rows:
        assert part.dtype == np.int64
        assert len(np.unique(part)) == len(part)
        assert np.array_equal(part, np.sort(part))
        assert ((part >= 0) & (part < len(y))).all()
    everything = np.concatenate(rows)
    if not rule.overlaps:
        assert len(np.unique(everything)) == len(everything)
    if not isinstance(rule, QuantityLabel | Shared):
        assert len(everything) == len(y)
    if getattr(rule, "min_size", 0):
        assert min(len(r) for r in rows) >= rule.min_size


def test_another_seed_gives_another_partition():
    y = np.arange(200) % 5
    for rule in RULES:
        assert rule.split(y, 8, 1)[0].digest() != rule.split(y, 8, 2)[0].digest()


def test_iid_sizes_differ_by_at_most_one():
    parts, _ = Iid().split(np.zeros(11, int), 4, 0)
    assert [parts.size(c) for c in range(4)] == [3, 3, 3, 2]


def test_balanced_dirichlet_closes_full_clients():
    # With tiny alpha a class goes to one client, which is then full: 4 classes of 10, 4 clients.
    y = np.repeat(np.arange(4), 10)
    for seed in range(10):
        parts, _ = Dirichlet(1e-3).split(y, 4, seed)
        sizes = [parts.size(c) for c in range(4)]
        assert sum(sizes) == 40 and max(sizes) < 40 / 4 + 10
    plain = [Dirichlet(1e-3, variant="plain")._draw([np.arange(10), np.arange(10, 20)], 20, 4, np.random.default_rng(s))
             for s in range(20)]  # fmt: skip
    assert any(len(np.unique(p)) == 1 for p in plain)


def test_dirichlet_by_domain_deals_out_domains_whatever_the_classes():
    rng = np.random.default_rng(0)
    y, domains = rng.integers(0, 4, 3000), rng.integers(0, 30, 3000)
    rule, _ = make_partition("dirichlet", {"alpha": 0.1, "by": "domain", "variant": "plain", "min_size": 10})
    names = [str(k) for k in range(30)]
    of_task, notes = on_domains(rule, domains, names, 10, 0)
    parts, _ = of_task(np.arange(3000)).split(y, 10, 5)
    alone, _ = Dirichlet(0.1, 10, "plain").split(domains, 10, 5)
    assert notes == [] and all(np.array_equal(*pair) for pair in zip(held(parts), held(alone), strict=True))
    assert sorted(np.concatenate(held(parts)).tolist()) == list(range(3000))
    counts = np.stack([np.bincount(domains[rows], minlength=30) for rows in held(parts)])
    assert counts.sum(1).min() >= 10 and (counts.max(0) / counts.sum(0)).mean() > 0.6
    shares = np.stack([np.bincount(y[rows], minlength=4) / len(rows) for rows in held(parts) if len(rows) > 200])
    assert np.abs(shares - 0.25).max() < 0.12  # classes are as in the whole
    with pytest.raises(DataError, match=r"partition.kind 'dirichlet' by domain deals out domains, but the data"):
        on_domains(rule, None, [], 10, 0)


@pytest.mark.parametrize("alpha, low, high", [(0.1, 0.6, 0.9), (1.0, 0.2, 0.45), (1000.0, 0.1, 0.12)])
def test_the_largest_share_of_a_class_falls_as_alpha_rises(alpha, low, high):
    y = np.repeat(np.arange(50), 200)
    parts, _ = Dirichlet(alpha, 10, "plain").split(y, 10, 0)
    counts = np.stack([np.bincount(y[rows], minlength=50) for rows in held(parts)])
    assert low < (counts.max(0) / 200).mean() < high and counts.sum() == len(y)


def test_dirichlet_mean_share_is_equal_for_every_client():
    y = np.zeros(997, int)
    sizes = np.mean([[p.size(c) for c in range(5)] for s in range(300) for p in [Dirichlet(1.0).split(y, 5, s)[0]]], 0)
    assert np.abs(sizes - 997 / 5).max() < 25


def test_floored_cuts_favour_no_client():
    y = np.repeat(np.arange(50), 20)
    totals = np.zeros(20)
    for s in range(30):
        totals += [Dirichlet(10.0).split(y, 20, s)[0].size(c) for c in range(20)]
    assert totals.max() / totals.min() < 1.1


def test_infeasible_minimum_is_refused_at_once():
    for rule in (Dirichlet(0.5, 2), QuantitySkew(0.5, 2)):
        start = time.perf_counter()
        with pytest.raises(DataError, match="needs 80 examples but the task has 50"):
            rule.split(np.arange(50) % 5, 40, 0)
        assert time.perf_counter() - start < 0.1


def test_small_alpha_with_a_minimum_ends_by_repair():
    y = np.arange(100) % 10
    start = time.perf_counter()
    parts, _ = Dirichlet(0.05, min_size=2).split(y, 10, 0)
    assert time.perf_counter() - start < 1
    assert min(parts.size(c) for c in range(10)) >= 2 and sum(parts.size(c) for c in range(10)) == 100


@pytest.mark.parametrize("min_size", [0, 10, 50])
def test_large_partition_is_quick(min_size):
    y = np.arange(50_000) % 100
    start = time.perf_counter()
    parts, _ = Dirichlet(0.1, min_size=min_size).split(y, 1000, 0)
    assert time.perf_counter() - start < 2
    assert sum(parts.size(c) for c in range(1000)) == 50_000


def test_repair_takes_from_the_largest():
    owners = np.array([0] * 6 + [1] * 3)
    fixed = repair(owners, 3, 2, np.random.default_rng(0))
    assert np.bincount(fixed, minlength=3).tolist() == [4, 3, 2]
    assert owners.tolist() == [0] * 6 + [1] * 3


def test_niid_bench_gives_k_labels_and_equal_disjoint_shares():
    y = np.repeat(np.arange(5), 12)
    parts, notes = QuantityLabel(2).split(y, 5, 3)
    assert notes == []
    labels = [set(y[r]) for r in held(parts)]
    assert all(len(mine) == 2 and c % 5 in mine for c, mine in enumerate(labels))
    for label in range(5):
        shares = [int((y[r] == label).sum()) for r in held(parts) if label in y[r]]
        assert sum(shares) == 12 and max(shares) - min(shares) <= 1


def test_niid_bench_notes_clamping_and_labels_without_owner():
    y = np.repeat(np.arange(2), 5)
    assert QuantityLabel(4).split(y, 3, 0)[1] == ["partition.alpha_q 4 was lowered to the 2 classes of the task"]
    notes = QuantityLabel(1).split(np.repeat(np.arange(4), 5), 3, 0)[1]
    assert notes == ["1 classes have no owner and are not used: partition.alpha_q * partition.clients is too small"]


def test_pilora_shards_are_single_class_and_use_four_fifths():
    y = np.repeat(np.arange(3), 50)
    parts, _ = QuantityLabel(2, "pilora_shards").split(y, 200, 0)
    assert all(parts.size(c) == 8 for c in range(200))  # 50 * 0.8 / 10 = 4 examples a shard
    assert len(np.unique(np.concatenate(held(parts)))) == 3 * 40


def test_glfc_clients_see_all_examples_of_their_classes():
    y = np.repeat(np.arange(10), 7)
    parts, _ = QuantityLabel(6, "glfc_classes").split(y, 4, 0)
    for rows in held(parts):
        assert len(np.unique(y[rows])) == 6 and len(rows) == 42


def test_shared_windows_overlap_and_wrap():
    y = np.zeros(10, int)
    parts, notes = Shared(4).split(y, 100_000, 0)
    assert notes == [] and parts.size(99_999) == 4 and parts.holders() == range(100_000)
    assert len(np.unique(np.concatenate([parts.rows(c) for c in range(3)]))) == 10
    assert np.array_equal(parts.rows(0), parts.rows(5))  # 5 * 4 = 20 = 2 * 10
    small, notes = Shared(40).split(y, 2, 0)
    assert small.size(0) == 10 and notes == ["partition.per_client 40 was lowered to the 10 examples of the task"]


def test_partition_task_maps_to_rows_of_the_source():
    rows = np.array([3, 7, 20, 21])
    parts, _ = partition_task(Iid(), np.zeros(4, int), rows, 2, seed=0, task=0)
    assert sorted(np.concatenate(held(parts)).tolist()) == [3, 7, 20, 21]
    other, _ = partition_task(Iid(), np.zeros(40, int), np.arange(40), 2, seed=0, task=1)
    same, _ = partition_task(Iid(), np.zeros(40, int), np.arange(40), 2, seed=0, task=0)
    assert other.digest() != same.digest()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("dirichlt", {}, "Did you mean 'dirichlet'"),
        ("dirichlet", {"alpha": 0}, "partition.alpha must be a finite number above 0, got 0"),
        ("dirichlet", {"alpha": -1.0}, "above 0, got -1.0"),
        ("dirichlet", {"alpha": float("nan")}, "above 0, got nan"),
        ("dirichlet", {"min_size": -1}, "partition.min_size must be an integer of at least 0"),
        ("dirichlet", {"variant": "balancd"}, "Did you mean 'balanced'"),
        ("dirichlet", {"by": "domains"}, "partition.by must be class or domain, got 'domains'. Did you mean 'domain'"),
        ("quantity_label", {"alpha_q": 0}, "partition.alpha_q must be an integer of at least 1, got 0"),
        ("quantity_label", {"qli_mode": "pilora"}, "pilora_shards"),
        ("quantity_label", {"shard_fraction": 1.5}, "must be in"),
        ("quantity_skew", {"alpha": 0.0}, "above 0"),
        ("shared", {"per_client": 0}, "at least 1, got 0"),
        ("iid", {"alpah": 1}, "Did you mean 'alpha'"),
    ],
)
def test_bad_options_are_refused_in_words(kind, options, message):
    with pytest.raises(ConfigError, match=message):
        make_partition(kind, options)


def test_an_option_of_another_kind_is_noted():
    rule, notes = make_partition("iid", {"alpha": 0.5, "min_size": None})
    assert rule == Iid() and notes == ["partition.alpha is not used by the kind 'iid'"]


def test_client_counts_are_checked():
    check_clients(Shared(), 1000, 10)
    with pytest.raises(DataError, match="only 10 training examples"):
        check_clients(Iid(), 11, 10)
    with pytest.raises(ConfigError, match=r"partition.clients must be an integer of at least 1, got 0"):
        check_clients(Shared(), 0, 10)
