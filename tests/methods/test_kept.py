"""Fields that clients keep for a stage: who is sent them, whatever goes wrong on the way."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core import Reply
from fedloom.methods.kept import KeptFields

FIELDS = KeptFields(("memo", "note"))
CLIENTS = 3


def context(stage):
    return SimpleNamespace(stage=SimpleNamespace(index=stage), num_clients=CLIENTS)


def fields(stage):
    return {"memo": {"a": torch.tensor(float(stage))}, "note": {}}


def server_at(stage, server=None):
    return {"params": {}, **(server or FIELDS.nobody(context(stage))), **fields(stage)}


def reply(client):
    return Reply(client, 1.0, {}, {})


def test_a_client_is_sent_the_fields_until_it_has_replied():
    server, ctx = server_at(1), context(1)
    assert FIELDS.sent(server, 2, ctx).keys() == {"memo", "note"} and not FIELDS.current(server, ctx)
    server = {**server, **FIELDS.marked(server, [reply(0), reply(2)], ctx)}
    assert FIELDS.current(server, ctx)
    assert FIELDS.sent(server, 2, ctx) == FIELDS.sent(server, 0, ctx) == {}
    assert FIELDS.sent(server, 1, ctx) == fields(1)
    more = FIELDS.marked(server, [reply(1)], ctx)["holders"]
    assert more["clients"].tolist() == [True, True, True]
    assert server["holders"]["clients"].tolist() == [True, False, True], "marks are new values"


def test_the_marks_of_an_older_stage_count_for_nothing():
    server, ctx = server_at(1), context(1)
    later = server_at(3, FIELDS.marked(server, [reply(0)], ctx))
    assert not FIELDS.current(later, context(3)) and FIELDS.sent(later, 0, context(3)) == fields(3)
    assert FIELDS.marked(later, [reply(1)], context(3))["holders"]["clients"].tolist() == [False, True, False]


def test_a_client_keeps_what_it_was_sent_for_the_stage():
    down, ctx = {"params": {}, **fields(1)}, context(1)
    state = FIELDS.kept(down, {"own": {}}, ctx)
    assert state.keys() == {"own", "memo", "note", "kept"} and FIELDS.holds(state, ctx)
    assert FIELDS.kept({"params": {}}, state, ctx) is state
    assert not FIELDS.holds(state, context(2)) and not FIELDS.holds({}, ctx)
    assert FIELDS.kept(fields(2), state, context(2))["memo"]["a"].item() == 2.0
    with pytest.raises(KeyError):
        FIELDS.kept({"params": {}}, state, context(2))


# per stage and round: what becomes of each client's work, None where it is not asked
OUTCOMES = st.lists(
    st.lists(
        st.tuples(*[st.sampled_from([None, "accepted", "rejected", "failed", "weightless"])] * CLIENTS), max_size=4
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(OUTCOMES)
def test_every_client_has_the_stage_s_fields_and_is_sent_them_once_unless_its_work_is_lost(stages):
    marks, states = FIELDS.nobody(context(0)), [{}] * CLIENTS
    for index, rounds in enumerate(stages):
        ctx, lost, sends = context(index), [0] * CLIENTS, [0] * CLIENTS
        for outcomes in rounds:
            server, accepted = server_at(index, marks), []
            for client, outcome in enumerate(outcomes):
                if outcome is None:
                    continue
                down = FIELDS.sent(server, client, ctx)
                sends[client] += bool(down)
                if outcome == "failed":
                    lost[client] += 1
                    continue
                new = FIELDS.kept(down, states[client], ctx)
                assert new["memo"]["a"].item() == index and new["note"] == {}
                lost[client] += outcome != "accepted"
                if outcome != "rejected":
                    states[client] = new
                if outcome == "accepted":  # the engine shows no reply of weight 0, though it keeps the state
                    accepted.append(reply(client))
            if accepted:
                marks = FIELDS.marked(server, accepted, ctx)
        assert all(sent <= 1 + missed for sent, missed in zip(sends, lost, strict=True))
