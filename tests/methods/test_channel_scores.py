"""From scores per domain to a mask, re-opened channels and prototypes, in numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.core import Batches, PayloadError, Reply
from fedloom.core.seeds import generator
from fedloom.local.gate_fisher import gate, gate_fisher
from fedloom.methods.channel_scores import COMBINES, DomainScores, MaskRule, Prototypes, ReopenRule, equal_domains
from fedloom.select.channels import Refresh, flops_aware, group_mean, raw_global, relative
from local.gated import examples, gated_context


def domains(*counts: int) -> Batches:
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    n = len(ids)
    return Batches(torch.zeros(n, 2), torch.zeros(n, dtype=torch.int64), torch.arange(n), key=("scores",),
                   prepare=lambda x, rng: x, domains=ids)  # fmt: skip


def scores(*values: tuple[float, ...]) -> dict[int, Tensor]:
    return {k: torch.tensor(v, dtype=torch.float64) for k, v in enumerate(values)}


def at(round: int, total: int = 8) -> Any:
    return SimpleNamespace(global_round=round, total_rounds=total)


def reply(client: int, values: Any, weight: float = 1.0) -> Reply:
    return Reply(client, weight, {"scores": {"channels": torch.as_tensor(values, dtype=torch.float32)}}, {})


def test_domains_count_by_their_examples_and_clients_by_theirs() -> None:
    """F = 30/40 (4, 1) + 10/40 (0, 9) = (3, 3); with a client of (1, 7) the federation has (2, 5)."""
    mixed = DomainScores(gate).mixed(scores((4, 1), (0, 9)), domains(30, 10))
    assert mixed.tolist() == [3.0, 3.0] and mixed.dtype == torch.float32
    rule = MaskRule(0.5, raw_global)
    new = rule.updated(rule.initial(2), [reply(0, mixed), reply(1, (1.0, 7.0))], (2,), None, at(0))
    assert new["scores"]["channels"].tolist() == [2.0, 5.0]
    assert new["mask"]["channels"].tolist() == [False, True]


def test_a_client_or_a_domain_of_large_loss_may_count_like_any_other() -> None:
    found, counts = list(scores((4, 1), (0, 9)).values()), (30, 10)
    assert COMBINES["client_norm"](found, counts).tolist() == [0.5, 0.5]
    assert equal_domains(found, counts).tolist() == [2.0, 5.0]
    assert COMBINES["client_norm"]([torch.zeros(2)], (3,)).tolist() == [0.0, 0.0]
    assert COMBINES["client_norm"]([10 * f for f in found], counts).tolist() == [0.5, 0.5]


def test_every_domain_is_measured_for_itself_at_the_clients_gates() -> None:
    ctx, data = gated_context("toy"), examples("toy", 30)
    state, mask = ctx.init_state(), torch.arange(8) % 3 > 0
    found = DomainScores(gate, samples=6).measure(state, data, mask, ctx)
    assert sorted(found) == [0, 1]
    for k, part in data.by_domain().items():
        assert torch.equal(found[k], gate_fisher(ctx, part, mask.float(), samples=6))
    assert not torch.equal(found[0], found[1]) and found[0][~mask].sum() > 0


def test_a_rule_opens_what_its_choice_does() -> None:
    mask, own = torch.tensor([True, True, False, False]), torch.tensor([1.0, 3.0, 1.9, 2.1])
    assert ReopenRule(relative, 1.0, 1.0)(own, mask, (4,)).tolist() == [False, False, False, True]
    assert torch.equal(ReopenRule(relative, 0.5, 0.25)(own, mask, (4,)), relative(own, mask, (4,), 0.5, 0.25))
    assert ReopenRule(relative, 1.0) == ReopenRule(relative) != ReopenRule(relative, 2.0)


def test_the_first_mask_is_made_when_the_warm_up_ends_and_the_last_when_masks_freeze() -> None:
    rule = MaskRule(0.5, raw_global, refresh=Refresh(warmup=2, every=2, freeze=0.75))
    assert [rule.measured(at(t)) for t in range(4)] == [False, True, True, True]
    server, masks = rule.initial(4), []
    for t in range(8):
        if rule.measured(at(t)):
            server = rule.updated(server, [reply(0, torch.arange(4.0).roll(t))], (4,), None, at(t))
        masks.append(server["mask"]["channels"].tolist())
    assert masks[0] == [True] * 4
    assert masks[1] == masks[2] == [True, False, False, True]
    assert masks[3] == masks[4] != masks[1]
    assert masks[5] == masks[6] == masks[7] != masks[3]


def test_scores_are_remembered_from_the_second_measurement_on() -> None:
    rule = MaskRule(0.5, raw_global, ema=0.75)
    first = rule.updated(rule.initial(2), [reply(0, (4.0, 0.0))], (2,), None, at(0))
    second = rule.updated(first, [reply(0, (0.0, 8.0))], (2,), None, at(1))
    assert first["scores"]["channels"].tolist() == [4.0, 0.0]
    assert second["scores"]["channels"].tolist() == [3.0, 2.0]
    assert second["mask"]["channels"].tolist() == [True, False]


def test_keeping_all_measures_nothing_and_only_one_threshold_reads_costs() -> None:
    assert not any(MaskRule(1.0, group_mean).measured(at(t)) for t in range(3))
    assert MaskRule(0.5, flops_aware).costly and not MaskRule(0.5, group_mean).costly
    cost = torch.tensor([1.0, 10.0], dtype=torch.float64)
    rule = MaskRule(0.5, flops_aware)
    new = rule.updated(rule.initial(2), [reply(0, (1.0, 2.0))], (2,), cost, at(0))
    assert new["mask"]["channels"].tolist() == [True, False]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_scores_that_are_not_finite_are_refused_with_the_clients_name(bad: float) -> None:
    rule = MaskRule(0.5, raw_global)
    with pytest.raises(PayloadError, match="client 7"):
        rule.updated(rule.initial(2), [reply(3, (1.0, 2.0)), reply(7, (1.0, bad))], (2,), None, at(0))
    with pytest.raises(PayloadError, match="not negative"):
        rule.updated(rule.initial(2), [reply(3, (1.0, -2.0))], (2,), None, at(0))


ALL = torch.ones(2, dtype=torch.bool)


def sent(client: int, found: dict[int, Tensor], data: Batches, mask: Tensor = ALL, count: int = 3) -> Reply:
    return Reply(client, 1.0, Prototypes().uploads(found, data, mask, count), {})


def test_signatures_are_shares_over_the_mask_and_those_without_signal_stay_at_home() -> None:
    mask = torch.tensor([True, False, True])
    up = Prototypes().uploads(scores((1, 5, 3), (0, 2, 0)), domains(3, 4), mask, 4)
    assert {k: v.tolist() for k, v in up["signatures"].items()} == {"0": [0.25, 0.75]}
    assert up["domains"]["counts"].tolist() == [3, 4, 0, 0] and up["signatures"]["0"].dtype == torch.float32
    ten = Prototypes().uploads(scores((10, 50, 30)), domains(3), mask, 4)
    assert torch.equal(ten["signatures"]["0"], up["signatures"]["0"])


def test_a_prototype_starts_at_its_first_mean_then_moves_by_its_momentum() -> None:
    """First mean (0.25 + 3 * 0.75) / 4; then mu p + (1 - mu) V. A domain that nobody has stays without one."""
    rule, old = Prototypes(0.5), torch.zeros(3, 2)
    replies = [sent(0, scores((1, 3)), domains(1)), sent(1, scores((3, 1)), domains(3))]
    first = rule.merged(replies, old, ALL)
    torch.testing.assert_close(first, torch.tensor([[0.625, 0.375], [0, 0], [0, 0]]))
    one = torch.tensor([[1.0, 0.0], [0, 0], [0, 0]])
    assert rule.merged([sent(0, scores((0, 1)), domains(5))], one, ALL)[0].tolist() == [0.5, 0.5]
    assert Prototypes(0.0).merged([sent(0, scores((0, 1)), domains(5))], one, ALL)[0].tolist() == [0.0, 1.0]
    assert Prototypes(1.0).merged([sent(0, scores((0, 1)), domains(5))], one, ALL)[0].tolist() == [1.0, 0.0]


def test_a_client_counts_for_the_domains_that_it_has_a_signature_of() -> None:
    other = {1: torch.tensor([1.0, 1.0])}
    replies = [sent(0, scores((1, 3), (0, 0)), domains(2, 50)), sent(4, other, domains(7, 2))]
    merged = Prototypes().merged(replies, torch.zeros(3, 2), ALL)
    assert merged.tolist() == [[0.25, 0.75], [0.5, 0.5], [0.0, 0.0]]
    kept = torch.tensor([[0.5, 0.5], [0.0, 0.0], [0.2, 0.8]])
    assert torch.equal(Prototypes().merged(replies, kept, ALL)[2], kept[2])


def test_prototypes_stay_on_the_simplex_of_the_mask() -> None:
    rng = generator("prototypes")
    mask, rule = torch.tensor([True, False, True, True]), Prototypes(0.4)
    values = torch.zeros(3, 4)
    for t in range(6):
        found = {k: torch.rand(4, generator=rng, dtype=torch.float64) for k in (0, 2)}
        values = rule.merged([sent(0, found, domains(2, 0, 9), mask)], values, mask)
        if t == 3:
            mask = torch.tensor([True, True, False, True])
        values = rule.under(values, mask)
        torch.testing.assert_close(values.sum(1), torch.tensor([1.0, 0.0, 1.0]))
        assert not values[:, ~mask].any() and bool((values >= 0).all())


def test_a_prototype_without_a_channel_left_is_uniform_and_a_missing_one_stays_missing() -> None:
    mask = torch.tensor([False, True, True])
    under = Prototypes().under(torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]), mask)
    assert under.tolist() == [[0.0, 0.5, 0.5], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


def test_a_signature_of_the_wrong_client_is_named() -> None:
    up = {"signatures": {"0": torch.tensor([torch.nan, 1.0])}, "domains": {"counts": torch.tensor([2, 0, 0])}}
    with pytest.raises(PayloadError, match="client 9"):
        Prototypes().merged([Reply(9, 1.0, up, {})], torch.zeros(3, 2), ALL)
