"""Inner products of updates: exact against plain arithmetic, over chunks, and by random projection."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedloom.merge import gram
from fedloom.merge.gram import Gram


def values(dtype: torch.dtype = torch.float32, size: int = 40) -> tuple[list[list[Tensor]], list[Tensor]]:
    rng = torch.Generator().manual_seed(0)
    shapes = [(size, 7), (size,)]
    bases = [torch.randn(*shape, generator=rng).to(dtype) for shape in shapes]
    return [[base + 0.1 * torch.randn(base.shape, generator=rng).to(dtype) for _ in range(3)] for base in bases], bases


def direct(tensors: list[list[Tensor]], bases: list[Tensor]) -> Tensor:
    rows = [(torch.stack(one).double() - base.double()).flatten(1) for one, base in zip(tensors, bases, strict=True)]
    flat = torch.cat(rows, 1)
    return flat @ flat.T


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-12), (torch.bfloat16, 1e-6)])
@pytest.mark.parametrize(("block", "span"), [(1 << 21, 8192), (96, 16), (1, 7)])
def test_products_are_those_of_the_whole_updates(
    dtype: torch.dtype, rtol: float, block: int, span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gram, "BLOCK", block)
    monkeypatch.setattr(gram, "SPAN", span)
    tensors, bases = values(dtype)
    torch.testing.assert_close(Gram()(tensors, bases), direct(tensors, bases), rtol=rtol, atol=rtol)


def test_a_small_update_of_large_values_keeps_its_digits() -> None:
    base = torch.full((5000,), 1000.0)
    moved = [base + 2.0**-10, base - 2.0**-10, base]
    found = Gram()([moved], [base])
    expected = 5000 * 2.0**-20 * torch.tensor([[1.0, -1, 0], [-1, 1, 0], [0, 0, 0]]).double()
    assert torch.equal(found, expected)


def test_the_change_comes_before_the_products_and_inputs_stay() -> None:
    tensors, bases = values()
    copies = [[tensor.clone() for tensor in one] for one in tensors]
    found = Gram(torch.sign)(tensors, bases)
    assert found.diagonal().tolist() == [320.0] * 3
    assert all(
        torch.equal(a, b) for one, two in zip(tensors, copies, strict=True) for a, b in zip(one, two, strict=True)
    )


def test_one_object_serves_larger_and_smaller_tensors_of_other_dtypes() -> None:
    shared = Gram()
    for dtype, size in ((torch.float32, 10), (torch.bfloat16, 90), (torch.float64, 30)):
        tensors, bases = values(dtype, size)
        assert torch.equal(shared(tensors, bases), Gram()(tensors, bases))


def test_a_projection_as_long_as_the_tensor_is_exact() -> None:
    tensors, bases = values()
    first = ([tensors[0]], [bases[0]])
    torch.testing.assert_close(Gram(sketch=280)(*first), direct(*first), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block", [1 << 21, 3000])
def test_a_short_projection_keeps_products_in_size(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram, "BLOCK", block)
    monkeypatch.setattr(gram, "SPAN", 500)
    tensors, bases = values(size=2000)
    exact, found = direct(tensors, bases), Gram(sketch=300)(tensors, bases)
    error = ((found - exact) / exact.diagonal().mean()).abs().max()
    assert 1e-6 < float(error) < 4 / 300**0.5
    assert torch.equal(found, Gram(sketch=300)(tensors, bases))
