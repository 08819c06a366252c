"""What is left of FedFMX when a part of it is taken away: the options that do it, and the switches made of them."""

import pytest
import torch
from torch import nn

from fedloom import methods
from fedloom.local import SGD, LocalSGD
from fedloom.methods.fedfmx import ABLATIONS, fedfmx
from methods.test_fedfmx import LOCAL, context, data, outcome, rounds


def bits(options):
    """Parameters of `outcome` as bytes, and the predictions."""
    params, scores = outcome(options)
    return {name: tensor.numpy().tobytes() for name, tensor in params.items()}, scores.detach().numpy().tobytes()


def test_all_is_the_number_of_experts():
    assert bits({"stop": "all"}) == bits({"stop": 4}) != bits({"stop": 3})
    assert bits({"inference_experts": "all"}) == bits({"inference_experts": 4}) != bits({"inference_experts": 3})


def test_uniform_weights_over_all_experts_weigh_their_losses_alike():
    """Without gate terms and with one batch, the first step moves every expert by its own mean loss over K."""
    given = {"stop": "all", "weights": "uniform", "beta": 0.0, "gamma": 0.0, "body": "identity"}
    method = fedfmx(local=LocalSGD(optimizer=SGD(lr=0.1), batch_size=50), **given)
    ctx = context(method)
    server, (update,) = rounds(method, ctx, [data()])
    assert update.metrics["active_experts"] == 4.0 and update.metrics["fallback_weights"] == 0.0
    begin = method.init_server(ctx)["params"]
    x, y = data().stored(torch.arange(23))
    live = {name: tensor.clone().requires_grad_() for name, tensor in begin.items()}
    features = torch.tanh(x @ live["backbone.layer.weight"].T + live["backbone.layer.bias"])
    losses = [
        nn.functional.cross_entropy(features @ live["heads.weight"][k].T + live["heads.bias"][k], y) for k in range(4)
    ]
    loss = torch.stack(losses).mean()
    loss.backward()
    for name in ("backbone.layer.weight", "heads.weight", "heads.bias"):
        assert torch.allclose(server["params"][name], begin[name] - 0.1 * live[name].grad, atol=1e-6), name
    assert update.metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)


def test_without_fres_the_fisher_does_not_route():
    """With `scores="loss"` what the Fisher was makes no difference to training; with the default it does."""
    ends = {}
    for scores in ("loss", "fres"):
        method = fedfmx(local=LOCAL, scores=scores, stop=1)
        ctx = context(method)
        server = method.init_server(ctx)
        rng = torch.Generator().manual_seed(3)
        noisy = {name: 5 * torch.rand(t.shape, generator=rng) for name, t in server["fisher"].items()}
        first = method.client_update(server, {}, data(), ctx).up["params"]["heads.weight"]
        other = method.client_update({**server, "fisher": noisy}, {}, data(), ctx).up["params"]["heads.weight"]
        ends[scores] = torch.equal(first, other)
    assert ends == {"loss": True, "fres": False}


def test_every_ablation_takes_something_away():
    full = bits({"stop": "literal"})
    found = {name: bits({"stop": "literal", **options}) for name, options in ABLATIONS.items()}
    assert {"no-fres", "no-aes", "no-rar", "bare"} <= found.keys() and methods.ablations("fedfmx") == ABLATIONS
    assert all(outcome != full for outcome in found.values())
    assert len({str(outcome) for outcome in found.values()}) == len(found)
