"""FedEWC: the numbers of F and its merge, a penalty that reaches what is trained, and what travels when."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedloom.core import ConfigError, Payload, Reply, Stage
from fedloom.core.payload import digest, nbytes
from fedloom.core.seeds import generator
from fedloom.core.tree import sub
from fedloom.engine.checkpoint import newest
from fedloom.engine.files import load_payload
from fedloom.engine.store import ClientStore
from fedloom.local.passes import diagonal_fisher, model_labels
from fedloom.methods.fedewc import FedEWC, _old_share, fedewc
from toys.domains import arriving
from toys.federation import BlobSpec, experiment, local
from toys.running import rows, start

NAME = "fedloom.methods.fedewc:fedewc"
EVERYBODY = {"num_clients": 3, "num_stages": 2, "rounds": 2, "per_class": 20, "cohort": 1.0}
pytestmark = pytest.mark.usefixtures("no_global_draws")


def context(whole, stage: int, client: int | None = None, exchange: str = "train"):
    return whole.context(whole.net(), stage, round=0, client=client, exchange=exchange)


def filled(tree: Payload, value: float) -> Payload:
    return {name: torch.full_like(tensor, value) for name, tensor in tree.items()}


def answer(client: int, fisher: Payload, weight: float = 1.0) -> Reply:
    return Reply(client, weight, {"fisher": fisher}, {})


def distance(a: Payload, b: Payload) -> float:
    return sum(float(gap.square().sum()) for gap in sub(a, b).values()) ** 0.5


def update(lam: float, *, stage: int = 1, fisher: float = 0.02, part: int | None = None):
    """A client's update from the initial model, with that Fisher everywhere; and the model it started from."""
    whole = experiment(NAME, options={"lam": lam})
    ctx = context(whole, stage, client=0)
    server = whole.method.init_server(ctx)
    server = {**server, "fisher": filled(server["params"], fisher)}
    data = whole.plan.train(0, stage, 0, "train")
    return whole.method.client_update(
        whole.method.send(server, 0, ctx), {}, data if part is None else data.part(0, part), ctx
    ), server["params"]


def test_the_penalty_reaches_the_trained_copy():
    """The defect of the public code: a penalty on another copy trains as if there were none."""
    gaps = [distance(end.up["params"], begin) for end, begin in (update(lam) for lam in (0.0, 100.0, 400.0))]
    assert gaps[0] > 1.5 * gaps[1] > 1.5 * gaps[2] > 0
    assert digest(update(0.0)[0].up) == digest(update(100.0, fisher=0.0)[0].up), "F = 0 leaves the weights free"


def test_one_step_moves_by_the_penalty_of_the_equation():
    """theta - lr (gradient + lam F (theta - theta*)), entry by entry, for an F that differs between them."""
    whole = experiment(NAME, options={"lam": 3.0}, spec=BlobSpec(norm=False))
    ctx = context(whole, 1, client=0)
    one_step = replace(local(), optimizer=replace(local().optimizer, momentum=0.0), epochs=1, batch_size=1000)
    method = replace(whole.method, local=replace(one_step, terms=whole.method.local.terms))
    server, data = method.init_server(ctx), whole.plan.train(0, 1, 0, "train")
    rng = generator("fisher")
    fisher = {name: torch.rand(tensor.shape, generator=rng) for name, tensor in server["params"].items()}
    anchor = {name: tensor - 0.5 for name, tensor in server["params"].items()}
    down = {**server, "fisher": fisher, "anchor": anchor}
    with_penalty = method.client_update(down, {}, data, ctx).up["params"]
    without = replace(method, lam=0.0).client_update(down, {}, data, ctx).up["params"]
    for name, tensor in without.items():
        expected = tensor - 0.1 * 3.0 * fisher[name] * 0.5
        dim = ctx.class_rows.get(name)
        if dim is not None:
            expected.index_copy_(dim, ctx.unseen, tensor.index_select(dim, ctx.unseen))
        torch.testing.assert_close(with_penalty[name], expected, rtol=1e-5, atol=1e-6)


def test_without_the_penalty_it_is_fedavg_bit_for_bit(tmp_path: Path):
    cur = start(tmp_path / "avg", experiment("fedloom.methods.fedavg:fedavg", options={"label_scope": "current"}))
    none = start(tmp_path / "none", experiment(NAME, options={"lam": 0.0}))
    some = start(tmp_path / "some", experiment(NAME))
    same = ("params_sha256", "accuracy_matrix", "bytes_up", "bytes_down", "sample_visits")
    assert [none[key] for key in same] == [cur[key] for key in same]
    assert some["params_sha256"] != cur["params_sha256"]


def test_the_first_merge_is_a_weighted_mean_with_a_cap():
    whole = experiment(NAME, options={"fisher_cap": 2.0})
    ctx = context(whole, 0)
    server = whole.method.init_server(ctx)
    small, large = filled(server["params"], 0.0), filled(server["params"], 2.0)
    large["head.bias"][:2] = 40.0
    replies = [answer(0, small, 1.0), answer(2, large, 3.0)]
    merged = whole.method.consolidate(server, replies, ctx)
    assert torch.equal(merged["fisher"]["head.weight"], torch.full((6, 8), 1.5))
    assert merged["fisher"]["head.bias"].tolist() == [2.0, 2.0, 1.5, 1.5, 1.5, 1.5], "the mean is capped, not the parts"
    assert all(merged[field] is server[field] for field in server if field != "fisher")
    uniform = replace(whole.method, uniform=True).consolidate(server, replies, ctx)
    assert torch.equal(uniform["fisher"]["head.weight"], torch.full((6, 8), 1.0))


@pytest.mark.parametrize(("stage", "share"), [(0, 0.0), (1, 1 / 2), (2, 2 / 3)])
def test_the_online_merge_weighs_by_classes(stage: int, share: float):
    """Two classes per stage: a = 0, 2/4, 4/6."""
    whole = experiment(NAME, options={"fisher_cap": 10.0})
    ctx = context(whole, stage)
    server = whole.method.init_server(ctx)
    server = {**server, "fisher": filled(server["params"], 3.0)}
    merged = whole.method.consolidate(server, [answer(1, filled(server["params"], 9.0))], ctx)["fisher"]
    torch.testing.assert_close(merged, filled(server["params"], share * 3.0 + (1 - share) * 9.0))


def test_clients_measure_the_model_that_they_are_sent_in_the_scope_of_the_loss():
    for scope in ("current", "seen"):
        whole = experiment(NAME, options={"label_scope": scope, "fisher_labels": "model"})
        method, ctx = whole.method, context(whole, 1, client=0, exchange="consolidate")
        server = method.init_server(ctx)
        down = method.send_model({**server, "params": filled(server["params"], 0.1)}, 0, ctx)
        data, state = whole.plan.train(0, 1, None, "consolidate"), {"anything": {}}
        found = method.measure(down, state, data, ctx)
        ctx.bind(down["params"], down["buffers"])
        expected = diagonal_fisher(ctx, data, scope=scope, labels=model_labels)
        assert found.state is state and digest(found.up) == digest({"fisher": expected})
        moved = expected["head.bias"].nonzero().flatten().tolist()
        assert moved == ([2, 3] if scope == "current" else [0, 1, 2, 3])


def test_every_stage_but_the_last_ends_with_a_measurement(tmp_path: Path):
    start(tmp_path / "run", experiment(NAME, **{**EVERYBODY, "num_stages": 3}))
    trips = [(row["stage"], row["exchange"], row["clients"]) for row in rows(tmp_path / "run")]
    train = [[(stage, "train", 3)] * 2 for stage in range(3)]
    assert trips == [*train[0], (0, "consolidate", 3), *train[1], (1, "consolidate", 3), *train[2]]


def test_a_stage_without_new_classes_is_not_measured():
    method = fedewc(local=local())
    classes = (0, 1, 2)
    plans = [list(method.plan(Stage(1, 3, 2, classes, classes, old))) for old in ((0, 1), classes)]
    assert [[trip.exchange for trip in trips] for trips in plans] == [["train", "train", "consolidate"], ["train"] * 2]


@pytest.mark.parametrize(("stage", "share"), [(0, 0.0), (1, 1 / 2), (2, 2 / 3), (3, 3 / 4)])
def test_a_stream_of_domains_is_weighed_by_pairs_of_class_and_domain(stage: int, share: float):
    """All six classes are there at once, and one domain more at every stage: by classes alone a would be 1."""
    whole = arriving(NAME, options={"fisher_cap": 10.0})
    ctx = context(whole, stage)
    server = whole.method.init_server(ctx)
    server = {**server, "fisher": filled(server["params"], 3.0)}
    merged = whole.method.consolidate(server, [answer(1, filled(server["params"], 9.0))], ctx)["fisher"]
    torch.testing.assert_close(merged, filled(server["params"], share * 3.0 + (1 - share) * 9.0))
    assert ("consolidate" in [trip.exchange for trip in whole.method.plan(ctx.stage)]) == (stage < 3)


def test_domains_that_are_all_there_leave_the_share_of_a_stream_of_classes_alone():
    method, classes = fedewc(local=local()), (0, 1, 2)
    stage = Stage(1, 3, 2, classes, classes, (0,), *((0, 1, 2, 3),) * 3)
    plain = replace(stage, domains=(), seen_domains=(), old_domains=())
    assert _old_share(stage) == _old_share(plain) == 1 / 3
    assert [trip.exchange for trip in method.plan(replace(stage, old=classes))] == ["train", "train"]


def test_f_and_the_anchor_travel_once_per_stage_and_client(tmp_path: Path):
    """In round 0 the model is the anchor; of two clients, the one that is first drawn later is sent it as well."""
    whole = experiment(NAME, **{**EVERYBODY, "cohort": 2, "rounds": 4})
    start(tmp_path / "run", whole)
    ctx = context(whole, 1)
    server = whole.method.init_server(ctx)
    size = {f: nbytes({f: server[f]}, whole.method.class_rows(ctx), ctx.stage.seen) for f in ("params", "buffers")}
    holders: set[int] = set()
    late = 0
    for row in (row for row in rows(tmp_path / "run") if row["stage"] == 1):
        cohort = set(whole.draw(1, row["round"], "cohort"))
        news = cohort - holders
        late += len(news) * (row["round"] > 0)
        extra = len(news) * size["params"] * (2 if row["round"] else 1)
        assert row["bytes_down"] == len(cohort) * (size["params"] + size["buffers"]) + extra
        holders |= cohort
    assert late == 1 and len(holders) == 3, "the draw must have somebody who comes later"


def test_the_anchor_is_the_model_with_which_the_stage_began(tmp_path: Path):
    whole = experiment(NAME, **{**EVERYBODY, "cohort": 2, "rounds": 4})
    start(tmp_path / "run", whole, checkpoint_keep=100)
    saved = tmp_path / "run" / "checkpoints"
    began = load_payload(saved / "stage0001-trip00000" / "server.safetensors")
    server, progress = newest(tmp_path / "run")
    past = {"anchor": began["params"], "fisher": began["fisher"]}
    assert digest({field: server[field] for field in past}) == digest(past) and past["fisher"]["head.weight"].any()
    assert digest({"params": server["params"]}) != digest({"params": began["params"]})
    store = ClientStore(tmp_path / "run" / "clients")
    for client in range(3):
        kept = store.load(client, progress.versions[client])
        assert digest({field: kept[field] for field in past}) == digest(past)


def test_a_measurement_that_nobody_answers_leaves_f_alone(tmp_path: Path, monkeypatch):
    """Without an F from the first stage there is nothing to hold on to: the run is finetuning."""
    measure = FedEWC.measure

    def spoilt(self, down, state, data, ctx):
        found = measure(self, down, state, data, ctx)
        return found._replace(up={"fisher": filled(found.up["fisher"], torch.nan)})

    monkeypatch.setattr(FedEWC, "measure", spoilt)
    summary = start(tmp_path / "run", experiment(NAME, **EVERYBODY))
    assert summary["rejected_updates"] == 3 and summary["degraded_rounds"] == 1
    server, _ = newest(tmp_path / "run")
    assert not any(tensor.any() for tensor in server["fisher"].values())
    plain = experiment("fedloom.methods.fedavg:fedavg", options={"label_scope": "current"}, **EVERYBODY)
    assert summary["params_sha256"] == start(tmp_path / "avg", plain)["params_sha256"]


def test_clients_without_data_count_for_nothing(tmp_path: Path):
    plan = {**EVERYBODY, "num_clients": 4}
    summary = start(tmp_path / "run", experiment(NAME, hollow=(1,), **plan))
    assert summary["failed_clients"] == summary["rejected_updates"] == summary["degraded_rounds"] == 0
    absent = start(tmp_path / "absent", experiment(NAME, empty=(1,), **plan))
    assert summary["params_sha256"] == absent["params_sha256"]


def test_a_client_with_one_example_trains_and_measures():
    whole = experiment(NAME, spec=BlobSpec(norm=False))
    ctx = context(whole, 1, client=0)
    server, data = whole.method.init_server(ctx), whole.plan.train(0, 1, 0, "train").part(0, 1)
    end = whole.method.client_update(whole.method.send(server, 0, ctx), {}, data, ctx)
    found = whole.method.measure(whole.method.send_model(server, 0, ctx), end.state, data, ctx)
    assert distance(end.up["params"], server["params"]) > 0
    assert found.up["fisher"]["head.bias"].any() and end.state["anchor"] == server["params"]


def test_a_client_writes_its_state_once_per_stage_and_predicts_with_the_model_alone():
    whole = experiment(NAME)
    method, ctx = whole.method, context(whole, 1, client=0)
    server, data = method.init_server(ctx), whole.plan.train(0, 1, 0, "train")
    assert method.send(server, 0, context(whole, 0, client=0)).keys() == {"params", "buffers"}
    assert method.send(server, 0, ctx).keys() == {"params", "buffers", "fisher"}
    first = method.client_update(method.send(server, 0, ctx), {}, data, ctx)
    merged = method.server_update(server, [Reply(0, 1.0, first.up, {})], context(whole, 1))
    assert method.send(merged, 0, ctx).keys() == {"params", "buffers"}
    assert method.send(merged, 1, ctx).keys() == {"params", "buffers", "fisher", "anchor"}
    assert method.client_update(method.send(merged, 0, ctx), first.state, data, ctx).state is first.state
    assert method.send(merged, None, ctx).keys() == {"params", "buffers"}


@pytest.mark.parametrize("option", ["label_scope", "fisher_labels"])
def test_unknown_words_are_refused(option: str):
    with pytest.raises(ConfigError, match="'sometimes'"):
        fedewc(local=local(), **{option: "sometimes"})
