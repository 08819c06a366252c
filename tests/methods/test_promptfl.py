"""PromptFL: the invariants of the specification's section 6, contexts per class, and CoOp written by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fedloom.core import ConfigError, Reply
from fedloom.engine.checkpoint import newest
from fedloom.local import SGD, LocalSGD, Schedule
from fedloom.methods.promptfl import promptfl
from fedloom.models.clip.network import ClipNetwork
from fedloom.models.clip.prompted import ClassPrompted, Prompted
from fedloom.models.clip.words import learnable
from toys.clip import toy_clip
from toys.federation import experiment
from toys.running import start

NAME = "fedloom.methods.promptfl:promptfl"
X = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))


def reply(client, weight, context, holds=None):
    up = {"params": {"context": torch.as_tensor(context)}, "buffers": {}}
    up |= {} if holds is None else {"holds": {"classes": torch.tensor(holds)}}
    return Reply(client, weight, up, {})


def merged(method, replies, old=9.0):
    old = {"params": {"context": torch.full((2, 3), old)}, "buffers": {}}
    return method.server_update(old, replies, None)["params"]["context"]


def test_clients_that_end_alike_are_averaged_to_what_each_ended_with():
    same = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(merged(promptfl(local=LocalSGD()), [reply(k, w, same) for k, w in ((0, 3.0), (1, 7.0))]), same)


def test_contexts_0_and_4_of_1_and_3_examples_make_3():
    replies = [reply(0, 1.0, torch.zeros(2, 3)), reply(1, 3.0, torch.full((2, 3), 4.0))]
    assert torch.equal(merged(promptfl(local=LocalSGD()), replies), torch.full((2, 3), 3.0))
    assert torch.equal(merged(promptfl(local=LocalSGD(), uniform=True), replies), torch.full((2, 3), 2.0))


def test_the_order_of_the_clients_is_irrelevant():
    draws = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(2))
    replies = [reply(k, k + 1.0, draws[k]) for k in range(5)]
    method = promptfl(local=LocalSGD())
    torch.testing.assert_close(merged(method, replies), merged(method, replies[::-1]), rtol=0, atol=1e-7)


def test_only_the_context_has_a_gradient_and_travels():
    net = Prompted(4)(toy_clip())
    net(X)["logits"].square().sum().backward()
    assert [n for n, p in net.named_parameters() if p.grad is not None] == ["context"]
    assert (net.context.grad != 0).all()
    whole = experiment(NAME)
    server = whole.method.init_server(whole.context(whole.net(), 0))
    assert {f: list(tree) for f, tree in server.items()} == {"params": ["context"], "buffers": []}


def test_the_prompt_of_vit_b_16_has_8192_numbers_around_zero():
    net = Prompted()(toy_clip(text_width=512))
    assert net.context.shape == (16, 512) and net.context.numel() == 8192
    assert net.context.std().item() == pytest.approx(0.02, rel=0.05) and net.context.mean().abs() < 1e-3
    assert torch.equal(net.context, Prompted()(toy_clip(text_width=512)).context)
    assert not torch.equal(net.context, Prompted()(toy_clip(seed=1, text_width=512)).context)


@torch.no_grad()
@pytest.mark.parametrize("build", [Prompted(4), ClassPrompted(4)])
def test_adding_a_class_leaves_the_features_of_the_others(build):
    few, more = build(toy_clip(3)).eval(), build(toy_clip(6)).eval()
    if build == ClassPrompted(4):
        more.context[:3] = few.context
    torch.testing.assert_close(few(X)["texts"], more(X)["texts"][:3], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(few(X)["logits"], more(X)["logits"][:, :3], rtol=1e-5, atol=1e-5)
    more.show([0, 1, 2])
    assert more(X)["logits"][:, :3].argmax(1).tolist() == few(X)["logits"].argmax(1).tolist()
    assert torch.isneginf(more(X)["logits"][:, 3:]).all()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_client_is_centralised_coop(momentum, tmp_path):
    """Two rounds of two epochs; optimiser state is fresh in every round, the rate a cosine over the rounds."""
    training = {"optimizer": SGD(lr=0.5, momentum=momentum), "schedule": Schedule("cosine")}
    options = {"n_ctx": 3, "training": training}
    plan = {"num_clients": 1, "num_stages": 1, "cohort": 1}
    whole = experiment(NAME, options=options, **plan)
    start(tmp_path / "run", whole)
    clip = toy_clip()
    phrases = learnable(clip.words, 3, clip.towers.length)
    context = torch.nn.Parameter(Prompted(3)(clip).context.detach().clone())
    for round in range(2):
        optimizer = torch.optim.SGD([context], lr=0.5 * (1 + [1, 0][round]) / 2, momentum=momentum)
        data = whole.plan.train(0, 0, round, "train")
        for epoch in range(2):
            for batch in data.epoch(epoch, 8):
                with torch.no_grad():
                    feats = torch.nn.functional.normalize(clip.towers.model.visual(batch.x), dim=-1)
                texts, _ = clip.towers.text(clip.towers.embedded(phrases, context), phrases.eot)
                loss = torch.nn.functional.cross_entropy(10 * feats @ texts.T, batch.y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    server, _ = newest(tmp_path / "run")
    torch.testing.assert_close(server["params"]["context"], context.detach(), rtol=1e-3, atol=1e-5)
    assert (context - Prompted(3)(clip).context).abs().max() > 0.01


def test_positions_are_three_prompts():
    logits = [Prompted(4, position)(toy_clip()).eval()(X)["logits"] for position in ("end", "middle", "front")]
    assert len({tuple(scores.flatten().tolist()) for scores in logits}) == 3


def test_a_context_that_leaves_no_room_for_a_name_is_refused_in_words():
    with pytest.raises(ConfigError, match=r"'red maple tree' with 19 context vectors takes 25 tokens"):
        Prompted(19)(toy_clip())


def ctx(seen, classes=4):
    unseen = torch.tensor([c for c in range(classes) if c not in seen], dtype=torch.long)
    return SimpleNamespace(num_classes=classes, unseen=unseen)


def class_server(context, started):
    return {
        "params": {"context": context},
        "buffers": {},
        "started": {"classes": torch.tensor(started, dtype=torch.bool)},
    }


def test_the_context_of_a_class_is_averaged_over_the_clients_that_hold_it():
    method = promptfl(local=LocalSGD(), class_specific=True)
    server = class_server(torch.full((4, 1, 2), 9.0), [1, 1, 0, 0])
    replies = [
        reply(0, 1.0, torch.zeros(4, 1, 2), [True, True, False, False]),
        reply(1, 3.0, torch.full((4, 1, 2), 4.0), [True, False, False, False]),
    ]
    new = method.server_update(server, replies, ctx([0, 1]))
    assert new["params"]["context"][:, 0, 0].tolist() == [3.0, 0.0, 9.0, 9.0]


def test_classes_that_arrive_start_from_the_mean_of_those_before_them():
    method = promptfl(local=LocalSGD(), class_specific=True)
    context = torch.tensor([1.0, 3.0, 50.0, 60.0]).view(4, 1, 1)
    first = method.send(class_server(context, [0, 0, 0, 0]), 0, ctx([0, 1]))
    assert torch.equal(first["params"]["context"], context), "in the first stage there is nothing to start from"
    later = class_server(context, [1, 1, 0, 0])
    assert method.send(later, 0, ctx([0, 1, 2]))["params"]["context"].flatten().tolist() == [1.0, 3.0, 2.0, 60.0]
    nobody = [reply(0, 1.0, torch.full((4, 1, 1), 7.0), [True, False, False, False])]
    new = method.server_update(later, nobody, ctx([0, 1, 2]))
    assert new["params"]["context"].flatten().tolist() == [7.0, 3.0, 2.0, 60.0]
    assert new["started"]["classes"].tolist() == [True, True, True, False]


def test_clients_tell_which_classes_they_hold_and_train_the_rest_as_negatives():
    whole = experiment(NAME, options={"class_specific": True, "n_ctx": 2, "label_scope": "seen"})
    context = whole.context(whole.net(), 1, round=0, client=1)
    data = whole.plan.train(1, 1, 0, "train")
    down = whole.method.send(whole.method.init_server(context), 1, context)
    update = whole.method.client_update(down, {}, data, context)
    assert update.up["holds"]["classes"].nonzero().flatten().tolist() == list(data.classes) == [2, 3]
    moved = (update.up["params"]["context"] != down["params"]["context"]).flatten(1).any(1)
    assert moved.tolist() == [True] * 4 + [False] * 2


def test_training_scores_the_tasks_classes_and_evaluation_all_that_arrived():
    whole = experiment(NAME, options={"n_ctx": 2})
    context = whole.context(whole.net(), 1, round=0, client=1)
    net: ClipNetwork = context.net.module
    server = whole.method.init_server(context)
    whole.method.client_update(server, {}, whole.plan.train(1, 1, 0, "train"), context)
    assert net.shown.tolist() == [2, 3]
    scores = whole.method.predict(server, {}, X, context)
    assert net.shown.tolist() == [0, 1, 2, 3] and torch.isneginf(scores[:, 4:]).all()
    replace(whole.method, label_scope="seen").client_update(server, {}, whole.plan.train(1, 1, 0, "train"), context)
    assert net.shown.tolist() == [0, 1, 2, 3]
