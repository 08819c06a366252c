"""The weighted mean: hand-computed values, dtypes, refusals, reading order and memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.core import ConfigError, PayloadError, Reply
from fedloom.merge import accumulate
from fedloom.merge.mean import replies_mean, weighted_mean


class Lazy(Mapping[str, Tensor]):
    """A tree that makes its tensors when asked and notes every read; `in` would read, as in `Mapping`."""

    def __init__(self, tree: Mapping[str, Tensor]):
        self.tree, self.reads = tree, []

    def __getitem__(self, name: str) -> Tensor:
        self.reads.append(name)
        return self.tree[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)


def w(*values: float, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"w": torch.tensor(values, dtype=dtype)}


def test_hand_computed_mean() -> None:
    merged = weighted_mean([w(1.0, -2.0), w(5.0, 6.0)], [1, 3], w(0.0, 0.0))
    assert torch.equal(merged["w"], torch.tensor([4.0, 4.0]))


def test_zero_weights_keep_the_old_tensors() -> None:
    old = w(7.0, 7.0)
    assert weighted_mean([w(1.0, 1.0)], [0], old)["w"] is old["w"]
    assert weighted_mean([], [], old)["w"] is old["w"]
    assert torch.equal(weighted_mean([w(1.0, 1.0), w(3.0, 3.0)], [0, 5], old)["w"], torch.tensor([3.0, 3.0]))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_bad_weight_names_the_client(weight: float) -> None:
    with pytest.raises(PayloadError, match="client 12: weight must be finite and not negative"):
        weighted_mean([w(1.0), w(1.0)], [1.0, weight], w(0.0), who=[7, 12])
    with pytest.raises(PayloadError, match="client at position 1: weight"):
        weighted_mean([w(1.0), w(1.0)], [1.0, weight], w(0.0))


def test_not_finite_values_name_client_and_tensor() -> None:
    with pytest.raises(PayloadError, match="client 4: 'w' holds NaN"):
        weighted_mean([w(1.0), w(3.0), w(float("nan"))], [1, 1, 1], w(0.0), who=[2, 3, 4])
    with pytest.raises(PayloadError, match="client at position 0: 'w' holds NaN or inf"):
        weighted_mean([w(float("inf"))], [1], w(0.0))
    rejected = weighted_mean([w(1.0), w(3.0), w(float("nan"))], [1, 1, 0], w(0.0))
    assert torch.equal(rejected["w"], torch.tensor([2.0]))


def test_integers_and_booleans_keep_their_dtype() -> None:
    trees = [{"n": torch.tensor(10), "m": torch.tensor([True, True])}]
    trees += [{"n": torch.tensor(13), "m": torch.tensor([False, True])}]
    old = {"n": torch.tensor(0), "m": torch.tensor([True, False])}
    merged = weighted_mean(trees, [1, 3], old)
    assert merged["n"].dtype == torch.int64 and merged["n"].item() == 12  # (10 + 39) / 4 = 12.25
    assert merged["m"].tolist() == [False, True] and merged["m"].dtype == torch.bool
    assert weighted_mean(trees, [1, 1], old)["m"].tolist() == [True, True]  # the tie keeps the old value
    assert weighted_mean(trees, [1, 1], old)["n"].item() == 12  # 11.5, half to even
    assert weighted_mean(trees, [1, 1], old, rules={"n": "max"})["n"].item() == 13
    assert weighted_mean(trees, [1, 1], old, rules={"n": "sum"})["n"].item() == 23
    assert weighted_mean(trees, [1, 1], old, rules={"n": "first"})["n"].item() == 10
    assert weighted_mean(trees, [1, 1], old, rules={"*": "frozen"})["n"] is old["n"]


def test_rules_match_patterns_and_refuse_misuse() -> None:
    trees = [{"bn.num_batches_tracked": torch.tensor(4), "x": torch.tensor([True])}] * 2
    old = {"bn.num_batches_tracked": torch.tensor(0), "x": torch.tensor([False])}
    merged = weighted_mean(trees, [1, 2], old, rules={"*.num_batches_tracked": "sum", "*": "first"})
    assert merged["bn.num_batches_tracked"].item() == 8 and merged["x"].item() is True
    with pytest.raises(ConfigError, match=r"unknown merge rule for '\*': 'maxx'.* Did you mean 'max'"):
        weighted_mean(trees, [1, 2], old, rules={"*": "maxx"})
    with pytest.raises(PayloadError, match="'sum' does not suit 'x'"):
        weighted_mean(trees, [1, 2], old, rules={"x": "sum"})
    small = [{"n": torch.tensor([100], dtype=torch.int8)}] * 2
    with pytest.raises(PayloadError, match=r"sum of 'n' over clients does not fit torch\.int8"):
        weighted_mean(small, [1, 1], {"n": torch.zeros(1, dtype=torch.int8)}, rules={"n": "sum"})


def test_float_max_and_sum() -> None:
    trees = [w(1.5, -3.0), w(-2.0, -1.0)]
    assert weighted_mean(trees, [1, 9], w(0.0, 0.0), rules={"w": "max"})["w"].tolist() == [1.5, -1.0]
    assert weighted_mean(trees, [1, 9], w(0.0, 0.0), rules={"w": "sum"})["w"].tolist() == [-0.5, -4.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_does_not_drift(dtype: torch.dtype) -> None:
    one = w(1.0, dtype=dtype)
    merged = weighted_mean([one] * 1000, [1.0] * 1000, w(0.0, dtype=dtype))["w"]
    assert merged.dtype == dtype and merged.item() == 1.0


def test_shapes_never_broadcast() -> None:
    three, one = w(1.0, 2.0, 3.0), w(1.0)
    messages = []
    for trees, old in (([three, one], three), ([one, three], three)):
        with pytest.raises(PayloadError, match=r"client 5: 'w' has shape \(1,\), the server's has \(3,\)") as error:
            weighted_mean(trees, [1, 1], old, who=[5 if t is one else 6 for t in trees])
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_dtypes_names_and_counts_are_compared() -> None:
    with pytest.raises(PayloadError, match=r"client 1: 'w' has dtype torch\.float64, the server's has torch\.float32"):
        weighted_mean([w(1.0, dtype=torch.float64)], [1], w(0.0), who=[1])
    with pytest.raises(PayloadError, match="client 1: 'v' is not a tensor that the server holds"):
        weighted_mean([{"v": torch.ones(1)}], [1], w(0.0), who=[1])
    with pytest.raises(PayloadError, match="2 trees but 1 weights"):
        weighted_mean([w(1.0), w(1.0)], [1], w(0.0))
    with pytest.raises(PayloadError, match="1 trees but 2 client ids"):
        weighted_mean([w(1.0)], [1], w(0.0), who=[1, 2])


def test_missing_name_means_not_mine() -> None:
    old = {"a": torch.tensor([9.0]), "b": torch.tensor([9.0])}
    merged = weighted_mean([{"a": torch.tensor([1.0])}, {}, {"a": torch.tensor([4.0])}], [1, 100, 2], old)
    assert merged["a"].item() == 3.0 and merged["b"] is old["b"]


@settings(max_examples=40, deadline=None)
@given(
    value=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=5),
    weights=st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=7),
)
def test_equal_inputs_give_exactly_those_values(value: list[float], weights: list[float]) -> None:
    tree = w(*value)
    merged = weighted_mean([tree] * len(weights), weights, w(*[0.0] * len(value)))
    assert torch.equal(merged["w"], tree["w"])


clients = st.lists(
    st.tuples(st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3), st.floats(0.01, 1e4)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(clients, st.randoms(use_true_random=False), st.floats(1e-3, 1e3))
def test_order_and_scale_of_weights_change_nothing_and_the_mean_is_convex(found, rng, factor) -> None:
    old = w(0.0, 0.0, 0.0)
    trees, weights = [w(*v) for v, _ in found], [n for _, n in found]
    merged = weighted_mean(trees, weights, old)["w"]
    shuffled = list(zip(trees, weights, strict=True))
    rng.shuffle(shuffled)
    again = weighted_mean([t for t, _ in shuffled], [n * factor for _, n in shuffled], old)["w"]
    # one fp32 step: a float64 difference can tip the last rounding; cancellation is bounded by the largest entry
    stacked = torch.stack([t["w"] for t in trees])
    torch.testing.assert_close(merged, again, rtol=1.2e-7, atol=1e-9 * float(stacked.abs().max()) + 1e-30)
    assert (merged >= stacked.min(0).values).all() and (merged <= stacked.max(0).values).all()


def test_scaling_weights_by_a_power_of_two_keeps_the_bits() -> None:
    rng = torch.Generator().manual_seed(0)
    trees = [{"w": torch.randn(100, generator=rng)} for _ in range(5)]
    old = {"w": torch.zeros(100)}
    a = weighted_mean(trees, [1.3, 2.0, 0.7, 5.0, 3.1], old)["w"]
    assert torch.equal(a, weighted_mean(trees, [n * 64 for n in (1.3, 2.0, 0.7, 5.0, 3.1)], old)["w"])


def test_inputs_are_not_altered_and_nothing_is_shared() -> None:
    tree, old = w(1.0, 2.0), w(0.0, 0.0)
    merged = weighted_mean([tree], [2.0], old)["w"]
    merged.add_(1)
    assert tree["w"].tolist() == [1.0, 2.0] and old["w"].tolist() == [0.0, 0.0]


def test_every_rank_and_dtype_survives_and_loads_strictly() -> None:
    module = torch.nn.Module()
    tensors = {
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "strided": torch.arange(6.0).reshape(2, 3).T,
        "flag": torch.tensor([True, False]),
        "fp16": torch.ones(2, dtype=torch.float16),
        "complex64": torch.tensor([1 + 2j, -1j]),
        "uint8": torch.tensor([255], dtype=torch.uint8),
    }
    for name, tensor in tensors.items():
        module.register_buffer(name, torch.zeros_like(tensor))
    for count in (1, 3):
        merged = weighted_mean([tensors] * count, [2.0] * count, dict(module.state_dict()))
        module.load_state_dict(merged, strict=True)
        for name, tensor in tensors.items():
            assert torch.equal(merged[name], tensor) and merged[name].dtype == tensor.dtype
            assert merged[name].is_contiguous()


def test_lazy_trees_are_read_once_per_name_in_order() -> None:
    trees = [Lazy({"a": torch.ones(2) * i, "b": torch.ones(3) * i}) for i in range(4)]
    lacking = Lazy({"b": torch.ones(3)})
    idle = Lazy({"a": torch.ones(2), "b": torch.ones(3)})
    old = Lazy({"a": torch.zeros(2), "b": torch.zeros(3)})
    weighted_mean([*trees, lacking, idle], [1, 1, 1, 1, 1, 0], old)
    assert all(tree.reads == ["a", "b"] for tree in trees)
    assert lacking.reads == ["b"] and idle.reads == [] and old.reads == ["a", "b"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.float64])
def test_lazy_chunked_and_resident_trees_give_the_same_bits(monkeypatch, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(1)
    trees = [{"w": (torch.randn(7, 5, generator=rng) * 100).to(dtype)} for _ in range(4)]
    weights, old = [1.0, 2.5, 0.3, 7.0], {"w": torch.zeros(7, 5, dtype=dtype)}
    whole = weighted_mean(trees, weights, old)["w"]
    monkeypatch.setattr(accumulate, "CHUNK", 8)
    assert torch.equal(weighted_mean(trees, weights, old)["w"], whole)
    assert torch.equal(weighted_mean([Lazy(t) for t in trees], weights, old)["w"], whole)
    exact = sum(t["w"].double() * n for t, n in zip(trees, weights, strict=True)) / sum(weights)
    torch.testing.assert_close(whole, exact.round().to(dtype) if dtype == torch.int32 else exact.to(dtype))


def test_a_large_lazy_cohort_holds_one_reply_tensor_at_a_time() -> None:
    alive: list[weakref.ref[Tensor]] = []
    peak = 0

    class Counting(Lazy):
        def __getitem__(self, name: str) -> Tensor:
            nonlocal peak
            value = super().__getitem__(name)
            alive.append(weakref.ref(value))
            peak = max(peak, sum(r() is not None for r in alive))
            return value

    big = {f"w{i}": torch.ones(1000) for i in range(3)}
    weighted_mean([Counting(big) for _ in range(50)], [1.0] * 50, {n: torch.zeros(1000) for n in big})
    gc.collect()
    assert peak <= 2  # the one just read, and the one before it until its name is bound again
    assert sum(r() is not None for r in alive) == 0


def test_replies_mean_over_a_field() -> None:
    replies = [Reply(0, 1.0, {"params": w(2.0)}, {}), Reply(3, 3.0, {"params": w(6.0)}, {}), Reply(4, 5.0, {}, {})]
    assert replies_mean(replies, "params", w(0.0))["w"].item() == 5.0
    assert replies_mean(replies, "params", w(0.0), uniform=True)["w"].item() == 4.0
    old = w(9.0)
    assert replies_mean(replies, "fisher", old)["w"] is old["w"]
    for uniform in (False, True):
        with pytest.raises(PayloadError, match="client 3: weight"):
            replies_mean([replies[0], replies[1]._replace(weight=-1.0)], "params", w(0.0), uniform=uniform)


def test_thread_count_does_not_change_the_bits() -> None:
    rng = torch.Generator().manual_seed(2)
    trees = [{"w": torch.randn(300_001, generator=rng)} for _ in range(3)]
    old, threads = {"w": torch.zeros(300_001)}, torch.get_num_threads()
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(weighted_mean(trees, [1.1, 0.3, 2.0], old)["w"])
    torch.set_num_threads(threads)
    assert torch.equal(*results)
