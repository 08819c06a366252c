"""What the server knows and sends: the pool, the gate, every client's next prompts."""

from __future__ import annotations

import dataclasses

import torch

from fedloom.core import Reply
from fedloom.core.payload import digest
from fedloom.methods.orchestrator import Orchestrator, Pool
from fedloom.select.dispatch import ByGate, at_random
from toys.federation import experiment

DUET = "fedloom.methods.fedduet:fedduet"
MADE = Orchestrator(Pool(), 6, 2, ByGate(0.0), hidden=8)


def context(round=0, stage=0):
    whole = experiment(DUET, num_clients=4, num_stages=2, rounds=2)
    return whole.context(whole.net(), stage, round=round)


def begun(made):
    """Its fields before the first round."""
    ctx = context()
    return made.initial(ctx, ctx.init_state()["params"])


def reply(client, loss=1.0, **more):
    feature = torch.nn.functional.normalize(torch.arange(1.0, 129) + client, dim=0)
    return Reply(client, 1.0, {"summary": {"feature": feature, "loss": torch.tensor([loss]), **more}}, {})


def test_it_starts_with_a_pool_of_distinct_concepts_and_a_draw_for_everybody():
    fields = begun(MADE)
    assert fields["pool"]["prompts"].shape == (6, 4, 8) and len(fields["pool"]["prompts"].unique(dim=0)) == 6
    assert fields["clients"]["index"].shape == (4, 2) and not fields["clients"]["known"].any()
    assert fields["usage"]["count"].shape == (4, 2, 6) and not fields["usage"]["count"].any()
    assert digest(fields) == digest(begun(MADE))
    for client in range(4):
        sent = MADE.sent(fields, client)["prompts"]["shared"]
        assert torch.equal(sent, fields["pool"]["prompts"][fields["clients"]["index"][client]])
    assert torch.equal(MADE.sent(fields, None)["prompts"]["shared"], fields["pool"]["prompts"][:2])


def test_a_round_moves_the_gate_and_notes_who_took_part():
    fields = begun(MADE)
    new = {**fields, **MADE.updated(fields, [reply(2), reply(0)], context())}
    assert digest({"g": new["gate"]}) != digest({"g": fields["gate"]})
    assert new["clients"]["known"].tolist() == [True, False, True, False]
    assert new["clients"]["usual"].tolist() == [1, 0, 1, 0]
    assert new["usage"]["count"][:, 0].sum(1).tolist() == [2, 0, 2, 0] and not new["usage"]["count"][:, 1].any()
    assert digest({**fields, **MADE.updated(fields, [reply(0), reply(2)], context())}) == digest(new)
    assert torch.equal(new["pool"]["prompts"], fields["pool"]["prompts"])


def test_known_clients_get_what_the_gate_scores_highest():
    fields = begun(MADE)
    fields["gate"] = {**fields["gate"], "out.bias": torch.tensor([0.0, 9, 0, 0, 8, 0])}
    new = MADE.updated(fields, [reply(1)], context())
    assert new["clients"]["index"][1].tolist() == [1, 4] == new["clients"]["common"].tolist()
    drawn = dataclasses.replace(MADE, dispatch=at_random)
    indices = {tuple(drawn.updated(fields, [reply(1)], context(r))["clients"]["index"][1].tolist()) for r in range(8)}
    assert len(indices) > 2


def test_a_summary_that_is_not_finite_teaches_nothing():
    fields = begun(MADE)
    bad = Reply(1, 1.0, {"summary": {"feature": torch.full((128,), torch.inf), "loss": torch.ones(1)}}, {})
    new = MADE.updated(fields, [bad], context())
    assert digest({"g": new["gate"]}) == digest({"g": fields["gate"]}) and not new["clients"]["known"].any()


def test_without_replies_only_the_draws_are_new():
    fields = begun(MADE)
    new = MADE.updated(fields, [], context())
    assert digest({"g": new["gate"]}) == digest({"g": fields["gate"]})
    assert not new["usage"]["count"].any()


def test_attention_teaches_the_prompts_that_were_looked_at():
    learner = dataclasses.replace(MADE, target="attention", over="dispatched", lr=0.05)
    fields = begun(learner)
    held = fields["clients"]["index"][0]
    for number in range(30):
        fields["clients"] = {
            **fields["clients"],
            "index": fields["clients"]["index"].index_copy(0, torch.tensor([0]), held[None]),
        }
        told = reply(0, attention=torch.tensor([0.9, 0.1]))
        fields = {**fields, **learner.updated(fields, [told], context(number))}
    from fedloom.merge.prompt_gate import scores

    score = scores(fields["gate"], fields["clients"]["summary"][:1])[0]
    assert score[held[0]] > score[held[1]] + 1


def test_an_empty_pool_sends_nothing():
    none = dataclasses.replace(MADE, size=0)
    whole = experiment(DUET, options={"prompts": False}, num_clients=4, num_stages=2, rounds=2)
    ctx = whole.context(whole.net(), 0, round=0)
    fields = none.initial(ctx, ctx.init_state()["params"])
    assert len(none.sent(fields, 1)["prompts"]["shared"]) == len(none.sent(fields, None)["prompts"]["shared"]) == 0
    assert not {**fields, **none.updated(fields, [reply(0)], ctx)}["usage"]["count"].numel()
