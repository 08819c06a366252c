"""What is kept, and when it is computed anew."""

from __future__ import annotations

import torch
from torch import nn

from fedloom.evaluate.cost import flops_per_example
from fedloom.models.clip.compact import build_clip
from fedloom.models.clip.memo import FrozenPrefix, Memo


def test_a_value_is_computed_again_when_a_tensor_changes_in_place():
    weight, made = nn.Parameter(torch.ones(2)), []
    memo, optimizer = Memo(), torch.optim.AdamW([weight], lr=0.1)

    def value():
        return memo("sum", [weight], lambda: made.append(1) or float(weight.detach().sum()))

    assert value() == value() == 2.0 and len(made) == 1
    weight.grad = torch.ones(2)
    optimizer.step()
    assert value() == float(weight.detach().sum()) and len(made) == 2
    weight.data = torch.zeros(2)
    with torch.no_grad():
        weight.copy_(torch.full((2,), 3.0))
    assert value() == 6.0 and len(made) == 3


def test_another_tensor_in_the_same_place_is_another_value():
    memo = Memo(size=64)
    for k in range(32):  # freed tensors give their memory to the next ones
        tensor = torch.full((5,), float(k))
        assert memo("first", [tensor], lambda t=tensor: float(t[0])) == k


def test_only_the_last_few_values_are_kept():
    memo = Memo(size=2)
    for key in "abc":
        memo(key, [], lambda key=key: key)
    assert [value for value, _ in memo.kept.values()] == ["b", "c"]


def test_each_example_is_computed_once_whatever_the_batches():
    seen = []

    def part(x):
        seen.append(len(x))
        return x.flatten(1) * 2

    prefix, x = FrozenPrefix(part), torch.randn(20, 3, 2, 2)
    assert torch.equal(prefix(x[:12]), x[:12].flatten(1) * 2) and seen == [8, 8]
    again = torch.cat([x[4:16].flip(0), x[:1], x[15:16]])
    assert torch.equal(prefix(again), again.flatten(1) * 2) and seen == [8, 8, 8]
    assert len(prefix.kept) == 16


def test_what_is_computed_does_not_depend_on_what_was_asked_before():
    sizes = {"embed_dim": 8, "stem": {"widths": [8, 8, 16], "blocks": [1, 0]}}
    vision = {"image_size": 16, "patch_size": 4, "layers": 1, "width": 16, "head_width": 8}
    text = {"context_length": 8, "vocab_size": 64, "width": 8, "heads": 2, "layers": 1}
    model = build_clip({**sizes, "vision_cfg": vision, "text_cfg": text}).eval()
    x = torch.randn(19, 3, 16, 16)
    one, many = FrozenPrefix(model.visual), FrozenPrefix(model.visual)
    singly = torch.cat([one(row[None]) for row in x.flip(0)]).flip(0)
    assert torch.equal(many(x), singly)


def test_beyond_its_room_examples_are_computed_each_time():
    seen = []
    prefix = FrozenPrefix(lambda x: seen.append(len(x)) or x.flatten(1), room=3 * 4 * 4)
    x = torch.randn(5, 4)
    assert torch.equal(prefix(x), x) and len(prefix.kept) == 3
    assert torch.equal(prefix(x), x) and len(seen) == 2


def test_a_count_of_operations_is_that_of_an_example_whatever_was_computed_before():
    linear, memo = nn.Linear(4, 4), Memo()
    prefix, x = FrozenPrefix(linear), torch.randn(2, 4)

    def forward():
        return prefix(x) + memo("sum", [linear.weight], lambda: linear(torch.ones(50, 4)).sum(0))

    counts = [flops_per_example(forward) for _ in range(2)]
    prefix(x)
    assert counts == [2 * 4 * 4 * 2] * 2 == [flops_per_example(forward)] * 2
