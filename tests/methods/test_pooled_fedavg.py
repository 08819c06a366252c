"""FedAvg over an expert pool without routing, and lazy parts of trees."""

import json
from collections.abc import Mapping

import torch

from fedloom.core import Batches, Context, Net, Stage
from fedloom.core.moe import inputs_recorded, moe_layers
from fedloom.local.terms import CrossEntropy
from fedloom.methods.experts import Part, PooledFedAvg
from fedloom.models.experts import ExpertPool
from toys.federation import BlobSpec, experiment, local
from toys.running import start


def test_trains_the_mixture_that_the_gate_makes():
    method = PooledFedAvg(local(terms=(CrossEntropy(),), epochs=20), experts=3, body=(5,))
    ctx = Context(Net(lambda: method.module(BlobSpec(num_classes=2))), Stage(0, 1, 1, (0, 1), (0, 1)), 2, round=0)
    y = torch.arange(40) % 2
    x = torch.stack([2.0 * y - 1, torch.zeros(40)], 1)
    data = Batches(x, y, torch.arange(40), key=(0,), prepare=lambda rows, _: rows)
    server = method.init_server(ctx)
    update = method.client_update(server, {}, data, ctx)
    assert not torch.equal(update.up["params"]["gate.weight"], server["params"]["gate.weight"])
    assert (method.predict(update.up, {}, x, ctx).argmax(1) == y).all()


def test_a_part_reads_only_what_is_asked_for():
    class Lazy(Mapping):
        read = ()

        def __getitem__(self, name):
            self.read += (name,)
            return torch.zeros(1)

        def __iter__(self):
            return iter(("heads.weight", "gate.weight"))

        def __len__(self):
            return 2

    tree = Lazy()
    part = Part(tree, {"heads.weight", "absent"})
    assert list(part) == ["heads.weight"] and len(part) == 1 and tree.read == ()
    assert part["heads.weight"].shape == (1,) and tree.read == ("heads.weight",)


def fedfmx_run(folder, **options):
    plan = {"num_clients": 3, "num_stages": 1, "rounds": 3, "per_class": 10, "cohort": 1.0}
    return start(folder, experiment("fedloom.methods.fedfmx:fedfmx", options=options, **plan))


def test_the_pool_takes_the_semantic_merge_and_the_alignment(tmp_path):
    found = {
        name: fedfmx_run(tmp_path / name, **options)
        for name, options in {
            "paper": {},
            "semantic": {"merge": "semantic"},
            "aligned": {"align": 0.5},
            "both": {"merge": "semantic", "align": 0.5},
        }.items()
    }
    assert len({summary["params_sha256"] for summary in found.values()}) == 4
    assert all(summary["rejected_updates"] == summary["failed_clients"] == 0 for summary in found.values())
    experts, features, floats = 4, 8, 4
    routing = floats * (3 * experts + 1) * 3 * 3  # three clients, three rounds
    centroids = floats * (experts * features + features) * 3 * 3
    up = {name: summary["bytes_up"] - found["paper"]["bytes_up"] for name, summary in found.items()}
    assert up == {"paper": 0, "aligned": routing, "semantic": routing + centroids, "both": routing + centroids}
    down = found["aligned"]["bytes_down"] - found["paper"]["bytes_down"]
    assert down == found["both"]["bytes_down"] - found["semantic"]["bytes_down"] == floats * 2 * experts * 3 * 2
    titles = [table["title"] for table in json.loads((tmp_path / "both" / "facts.json").read_text())["tables"]]
    assert "Routing distribution, layer 1 of 1" in titles


def test_a_pool_that_tells_its_routing_gives_the_same_logits():
    args = (BlobSpec().backbone(), 3, 4, "mlp")
    plain, telling = ExpertPool(*args), ExpertPool(*args, chosen=2)
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    out, told = plain.eval()(x), telling.eval()(x)
    assert torch.equal(out["logits"], told["logits"]) and "routing" not in out
    (layer,) = moe_layers(telling)
    assert moe_layers(plain) == () and (layer.num_experts, layer.top_k, layer.hidden) == (4, 2, 8)
    params = dict(telling.named_parameters())
    inside = {name for name in params if name.startswith(("bodies.", "heads."))}
    assert set(layer.expert_names) == inside and layer.gate == ("gate.weight", "gate.bias")
    assert [part.of(params).shape[0] for part in layer.experts[3]] == [1] * len(inside)
    torch.testing.assert_close(told["routing"][0].exp(), told["router_logits"].softmax(1))
    assert told["selected"].sum(2).tolist() == [[2] * 5] and told["token_mask"].all()
    assert "expert_inputs" not in told
    with inputs_recorded(telling):
        assert torch.equal(telling(x)["expert_inputs"][0], told["feats"])
