"""The semantic merge of experts: golden values, a brute-force reference, reductions to the mean, refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.core import ConfigError, PayloadError
from fedloom.core.moe import MoELayer, Slice
from fedloom.merge.mean import weighted_mean
from fedloom.merge.semantic import Region, SemanticMerge, experts_by_shares
from fedloom.merge.semantic_parts import (
    DIRECTIONS,
    PRIORS,
    REGIONS,
    RULES,
    SIMILARITIES,
    Const,
    Ema,
    MeanStd,
    Quantile,
)

Trees = list[dict[str, Tensor]]


def single(layers: int = 1, experts: int = 3, hidden: int = 2) -> list[MoELayer]:
    """Layers whose experts are tensors of their own."""
    slices = [tuple((Slice(f"{at}.{e}.w"), Slice(f"{at}.{e}.b")) for e in range(experts)) for at in range(layers)]
    return [MoELayer(str(at), parts, (f"{at}.gate",), 1, hidden) for at, parts in enumerate(slices)]


def stacked(layers: int = 1, experts: int = 3, hidden: int = 2) -> list[MoELayer]:
    """Layers whose experts are slices of stacked tensors."""

    def slices(at: int) -> tuple[tuple[Slice, ...], ...]:
        return tuple(tuple(Slice(f"{at}.{n}", (slice(e, e + 1),)) for n in "wb") for e in range(experts))

    return [MoELayer(str(at), slices(at), (f"{at}.gate",), 1, hidden) for at in range(layers)]


def as_stacked(tree: Mapping[str, Tensor], layers: int, experts: int) -> dict[str, Tensor]:
    return {
        f"{at}.{n}": torch.stack([tree[f"{at}.{e}.{n}"] for e in range(experts)]) for at in range(layers) for n in "wb"
    }


def random_case(
    clients: int = 4, layers: int = 2, experts: int = 3, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Trees, list[float], dict[str, Tensor], Trees]:
    """Trees, weights, the server's tree and statistics; updates of an expert share a direction, more or less."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    names = {
        f"{at}.{e}.{n}": shape
        for at in range(layers)
        for e in range(experts)
        for n, shape in (("w", (3, 2)), ("b", (3,)))
    }
    old = {name: draw(*shape).to(dtype) for name, shape in names.items()}
    common = {name: draw(*shape) for name, shape in names.items()}
    trees = [
        {n: (old[n] + 0.1 * common[n] + 0.1 * draw(*s)).to(dtype) for n, s in names.items()} for _ in range(clients)
    ]
    centers = draw(layers, experts, 2)
    statistics = [
        {
            "count": torch.randint(0, 4, (layers, experts), generator=rng).float(),
            "centroid": (centers + 0.4 * draw(layers, experts, 2)).float(),
            "hidden": draw(layers, 2).float(),
            "tokens": torch.tensor([10.0 + i]),
        }
        for i in range(clients)
    ]
    for one in statistics:
        one["centroid"] = one["centroid"] * (one["count"] > 0)[..., None]
    return trees, [3.0, 1.0, 2.0, 5.0, 4.0][:clients], old, statistics


def golden() -> tuple[Trees, list[float], dict[str, Tensor], Trees, list[MoELayer]]:
    layer = MoELayer("l", tuple((Slice(f"e{e}"),) for e in range(3)), ("gate",), 1, 2)
    centroid = [
        [(1, 0), (0, 1), (0, 0)],
        [(0.9, 0.1), (0.1, 1), (-1, 0)],
        [(0, 0), (1, 1), (-1, -0.2)],
    ]
    count = [(600, 300, 0), (250, 150, 50), (0, 80, 400)]
    updates = [[(1, 0), (1, 0), (9, 9)], [(1, 1), (0.8, 0.6), (0, 1)], [(7, 7), (-1, 0.2), (0, 2)]]
    trees = [{f"e{e}": torch.tensor(u, dtype=torch.float32) for e, u in enumerate(row)} for row in updates]
    statistics = [
        {"count": torch.tensor([n], dtype=torch.float32), "centroid": torch.tensor([c], dtype=torch.float32)}
        for n, c in zip(count, centroid, strict=True)
    ]
    return trees, [100, 50, 50], {f"e{e}": torch.zeros(2) for e in range(3)}, statistics, [layer]


def test_the_golden_example_has_its_values() -> None:
    trees, weights, old, statistics, layers = golden()
    merged, region = SemanticMerge()(trees, weights, old, layers, statistics)

    def near(found: Tensor, *expected: float) -> None:
        torch.testing.assert_close(
            found.double().flatten(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=2e-6
        )

    near(region.similarity[0, 0, 0, 1], 0.995012)
    near(region.direction[0, 0, 0, 1], 0.707107)
    near(region.gates[0, 0, :2, :2], 1, 0.703580, 0.703580, 1)
    near(region.shares[:, 0, 0], 0.691955, 0.308045, 0)
    near(merged["e0"], 1, 0.308045)
    near(region.similarity[0, 1][[0, 0, 1], [1, 2, 2]], 0.997503, 0.778801, 0.816686)
    near(region.direction[0, 1][[0, 0, 1], [1, 2, 2]], 0.8, -0.980581, -0.666795)
    near(region.thresholds[:, 0, 1], 0.768901, 0)
    near(region.gates[0, 1][[0, 0, 1], [1, 2, 2]], 0.798002, 0, 0)
    near(region.shares[:, 0, 1], 0.608790, 0.282420, 0.108790)
    near(merged["e1"], 0.725936, 0.191210)
    near(region.similarity[0, 2, 1, 2], 0.990050)
    near(region.direction[0, 2, 1, 2], 1)
    near(region.shares[:, 0, 2], 0, 0.5, 0.5)
    near(merged["e2"], 0, 1.5)


def test_an_opposed_client_gets_a_tenth() -> None:
    update = torch.tensor([1.0, 2.0])
    trees = [{"e": s * update} for s in (1, 1, 1, -1)]
    layer = MoELayer("l", ((Slice("e"),),), (), 1, 2)
    statistics = [{"count": torch.ones(1, 1)}] * 4
    merge = SemanticMerge(similarity=SIMILARITIES["none"])
    merged, region = merge(trees, [1] * 4, {"e": torch.zeros(2)}, [layer], statistics)
    torch.testing.assert_close(
        region.shares[:, 0, 0], torch.tensor([0.3, 0.3, 0.3, 0.1], dtype=torch.float64), rtol=0, atol=1e-12
    )
    assert region.thresholds[:, 0, 0].tolist() == [1, 0]
    torch.testing.assert_close(merged["e"], 0.8 * update)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_identical_clients_give_the_weighted_mean(similarity: str, rule: str) -> None:
    trees, _, old, statistics = random_case()
    weights = [10.0, 20.0, 30.0, 40.0]
    trees, statistics = [trees[0]] * 4, [{**statistics[0], "count": torch.full((2, 3), 7.0)}] * 4
    statistics[0]["centroid"] = torch.rand(2, 3, 2) + 0.5
    merge = SemanticMerge(similarity=SIMILARITIES[similarity], rule=RULES[rule])
    merged, region = merge(trees, weights, old, single(2), [statistics[0]] * 4)
    mean = weighted_mean(trees, weights, old)
    expected = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)[:, None, None].expand(-1, 2, 3)
    torch.testing.assert_close(region.shares, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(region.gates, torch.ones(2, 3, 4, 4).double(), rtol=0, atol=1e-9)
    for name in old:
        torch.testing.assert_close(merged[name], mean[name], rtol=0, atol=1e-6)


def test_updates_of_one_direction_and_different_length_give_the_weighted_mean() -> None:
    trees, weights, old, _ = random_case()
    trees = [{n: old[n] + (1 + i) * (trees[0][n] - old[n]) for n in old} for i in range(4)]
    merged, region = SemanticMerge(SIMILARITIES["none"])(
        trees, weights, old, single(2), [{"count": torch.ones(2, 3)}] * 4
    )
    mean = weighted_mean(trees, weights, old)
    torch.testing.assert_close(region.direction, torch.ones(2, 3, 4, 4).double(), rtol=0, atol=1e-6)
    for name in old:
        torch.testing.assert_close(merged[name], mean[name], rtol=0, atol=1e-6)


def reference(case: Any, options: Mapping[str, Any], at: int, e: int) -> tuple[list[float], Tensor]:
    """Shares and values of one expert, loop by loop, of the options by name."""
    trees, weights, old, stats = case
    part = [i for i in range(len(trees)) if stats[i]["count"][at, e] >= options.get("n_min", 1)]
    centers = {
        (i, k): stats[i]["centroid"][at, k].double()
        for i in range(len(trees))
        for k in range(3)
        if stats[i]["count"][at, k] >= options.get("n_min", 1)
    }
    gaps = sorted(float((a - b).square().sum()) for a, b in itertools.combinations(centers.values(), 2))
    sigma2 = (gaps[(len(gaps) - 1) // 2] + gaps[len(gaps) // 2]) / 2
    tokens = sum(float(s["tokens"]) for s in stats)
    mean = sum((float(s["tokens"]) * s["hidden"][at].double() for s in stats), torch.zeros(2).double()) / tokens
    names = [f"{at}.{e}.w"] if options.get("direction") == "first" else [f"{at}.{e}.w", f"{at}.{e}.b"]

    def update(i: int) -> Tensor:
        flat = torch.cat([(trees[i][n].double() - old[n].double()).flatten() for n in names])
        return flat.sign() if options.get("direction") == "sign" else flat

    def cosine(a: Tensor, b: Tensor) -> float:
        return float(a @ b / (a.norm() * b.norm()))

    def similarity(i: int, j: int) -> float:
        a, b = centers[i, e], centers[j, e]
        kind = options.get("similarity", "rbf")
        if kind == "rbf":
            return math.exp(-float((a - b).square().sum()) / (2 * sigma2))
        return (
            1.0
            if kind == "none"
            else max(0.0, cosine(a - mean, b - mean) if kind == "cosine_centered" else cosine(a, b))
        )

    pairs = list(itertools.combinations(part, 2))
    s, d = ({p: f(*p) for p in pairs} for f in (similarity, lambda i, j: cosine(update(i), update(j))))

    def threshold(values: Mapping[Any, float]) -> float:
        v = torch.tensor(list(values.values()), dtype=torch.float64)
        return min(1.0, max(0.0, float(v.mean() - v.std(correction=0)))) if len(v) else 0.0

    tau_s, tau_d = threshold(s), threshold(d)
    gamma = {(i, i): 1.0 for i in part}
    for i, j in pairs:
        passes = s[i, j] >= tau_s - 1e-6 and d[i, j] >= tau_d - 1e-6
        positive = max(0.0, d[i, j])
        value = {
            "gated": s[i, j] * positive * passes,
            "mean": (s[i, j] + positive) / 2 * passes,
            "hard_only": float(passes),
            "soft_only": s[i, j] * positive,
        }[options.get("region", "gated")]
        gamma[i, j] = gamma[j, i] = value
    pi = {i: float(stats[i]["count"][at, e]) if options.get("prior") == "tokens" else weights[i] for i in part}
    c = {i: sum(pi[j] * gamma[i, j] for j in part) / sum(pi.values()) for i in part}
    a = [pi[i] * c[i] / sum(pi[k] * c[k] for k in part) if i in part else 0.0 for i in range(len(trees))]
    values = old[f"{at}.{e}.w"].double()
    return a, values + sum(
        (a[i] * (trees[i][f"{at}.{e}.w"].double() - values) for i in part), torch.zeros(3, 2).double()
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_min": 2},
        {"direction": "sign"},
        {"prior": "tokens"},
        *({"similarity": name} for name in ("cosine_centered", "cosine_raw", "none")),
        *({"region": name} for name in ("mean", "hard_only", "soft_only")),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_option_agrees_with_loops_over_clients(options: dict[str, Any], seed: int) -> None:
    case = random_case(5, seed=seed)
    tables: dict[str, Mapping[str, Any]] = {
        "similarity": SIMILARITIES, "direction": DIRECTIONS, "region": REGIONS, "prior": PRIORS
    }  # fmt: skip
    chosen = {k: tables[k][v] if k in tables else v for k, v in options.items()}
    trees, weights, old, statistics = case
    merged, region = SemanticMerge(**chosen)(trees, weights, old, single(2), statistics)
    for at, e in itertools.product(range(2), range(3)):
        shares, value = reference(case, options, at, e)
        torch.testing.assert_close(
            region.shares[:, at, e], torch.tensor(shares, dtype=torch.float64), rtol=0, atol=1e-9
        )
        torch.testing.assert_close(merged[f"{at}.{e}.w"], value.float(), rtol=0, atol=1e-6)


def test_stacked_experts_merge_like_experts_of_their_own() -> None:
    trees, weights, old, statistics = random_case(5)
    apart, one = SemanticMerge()(trees, weights, old, single(2), statistics)
    together, two = SemanticMerge()(
        [as_stacked(tree, 2, 3) for tree in trees], weights, as_stacked(old, 2, 3), stacked(2), statistics
    )
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    for name, tensor in as_stacked(apart, 2, 3).items():
        assert torch.equal(together[name], tensor)


def test_a_lone_participant_is_taken_whole_and_nobody_keeps_the_old_object() -> None:
    trees, weights, old, statistics = random_case(3, 1)
    for i, one in enumerate(statistics):
        one["count"] = torch.tensor([[5.0 * (i == 1), 0.0, 1.0]])
    merged, region = SemanticMerge()(trees, weights, old, single(), statistics)
    assert torch.equal(merged["0.0.w"], trees[1]["0.0.w"]) and region.shares[:, 0, 0].tolist() == [0, 1, 0]
    assert merged["0.1.w"] is old["0.1.w"] and not region.shares[:, 0, 1].any()
    assert region.thresholds[:, 0].T.tolist()[:2] == [[-1, -1], [-1, -1]]
    olds, whole = as_stacked(old, 1, 3), [as_stacked(tree, 1, 3) for tree in trees]
    result, _ = SemanticMerge()(whole, weights, olds, stacked(), statistics)
    assert torch.equal(result["0.w"][1], olds["0.w"][1]) and not torch.equal(result["0.w"][2], olds["0.w"][2])
    nobody = [{**one, "count": torch.zeros(1, 3)} for one in statistics]
    assert SemanticMerge()(whole, weights, olds, stacked(), nobody)[0]["0.w"] is olds["0.w"]
    assert SemanticMerge()([], [], olds, stacked(), [])[0]["0.w"] is olds["0.w"]
    assert SemanticMerge()(whole, [0, 0, 0], olds, stacked(), nobody)[0]["0.w"] is olds["0.w"]


def test_without_a_surviving_pair_shares_follow_the_square_of_the_prior() -> None:
    trees = [{"e": torch.tensor(v)} for v in ((1.0, 0.0), (-1.0, 0.0))]
    layer = MoELayer("l", ((Slice("e"),),), (), 1, 2)
    merge = SemanticMerge(SIMILARITIES["none"])
    _, region = merge(trees, [1, 3], {"e": torch.zeros(2)}, [layer], [{"count": torch.ones(1, 1)}] * 2)
    torch.testing.assert_close(region.shares[:, 0, 0], torch.tensor([0.1, 0.9], dtype=torch.float64))


def test_an_update_of_zero_has_no_direction_and_a_withheld_centroid_no_likeness() -> None:
    trees, weights, old, statistics, layers = golden()
    trees[0]["e1"] = old["e1"].clone()
    _, region = SemanticMerge()(trees, weights, old, layers, statistics)
    assert region.direction[0, 1, 0].tolist() == [1, 0, 0]
    trees, weights, old, statistics, layers = golden()
    statistics[0]["centroid"][0, 1] = 0
    _, region = SemanticMerge()(trees, weights, old, layers, statistics)
    assert region.similarity[0, 1, 0].tolist() == [1, 0, 0] and region.gates[0, 1, 0].tolist() == [1, 0, 0]
    assert float(region.similarity[0, 1, 1, 2]) > 0.5


def test_centroids_that_are_all_alike_have_similarity_one() -> None:
    trees, weights, old, statistics, layers = golden()
    statistics = [{**one, "centroid": torch.ones(1, 3, 2)} for one in statistics]
    assert torch.equal(
        SemanticMerge()(trees, weights, old, layers, statistics)[1].similarity[0, 1], torch.ones(3, 3).double()
    )


def test_the_largest_component_wins_and_a_tie_goes_to_more_weight_then_to_the_first() -> None:
    chain = torch.eye(6).double()
    for i, j in ((0, 3), (1, 4), (4, 5)):
        chain[i, j] = chain[j, i] = 0.2
    prior = torch.tensor([9.0, 1.0, 1.0, 9.0, 2.0, 1.0], dtype=torch.float64)
    assert RULES["component"](chain, prior).tolist() == [0, 0.25, 0, 0, 0.5, 0.25]
    pairs = torch.eye(4).double()
    pairs[0, 1] = pairs[1, 0] = pairs[2, 3] = pairs[3, 2] = 1
    assert RULES["component"](pairs, torch.tensor([1.0, 1.0, 3.0, 1.0], dtype=torch.float64)).tolist() == [
        0,
        0,
        0.75,
        0.25,
    ]
    assert RULES["component"](pairs, torch.ones(4).double()).tolist() == [0.5, 0.5, 0, 0]
    assert RULES["component"](torch.ones(1, 1).double(), torch.tensor([7.0], dtype=torch.float64)).tolist() == [1]
    line = torch.eye(9).double() + torch.diag(torch.ones(8), 1).double() + torch.diag(torch.ones(8), -1).double()
    torch.testing.assert_close(RULES["component"](line, torch.ones(9).double()), torch.full((9,), 1 / 9).double())


def test_a_personal_expert_is_the_mean_by_the_clients_own_gates() -> None:
    trees, weights, old, statistics = random_case(5)
    common, region = SemanticMerge(rule=RULES["personalized"])(trees, weights, old, single(2), statistics)
    for client in range(5):
        mine = experts_by_shares(trees, region.personal(client), old, single(2))
        for at, e in itertools.product(range(2), range(3)):
            name = f"{at}.{e}.w"
            takes = statistics[client]["count"][at, e] > 0
            w = [float(region.gates[at, e, client, j]) * weights[j] for j in range(5)]
            expected = sum(x / sum(w) * tree[name] for x, tree in zip(w, trees, strict=True)) if takes else common[name]
            torch.testing.assert_close(mine[name], expected, rtol=0, atol=1e-6)


def test_the_last_tensor_is_the_last_matrix_with_its_bias() -> None:
    old = {"up": torch.zeros(2, 3, 4), "b": torch.zeros(2, 3), "down": torch.zeros(2, 4, 3), "c": torch.zeros(2, 4)}
    parts = [Slice(name, (slice(1, 2),)) for name in old]
    assert [part.name for part in DIRECTIONS["last_tensor"].parts(parts, old)] == ["down", "c"]
    assert DIRECTIONS["last_tensor"].parts([Slice("c"), Slice("v")], {"c": torch.zeros(4), "v": torch.zeros(3)}) == [
        Slice("v")
    ]
    factors = {"lora_A": torch.zeros(4, 3), "lora_B": torch.zeros(5, 4)}  # of two experts and rank 2
    pair = [Slice("lora_A", (slice(2, 4),)), Slice("lora_B", (slice(None), slice(1, None, 2)))]
    assert [part.name for part in DIRECTIONS["last_tensor"].parts(pair, factors)] == ["lora_B"]
    assert [p.name for p in DIRECTIONS["last_tensor"].parts(pair[:1] + parts[1:2], factors | old)] == ["lora_A", "b"]
    assert list(DIRECTIONS["whole"].parts(parts, old)) == parts
    layer = MoELayer("l", ((Slice("w"), Slice("v"), Slice("c")),), (), 1, 2)
    trees = [
        {"w": torch.full((2, 2), s), "v": torch.full((2, 2), t), "c": torch.ones(2)}
        for s, t in ((1.0, 1.0), (-9.0, 2.0))
    ]
    zeros = {name: torch.zeros_like(tensor) for name, tensor in trees[0].items()}
    statistics = [{"count": torch.ones(1, 1)}] * 2
    found = {
        name: float(
            SemanticMerge(SIMILARITIES["none"], DIRECTIONS[name])(trees, [1, 1], zeros, [layer], statistics)[
                1
            ].direction[0, 0, 0, 1]
        )
        for name in DIRECTIONS
    }
    assert found["last_tensor"] == pytest.approx((4 * 2 + 2) / math.sqrt(6 * 18))
    assert found["whole"] == pytest.approx((-9 * 4 + 4 * 2 + 2) / math.sqrt(10 * (4 * 81 + 18)))
    assert found["sign"] == pytest.approx(0.2)


def test_thresholds_by_hand() -> None:
    s, d = torch.tensor([0.2, 0.4, 0.9], dtype=torch.float64), torch.tensor([-1.0, -0.5, 0.1], dtype=torch.float64)
    mean, std = 0.5, math.sqrt((0.09 + 0.01 + 0.16) / 3)
    assert MeanStd()(s, d, None) == pytest.approx((mean - std, 0))
    assert MeanStd(0.5)(s, d, None) == pytest.approx((mean - std / 2, 0))
    assert MeanStd(-9.0)(s, d, None) == (1, 1)
    assert Quantile(0.5)(s, d, None) == pytest.approx((0.4, 0))
    assert Quantile(1.0)(s, d, None) == pytest.approx((0.9, 0.1))
    assert Ema(1.0, 0.75)(s, d, None) == pytest.approx((mean - std, 0))
    assert Ema(1.0, 0.75)(s, d, (0.8, 0.4)) == pytest.approx((0.6 + (mean - std) / 4, 0.3))
    assert Const(0.3, 0.1)(s, d, (0.8, 0.4)) == (0.3, 0.1)
    for bad in (lambda: Quantile(1.5), lambda: Ema(decay=-0.1), lambda: Const(direction=2.0)):
        with pytest.raises(ConfigError, match=r"must be in \[0, 1\]"):
            bad()


def test_thresholds_follow_those_of_the_round_before_and_stay_where_there_is_no_pair_or_nobody() -> None:
    trees, weights, old, statistics, layers = golden()
    merge = SemanticMerge(threshold=Ema(decay=0.5))
    _, first = merge(trees, weights, old, layers, statistics)
    statistics[2]["count"][0, 2] = 0  # expert 2 loses its only pair
    for one in statistics:
        one["count"][0, 1] = 0  # expert 1 loses everybody
    statistics[0]["centroid"][0, 0] = torch.tensor([0.0, 1.0])
    _, second = merge(trees, weights, old, layers, statistics, before=first.thresholds)
    assert torch.equal(second.thresholds[:, 0, 1:], first.thresholds[:, 0, 1:])
    expected = (first.thresholds[0, 0, 0] + second.similarity[0, 0, 0, 1]) / 2
    assert float(second.thresholds[0, 0, 0]) == pytest.approx(float(expected))


def test_experts_that_are_frozen_have_nothing_to_merge() -> None:
    layer = MoELayer("l", ((), ()), ("gate",), 1, 2)
    tree = {"gate": torch.zeros(2, 2)}
    merged, region = SemanticMerge(SIMILARITIES["none"])(
        [tree] * 2, [1, 1], tree, [layer], [{"count": torch.ones(1, 2)}] * 2
    )
    assert merged == {} and not region.shares.any() and not region.prior.any()


class Reading(Mapping[str, Tensor]):
    """A tree that makes its tensors anew when asked, and counts."""

    def __init__(self, tree: Mapping[str, Tensor]):
        self.tree, self.reads = tree, 0

    def __getitem__(self, name: str) -> Tensor:
        self.reads += 1
        return self.tree[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)


@pytest.mark.parametrize("stack", [False, True])
def test_lazy_trees_and_the_stream_give_the_same_bits(stack: bool) -> None:
    trees, weights, old, statistics = random_case(4)
    layers = stacked(2) if stack else single(2)
    if stack:
        trees, old = [as_stacked(tree, 2, 3) for tree in trees], as_stacked(old, 2, 3)
    merged, region = SemanticMerge()(trees, weights, old, layers, statistics)
    lazy, again = SemanticMerge()([Reading(tree) for tree in trees], weights, Reading(old), layers, statistics)
    into, filled = {name: torch.full_like(t, torch.nan) for name, t in old.items()}, Region.empty(4, layers)
    for part, value in SemanticMerge().stream(trees, weights, old, layers, statistics, region=filled):
        part.of(into).copy_(value)
    for name in old:
        assert torch.equal(merged[name], lazy[name]) and torch.equal(merged[name], into[name])
    for a, b, c in zip(region, again, filled, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_a_participants_tensor_is_read_once_and_others_never() -> None:
    trees, weights, old, statistics = random_case(4)
    lazy = [Reading(tree) for tree in trees]
    SemanticMerge()(lazy, weights, old, single(2), statistics)
    assert [tree.reads for tree in lazy] == [2 * int((one["count"] > 0).sum()) for one in statistics]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_kept_and_sums_are_wide(dtype: torch.dtype) -> None:
    trees, weights, old, statistics = random_case(4, dtype=dtype)
    merged, region = SemanticMerge()(trees, weights, old, single(2), statistics)
    wide, exact = SemanticMerge()(
        [{n: t.double() for n, t in tree.items()} for tree in trees],
        weights,
        {n: t.double() for n, t in old.items()},
        single(2),
        statistics,
    )
    torch.testing.assert_close(region.shares, exact.shares, rtol=0, atol=1e-6)
    for name in old:
        assert merged[name].dtype == dtype
        torch.testing.assert_close(merged[name], wide[name].to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_a_client_that_lacks_an_expert_takes_no_part_in_it() -> None:
    trees, weights, old, statistics, layers = golden()
    del trees[2]["e1"]
    merged, region = SemanticMerge(SIMILARITIES["none"])(trees, weights, old, layers, statistics)
    assert region.shares[2, 0, 1] == 0
    same, _ = SemanticMerge(SIMILARITIES["none"])(trees[:2], weights[:2], old, layers, statistics[:2])
    assert torch.equal(merged["e1"], same["e1"])


def test_an_expert_that_a_client_did_not_use_may_hold_anything() -> None:
    trees, weights, old, statistics = random_case(3, 1)
    stacks, olds = [as_stacked(tree, 1, 3) for tree in trees], as_stacked(old, 1, 3)
    statistics = [{**one, "count": torch.tensor([[1.0, 1.0, float(i > 0)]])} for i, one in enumerate(statistics)]
    clean = SemanticMerge()(stacks, weights, olds, stacked(), statistics)[0]
    stacks[0]["0.w"][2] = torch.nan
    assert torch.equal(SemanticMerge()(stacks, weights, olds, stacked(), statistics)[0]["0.w"], clean["0.w"])


def test_bad_input_names_client_and_tensor() -> None:
    trees, weights, old, statistics, layers = golden()

    def merge(who: Any = (7, 8, 9), **changes: Any) -> None:
        given = {"trees": trees, "weights": weights, "old": old, "statistics": statistics, **changes}
        SemanticMerge()(given["trees"], given["weights"], given["old"], layers, given["statistics"], who=who)

    def swapped(rows: Any, change: Any) -> Any:
        return [rows[0], {**rows[1], **change}, rows[2]]

    with pytest.raises(PayloadError, match="client 8: 'e1' holds NaN"):
        merge(trees=swapped(trees, {"e1": torch.tensor([1.0, torch.nan])}))
    with pytest.raises(PayloadError, match="client 8: 'e0' holds NaN or infinite"):
        merge(trees=swapped(trees, {"e0": torch.tensor([1.0, torch.inf])}))
    with pytest.raises(PayloadError, match=r"client 8: 'e1' has shape \(3,\), the server's has \(2,\)"):
        merge(trees=swapped(trees, {"e1": torch.zeros(3)}))
    with pytest.raises(PayloadError, match="client 8: 'e1' has dtype"):
        merge(trees=swapped(trees, {"e1": torch.zeros(2).double()}))
    with pytest.raises(PayloadError, match="client 8: 'x' is not a tensor that the server holds"):
        merge(trees=swapped(trees, {"x": torch.zeros(3)}))
    with pytest.raises(PayloadError, match="client at position 2: weight must be finite"):
        merge(who=None, weights=[1, 1, -1])
    with pytest.raises(PayloadError, match="3 trees but 2 clients' routing statistics"):
        merge(statistics=statistics[:2])
    with pytest.raises(PayloadError, match="the server holds no tensor 'e2'"):
        merge(old={"e0": old["e0"], "e1": old["e1"]})
    with pytest.raises(
        PayloadError, match=r"client 8: routing statistic 'count' has shape \(3,\), must have shape \(1, 3"
    ):
        merge(statistics=swapped(statistics, {"count": torch.ones(3)}))
    with pytest.raises(PayloadError, match="client 8: routing statistic 'centroid' holds NaN"):
        merge(statistics=swapped(statistics, {"centroid": torch.full((1, 3, 2), torch.nan)}))
    with pytest.raises(PayloadError, match="client at position 0: routing statistic 'tokens' is missing"):
        replace(SemanticMerge(), similarity=SIMILARITIES["cosine_centered"])(trees, weights, old, layers, statistics)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"n_min, .*, must be at least 1, got 0"):
        SemanticMerge(n_min=0)
    with pytest.raises(ConfigError, match="sketch must be 0"):
        SemanticMerge(sketch=-1)


def test_a_sketch_changes_cosines_and_a_longer_one_changes_them_less() -> None:
    trees, weights, old, statistics = random_case(4)
    exact = SemanticMerge()(trees, weights, old, single(2), statistics)[1]
    short = SemanticMerge(sketch=4)(trees, weights, old, single(2), statistics)[1]
    full = SemanticMerge(sketch=64)(trees, weights, old, single(2), statistics)[1]
    assert torch.equal(exact.similarity, short.similarity) and not torch.equal(exact.direction, short.direction)
    assert float((full.direction - exact.direction).abs().max()) < float(
        (short.direction - exact.direction).abs().max()
    )
