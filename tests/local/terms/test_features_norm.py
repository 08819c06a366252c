"""The size of features in numbers, against autograd."""

from __future__ import annotations

import pytest
import torch

from fedloom.core import ConfigError
from fedloom.local.terms.features_norm import FeaturesNorm, euclidean, squared

G = [[3.0, -4.0], [0.0, 0.0], [1.0, 0.0]]


def value(term: FeaturesNorm, g: torch.Tensor) -> torch.Tensor:
    return term({}, {"feats": g, "logits": g}, None, {}, {})


def test_it_is_the_mean_of_squared_norms_with_their_gradient() -> None:
    """(25 + 0 + 1) / 3, with the gradient 2 gamma g / 3."""
    g = torch.tensor(G, dtype=torch.float64, requires_grad=True)
    loss = value(FeaturesNorm(0.3), g)
    loss.backward()
    assert loss.item() == pytest.approx(0.3 * 26 / 3, abs=1e-12)
    torch.testing.assert_close(g.grad, 0.2 * g.detach())


def test_the_norm_itself_has_unit_gradients_and_none_at_zero() -> None:
    g = torch.tensor(G, dtype=torch.float64, requires_grad=True)
    loss = value(FeaturesNorm(0.3, euclidean), g)
    loss.backward()
    assert loss.item() == pytest.approx(0.3 * 6 / 3, abs=1e-12)
    torch.testing.assert_close(g.grad, 0.1 * torch.tensor([[0.6, -0.8], [0.0, 0.0], [1.0, 0.0]], dtype=torch.float64))
    assert squared(g).tolist() == [25.0, 0.0, 1.0] and euclidean(g).tolist() == [5.0, 0.0, 1.0]


def test_weights_and_networks_that_do_not_fit_are_refused_in_words() -> None:
    for gamma in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"gamma must be a finite number of at least 0, got {gamma}"):
            FeaturesNorm(gamma)
    with pytest.raises(ConfigError, match="needs features"):
        FeaturesNorm(0.1)({}, {"logits": torch.zeros(2, 2)}, None, {}, {})
