"""FedCLIP: the attention adapter in numbers, the plain mean, and whole runs against FedAvg of the same network."""

from dataclasses import replace

import pytest
import torch

from fedloom.core import ConfigError, Reply
from fedloom.local.terms import CrossEntropy
from fedloom.methods.clip_based import ClipMethod
from fedloom.methods.fedclip import fedclip
from fedloom.models.clip.image_attention import Attention
from fedloom.models.clip.network import ClipNetwork
from fedloom.models.clip.words import fixed
from toys.clip import toy_clip
from toys.federation import experiment, local
from toys.running import start

NAME = "fedloom.methods.fedclip:fedclip"
X = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))


def network(**sizes):
    return Attention()(toy_clip(**sizes)).eval()


def zero_shot():
    clip = toy_clip()
    return ClipNetwork(clip, fixed(clip.words, "a photo of a {}.", 24)).eval()


@torch.no_grad()
def test_without_the_second_layer_the_logits_are_zero_shot():
    net = network()
    net.attention[2].weight.zero_()
    net.attention[2].bias.zero_()
    assert torch.equal(net.attention(zero_shot()(X)["feats"]), torch.full((5, 128), 1 / 128))
    assert torch.allclose(net(X)["logits"], zero_shot()(X)["logits"], atol=2e-6)
    assert net(X)["logits"].argmax(1).tolist() == zero_shot()(X)["logits"].argmax(1).tolist()


@torch.no_grad()
def test_a_constant_added_to_the_last_bias_changes_nothing():
    net = network()
    before = net(X)["logits"]
    net.attention[2].bias.add_(3.0)
    assert torch.allclose(net(X)["logits"], before, atol=1e-5)


@torch.no_grad()
def test_the_length_of_a_feature_cancels():
    net = network()
    before = net(X)["logits"]
    again = network()
    again.towers.model.visual.proj.mul_(7.0)
    assert torch.allclose(again(X)["logits"], before, atol=1e-5)


@torch.no_grad()
def test_features_are_the_published_formula():
    net, f = network(), zero_shot()(X)["feats"]
    first, _, second, _ = net.attention
    a = (torch.tanh(f @ first.weight.T + first.bias) @ second.weight.T + second.bias).softmax(-1)
    expected = a * f / (a * f).norm(dim=-1, keepdim=True)
    assert torch.allclose(net(X)["feats"], expected, atol=1e-6)


def test_the_adapter_has_525312_parameters_at_width_512():
    net = network(joint=512)
    assert sum(p.numel() for p in net.parameters() if p.requires_grad) == 525_312
    assert next(n for n, p in net.named_parameters() if p.requires_grad) == "attention.0.weight"


def test_clients_count_the_same_unless_asked():
    def reply(k, weight, value):
        return Reply(k, weight, {"params": {"w": torch.tensor(value)}, "buffers": {}}, {})

    replies, server = [reply(0, 1.0, 0.0), reply(1, 3.0, 4.0)], {"params": {"w": torch.tensor(9.0)}, "buffers": {}}
    assert fedclip(local=local()).server_update(server, replies, None)["params"]["w"] == 2
    assert fedclip(local=local(), uniform=False).server_update(server, replies, None)["params"]["w"] == 3


def test_a_run_is_fedavg_of_the_attention(tmp_path):
    method = ClipMethod(replace(local(), terms=(CrossEntropy("current"),)), True, build=Attention())
    theirs = start(tmp_path / "avg", replace(experiment(NAME), method=method, rebuild=None))
    assert start(tmp_path / "ours", experiment(NAME))["params_sha256"] == theirs["params_sha256"]
    other = start(tmp_path / "pairs", experiment(NAME, options={"loss": "contrastive"}))
    assert other["params_sha256"] != theirs["params_sha256"] and other["failed_clients"] == 0


@pytest.mark.parametrize("loss", ["ce", "contrastive"])
def test_a_client_with_one_picture_skips_it_where_pairs_are_compared(loss):
    whole = experiment(NAME, options={"loss": loss, "training": {"batch_size": 2}}, num_clients=1, num_stages=1)
    ctx = whole.context(whole.net(), 0, round=0, client=0)
    down, data = whole.method.init_server(ctx), whole.plan.train(0, 0, 0, "train").part(0, 1)
    update = whole.method.client_update(down, {}, data, ctx)
    same = [torch.equal(update.up["params"][name], tensor) for name, tensor in down["params"].items()]
    assert all(same) if loss == "contrastive" else not any(same)


def test_batches_of_one_picture_are_refused_where_pairs_are_compared():
    with pytest.raises(ConfigError, match=r"compares the pictures of a batch, and training.batch_size is 1; set it to"):
        fedclip(local=local(batch_size=1), loss="contrastive")
    assert fedclip(local=local(batch_size=1)).pairs is False


def test_the_sentence_is_an_option():
    assert fedclip(local=local(), template="the {}.").build == Attention("the {}.")
