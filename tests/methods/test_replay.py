"""Replay: what clients keep, what they train on, how the nearest mean predicts, and that it remembers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedloom.core import Batches, ConfigError, Net, Reply, RunError
from fedloom.core.payload import nbytes
from fedloom.engine.checkpoint import newest
from fedloom.engine.store import ClientStore
from fedloom.methods.exemplars import Exemplars, chosen, drawn, herded
from fedloom.methods.nearest import added_up, nearness
from fedloom.methods.replay import replay
from fedloom.select.herding import herd
from toys.federation import BlobSpec, Headed, experiment
from toys.running import rows, start

REPLAY, AVG = "fedloom.methods.replay:replay", "fedloom.methods.fedavg:fedavg"


def toy(**changes: Any):
    """The blobs with every client in every round."""
    options = changes.pop("options", {})
    return experiment(REPLAY, cohort=1.0, options=options, **changes)


def finished(path: Path, whole):
    """Server state of a run, and each client's exemplars."""
    start(path, whole)
    server, progress = newest(path)
    store = ClientStore(path / "clients")
    kept = {c: store.load(c, version)["exemplars"] for c, version in progress.versions.items()}
    return server, kept


def held(whole, client, stages=range(3)):
    """Everything that a client has held, as (inputs, labels)."""
    parts = [whole.plan.train(client, s, None, "train") for s in stages]
    x, y = zip(*(part.stored(torch.arange(len(part))) for part in parts), strict=True)
    return torch.cat(x), torch.cat(y)


def consolidated(whole, method, client, stages, state=None):
    """A client's state after each of some stages, all with the initial model, and its uploads."""
    state, ups = state or {}, []
    for stage in stages:
        ctx = whole.context(whole.net(), stage, exchange="consolidate", client=client)
        down = method.send_model(method.init_server(ctx), client, ctx)
        update = method.consolidate(down, state, whole.plan.train(client, stage, None, "consolidate"), ctx)
        state = update.state
        ups.append((state["exemplars"], update))
    return ups


@dataclass(frozen=True)
class Spy:
    """Stands for LocalSGD: trains nothing, and tells which examples it was given."""

    terms: tuple = ()
    decisions: tuple = ()

    def __call__(self, down, data, ctx, ref=None):
        batches = list(data.epoch(batch_size=10))
        x, y = data.stored(torch.arange(len(data)))
        metrics = {"visits": sum(len(batch.y) for batch in batches), "x": x, "y": y}
        return SimpleNamespace(params=down["params"], buffers=down["buffers"], metrics=metrics)


# what is kept


@pytest.mark.parametrize(("memory", "expected"), [(12, 2), (13, 2), (6, 1), (10**6, 10**6)])
def test_a_client_keeps_floor_of_memory_by_seen_classes_of_each_class(memory, expected, tmp_path: Path):
    whole = toy(options={"memory": memory})
    _, kept = finished(tmp_path / "run", whole)
    assert kept.keys() == {0, 1, 2, 3}
    for client, exemplars in kept.items():
        x, y = held(whole, client)
        counts, had = exemplars["y"].bincount(minlength=6), y.bincount(minlength=6)
        assert counts.tolist() == had.clamp(max=expected).tolist()
        assert len(exemplars["y"]) <= memory
        for one, label in zip(exemplars["x"], exemplars["y"], strict=True):
            assert any(torch.equal(one, other) and label == c for other, c in zip(x, y, strict=True))
    told = [row["train/exemplars"] for row in rows(tmp_path / "run") if row["exchange"] == "consolidate"]
    assert len(told) == 3 and all(0 <= count <= memory for count in told)


def test_older_classes_lose_their_last_exemplars_and_memory_is_never_exceeded():
    whole, method = toy(), toy(options={"memory": 12}).method
    ups = [exemplars for exemplars, _ in consolidated(whole, method, 0, range(3))]
    assert [exemplars["y"].bincount(minlength=6).tolist() for exemplars in ups] == [
        [6, 6, 0, 0, 0, 0],
        [3, 3, 3, 3, 0, 0],
        [2, 2, 2, 2, 2, 2],
    ]
    for c in range(6):
        of = [exemplars["x"][exemplars["y"] == c] for exemplars in ups]
        for earlier, later in pairwise(of):
            assert not len(earlier) or torch.equal(later, earlier[: len(later)]), "the first ones stay, in their order"


def test_exemplars_are_those_that_herding_picks_by_the_final_model_of_the_stage():
    whole, method = toy(), toy(options={"memory": 8}).method
    ((exemplars, _),) = consolidated(whole, method, 2, [0])
    x, y = held(whole, 2, [0])
    module = BlobSpec().classifier().eval()
    for c in (0, 1):
        features = F.normalize(module.body(x[y == c])).detach()
        assert torch.equal(exemplars["x"][exemplars["y"] == c], x[y == c][herd(features, 4)])


def test_fewer_examples_than_the_share_are_all_kept():
    whole, method = toy(per_class=6), toy(options={"memory": 1000}).method
    ((exemplars, _),) = consolidated(whole, method, 1, [0])
    _, y = held(whole, 1, [0])
    assert exemplars["y"].bincount(minlength=6).tolist() == y.bincount(minlength=6).tolist()


def test_a_class_that_comes_again_is_chosen_anew():
    whole, method = toy(), toy(options={"memory": 12}).method
    once, again = consolidated(whole, method, 0, [0, 0])
    assert torch.equal(once[0]["x"], again[0]["x"]) and torch.equal(once[0]["y"], again[0]["y"])


def test_random_exemplars_are_of_the_class_and_drawn_by_seed():
    features, labels = torch.zeros(30, 2), torch.arange(3).repeat(10)
    picks = [chosen(drawn, features, labels, 4, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(picks[0], picks[1]) and not torch.equal(picks[0], picks[2])
    assert labels[picks[0]].tolist() == [0] * 4 + [1] * 4 + [2] * 4 and len(set(picks[0].tolist())) == 12
    assert len(chosen(drawn, features, labels, 99, torch.Generator())) == 30
    assert chosen(herded, features[:0], labels[:0], 4, torch.Generator()).tolist() == []
    whole = toy()
    (herding, _), (random, _) = (
        consolidated(whole, toy(options={"memory": 8, "pool": pool}).method, 0, [0])[0]
        for pool in ("herding", "random")
    )
    assert torch.equal(herding["y"], random["y"]) and not torch.equal(herding["x"], random["x"])


def test_inputs_that_are_a_mapping_are_kept_too():
    x = {"ids": torch.arange(8).view(4, 2), "mask": torch.ones(4, 2)}
    data = Batches(x, torch.tensor([1, 0, 1, 0]), torch.arange(4), key=(), prepare=lambda x, rng: x)
    kept = Exemplars(*data.stored(torch.tensor([2, 1, 3]))).field()
    assert kept["exemplars"].keys() == {"y", "x.ids", "x.mask"}
    back = Exemplars.of(kept, data).trimmed(1)
    assert back.x["ids"].tolist() == [[2, 3], [4, 5]] and back.y.tolist() == [0, 1]
    assert len(data.joined(*back)) == 6


# what is trained on


def trained(state, stage, client=0, **options):
    whole = toy()
    method = replay(local=Spy(), distillation=0.0, **options)
    ctx = whole.context(whole.net(), stage, round=0, client=client)
    data = whole.plan.train(client, stage, 0, "train")
    return len(data), method.client_update(ctx.init_state(), state, data, ctx).metrics


def kept_by(client, stages, memory):
    whole = toy()
    return consolidated(whole, toy(options={"memory": memory}).method, client, stages)[-1][1].state


@pytest.mark.parametrize("visits", ["equal", "all"])
def test_new_examples_and_exemplars_are_trained_on_together(visits):
    new, seen = trained(kept_by(0, [0], 12), 1, memory=12, visits=visits)
    assert seen["y"][new:].bincount().tolist() == [6, 6] and set(seen["y"][:new].tolist()) == {2, 3}
    assert seen["visits"] == (new if visits == "equal" else new + 12)


def test_a_client_that_was_away_for_two_stages_uses_the_first_of_each_class():
    state = kept_by(0, [0], 12)
    away, both = trained(state, 2, memory=12)[1], trained(kept_by(0, [0, 1], 12), 2, memory=12)[1]
    old = state["exemplars"]
    for c in (0, 1):
        mine = away["x"][away["y"] == c]
        assert len(mine) == 3 and torch.equal(mine, old["x"][old["y"] == c][:3])
        assert torch.equal(mine, both["x"][both["y"] == c]), "as if it had trimmed in time"
    whole = toy()
    ((late, _),) = consolidated(whole, toy(options={"memory": 12}).method, 0, [2], state)
    assert late["y"].bincount(minlength=6).tolist() == [2, 2, 0, 0, 2, 2]


def test_classes_of_the_stage_are_not_joined_with_their_own_exemplars():
    new, seen = trained(kept_by(0, [0, 1], 12), 1, memory=12)
    assert seen["y"][new:].unique().tolist() == [0, 1]


def test_in_the_first_stage_there_is_nothing_to_rehearse():
    new, seen = trained({}, 0)
    assert len(seen["y"]) == new == seen["visits"]


def test_without_memory_and_distillation_it_is_fedavg_bit_for_bit(tmp_path: Path):
    ours = start(tmp_path / "ours", toy(options={"memory": 0, "distillation": 0.0}))
    theirs = start(tmp_path / "theirs", experiment(AVG, cohort=1.0))
    assert ours["params_sha256"] == theirs["params_sha256"] and rows(tmp_path / "ours") == rows(tmp_path / "theirs")
    assert ours["accuracy_matrix"] == theirs["accuracy_matrix"], "and it predicts by logits"


def test_without_memory_its_loss_is_that_of_fedlwf_over_all_classes(tmp_path: Path):
    ours = start(tmp_path / "ours", toy(options={"memory": 0, "distillation": 1.5, "temperature": 3.0}))
    theirs = {"weight": 1.5, "temperature": 3.0, "label_scope": "seen"}
    lwf = start(tmp_path / "theirs", experiment("fedloom.methods.fedlwf:fedlwf", cohort=1.0, options=theirs))
    assert ours["params_sha256"] == lwf["params_sha256"] and rows(tmp_path / "ours") == rows(tmp_path / "theirs")


def test_training_visits_as_many_examples_as_fedavg_does(tmp_path: Path):
    start(tmp_path / "ours", toy(options={"memory": 30}))
    start(tmp_path / "theirs", experiment(AVG, cohort=1.0))
    ours = [row["sample_visits"] for row in rows(tmp_path / "ours") if row["exchange"] == "train"]
    assert ours == [row["sample_visits"] for row in rows(tmp_path / "theirs")]


# class means


def test_nearest_mean_by_hand():
    sums, counts = torch.tensor([[0.0, 5.0], [3.0, 0.0], [0.0, 0.0]]), torch.tensor([2, 1, 0])
    scores = nearness(torch.tensor([[2.0, 0.0], [0.3, 0.4]]), sums, counts)
    expected = [[-2.0, 0.0], [-(0.6**2 + 0.2**2), -(0.4**2 + 0.8**2)]]
    torch.testing.assert_close(scores[:, :2], torch.tensor(expected))
    assert torch.isneginf(scores[:, 2]).all() and scores.argmax(1).tolist() == [1, 0]


def means(sums, counts, current=False):
    return {"sums": torch.tensor(sums), "counts": torch.tensor(counts), "current": torch.tensor(current)}


def test_sums_of_clients_add_up_and_a_class_that_nobody_reports_keeps_what_it_had():
    server = {"means": means([[1.0], [2.0], [3.0]], [1, 2, 3])}
    sent = [([[4.0], [0.0], [0.0]], [2, 0, 0]), ([[-1.0], [0.0], [6.0]], [1, 0, 5])]
    replies = [
        Reply(c, 1.0, {"means": {"sums": torch.tensor(s), "counts": torch.tensor(n)}}, {})
        for c, (s, n) in enumerate(sent)
    ]
    new = added_up(server, replies)["means"]
    assert new["sums"].flatten().tolist() == [3.0, 2.0, 6.0] and new["counts"].tolist() == [3, 2, 5]
    assert new["current"].item() is True


def test_a_class_that_a_client_has_not_held_has_no_row_in_its_upload():
    whole, method = toy(), toy(options={"memory": 12}).method
    (_, update), *_ = consolidated(whole, method, 0, [0])
    up = update.up["means"]
    assert up["counts"].tolist() == [6, 6, 0, 0, 0, 0] and not up["sums"][2:].any()
    assert set(update.up) | {"params", "buffers"} == set(method.reveals)


@pytest.mark.parametrize("pool", ["herding", "random"])
def test_predictions_are_the_nearest_mean_of_all_clients_exemplars(pool, tmp_path: Path):
    whole = toy(options={"memory": 12, "pool": pool})
    server, kept = finished(tmp_path / "run", whole)
    ctx = whole.context(whole.net(), 2, exchange="evaluate")
    module = ctx.net.module
    ctx.bind(server["params"], server["buffers"])
    with ctx.evaluating():
        unit = {c: F.normalize(module.body(e["x"])) for c, e in kept.items()}
    mu = torch.stack([torch.cat([unit[c][kept[c]["y"] == k] for c in kept]).mean(0) for k in range(6)])
    x = whole.plan.test(0).stored(torch.arange(60))[0]
    scores = whole.method.predict(whole.method.send(server, None, ctx), {}, x, ctx)
    ctx.bind(server["params"], server["buffers"])
    with ctx.evaluating():
        distances = torch.cdist(F.normalize(module.body(x)), F.normalize(mu)).square()
    torch.testing.assert_close(scores, -distances, rtol=1e-4, atol=1e-4)


def test_once_the_model_has_moved_on_the_means_are_old_and_logits_decide(tmp_path: Path):
    whole = toy(options={"memory": 12})
    server, _ = finished(tmp_path / "run", whole)
    method, ctx = whole.method, whole.context(whole.net(), 2, exchange="evaluate")
    for client in (None, 0):
        assert method.send(server, client, ctx).keys() >= {"params", "buffers", "means"}
    assert "means" not in method.send(server, 0, whole.context(whole.net(), 2)), "training needs no means"
    reply = Reply(0, 1.0, {name: server[name] for name in ("params", "buffers")}, {})
    moved = method.server_update(server, [reply], whole.context(whole.net(), 2))
    assert "means" not in method.send(moved, None, ctx)
    x = whole.plan.test(0).stored(torch.arange(5))[0]
    linear = method.predict(method.send(moved, None, ctx), {}, x, ctx)
    ctx.bind(moved["params"], moved["buffers"])
    assert torch.equal(linear, ctx.scores(x))


def test_a_stage_in_which_nobody_trains_leaves_predictions_as_they_were(tmp_path: Path):
    whole = experiment("fedloom.methods.replay:replay", idle=(2,), options={"memory": 12})
    matrix = start(tmp_path / "run", whole)["accuracy_matrix"]
    assert matrix[2][:2] == matrix[1][:2] and min(matrix[1][:2]) > 0.5


@pytest.mark.parametrize("memory", [1, 5])
def test_a_memory_smaller_than_the_number_of_classes_is_refused(memory: int, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"method.memory is {memory}, but the stream has 6 classes.*at least 6, or 0"):
        start(tmp_path / "run", experiment("fedloom.methods.replay:replay", options={"memory": memory}))


class Sideways(Headed):
    """Its features are not what its head reads."""

    def forward(self, x):
        return {**super().forward(x), "feats": x}


def test_features_that_the_head_does_not_read_are_refused(tmp_path: Path):
    whole = toy(options={"memory": 12})
    net = Net(lambda: Sideways(BlobSpec(num_classes=6).backbone(), 6))
    ctx = whole.context(net, 0, exchange="consolidate", client=0)
    state = net.fresh()
    with pytest.raises(ConfigError, match="'feats' has 2 features, but the head reads 8"):
        whole.method.consolidate(state, {}, whole.plan.train(0, 0, None, "consolidate"), ctx)


def test_linear_inference_uploads_and_keeps_no_means(tmp_path: Path):
    server, kept = finished(tmp_path / "run", toy(options={"memory": 12, "inference": "linear"}))
    assert "means" not in server and all(len(exemplars["y"]) for exemplars in kept.values())
    assert [row["bytes_up"] for row in rows(tmp_path / "run") if row["exchange"] == "consolidate"] == [0, 0, 0]


def test_only_rows_of_seen_classes_count_as_traffic(tmp_path: Path):
    whole = toy(options={"memory": 12})
    start(tmp_path / "run", whole)
    told = [row for row in rows(tmp_path / "run") if row["exchange"] == "consolidate"]
    per_class = 8 * 4 + 8  # a float32 sum of width 8 and an int64 count
    assert [row["bytes_up"] for row in told] == [4 * seen * per_class for seen in (2, 4, 6)]
    ctx = whole.context(whole.net(), 0)
    model = {f: whole.method.init_server(ctx)[f] for f in ("params", "buffers")}
    expected = [4 * nbytes(model, whole.method.class_rows(ctx), range(seen)) for seen in (2, 4, 6)]
    assert [row["bytes_down"] for row in told] == expected


def test_a_client_without_data_sends_and_keeps_nothing(tmp_path: Path):
    summary = start(tmp_path / "run", toy(hollow=(1,)))
    assert summary["rejected_updates"] == summary["failed_clients"] == 0
    assert newest(tmp_path / "run")[1].versions.keys() == {0, 1, 2, 3}, "of client 1 the teacher alone"
    state = ClientStore(tmp_path / "run" / "clients").load(1, newest(tmp_path / "run")[1].versions[1])
    assert "exemplars" not in state


def test_a_network_without_features_is_refused_in_the_first_round(tmp_path: Path):
    @dataclass(frozen=True)
    class LogitsSpec(BlobSpec):
        def classifier(self):
            class Bare(Headed):
                def forward(self, x):
                    return super().forward(x)["logits"]

            return Bare(self.backbone(), self.num_classes)

    whole = replace(toy(), spec=LogitsSpec(), rebuild=None)
    with pytest.raises(RunError, match=r"stage 0, round 0.*the method needs features"):
        start(tmp_path / "run", whole)


# what it is for


@pytest.mark.parametrize("inference", ["nme", "linear"])
def test_it_remembers_old_tasks_that_fedavg_forgets(inference, tmp_path: Path):
    many = {"rounds": 6, "per_class": 60}
    ours = start(tmp_path / "ours", toy(options={"memory": 24, "inference": inference}, **many))
    theirs = start(tmp_path / "theirs", experiment(AVG, cohort=1.0, **many))
    old, forgotten = (sum(summary["accuracy_matrix"][-1][:2]) / 2 for summary in (ours, theirs))
    assert old > forgotten + 0.4
    assert ours["final_accuracy"] > theirs["final_accuracy"] + 0.2
