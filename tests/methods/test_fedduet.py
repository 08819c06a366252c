"""Fed-Duet: which experts train when, what stays with whom, and the released code's defects only when asked for."""

from __future__ import annotations

import dataclasses
import json
import warnings
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch

from fedloom.core import ConfigError
from fedloom.core.payload import digest, not_finite
from fedloom.engine.checkpoint import newest
from fedloom.methods import duet_stages as stages
from fedloom.methods.duet import FedDuet
from fedloom.methods.fedduet import ABLATIONS, PRESETS, fedduet
from fedloom.models.clip.anchors import noisy_pool
from fedloom.models.clip.network import ClipNetwork
from fedloom.models.clip.words import fixed
from toys.clip import LENGTH, toy_clip
from toys.federation import experiment, local
from toys.running import rows, start

DUET = "fedloom.methods.fedduet:fedduet"
SMALL: dict[str, Any] = {
    "experts": 3, "bottleneck": 4, "shared_width": 4, "pooled": 16, "heads": 2, "pool_size": 6, "dispatch": 2,
    "gate_hidden": 8,
}  # fmt: skip
PLAN: dict[str, Any] = {"num_clients": 3, "num_stages": 2, "rounds": 4, "per_class": 16, "cohort": 1.0}
OF = stages.COMPONENTS


@dataclass(frozen=True)
class Noted(FedDuet):
    """Notes every client's call and every state of the server."""

    calls: list[Any] = field(default_factory=list, compare=False)
    servers: list[Any] = field(default_factory=list, compare=False)

    def client_update(self, down, state, data, ctx):
        update = super().client_update(down, state, data, ctx)
        self.calls.append((ctx.stage.index, ctx.round, ctx.client, down, state, update))
        return update

    def server_update(self, server, replies, ctx):
        new = super().server_update(server, replies, ctx)
        read = [(reply.weight, {n: t.clone() for n, t in reply.up["params"].items()}) for reply in replies]
        self.servers.append((ctx.stage.index, ctx.round, server, read, new))
        return new


def method_of(**options: Any) -> FedDuet:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fedduet(local=local(batch_size=16, epochs=1), **{**SMALL, **options})


def noted(path, *, plan=None, **options):
    given = method_of(**options)
    parts = {f.name: getattr(given, f.name) for f in dataclasses.fields(given)}
    whole = dataclasses.replace(experiment(DUET, **{**PLAN, **(plan or {})}), method=Noted(**parts), rebuild=None)
    return start(path, whole, checkpoint_every=1), whole.method


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The default method on three clients, two tasks of four rounds."""
    folder = tmp_path_factory.mktemp("duet") / "run"
    summary, method = noted(folder)
    return folder, summary, method


def component(tree, *names):
    return stages.part(tree, [OF[name] for name in names])


def test_the_adapted_model_is_the_clip_at_the_start():
    clip, parts = toy_clip(), method_of(prompts=False).build
    x = torch.randn(7, 2)
    adapted, plain = parts(clip).eval(), ClipNetwork(clip, fixed(clip.words, "a photo of a {}.", LENGTH)).eval()
    for name in ("feats", "texts", "logits"):  # pictures take another path through the kernels, texts the same
        torch.testing.assert_close(adapted(x)[name], plain(x)[name], atol=1e-6, rtol=0)
    assert torch.equal(adapted(x)["texts"], plain(x)["texts"])
    tokens, layers = clip.towers.image_start(x), list(adapted.image_adapters.values())
    with torch.no_grad():
        found = clip.towers.image_through(tokens, layers)[0]
        assert torch.equal(found, clip.towers.image_through(tokens, [None, None])[0])
    assert adapted(x)["image_gates"].count_nonzero(-1).max() == 2


def test_adapters_train_in_the_first_rounds_and_prompts_in_the_rest(run):
    _, _, method = run
    for _, number, _, down, state, update in method.calls:
        start_of = {**down["params"], **(state.get("personal", {}) if number else {})}
        end = {**down["params"], **update.up["params"], **update.state["personal"]}
        adapters = component(start_of, "shared adapters", "routers", "local adapters")
        prompts = component(start_of, "local prompt", "fusion")
        still, moving = (prompts, adapters) if number < 2 else (adapters, prompts)
        assert all(torch.equal(end[name], value) for name, value in still.items())
        assert any(not torch.equal(end[name], value) for name, value in moving.items())


def test_local_adapters_change_between_rounds_and_are_what_the_client_ended_with(run):
    _, _, method = run
    for client in range(3):
        own = [c for c in method.calls if c[2] == client]
        for before, after in pairwise(own):
            if before[0] == after[0]:
                assert digest({"p": after[4]["personal"]}) == digest({"p": before[5].state["personal"]})
        first, second = (component(c[5].state["personal"], "local adapters") for c in own[:2])
        ups = [name for name in first if name.endswith("up_weight")]
        assert ups and any(first[name].any() for name in ups)
        assert any(not torch.equal(first[name], second[name]) for name in ups)


def test_only_the_first_message_of_a_task_brings_what_clients_keep(run):
    _, _, method = run
    for _, number, _, down, state, _ in method.calls:
        kept = component(down["params"], "local adapters", "local prompt", "fusion")
        assert bool(kept) is (number == 0)
        assert number == 0 or set(down["params"]) | set(state["personal"]) == set(method.servers[0][2]["params"])


def test_messages_hold_what_is_shared_and_in_the_last_round_everything(run):
    _, _, method = run
    shared, own = ("shared adapters", "routers"), ("local adapters", "local prompt", "fusion")
    for _, number, _, down, _, update in method.calls:
        sent, whole = update.up["params"], {**down["params"], **update.state["personal"]}
        wanted = {0: shared, 1: shared, 2: (), 3: own}[number]
        assert sent.keys() == component(whole, *wanted).keys()
        assert update.up["summary"]["feature"].norm() <= 1 + 1e-6
        assert set(update.state["personal"]) == set(component(whole, *own))


def test_a_task_starts_from_the_averages_of_what_was_local(run):
    _, _, method = run
    last = next(s for s in method.servers if s[:2] == (0, 3))
    total = sum(weight for weight, _ in last[3])
    for name, value in component(last[4]["params"], "local prompt", "local adapters").items():
        torch.testing.assert_close(value, sum(weight * up[name] for weight, up in last[3]) / total)
    for _, _, _, down, _, update in (c for c in method.calls if c[:2] == (1, 0)):
        start_of = component(down["params"], "local prompt")
        assert torch.equal(start_of["context"], last[4]["params"]["context"])
        assert torch.equal(update.state["personal"]["context"], start_of["context"])  # adapters train first


def test_every_client_gets_distinct_prompts_of_the_pool_and_their_use_is_counted(run):
    folder, _, method = run
    server = method.servers[-1][4]
    assert server["usage"]["count"].sum((2,)).tolist() == [[8, 8]] * 3  # two prompts in four rounds
    assert all(len(set(row.tolist())) == 2 for row in server["clients"]["index"])
    pool = server["pool"]["prompts"]
    for *_, down, _, _ in method.calls:
        assert all(any(torch.equal(p, q) for q in pool) for p in down["prompts"]["shared"])
    assert digest(newest(folder)[0]) == digest(server)


def test_the_stability_target_is_the_routing_at_the_end_of_the_last_task(run):
    _, _, method = run
    for client in range(3):
        first = [c for c in method.calls if c[0] == 0 and c[2] == client]
        second = [c for c in method.calls if c[0] == 1 and c[2] == client]
        assert all(not c[5].state.get("target") for c in first)
        ended = first[-1][5].state["routing"]
        assert set(ended) == {"image", "text"}
        for call in second:
            assert all(torch.equal(call[5].state["target"][k], ended[k]) for k in ended)


def test_shared_prompts_influence_predictions_unless_the_released_rule_is_asked_for():
    x = torch.randn(9, 2)
    for served, differs in (("fused", True), ("shared", True), ("local", False)):
        whole = experiment(DUET, options=SMALL, **PLAN)
        method = method_of(served=served)
        ctx = dataclasses.replace(whole, method=method, rebuild=None).context
        net_ctx = ctx(dataclasses.replace(whole, method=method, rebuild=None).net(), 0)
        server = method.init_server(net_ctx)
        down = method.send(server, None, net_ctx)
        other = {**down, "prompts": {"shared": down["prompts"]["shared"].flip(-1)}}
        a, b = (method.predict(d, {}, x, net_ctx) for d in (down, other))
        assert torch.equal(a, b) is not differs


def test_the_released_loop_never_trains_local_adapters_and_says_so(tmp_path):
    with pytest.warns(UserWarning, match="follows the public code") as told:
        fedduet(local=local(), **{**SMALL, **PRESETS["code_2026"]})
    said = " ".join(str(w.message) for w in told)
    for words in (
        "local adapters never learn",
        "out of every prediction",
        "routes all classes alike",
        "in a tie",
        "knows no concepts",
    ):
        assert words in said
    _, method = noted(tmp_path / "run", **PRESETS["code_2026"])
    ends = [update.state["personal"] for _, number, *_, update in method.calls if number == 3]
    trees = [*ends, *(new["params"] for *_, new in method.servers)]
    ups = [
        tensor
        for tree in trees
        for name, tensor in component(tree, "local adapters").items()
        if name.endswith("up_weight")
    ]
    assert ups and all(not tensor.any() for tensor in ups)
    shared = component(method.servers[-1][4]["params"], "shared adapters")
    assert any(tree.any() for name, tree in shared.items() if name.endswith("up_weight"))


def test_with_nothing_kept_and_everything_trained_it_is_fedavg_of_the_network(tmp_path):
    _, method = noted(tmp_path / "run", plan={"num_clients": 1, "num_stages": 1, "rounds": 2}, kept="nothing",
                      train="together")  # fmt: skip
    for (*_, new), (*_, update) in zip(method.servers, method.calls, strict=True):
        assert digest({"p": new["params"]}) == digest({"p": update.up["params"]})
        assert not update.state["personal"]


@pytest.mark.parametrize(("name", "missing"), [("no-adapters", "*_adapters.*"), ("no-prompts", "context")])
def test_an_ablation_takes_a_kind_of_expert_away(tmp_path, name, missing):
    _, method = noted(tmp_path / "run", plan={"rounds": 2, "num_stages": 1}, **ABLATIONS[name])
    params = method.servers[-1][4]["params"]
    assert params and not stages.matching(params, [missing])
    moved = [n for n in params if any(not torch.equal(params[n], s[2]["params"][n]) for s in method.servers)]
    assert moved
    sent = method.calls[0][3]["prompts"]["shared"]
    assert len(sent) == (0 if name == "no-prompts" else 2)


def test_noise_on_the_summary_changes_what_is_dispatched_and_nothing_of_training(tmp_path):
    one = {"num_stages": 1, "rounds": 1}
    _, plain = noted(tmp_path / "a", plan=one)
    _, noisy = noted(tmp_path / "b", plan=one, noise_sigma=10.0)
    for (*_, a), (*_, b) in zip(plain.calls, noisy.calls, strict=True):
        assert digest({"p": a.up["params"]}) == digest({"p": b.up["params"]})
        assert b.up["summary"]["feature"].norm() > 50 > 1 >= a.up["summary"]["feature"].norm()


def test_the_pool_and_the_gate_live_on_or_start_anew_with_a_task(tmp_path):
    for across, same in (("persist", False), ("reset", True)):
        _, method = noted(tmp_path / across, plan={"rounds": 1}, across_tasks=across)
        first, after = method.servers[0][2], method.servers[0][4]
        assert (digest({"g": first["gate"]}) == digest({"g": after["gate"]})) is same
        assert bool(after["clients"]["known"].any()) is not same


def test_a_pool_that_starts_anew_is_around_the_servers_prompt_whoever_trained_last(tmp_path):
    _, method = noted(tmp_path / "run", plan={"rounds": 1}, across_tasks="reset", anchors="noise")
    for *_, before, _, after in method.servers:
        assert not torch.equal(before["params"]["context"], after["params"]["context"])
        assert torch.equal(after["pool"]["prompts"], noisy_pool(after["params"]["context"], 6, 0))


def test_a_client_without_examples_uploads_finite_numbers():
    whole = experiment(DUET, options=SMALL, **{**PLAN, "hollow": (0,)})
    ctx = whole.context(whole.net(), 0, round=0, client=0)
    down = whole.method.send(whole.method.init_server(ctx), 0, ctx)
    update = whole.method.client_update(down, {}, whole.plan.train(0, 0, 0, "train"), ctx)
    assert not_finite(update.up) is None and not_finite(update.state) is None
    assert all(torch.equal(tensor, down["params"][name]) for name, tensor in update.up["params"].items())


@pytest.mark.parametrize(
    ("train", "rounds", "share", "wanted"),
    [
        ("halves", 5, 0.5, "aappp"),
        ("halves", 4, 0.75, "aaap"),
        ("halves", 1, 0.5, "b"),
        ("alternate", 3, 0.5, "apa"),
        ("together", 2, 0.5, "bb"),
    ],
)
def test_rounds_are_split_as_asked(train, rounds, share, wanted):
    letters = {(stages.ADAPTERS,): "a", (stages.PROMPTS,): "p", ((*stages.ADAPTERS, *stages.PROMPTS),): "b"}
    assert "".join(letters[stages.STAGES[train](r, rounds, share)] for r in range(rounds)) == wanted


def test_both_phases_inside_a_round_share_its_epochs():
    names = ["image_adapters.0.local.up_weight", "context"]
    found = stages.phases(stages.inside(0, 4, 0.5), names, 3)
    assert [(p.trainable, p.epochs) for p in found] == [(stages.ADAPTERS, 2), (stages.PROMPTS, 1)]
    with pytest.raises(ConfigError, match=r"training\.local_epochs is 1"):
        stages.phases(stages.inside(0, 4, 0.5), names, 1)
    assert len(stages.phases(stages.inside(0, 4, 0.5), ["context"], 1)) == 1
    with pytest.raises(ConfigError, match=r"training\.local_epochs is 1"):
        fedduet(local=local(epochs=1), train="inside")
    assert fedduet(local=local(epochs=1), train="inside", prompts=False) is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dispatch": 9}, "dispatch is 9 and the pool holds 6"),
        ({"pooled": 48}, "pooled is 48, which does not divide the joint width 128"),
        ({"adapters": False, "prompts": False}, "trains nothing"),
        ({"gate_target": "attention", "fusion": "mean"}, "needs the attention of the fusion"),
        ({"pool_size": 5000, "dispatch": 2}, "5000"),
        ({"vocabulary": "nowhere"}, "nowhere"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        noted(tmp_path / "run", **options)


def test_clients_have_views_of_their_own_and_the_rows_tell_them(run):
    folder, summary, _ = run
    assert summary["per_client_accuracy_mean"] is not None
    assert all(row["train/loss"] > 0 for row in rows(folder))


def test_the_report_tells_prompts_routing_and_what_each_component_costs(run):
    folder, _, _ = run
    tables = {t["title"]: t for t in json.loads((folder / "facts.json").read_text())["tables"]}
    cost = tables["Sent by component, kB"]
    table = {
        row: dict(zip(cost["columns"], values, strict=True))
        for row, values in zip(cost["rows"], cost["values"], strict=True)
    }
    shared = 2 * 4 * ((2 * 4 * 16 + 4 + 16) + (2 * 4 * 8 + 4 + 8)) / 1000  # two blocks of width 16 and of width 8
    assert (
        table["shared adapters"]["down, later"]
        == table["shared adapters"]["up, round 1 of a task"]
        == pytest.approx(shared)
    )
    assert table["local prompt"]["up, round 1 of a task"] == 0 < table["local prompt"]["up, round 4 of a task"]
    assert table["prompts"]["down, later"] == pytest.approx(2 * 4 * 8 * 4 / 1000)
    assert table["local adapters"]["down, later"] == 0 < table["local adapters"]["down, first"]
    assert "Experts by layer" in tables and "Use of the prompt pool" in tables
