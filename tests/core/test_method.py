from __future__ import annotations

import pytest

from fedloom.core import Method, Stage, Trip
from toys.federation import experiment


def test_the_base_has_one_train_exchange_per_round():
    method = Method()
    assert list(method.exchanges()) == ["train"] and method.init_client(None) == {}
    assert list(method.plan(Stage(0, 2, 3, (0,), (0,)))) == [Trip("train", r, "cohort") for r in range(3)]
    assert method.send({"a": {}}, 3, None) == {"a": {}}
    with pytest.raises(TypeError, match="Method defines no client_update"):
        method.client_update({}, {}, None, None)
    with pytest.raises(TypeError, match="Method defines no server_update"):
        method.server_update({}, [], None)


def test_class_rows_and_initial_state_come_from_the_network():
    whole = experiment("fedloom.methods.fedavg:fedavg")
    ctx = whole.context(whole.net(), 0)
    assert whole.method.class_rows(ctx) == {("params", "head.weight"): 0, ("params", "head.bias"): 0}
    assert set(whole.method.init_server(ctx)) == {"params", "buffers"}
