"""FedAvg over an expert pool without routing, and lazy parts of trees."""

from collections.abc import Mapping

import torch

from fedloom.core import Batches, Context, Net, Stage
from fedloom.local.terms import CrossEntropy
from fedloom.methods.experts import Part, PooledFedAvg
from toys.federation import BlobSpec, local


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
