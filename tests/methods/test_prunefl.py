"""PruneFL: masks in training, on the wire and at the server, the client that prunes alone, and where it is FedAvg."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from fedloom.core import ConfigError, PayloadError, Reply
from fedloom.core.payload import nbytes
from fedloom.engine.checkpoint import newest
from fedloom.engine.files import load_payload
from fedloom.methods.prunefl import PRESETS, PruneFL
from fedloom.models.channels import unpack
from fedloom.models.sparse import packed
from toys.federation import BlobSpec, experiment, method_of
from toys.running import Notes, rows, start
from toys.weights_shared import SlidingSpec

PRUNE, AVG = "fedloom.methods.prunefl:prunefl", "fedloom.methods.fedavg:fedavg"
WIDE = BlobSpec(6, residual=True)
SHAPES = {"body.layers.0.weight": (8, 2), "body.block.one.weight": (24, 8), "body.block.two.weight": (8, 24)}
TOTAL = 16 + 192 + 192
DENSE: dict[str, Any] = {"initial_checks": 0, "adjust_every": 0}


def prune(rounds: int = 4, stages: int = 1, seed: int = 0, cohort: float = 1.0, **options: Any):
    return experiment(PRUNE, seed=seed, cohort=cohort, num_stages=stages, rounds=rounds, spec=WIDE, options=options)


def contexts(whole):
    """A function: (client, round) -> context, and the first server state."""
    net = whole.net()
    return lambda client=None, round=0: whole.context(net, 0, round=round, client=client), whole.method.init_server(
        whole.context(net, 0)
    )


def masks(server) -> dict[str, torch.Tensor]:
    return {n: unpack(bits, math.prod(SHAPES[n])).view(SHAPES[n]) for n, bits in server["bits"].items()}


def active(server) -> int:
    return sum(len(values) for values in server["values"].values())


def test_without_pruning_it_is_fedavg_bit_for_bit(tmp_path: Path):
    ours = start(tmp_path / "ours", prune(stages=3, rounds=2, cohort=0.5, **DENSE))
    theirs = start(tmp_path / "theirs", experiment(AVG, spec=WIDE))
    assert ours["params_sha256"] == theirs["params_sha256"]
    assert ours["bytes_up"] == theirs["bytes_up"]
    assert ours["active_parameters"] == theirs["active_parameters"] == theirs["parameters"]


def test_the_kept_weights_alone_travel_with_a_bit_for_each_on_the_way_down(tmp_path: Path):
    whole = prune(rounds=1, **DENSE, max_density=0.3)
    start(tmp_path / "run", whole)
    (row,) = rows(tmp_path / "run")
    kept = sum(int(0.3 * math.prod(shape)) for shape in SHAPES.values())
    server = newest(tmp_path / "run")[0]
    others = nbytes({field: server[field] for field in ("params", "buffers")})
    assert active(server) == kept == 118
    assert row["bytes_up"] == 4 * (4 * kept + others)
    assert row["bytes_down"] == row["bytes_up"] + 4 * TOTAL // 8


def test_pruned_weights_are_zero_in_the_model_that_serves_and_active_parameters_count_the_others(tmp_path: Path):
    summary = start(tmp_path / "run", prune(**DENSE, max_density=0.3))
    server = newest(tmp_path / "run")[0]
    ctx, _ = contexts(whole := prune(**DENSE, max_density=0.3))
    view = whole.method.send(server, None, ctx())
    for name, mask in masks(server).items():
        assert torch.equal(view["params"][name] != 0, mask)
    assert summary["parameters"] == 574 and summary["active_parameters"] == 574 - TOTAL + 118


def test_squares_of_all_weights_are_sent_in_the_rounds_that_end_with_a_new_mask(tmp_path: Path):
    whole = prune(rounds=7, initial_checks=0, adjust_every=3, max_density=0.3)
    start(tmp_path / "run", whole, checkpoint_keep=100)
    up = [row["bytes_up"] for row in rows(tmp_path / "run")]
    ctx, server = contexts(whole)
    assert [whole.method.due(ctx(0, r)) for r in range(7)] == [False, False, True, False, False, True, False]
    assert up[2] - up[1] == 4 * 4 * TOTAL and up[0] == up[1]
    update = whole.method.client_update(server, {}, whole.plan.train(0, 0, 2, "train"), ctx(0, 2))
    assert {n: tuple(t.shape) for n, t in update.up["squares"].items()} == SHAPES
    outside = ~masks(server)["body.block.one.weight"]
    assert (update.up["squares"]["body.block.one.weight"][outside] > 0).any(), "squares are of pruned weights, too"


def test_no_new_mask_is_made_after_the_last_round():
    whole = prune(rounds=3, stages=2, adjust_every=3)
    net = whole.net()
    due = [whole.method.due(whole.context(net, s, round=r)) for s in range(2) for r in range(3)]
    assert due == [False, False, True, False, False, False]


def test_the_server_takes_the_mean_then_the_mask_and_what_returns_starts_at_zero():
    whole = prune(initial_checks=0, adjust_every=1, max_density=0.3, adjust_share=0.5)
    ctx, server = contexts(whole)
    replies = []
    for client in (0, 1):
        data = whole.plan.train(client, 0, 0, "train")
        replies.append(Reply(client, len(data), whole.method.client_update(server, {}, data, ctx(client)).up, {}))
    new = whole.method.server_update(server, replies, ctx())
    n0, n1 = (reply.weight for reply in replies)
    old, now = masks(server), masks(new)
    view = whole.method.send(new, None, ctx())["params"]
    mean = {n: (n0 * a.double() + n1 * b.double()) / (n0 + n1) for n, a, b in _both(replies, "values")}
    squares = {n: (n0 * a.double() + n1 * b.double()) / (n0 + n1) for n, a, b in _both(replies, "squares")}
    weights = {n: torch.zeros(old[n].shape).masked_scatter(old[n], v.float()) for n, v in mean.items()}
    times = dict.fromkeys(weights, 1.0)
    expected = whole.method.rule(weights, old, {n: s.float() for n, s in squares.items()}, times, 0)
    returned = 0
    for name in old:
        assert torch.equal(now[name], expected[name])
        assert torch.equal(view[name], torch.where(now[name] & old[name], weights[name], 0))
        returned += int((now[name] & ~old[name]).sum())
    assert returned > 0 and active(new) <= 118 + 2


def _both(replies, field):
    first, second = (reply.up[field] for reply in replies)
    return [(name, first[name], second[name]) for name in first]


def test_the_density_stays_within_its_limit_over_a_run(tmp_path: Path):
    whole = prune(rounds=6, adjust_every=1, max_density=0.25, fixed_time=3.0, adjust_share=0.6)
    start(tmp_path / "run", whole, checkpoint_keep=100)
    points = sorted((tmp_path / "run" / "checkpoints").glob("*/server.safetensors"))
    sizes = [active(load_payload(point)) for point in points]
    assert len(sizes) == 7 and all(0 < size <= 100 for size in sizes) and len(set(sizes)) > 1


def test_first_one_client_alone_prunes_and_the_others_get_nothing(tmp_path: Path):
    whole, notes = prune(rounds=1, initial_client=2), Notes()
    start(tmp_path / "run", whole, [notes])
    initial, train = rows(tmp_path / "run")
    ctx, server = contexts(whole)
    assert initial["exchange"] == "initial" and initial["clients"] == 4 and notes.notes == []
    assert initial["bytes_down"] == nbytes(server)
    assert [whole.method.send_one(server, k, ctx(k)) for k in (0, 1, 3)] == [{}] * 3
    data = whole.plan.train(2, 0, None, "initial")
    update = whole.method.prune_alone(whole.method.send_one(server, 2, ctx(2, None)), {}, data, ctx(2, None))
    assert initial["bytes_up"] == nbytes(update.up) < nbytes(server)
    checks, rest = divmod(initial["sample_visits"], 2 * len(data))
    assert 5 <= checks <= 20 and rest == 0
    assert train["bytes_up"] < 4 * nbytes({f: server[f] for f in ("params", "values", "buffers")})
    adopted = whole.method.adopt(server, [Reply(2, 1.0, update.up, {})], ctx())
    assert active(adopted) == active({"values": update.up["pruned"]}) < TOTAL


def test_checks_end_when_the_size_is_steady_or_there_are_no_more(tmp_path: Path):
    still = {"adjust_share": 0.0, "fixed_time": 0.0}  # nothing is a candidate of a full mask, so its size is steady
    for checks, options, expected in ((20, still, 5), (3, still, 3)):
        whole = prune(rounds=1, initial_checks=checks, **options)
        start(tmp_path / str(checks), whole)
        size = len(whole.plan.train(0, 0, None, "initial"))
        assert rows(tmp_path / str(checks))[0]["sample_visits"] == expected * 2 * size


def test_the_epochs_of_later_checks_see_other_orders(monkeypatch):
    seen = []
    trained = PruneFL.trained

    def watch(self, model, data, ctx, record=None):
        seen.append(tuple(k for batch in data.epoch(0, 8) for k in batch.index.tolist()))
        return trained(self, model, data, ctx, record)

    monkeypatch.setattr(PruneFL, "trained", watch)
    whole = prune(initial_checks=4)
    ctx, server = contexts(whole)
    whole.method.prune_alone(server, {}, whole.plan.train(0, 0, None, "initial"), ctx(0, None))
    assert len(set(seen)) == len(seen) == 4


def test_a_first_client_without_data_leaves_the_model_as_it_was(tmp_path: Path):
    notes = Notes()
    whole = experiment(PRUNE, cohort=1.0, num_stages=1, spec=WIDE, hollow=(0,), options={"adjust_every": 0})
    summary = start(tmp_path / "run", whole, [notes])
    assert any("initial" in note and "state kept" in note for note in notes.notes)
    assert summary["active_parameters"] == summary["parameters"]


def test_an_upload_whose_bits_do_not_fit_is_refused_in_words():
    whole = prune()
    ctx, server = contexts(whole)
    values = {name: tensor[1:] for name, tensor in server["values"].items()}
    up = {"params": server["params"], "buffers": server["buffers"], "bits": server["bits"], "pruned": values}
    with pytest.raises(PayloadError, match="values for"):
        whole.method.adopt(server, [Reply(0, 1.0, up, {})], ctx())


def test_time_by_operations_prunes_other_weights_than_time_that_is_uniform(tmp_path: Path):
    found = {}
    for time in ("macs", "uniform"):
        whole = experiment(PRUNE, cohort=1.0, num_stages=1, spec=SlidingSpec(6), options={"time": time})
        start(tmp_path / time, whole)
        found[time] = {n: len(v) for n, v in newest(tmp_path / time)[0]["values"].items()}
    assert found["macs"] != found["uniform"]


@pytest.mark.filterwarnings("ignore:prunefl follows the public code")
def test_the_public_codes_importance_squares_the_sum_in_rounds_and_single_steps_before(tmp_path: Path):
    for name, options in PRESETS.items():
        start(tmp_path / name, prune(rounds=4, adjust_every=2, **options))
    first, second = (rows(tmp_path / name) for name in PRESETS)
    assert first[:2] == second[:2], "the client that prunes alone does the same"
    assert newest(tmp_path / "paper")[0]["values"].keys() == set(SHAPES)
    assert first[3:] != second[3:]


def test_the_public_codes_preset_warns_of_what_differs():
    with pytest.warns(UserWarning, match="prunefl follows the public code where it differs"):
        method_of(PRUNE, **PRESETS["code_2022"])


def test_options_and_networks_that_cannot_work_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"initial_client must be a client from 0 to 9, got 10"):
        fedloom.run("quickstart", method={"name": "prunefl", "initial_client": 10}, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="no weights to prune"):
        fedloom.run("quickstart", method="prunefl", model={"name": "linear"}, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="max_density"):
        fedloom.run("quickstart", method={"name": "prunefl", "max_density": 0.0}, out=tmp_path / "run")


def test_a_run_tells_which_share_of_each_layers_weights_the_masks_keep(tmp_path: Path):
    start(tmp_path / "run", prune(rounds=2, max_density=0.3, adjust_every=1, initial_checks=2))
    (table,) = json.loads((tmp_path / "run" / "facts.json").read_text())["tables"]
    server = newest(tmp_path / "run")[0]
    sizes = {name: (int(mask.sum()), mask.numel()) for name, mask in masks(server).items()}
    assert table["rows"] == [f"{name}, {sizes[name][0]} of {sizes[name][1]}" for name in SHAPES]
    assert table["values"] == [[sizes[name][0] / sizes[name][1]] for name in SHAPES]
    assert f"keep {active(server)} of the {TOTAL} weights" in table["note"] and active(server) <= 0.3 * TOTAL


def test_shares_are_those_of_the_masks_whatever_values_the_weights_have():
    ctx, server = contexts(prune(**DENSE))
    mask = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in SHAPES.items()}
    for found, count in zip(mask.values(), (4, 48, 0), strict=True):
        found.view(-1)[:count] = True
    params = {**server["params"], **{name: torch.zeros(shape) for name, shape in SHAPES.items()}}
    given = {**packed(params, mask), "buffers": server["buffers"]}
    (table,) = prune().method.facts(given, {}, ctx())
    assert table.values == [[0.25], [0.25], [0.0]]
    assert table.rows[0] == "body.layers.0.weight, 4 of 16"
    (table,) = prune(**DENSE).method.facts(server, {}, ctx())
    assert table.values == [[1.0]] * 3
