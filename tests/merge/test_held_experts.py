"""Parts of networks with experts: cut and filled again, and merged by their holders."""

from __future__ import annotations

import pytest
import torch

from fedloom.core import PayloadError
from fedloom.core.moe import MoELayer, Slice
from fedloom.merge.held_experts import held_means, layout
from fedloom.merge.mean import weighted_mean

E = 3


def stacked(at: int = 0) -> MoELayer:
    """Three experts in a stacked tensor, and in the two factors of an adapter of rank 2."""
    experts = tuple(
        (
            Slice(f"l{at}.up", (slice(e, e + 1),)),
            Slice(f"l{at}.lora_A", (slice(2 * e, 2 * e + 2),)),
            Slice(f"l{at}.lora_B", (slice(None), slice(e, None, E))),
            Slice(f"l{at}.frozen", (slice(e, e + 1),)),
        )
        for e in range(E)
    )
    return MoELayer(f"l{at}", experts, (f"l{at}.gate", f"l{at}.bias"), 1, 4)


def modules(at: int = 1) -> MoELayer:
    """Three experts that are modules of one tensor each."""
    return MoELayer(f"l{at}", tuple((Slice(f"l{at}.{e}.w"),) for e in range(E)), (f"l{at}.gate",), 1, 4)


LAYERS = (stacked(), modules())


def tree(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    shapes = {
        "rest": (5,),
        "l0.up": (E, 2, 4),
        "l0.lora_A": (2 * E, 4),
        "l0.lora_B": (5, 2 * E),
        "l0.gate": (E, 4),
        "l0.bias": (E,),
        **{f"l1.{e}.w": (2, 4) for e in range(E)},
        "l1.gate": (E, 4),
    }
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=rng).to(dtype) for name, shape in shapes.items()}


def held(*rows: str) -> torch.Tensor:
    return torch.tensor([[c == "x" for c in row] for row in rows])


def expert(values, layer: int, e: int) -> list[torch.Tensor]:
    """All tensors of one expert, and its gate rows."""
    parts = [part.of(values) for part in LAYERS[layer].experts[e] if part.name in values]
    return [*parts, *(values[name][e] for name in LAYERS[layer].gate)]


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_part_has_the_held_experts_and_their_gate_rows_alone():
    whole, mine = tree(0), held("x.x", ".x.")
    part = layout(LAYERS, whole).cut(whole, mine)
    assert part.keys() == whole.keys() - {"l1.0.w", "l1.2.w"}
    assert torch.equal(part["l0.up"], whole["l0.up"][[0, 2]]) and torch.equal(part["l1.gate"], whole["l1.gate"][[1]])
    assert torch.equal(part["l0.lora_A"], whole["l0.lora_A"][[0, 1, 4, 5]])
    assert torch.equal(part["l0.lora_B"], whole["l0.lora_B"][:, [0, 2, 3, 5]])
    assert part["rest"] is whole["rest"]


def test_numbers_that_travel_are_affine_in_the_number_of_held_experts():
    whole = tree(0)
    where = layout(LAYERS, whole)

    def numbers(*rows: str) -> int:
        return sum(tensor.numel() for tensor in where.cut(whole, held(*rows)).values())

    per_expert = (8 + 8 + 10 + 4 + 1, 8 + 4)
    assert numbers("x..", "x..") == 5 + sum(per_expert)
    assert (
        numbers("xx.", "x..") - numbers("x..", "x..") == numbers("xxx", "x..") - numbers("xx.", "x..") == per_expert[0]
    )
    assert (
        numbers("x..", "x.x") - numbers("x..", "x..") == numbers("x..", "xxx") - numbers("x..", "x.x") == per_expert[1]
    )


def test_a_filled_part_has_what_was_held_and_zeros():
    whole, mine = tree(0), held("x.x", ".x.")
    where = layout(LAYERS, whole)
    filled = where.filled(where.cut(whole, mine), mine, whole)
    assert {name: tensor.shape for name, tensor in filled.items()} == {n: t.shape for n, t in whole.items()}
    for layer in range(2):
        for e in range(E):
            found = expert(filled, layer, e)
            if mine[layer, e]:
                assert same(found, expert(whole, layer, e))
            else:
                assert not any(tensor.any() for tensor in found)
    assert same(where.cut(filled, mine).values(), where.cut(whole, mine).values())


def test_scores_of_what_is_not_held_lie_below_all_that_is():
    whole, mine = {"l0.bias": torch.tensor([-3.0, 5.0, -2.0])}, held("x.x", "xxx")
    where = layout(LAYERS, whole)
    filled = where.filled(where.cut(whole, mine), mine, whole, below=True)
    assert filled["l0.bias"].tolist() == [-3.0, -4.0, -2.0]


def merge(parts, weights, old, masks, use=None):
    use = use or [mine * weight for mine, weight in zip(masks, weights, strict=True)]
    where = layout(LAYERS, old)
    cut = [where.cut(part, mine) for part, mine in zip(parts, masks, strict=True)]
    return held_means(cut, weights, old, masks, use, LAYERS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_nobody_stay_and_those_of_one_are_copied_bit_for_bit(dtype):
    old, one, two = tree(0, dtype), tree(1, dtype), tree(2, dtype)
    new = merge([one, two], [3.0, 7.0], old, [held("xx.", "x.."), held(".x.", ".x.")])
    for layer, e in ((0, 2), (1, 2)):
        assert same(expert(new, layer, e), expert(old, layer, e))
    assert same(expert(new, 0, 0), expert(one, 0, 0)) and same(expert(new, 1, 0), expert(one, 1, 0))
    assert same(expert(new, 1, 1), expert(two, 1, 1))
    assert all(tensor.dtype == dtype for tensor in new.values())


def test_several_holders_are_averaged_by_their_weights_and_the_rest_over_all():
    old, one, two = tree(0), tree(1), tree(2)
    new = merge([one, two], [3.0, 7.0], old, [held("xx.", "x.."), held(".x.", ".x.")])
    for found, a, b in zip(expert(new, 0, 1), expert(one, 0, 1), expert(two, 0, 1), strict=True):
        torch.testing.assert_close(found, 0.3 * a + 0.7 * b)
    torch.testing.assert_close(new["rest"], 0.3 * one["rest"] + 0.7 * two["rest"])


def test_each_expert_has_its_own_weights():
    old, one, two = tree(0), tree(1), tree(2)
    every = held("xxx", "xxx")
    use = [torch.tensor([[1.0, 1.0, 0.0], [2.0, 0.0, 0.0]]), torch.tensor([[1.0, 3.0, 5.0], [0.0, 0.0, 1.0]])]
    new = merge([one, two], [1.0, 1.0], old, [every, every], use)
    shares = {(0, 0): (0.5, 0.5), (0, 1): (0.25, 0.75), (0, 2): (0.0, 1.0), (1, 0): (1.0, 0.0), (1, 2): (0.0, 1.0)}
    for (layer, e), (first, second) in shares.items():
        for found, a, b in zip(expert(new, layer, e), expert(one, layer, e), expert(two, layer, e), strict=True):
            torch.testing.assert_close(found, first * a + second * b)
    assert same(expert(new, 1, 1), expert(old, 1, 1))


def test_with_every_expert_held_it_is_the_weighted_mean_bit_for_bit():
    old, parts, weights = tree(0), [tree(k) for k in range(1, 5)], [3.0, 17.0, 40.0, 1.0]
    every = held("xxx", "xxx")
    assert same(merge(parts, weights, old, [every] * 4).values(), weighted_mean(parts, weights, old).values())


def test_what_counts_outside_the_held_set_is_not_read():
    old, one = tree(0), tree(1)
    mine = held("x..", "x..")
    new = merge([one], [1.0], old, [mine], [torch.ones(2, E)])
    assert same(expert(new, 0, 1), expert(old, 0, 1)) and same(expert(new, 1, 1), expert(old, 1, 1))


def test_a_part_of_another_shape_is_refused_by_client_and_tensor():
    old, mine = tree(0), held("x..", "xxx")
    with pytest.raises(PayloadError, match=r"client 4: 'l0\.up' has shape \(3, 2, 4\), what it holds has \(1, 2, 4\)"):
        held_means([{"l0.up": old["l0.up"]}], [1.0], old, [mine], [mine.float()], LAYERS, who=[4])


def test_values_that_are_not_finite_are_refused_by_client_and_tensor():
    old, every = tree(0), held("xxx", "xxx")
    bad = {**old, "l0.gate": old["l0.gate"] * torch.nan}
    with pytest.raises(PayloadError, match=r"client at position 1: 'l0\.gate' holds NaN"):
        merge([old, bad], [1.0, 1.0], old, [every, every])
