"""MOON: its loss by hand, which models it contrasts, and where it is FedAvg."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fedloom.core import ConfigError, Net
from fedloom.core.payload import digest
from fedloom.engine.checkpoint import newest
from fedloom.engine.store import ClientStore
from fedloom.local import SGD
from fedloom.methods.fedavg import fedavg
from fedloom.methods.moon import PREVIOUS, moon
from fedloom.models.projection import projected_classifier
from toys.federation import BlobSpec, experiment, local
from toys.running import rows, start

MOON, AVG = "fedloom.methods.moon:moon", "fedloom.methods.fedavg:fedavg"
SMALL = {"out_dim": 6}


@dataclass(frozen=True)
class ProjectedSpec(BlobSpec):
    """The blobs' network with MOON's projection, for FedAvg."""

    def classifier(self):
        return projected_classifier(self, 6)


def at_work(norm=True, **options):
    """A context and the data of a client, and MOON with one step of the whole data."""
    whole = experiment(MOON, spec=BlobSpec(norm=norm), options={**SMALL, **options})
    method = moon(local=local(optimizer=SGD(lr=0.5), epochs=1, batch_size=1000), **{**SMALL, **options})
    return whole.context(whole.net(), 0, round=0, client=0), whole.plan.train(0, 0, 0, "train"), method


def model_of(method, seed, norm=True):
    return Net(lambda: method.module(BlobSpec(seed=seed, norm=norm))).fresh()


def as_previous(model):
    return dict(zip(PREVIOUS, (model["params"], model["buffers"]), strict=True))


@pytest.mark.parametrize("head", ["projection", "none"])
def test_one_step_follows_the_gradient_of_the_loss_written_by_hand(head):
    ctx, data, method = at_work(norm=False, head=head, mu=2.0, tau=0.7)
    down, previous, start_ = (model_of(method, seed, norm=False) for seed in (1, 2, 1))
    end = method.client_update(down, as_previous(previous), data, ctx)
    x, y = data.stored(torch.arange(len(data)))
    module = method.module(BlobSpec(norm=False))
    w = {name: tensor.clone().requires_grad_() for name, tensor in start_["params"].items()}
    out = torch.func.functional_call(module, w, x)
    near, far = (torch.func.functional_call(module, m["params"], x)["feats"] for m in (down, previous))
    cosines = [torch.nn.functional.cosine_similarity(out["feats"], z.detach(), eps=1e-30) for z in (near, far)]
    contrast = -(torch.stack(cosines, 1) / 0.7).log_softmax(1)[:, 0].mean()
    seen = list(ctx.stage.seen)
    loss = torch.nn.functional.cross_entropy(out["logits"][:, seen], y) + 2.0 * contrast
    loss.backward()
    assert end.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, tensor in w.items():
        torch.testing.assert_close(end.up["params"][name], (tensor - 0.5 * tensor.grad).detach(), msg=name)


def test_in_its_first_participation_a_client_has_no_contrastive_loss():
    ctx, data, method = at_work()
    down = model_of(method, 1)
    ours = method.client_update(down, method.init_client(ctx), data, ctx)
    theirs = fedavg(local=method.local).client_update(down, {}, data, ctx)
    assert digest(ours.up) == digest(theirs.up) and ours.metrics == theirs.metrics


def test_the_downloaded_model_in_the_place_of_the_previous_one_adds_mu_log_2_and_moves_nothing():
    ctx, data, method = at_work()
    down = model_of(method, 1)
    none, same = (method.client_update(down, state, data, ctx) for state in ({}, as_previous(down)))
    ctx.bind(down["params"], down["buffers"])
    near = ctx.teacher(down["params"], down["buffers"])
    x, _ = data.stored(torch.arange(len(data)))
    assert not torch.allclose(ctx.apply(x)["feats"], near(x)["feats"]), "training and evaluation mode differ"
    assert same.metrics["loss"] - none.metrics["loss"] == pytest.approx(5.0 * 0.69315, abs=1e-4)
    assert digest(none.up) == digest(same.up)


def test_the_next_previous_model_is_the_local_one_and_not_the_merged_one(tmp_path: Path):
    ctx, data, method = at_work()
    update = method.client_update(model_of(method, 1), as_previous(model_of(method, 2)), data, ctx)
    kept = {"params": update.state["previous_params"], "buffers": update.state["previous_buffers"]}
    assert set(update.state) == set(PREVIOUS) and digest(kept) == digest(update.up)
    start(tmp_path / "run", experiment(MOON, options=SMALL, cohort=1.0, num_stages=1))
    server, progress = newest(tmp_path / "run")
    store = ClientStore(tmp_path / "run" / "clients")
    states = {client: store.load(client, version) for client, version in progress.versions.items()}
    ends = {digest({"params": s["previous_params"], "buffers": s["previous_buffers"]}) for s in states.values()}
    assert len(ends) == len(states) > 1, "every client has a model of its own"
    assert digest(server) not in ends


def test_the_other_models_are_in_evaluation_mode_and_get_no_gradient():
    ctx, data, method = at_work(norm=True)
    down, previous = model_of(method, 1), model_of(method, 2)
    previous["buffers"] = {name: tensor + 1 for name, tensor in previous["buffers"].items()}
    given = digest(down), digest(previous)
    update = method.client_update(down, as_previous(previous), data, ctx)
    assert (digest(down), digest(previous)) == given != (digest(update.up),) * 2
    for name, model in (("global", down), ("previous", previous)):
        net = ctx.net.twin(name)
        assert not net.module.training and all(p.grad is None for p in net.module.parameters())
        params, buffers = net.take()
        assert digest({"params": params, "buffers": buffers}) == digest(model), name
    assert digest({"b": update.up["buffers"]}) != digest({"b": down["buffers"]}), "the trained model's did move"


def test_the_contrast_leaves_features_nearer_to_the_global_model_s_than_to_the_previous_ones():
    ctx, data, _ = at_work(norm=False)
    x, _ = data.stored(torch.arange(len(data)))

    def cosines(mu):
        method = moon(local=local(optimizer=SGD(lr=0.05), epochs=30, batch_size=1000), mu=mu, **SMALL)
        down, previous = model_of(method, 1, norm=False), model_of(method, 2, norm=False)
        end = method.client_update(down, as_previous(previous), data, ctx).up["params"]
        z, near, far = (ctx.teacher(p, {})(x)["feats"] for p in (end, down["params"], previous["params"]))
        return [torch.nn.functional.cosine_similarity(z, other).mean().item() for other in (near, far)]

    (near_with, far_with), (near_without, far_without) = cosines(5.0), cosines(0.0)
    assert near_with - far_with > near_without - far_without + 0.5


def test_without_weight_it_is_fedavg_on_the_same_network_in_bits_and_bytes(tmp_path: Path):
    ours = start(tmp_path / "ours", experiment(MOON, options={**SMALL, "mu": 0.0}))
    theirs = start(tmp_path / "theirs", experiment(AVG, spec=ProjectedSpec()))
    some = start(tmp_path / "some", experiment(MOON, options=SMALL))
    assert ours["params_sha256"] == theirs["params_sha256"] != some["params_sha256"]
    assert rows(tmp_path / "ours") == rows(tmp_path / "theirs")
    assert ours["bytes_down"] == some["bytes_down"] and ours["bytes_up"] == some["bytes_up"]
    assert not newest(tmp_path / "ours")[1].versions, "nothing is kept on clients"


def test_without_weight_and_projection_it_is_fedavg(tmp_path: Path):
    ours = start(tmp_path / "ours", experiment(MOON, options={"mu": 0.0, "head": "none"}))
    theirs = start(tmp_path / "theirs", experiment(AVG))
    assert ours["params_sha256"] == theirs["params_sha256"]


def test_the_first_round_is_fedavg_and_the_second_is_not(tmp_path: Path):
    for rounds, same in ((1, True), (2, False)):
        plan = {"num_stages": 1, "rounds": rounds, "cohort": 1.0}
        ours = start(tmp_path / f"ours {rounds}", experiment(MOON, options=SMALL, **plan))
        theirs = start(tmp_path / f"theirs {rounds}", experiment(AVG, spec=ProjectedSpec(), **plan))
        assert (ours["params_sha256"] == theirs["params_sha256"]) is same


def test_a_network_without_features_is_refused_in_words():
    ctx, data, method = at_work(head="none")
    module = torch.nn.Linear(2, 6)
    bare = Net(lambda: module)
    ctx = type(ctx)(net=bare, stage=ctx.stage, num_classes=6)
    with pytest.raises(ConfigError, match="needs features"):
        method.client_update(bare.fresh(), {}, data, ctx)
