"""Partitions over domains: who claims what, and that a domain's examples are dealt out as the claims say."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core import ConfigError, DataError
from fedloom.data import from_arrays, make_plan
from fedloom.data.domains import Claimed, DirichletDomain, KDomains, Single
from fedloom.data.partition import make_partition, on_domains
from toys.domains import NAMES, source

RULES = [
    KDomains(),
    KDomains(domains_min=1, domains_max=2, share=0.2),
    KDomains(domains_min=1, label_alpha=0.1),
    DirichletDomain(alpha=0.1),
    DirichletDomain(alpha=0.5, share=0.1, label_alpha=0.5),
    DirichletDomain(alpha=1e-3),
    Single(),
    Single(share=0.05, label_alpha=0.05),
]
cells = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=12, max_size=120).filter(
    lambda found: len({domain for _, domain in found}) > 1  # domains_min is 2 in some rules
)


def dealt(rule, y, domains, clients, seed=0, task=0, names=("a", "b", "c")):
    """Rows of every client, and the claims."""
    rule_of, _ = on_domains(rule, domains, names, clients, seed)
    claimed = rule_of(np.arange(len(y)))
    parts, _ = claimed.split(y, clients, 1000 * seed + task)
    return [parts.rows(c) for c in range(clients)], claimed.claims


@pytest.mark.parametrize("rule", RULES, ids=repr)
@settings(max_examples=25, deadline=None)
@given(examples=cells, clients=st.integers(5, 12), seed=st.integers(0, 99))
def test_domains_are_dealt_out_disjointly_to_their_holders(rule, examples, clients, seed):
    y, domains = np.array(examples).T
    rows, claims = dealt(rule, y, domains, clients, seed)
    again, same = dealt(rule, y, domains, clients, seed)
    assert np.array_equal(claims, same) and all(np.array_equal(a, b) for a, b in zip(rows, again, strict=True))
    everything = np.concatenate(rows)
    assert len(np.unique(everything)) == len(everything)
    if rule.share == 1:
        assert sorted(everything.tolist()) == list(range(len(y)))
    for client, part in enumerate(rows):
        assert part.dtype == np.int64 and np.array_equal(part, np.sort(part))
        held = np.bincount(domains[part], minlength=3)
        assert not held[claims[client] == 0].any(), "a client has examples of a domain that it does not hold"
        most = np.maximum(1, np.floor(rule.share * np.bincount(domains, minlength=3) + 1e-9))
        assert (held <= most).all(), "a client has more than its share"


@pytest.mark.parametrize("rule", RULES, ids=repr)
@settings(max_examples=25, deadline=None)
@given(examples=cells, clients=st.integers(5, 12), seed=st.integers(0, 99))
def test_no_client_is_empty_where_its_domains_have_an_example_for_it(rule, examples, clients, seed):
    y, domains = np.array(examples).T
    rows, claims = dealt(rule, y, domains, clients, seed)
    for client in (c for c, part in enumerate(rows) if not len(part)):
        main = np.flatnonzero(claims[client] == claims[client].max())
        takers = [c for c, part in enumerate(rows) if np.isin(domains[part], main).any() and len(part) > 1]
        assert not takers, "another client holds two examples that this one could have had"


@pytest.mark.parametrize("rule", [KDomains(), KDomains(label_alpha=0.05), Single(label_alpha=0.05)], ids=repr)
@settings(max_examples=25, deadline=None)
@given(examples=cells, clients=st.integers(5, 9), seed=st.integers(0, 99))
def test_every_holder_gets_every_class_that_there_is_enough_of(rule, examples, clients, seed):
    y, domains = np.array(examples).T
    rows, _ = dealt(rule, y, domains, clients, seed)
    for domain in range(3):
        counts = np.bincount(y[domains == domain], minlength=4)
        parts = [np.bincount(y[part[domains[part] == domain]], minlength=4) for part in rows]
        holders = [part for part in parts if part.sum()]
        for part in holders:
            assert (part > 0).sum() >= min(part.sum(), (counts >= len(holders)).sum())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), clients=st.integers(1, 20), count=st.integers(1, 7), seed=st.integers(0, 99))
def test_k_domains_covers_every_domain_and_stays_within_its_bounds(data, clients, count, seed):
    low = data.draw(st.integers(1, count))
    high = data.draw(st.integers(low, count))
    rule = KDomains(domains_min=low, domains_max=high)
    names = [f"d{k}" for k in range(count)]
    if clients * high < count:
        with pytest.raises(ConfigError, match="cannot give each 1 holders"):
            rule.claims(clients, names, seed)
        return
    claims, _ = rule.claims(clients, names, seed)
    assert set(np.unique(claims)) <= {0.0, 1.0} and claims.shape == (clients, count)
    assert low <= claims.sum(1).min() and claims.sum(1).max() <= high
    assert claims.sum(0).min() >= min(5, clients, clients * high // count)
    cover = data.draw(st.integers(1, clients * high // count))
    asked = KDomains(domains_min=low, domains_max=high, cover=min(cover, clients)).claims(clients, names, seed)[0]
    assert asked.sum(0).min() >= min(cover, clients)


def test_numbers_of_domains_are_drawn_uniformly():
    sizes = np.concatenate([KDomains().claims(20, NAMES, seed)[0].sum(1) for seed in range(100)])
    shares = np.bincount(sizes.astype(int), minlength=5)[2:] / len(sizes)
    assert np.abs(shares - 1 / 3).max() < 0.04


def test_twenty_clients_hold_two_to_four_of_four_domains_and_five_hold_each():
    claims, notes = KDomains().claims(20, NAMES, 0)
    assert notes == [] and claims.sum(0).min() >= 5
    assert not np.array_equal(claims, KDomains().claims(20, NAMES, 1)[0]), "another seed, other holders"


def test_what_was_changed_of_the_draw_is_noted():
    rule = KDomains(domains_min=1, domains_max=2)
    _, notes = rule.claims(6, NAMES, 0)
    assert notes[0] == "partition.cover is 3, not 5: with at most 2 domains each, 6 clients have no more places"
    assert notes[1].startswith("partition.cover 3 gave ") and notes[1].endswith("than were drawn")


def test_clients_that_all_hold_every_domain_are_noted():
    assert KDomains().claims(4, NAMES, 0)[1][-1].startswith("every client holds every domain")
    assert KDomains(domains_min=4).claims(4, NAMES, 0)[1] == []


@given(clients=st.integers(4, 30), seed=st.integers(0, 99))
def test_single_gives_one_domain_to_each_client_as_evenly_as_possible(clients, seed):
    claims, _ = Single().claims(clients, NAMES, seed)
    assert (claims.sum(1) == 1).all()
    assert claims.sum(0).max() - claims.sum(0).min() <= 1


def test_a_domain_is_split_equally_among_its_holders():
    y, domains = np.arange(103) % 4, np.zeros(103, int)
    rows, _ = dealt(KDomains(domains_min=1), y, domains, 5, names=("a",))
    assert sorted(len(part) for part in rows) == [20, 20, 21, 21, 21]
    for part in rows:
        assert np.ptp(np.bincount(y[part], minlength=4)) <= 2, "the domain's own mix of labels"


def test_a_domain_is_dealt_out_in_proportion_to_the_clients_draws():
    y, domains = np.zeros(3000, int), np.repeat([0, 1, 2], 1000)
    rows, claims = dealt(DirichletDomain(alpha=0.5), y, domains, 6)
    held = np.stack([np.bincount(domains[part], minlength=3) for part in rows])
    assert claims.sum(1) == pytest.approx(1)
    assert np.abs(held - 1000 * claims / claims.sum(0)).max() <= 1


def test_shares_shrink_all_parts_alike_so_that_the_skew_stays():
    y, domains = np.zeros(3000, int), np.repeat([0, 1, 2], 1000)
    whole, _ = dealt(DirichletDomain(alpha=0.5), y, domains, 6)
    some, _ = dealt(DirichletDomain(alpha=0.5, share=0.1), y, domains, 6)
    for domain in range(3):
        before, after = (np.array([(domains[part] == domain).sum() for part in rows]) for rows in (whole, some))
        assert after.max() == 100
        assert np.abs(after - before * 100 / before.max()).max() <= 1


def test_the_published_shares_of_the_digits_are_met():
    """1 % of MNIST, USPS and SVHN are 600, 72 and 732 examples a client."""
    counts = [60_000, 7_291, 73_257]
    domains = np.repeat(np.arange(3), counts)
    rows, claims = dealt(KDomains(share=0.01), np.arange(len(domains)) % 10, domains, 20)
    for client, part in enumerate(rows):
        assert np.bincount(domains[part], minlength=3).tolist() == (claims[client] * [600, 72, 732]).tolist()


@pytest.mark.parametrize("share", [0.29, 0.07, 0.57])
def test_a_share_that_is_a_whole_number_is_not_lost_to_rounding(share):
    y = np.zeros(100, int)
    rows, _ = dealt(KDomains(domains_min=1, share=share, cover=1), y, y, 1, names=("a",))
    assert len(rows[0]) == round(100 * share)


def test_a_share_of_less_than_one_example_is_one_and_said_to_be():
    y, domains = np.arange(40) % 2, np.repeat([0, 1], 20)
    rule_of, _ = on_domains(Single(share=0.01), domains, ("a", "b"), 4, 0)
    parts, notes = rule_of(np.arange(40)).split(y, 4, 0)
    assert [parts.size(c) for c in range(4)] == [1] * 4
    assert notes == ["partition.share 0.01 is less than one example of 2 domains: a client gets one"]


@pytest.mark.parametrize("rule", [KDomains(), DirichletDomain(), Single()], ids=repr)
def test_a_domain_without_training_examples_is_held_by_nobody_and_said_to_be(rule):
    y, domains = np.arange(60) % 2, np.repeat([0, 2], 30)
    rule_of, notes = on_domains(rule, domains, ("a", "b", "c"), 6, 0)
    claimed = rule_of(np.arange(60))
    assert not claimed.claims[:, 1].any() and claimed.claims[:, [0, 2]].any(0).all()
    assert "domain 'b' has no training examples, so no client holds it; it is only evaluated" in notes
    parts, _ = claimed.split(y, 6, 0)
    assert sum(parts.size(c) for c in range(6)) == 60 and min(parts.size(c) for c in range(6)) > 0


def test_label_skew_inside_a_domain_leaves_sizes_alone():
    y, domains = np.tile(np.arange(10), 300), np.zeros(3000, int)
    mixes = {}
    for alpha in (0.1, 1000.0, None):
        rows, _ = dealt(Single(label_alpha=alpha, share=0.05), y, domains, 10, names=("a",))
        assert [len(part) for part in rows] == [150] * 10
        mixes[alpha] = np.mean([np.bincount(y[part], minlength=10).max() / len(part) for part in rows])
    assert mixes[0.1] > 0.4 > 0.15 > mixes[1000.0] > 0.1 == pytest.approx(mixes[None], abs=0.01)


def test_a_minimum_is_taken_from_the_largest_of_the_domain_that_a_client_claims_most():
    y, domains = np.zeros(60, int), np.repeat([0, 1], 30)
    claims = np.array([[0.97, 0.01], [0.03, 0.01], [0.0, 0.98]])

    def sizes(**options):
        parts, _ = Claimed(DirichletDomain(**options), claims, domains).split(y, 3, 0)
        return [np.bincount(domains[parts.rows(c)], minlength=2).tolist() for c in range(3)]

    assert sizes(min_size=0) == [[29, 0], [1, 0], [0, 30]]
    assert sizes(min_size=4) == [[26, 0], [4, 0], [0, 30]]
    assert sizes(min_size=4, share=0.2) == [[6, 0], [4, 0], [0, 6]], "of what is not used nobody loses any"
    with pytest.raises(DataError, match=r"partition.min_size 20: client 1 can get only 10 examples"):
        sizes(min_size=20)


@pytest.mark.parametrize("kind", ["k_domains", "dirichlet_domain", "single"])
def test_the_same_clients_hold_a_domain_in_every_task(kind):
    """Of each task's cells every holder of the domain has some, and nobody else."""
    options = {"k_domains": {"cover": 2}, "dirichlet_domain": {"alpha": 5.0}, "single": {}}[kind]
    plan = make_plan(source(per_cell=30), stream={"tasks": 3}, partition={"kind": kind, "clients": 8, **options})
    held = [np.array([plan.stage_counts(c, s).sum(1).tolist() for c in range(8)]) > 0 for s in range(3)]
    assert np.array_equal(held[0], held[1]) and np.array_equal(held[1], held[2])
    assert held[0].any(1).all() and held[0].all() == (kind == "dirichlet_domain")
    draws = {tuple((plan.rows(0, s) // 24).tolist()) for s in range(3)}  # 24 examples are one of each cell
    assert len(draws) == 3, "every task has a draw of its own"


def test_other_kinds_ignore_domains():
    with_domains = source()
    plain = replace(with_domains, domains_train=None, domains_test=None, domain_names=())
    for partition in ({"kind": "iid"}, {"kind": "dirichlet"}, {"kind": "shared"}, {"kind": "quantity_label"}):
        plans = [make_plan(data, stream={"tasks": 3}, partition=partition) for data in (with_domains, plain)]
        for stage in range(3):
            for client in range(10):
                assert np.array_equal(plans[0].rows(client, stage), plans[1].rows(client, stage))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("k_domains", {"domains_min": 0}, "partition.domains_min must be an integer of at least 1, got 0"),
        ("k_domains", {"domains_max": 0}, "partition.domains_max must be an integer of at least 1"),
        ("k_domains", {"domains_min": 3, "domains_max": 2}, "domains_max 2 is below partition.domains_min 3"),
        ("k_domains", {"cover": 0}, "partition.cover must be an integer of at least 1"),
        ("k_domains", {"share": 0.0}, r"partition.share must be in \(0, 1\], got 0.0"),
        ("k_domains", {"share": 1.01}, r"partition.share must be in \(0, 1\]"),
        ("single", {"share": True}, r"partition.share must be in \(0, 1\], got True"),
        ("single", {"share": float("nan")}, "got nan"),
        ("single", {"label_alpha": 0.0}, "partition.label_alpha must be a finite number above 0"),
        ("single", {"min_size": -1}, "partition.min_size must be an integer of at least 0"),
        ("dirichlet_domain", {"alpha": -1.0}, "partition.alpha must be a finite number above 0"),
        ("k_domain", {}, "Did you mean 'k_domains'"),
        ("k_domains", {"domain_min": 1}, "Did you mean 'domains_min'"),
    ],
)
def test_bad_options_are_refused_in_words(kind, options, message):
    with pytest.raises(ConfigError, match=message):
        make_partition(kind, options)


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (
            {"kind": "k_domains", "domains_min": 5},
            "partition.domains_min is 5 but the number of domains with training examples is 4; use at most 4",
        ),
        (
            {"kind": "k_domains", "domains_max": 6},
            "partition.domains_max is 6 but the number of domains with training examples is 4; use at most 4",
        ),
        ({"kind": "k_domains", "cover": 11}, "10 clients with at most 4 of the 4 domains cannot give each 11 holders"),
        ({"kind": "k_domains", "domains_max": 2, "clients": 1}, "cannot give each 1 holders"),
        ({"kind": "single", "clients": 3}, "some of the 4 domains would be held by no client"),
    ],
)
def test_claims_that_cannot_be_met_are_refused_in_words(partition, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(source(), stream={"kind": "static"}, partition=partition)


@pytest.mark.parametrize("kind", ["k_domains", "dirichlet_domain", "single"])
def test_data_without_domains_are_refused_in_words(kind):
    plain = from_arrays(
        (np.zeros((40, 1), np.float32), np.arange(40) % 2, np.zeros((4, 1), np.float32), np.arange(4) % 2)
    )
    with pytest.raises(DataError, match=f"'{kind}' deals out domains, but the data have no domain labels.*data.domain"):
        make_plan(plain, stream={"kind": "static"}, partition={"kind": kind})


def test_a_plan_deals_out_only_domains_with_training_examples():
    made = source(names=("here", "there"))
    empty = replace(made, domain_names=("here", "there", "nowhere"))
    plan = make_plan(empty, stream={"kind": "static"}, partition={"kind": "single", "clients": 3})
    assert sorted(plan.size(c, 0) for c in range(3)) == [30, 30, 60]
    assert any(note.startswith("domain 'nowhere' has no training examples") for note in plan.notes)
    assert len(plan.test(0, 2)) == 0 and plan.domain_counts(0, 0).shape == (3, 6)


def test_large_partitions_are_quick():
    y, domains = np.arange(100_000) % 345, torch.arange(100_000).numpy() % 6
    start = time.perf_counter()
    for rule in (KDomains(), DirichletDomain(alpha=0.1, min_size=2), Single(label_alpha=0.1)):
        dealt(rule, y, domains, 200, names=[f"d{k}" for k in range(6)])
    assert time.perf_counter() - start < 10
