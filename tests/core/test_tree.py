from __future__ import annotations

import pytest
import torch

from fedloom.core import PayloadError, tree

A = {"w": torch.tensor([1.0, -2.0]), "b": torch.tensor(3.0)}
B = {"w": torch.tensor([0.5, 4.0]), "b": torch.tensor(-1.0)}


def test_arithmetic_by_hand_and_without_touching_the_arguments():
    before = tree.clone(A), tree.clone(B)
    assert tree.add(A, B)["w"].tolist() == [1.5, 2.0]
    assert tree.sub(A, B)["b"].item() == 4.0
    assert tree.axpy(2.0, A, B)["w"].tolist() == [2.5, 0.0]
    assert tree.scale(A, -2.0)["w"].tolist() == [-2.0, 4.0]
    assert tree.zeros_like(A)["b"].shape == ()
    assert tree.sq_norm(A).item() == 14.0 and tree.sq_norm({}).item() == 0.0
    assert all(torch.equal(A[n], before[0][n]) and torch.equal(B[n], before[1][n]) for n in A)


def test_sq_norm_has_the_gradient_2w():
    w = torch.tensor([1.0, -2.0], requires_grad=True)
    tree.sq_norm({"w": w}).backward()
    assert w.grad.tolist() == [2.0, -4.0]


def test_clone_shares_nothing():
    copy = tree.clone(A)
    copy["w"].zero_()
    assert A["w"].tolist() == [1.0, -2.0]


def test_other_names_are_an_error_that_names_them():
    with pytest.raises(PayloadError, match=r"only in the first \['b'\], only in the second \['c'\]"):
        tree.add(A, {"w": B["w"], "c": B["b"]})


def test_a_tree_on_its_device_is_of_the_same_tensors():
    small = {"a": torch.ones(2), "b": torch.zeros(())}
    moved = tree.on_device(small, "meta")
    assert {t.device.type for t in moved.values()} == {"meta"} and moved["a"].shape == (2,)
    assert all(tree.on_device(small, "cpu")[name] is tensor for name, tensor in small.items())
