"""pFedMoAP: the invariants of the specification's section 3, its two optimisers, and whole runs against PromptFL."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedloom.core import ConfigError, Reply
from fedloom.core.payload import nbytes
from fedloom.engine.checkpoint import newest
from fedloom.local import SGD, LocalSGD, Schedule
from fedloom.methods.pfedmoap import gate_of, joined, pfedmoap
from toys.federation import experiment
from toys.running import start

NAME, PROMPTFL = "fedloom.methods.pfedmoap:pfedmoap", "fedloom.methods.promptfl:promptfl"
X = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))


def whole(**options):
    return experiment(NAME, options={"n_ctx": 2, **options})


def table(known=(True, True, True, True)):
    """A server's state whose clients' prompts are 0, 1, 3 and 7 times a pattern that begins with 1."""
    pattern = torch.randn(2, 8, generator=torch.Generator().manual_seed(3))
    pattern[0, 0] = 1.0
    last = torch.tensor([0.0, 1.0, 3.0, 7.0]).view(4, 1, 1) * pattern
    prompts = {"last": last, "known": torch.tensor(known)}
    return {"params": {"context": 0.1 * pattern}, "buffers": {}, "prompts": prompts}


def sent(server, client, **options):
    """Positions of the experts that a client is sent."""
    toy = whole(**options)
    down = toy.method.send(server, client, toy.context(toy.net(), 0, round=1, client=client))
    return down["experts"]["prompts"][:, 0, 0].tolist() if "experts" in down else None


def test_a_client_is_sent_the_nearest_prompts_and_never_its_own():
    assert sent(table(), 0, experts=3) == [1.0, 3.0]
    assert sent(table(), 2, experts=3) == [0.0, 1.0]
    assert sent(table(), 3, experts=2) == [3.0]
    for choose in ("nearest", "random"):
        for client, own in enumerate((0.0, 1.0, 3.0, 7.0)):
            assert set(sent(table(), client, choose=choose)) == {0.0, 1.0, 3.0, 7.0} - {own}


def test_fewer_known_prompts_are_all_sent_and_none_to_newcomers_or_the_global_view():
    assert sent(table((True, False, False, True)), 0) == [7.0]
    assert sent(table((True, False, False, False)), 0) is None
    assert sent(table((False, True, True, True)), 0) is None
    assert sent(table(), None) is None and sent(table(), 0, experts=1) is None


def test_m_prompts_travel_down_and_one_up():
    toy = whole(experts=3)
    ctx = toy.context(toy.net(), 0, round=1, client=0)
    down = toy.method.send(table(), 0, ctx)
    assert nbytes(down) == 3 * 2 * 8 * 4
    update = toy.method.client_update(down, toy.method.init_client(ctx), toy.plan.train(0, 0, 1, "train"), ctx)
    assert nbytes(update.up) == 2 * 8 * 4 and set(update.up) <= set(toy.method.reveals)


def test_the_server_averages_by_examples_and_notes_each_prompt():
    replies = [
        Reply(1, 1.0, {"params": {"context": torch.zeros(2, 8)}, "buffers": {}}, {}),
        Reply(3, 3.0, {"params": {"context": torch.full((2, 8), 4.0)}, "buffers": {}}, {}),
    ]
    new = whole().method.server_update(table((True, False, True, False)), replies, None)
    assert torch.equal(new["params"]["context"], torch.full((2, 8), 3.0))
    assert new["prompts"]["last"][:, 0, 0].tolist() == [0.0, 0.0, 3.0, 4.0] and new["prompts"]["known"].all()


def test_a_first_participation_is_promptfl_and_leaves_the_attention_alone():
    toy, plain = whole(), experiment(PROMPTFL, options={"n_ctx": 2})
    ctx, theirs = (e.context(e.net(), 0, round=0, client=0) for e in (toy, plain))
    data, state = toy.plan.train(0, 0, 0, "train"), toy.method.init_client(ctx)
    update = toy.method.client_update(toy.method.send(toy.method.init_server(ctx), 0, ctx), state, data, ctx)
    other = plain.method.client_update(plain.method.init_server(theirs), {}, data, theirs)
    assert torch.equal(update.up["params"]["context"], other.up["params"]["context"])
    assert all(torch.equal(tensor, state["gate"][name]) for name, tensor in update.state["gate"].items())


@pytest.mark.parametrize("experts", [1, 10])
def test_without_experts_a_run_is_promptfl(experts, tmp_path):
    ours = start(tmp_path / "ours", whole(experts=experts))
    theirs = start(tmp_path / "theirs", experiment(PROMPTFL, options={"n_ctx": 2}))
    assert (ours["params_sha256"] == theirs["params_sha256"]) is (experts == 1)
    if experts == 1:
        assert ours["accuracy_matrix"] == theirs["accuracy_matrix"]
        assert (ours["bytes_up"], ours["bytes_down"]) == (theirs["bytes_up"], theirs["bytes_down"])


def test_prompt_and_attention_move_in_the_same_steps_by_optimisers_of_their_own():
    """Against torch: SGD with momentum and a cosine for the prompt, plain SGD 0.03 for the attention."""
    training = {"optimizer": SGD(lr=0.2, momentum=0.5, weight_decay=0.01), "schedule": Schedule("cosine", per="step")}
    toy = whole(gate_lr=0.03, training=training)
    ctx = toy.context(toy.net(), 0, round=1, client=0)
    data, down, state = toy.plan.train(0, 0, 1, "train"), toy.method.send(table(), 0, ctx), toy.method.init_client(ctx)
    update = toy.method.client_update(down, state, data, ctx)
    net = toy.net().module
    net.show(ctx.stage.classes)
    net.receive(down["experts"]["prompts"])
    net.load_state_dict(joined(down, state)["params"], strict=False)
    prompt = torch.optim.SGD([net.context], lr=0.2, momentum=0.5, weight_decay=0.01)
    gate = torch.optim.SGD(net.fusion.parameters(), lr=0.03)
    steps = [batch for epoch in range(2) for batch in data.epoch(epoch, 8)]
    for step, batch in enumerate(steps):
        prompt.param_groups[0]["lr"] = 0.2 * toy.method.local.schedule.factor(ctx, step, len(steps))
        loss = nn.functional.cross_entropy(net(batch.x)["logits"], batch.y)
        prompt.zero_grad()
        gate.zero_grad()
        loss.backward()
        prompt.step()
        gate.step()
    torch.testing.assert_close(update.up["params"]["context"], net.context.detach())
    for name, tensor in gate_of({n: p for n, p in net.named_parameters() if p.requires_grad}).items():
        torch.testing.assert_close(update.state["gate"][name], tensor.detach(), rtol=1e-4, atol=1e-6)
        assert not torch.equal(tensor, state["gate"][name])


def test_clients_predict_with_their_own_attention_and_experts_and_the_rest_with_the_prompt_alone():
    toy = whole()
    method, server = toy.method, table((True, True, True, False))
    ctx = toy.context(toy.net(), 0, client=0)
    fresh = method.init_client(ctx)
    trained = {"gate": {name: tensor + 0.1 for name, tensor in fresh["gate"].items()}}

    def scores(client, state):
        return method.predict(method.send(server, client, ctx), state, X, ctx)

    with_experts, after = scores(0, trained), scores(None, trained)
    assert torch.isneginf(after[:, 2:]).all()
    assert not torch.allclose(with_experts, after)
    assert not torch.allclose(with_experts, scores(0, fresh)), "the attention is the client's own"
    assert not torch.allclose(with_experts, scores(1, trained)), "so are the experts"
    assert torch.equal(after, scores(3, trained)), "a client that has not taken part has the averaged prompt"
    assert torch.equal(after, scores(None, fresh)) and torch.equal(with_experts, scores(0, trained))


def test_the_attention_goes_on_from_where_it_was_in_every_round(tmp_path, monkeypatch):
    toy = whole()
    method, kept = type(toy.method), {}
    train = method.client_update

    def client_update(self, down, state, data, ctx):
        for name, tensor in kept.get(ctx.client, {}).items():
            assert torch.equal(tensor, state["gate"][name])
        update = train(self, down, state, data, ctx)
        moved = any(not torch.equal(tensor, state["gate"][name]) for name, tensor in update.state["gate"].items())
        assert moved is ("experts" in down)
        kept[ctx.client] = {name: tensor.clone() for name, tensor in update.state["gate"].items()}
        return update

    monkeypatch.setattr(method, "client_update", client_update)
    start(tmp_path / "run", toy)
    server, _ = newest(tmp_path / "run")
    assert server["prompts"]["known"].nonzero().flatten().tolist() == sorted(kept)
    assert all(server["prompts"]["last"][client].any() for client in kept)


def test_an_option_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="unknown choose 'near'"):
        pfedmoap(local=LocalSGD(), choose="near")


def test_the_prompt_alone_follows_the_training_section():
    method = pfedmoap(local=LocalSGD(SGD(lr=0.5)), gate_lr=0.02)
    assert method.local.optimizer == SGD(lr=0.5)
    (group,) = method.local.groups
    assert (group.names, group.optimizer, group.schedule) == (("fusion.*",), SGD(lr=0.02), Schedule())
    assert replace(method, experts=3) != method
