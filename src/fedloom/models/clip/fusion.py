"""How the texts of several prompts become one score per picture and class, and how that score is weighed.

Source: Luo, Chen, Wu, "Mixture of Experts Made Personalized: Federated Prompt Learning for Vision-Language Models"
(ICLR 2025, arXiv 2410.10114), which Fed-Duet takes over. Of a class, t_0 is the text of the client's own prompt and
t_1..t_n those of others; pi makes d_g entries of d:

    e_bc = W_O concat_h( sum_j softmax_j(s (W_Q pi(f_b))_h . (W_K pi(t_j))_h) (W_V pi(t_j))_h ) + b_O

with a bias in every W, no residual, no norm and no dropout. Shapes: B pictures, C classes, J = 1 + n prompts. All is
computed in the parameters' precision, under autocast too: the scale s = 10 is large for half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.errors import ConfigError, pick

SCALES: Mapping[str, Callable[[int], float]] = {"ten": lambda width: 10.0, "sqrt": lambda width: width**-0.5}


class Slice(nn.Module):
    """Every `stride`-th entry: [..., d] -> [..., d / stride]."""

    def __init__(self, stride: int):
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return x[..., :: self.stride]


def projection(width: int, pooled: int) -> nn.Linear:
    """A learned map without bias that starts as the strided slice, one for pictures and texts."""
    linear = nn.Linear(width, pooled, bias=False)
    nn.init.zeros_(linear.weight)
    linear.weight.data[torch.arange(pooled), torch.arange(0, width, width // pooled)] = 1.0
    return linear


POOLINGS: Mapping[str, Callable[[int, int], nn.Module]] = {
    "slice": lambda width, pooled: Slice(width // pooled),
    "none": lambda width, pooled: nn.Identity(),
    "learned": projection,
}


def pooling_of(name: str, width: int, pooled: int) -> tuple[nn.Module, int]:
    """pi and d_g. Raises `ConfigError` where `pooled` does not divide the joint width `width`."""
    make = pick("pooling", name, POOLINGS)
    if name != "none" and width % pooled:
        raise ConfigError(
            f"method.pooled is {pooled}, which does not divide the joint width {width} of this CLIP; take a divisor"
        )
    return make(width, pooled), width if name == "none" else pooled


class CrossAttention(nn.Module):
    """Attention of a picture over the texts of every class in several prompts.

    width: joint width d. pooled: d_g, a divisor of d. heads: a divisor of d_g. scale: s, "ten" or "sqrt" (one over the
    root of a head's width). pooling: pi, "slice" (strided), "none" (all of d) or "learned". residual: e_bc is then
    g * layer_norm(pi(t_0) + e_bc) + b with g from d_g^-1/2, so that it starts with length 1.
    Raises `ConfigError` for widths that do not divide and names that do not exist.
    """

    def __init__(
        self,
        width: int,
        pooled: int = 128,
        heads: int = 8,
        *,
        scale: str = "ten",
        pooling: str = "slice",
        residual: bool = False,
    ):
        super().__init__()
        self.pooled, inner = pooling_of(pooling, width, pooled)
        if inner % heads:
            raise ConfigError(f"method.heads is {heads}, which does not divide the width {inner}; take a divisor")
        self.heads, self.scale = heads, pick("scale", scale, SCALES)(inner // heads)
        self.query, self.key = nn.Linear(inner, inner), nn.Linear(inner, inner)
        self.value, self.out = nn.Linear(inner, inner), nn.Linear(inner, inner)
        self.norm = nn.LayerNorm(inner) if residual else None
        if self.norm is not None:
            nn.init.constant_(self.norm.weight, inner**-0.5)

    def forward(self, feats: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """feats [B, d], texts [J, C, d] -> e [B, C, d_g], and each prompt's share of the attention [J].

        The share is a mean over pictures, classes and heads, without gradient.
        """
        with exactly(feats):
            feats, texts = self._pooled(feats), self._pooled(texts)
            weights, values = self._weights(feats, texts), self._split(self.value(texts))
            found = self.out(torch.einsum("hbjc,jchk->bchk", weights, values).flatten(2))
            return found if self.norm is None else self.norm(texts[0] + found), _share(weights)

    def similarity(self, feats: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """pi(f_b) . e_bc [B, C] and the shares [J], without making e where there is no norm: W_O is turned on f."""
        if self.norm is not None:
            return _scored(self, feats, texts)
        with exactly(feats):
            feats, texts = self._pooled(feats), self._pooled(texts)
            weights, values = self._weights(feats, texts), self._split(self.value(texts))
            turned = self._split(feats @ self.out.weight)
            found = (weights * torch.einsum("bhk,jchk->hbjc", turned, values)).sum((0, 2))
            return found + (feats @ self.out.bias)[:, None], _share(weights)

    def _weights(self, feats: Tensor, texts: Tensor) -> Tensor:
        """Pooled feats [B, d_g], texts [J, C, d_g] -> attention [heads, B, J, C], which sums to 1 over J."""
        query, key = self._split(self.scale * self.query(feats)), self._split(self.key(texts))
        return torch.einsum("bhk,jchk->hbjc", query, key).softmax(2)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1)

    def _pooled(self, x: Tensor) -> Tensor:
        found: Tensor = self.pooled(x.to(self.out.weight.dtype))
        return found

    @torch.no_grad()
    def identity_(self) -> CrossAttention:
        """Make W_Q, W_K, W_V and W_O the identity and the biases 0."""
        for linear in (self.query, self.key, self.value, self.out):
            nn.init.eye_(linear.weight)
            nn.init.zeros_(linear.bias)
        return self


class MeanOfTexts(nn.Module):
    """No attention: e_bc is the mean over the prompts of pi(t_j), with nothing to learn but a learned pi."""

    def __init__(self, width: int, pooled: int = 128, *, pooling: str = "slice"):
        super().__init__()
        self.pooled, _ = pooling_of(pooling, width, pooled)

    def forward(self, feats: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """feats [B, d], texts [J, C, d] -> e [B, C, d_g], and equal shares [J]."""
        with exactly(feats):
            mean = self.pooled(texts.float()).mean(0)
        return mean.expand(feats.shape[0], -1, -1), mean.new_full((len(texts),), 1 / len(texts))

    def similarity(self, feats: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """pi(f_b) . e_bc [B, C] and the shares [J]."""
        return _scored(self, feats, texts)


def exactly(x: Tensor) -> torch.autocast:
    """A block without autocast on the tensor's device."""
    return torch.autocast(x.device.type, enabled=False)


def _scored(fusion: CrossAttention | MeanOfTexts, feats: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
    fused, share = fusion(feats, texts)
    with exactly(feats):
        return torch.einsum("bd,bcd->bc", fusion.pooled(feats.to(fused.dtype)), fused), share


def _share(weights: Tensor) -> Tensor:
    return weights.detach().mean((0, 1, 3))


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats [B] of softmax(logits) [B, C]; its gradient stays finite where a probability rounds to 0."""
    logs = F.log_softmax(logits, -1)
    return -(logs.exp() * logs).sum(-1)


class EntropyWeight(nn.Module):
    """lam_b = sigmoid(a (H_shared - H_local) + b) with a and b learned from 0: above 0, a favours the surer logits."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.bias = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, local: Tensor, shared: Tensor, feats: Tensor) -> Tensor:
        """Logits [B, C] of the shown classes alone, features [B, d] -> lam [B, 1]."""
        return torch.sigmoid(self.slope * (entropy(shared) - entropy(local)) + self.bias)[:, None]


class ConstantWeight(nn.Module):
    """The same lam for every picture."""

    def __init__(self, value: float = 0.5):
        super().__init__()
        self.value = value

    def forward(self, local: Tensor, shared: Tensor, feats: Tensor) -> Tensor:
        """-> lam [B, 1]."""
        return local.new_full((local.shape[0], 1), self.value)


class WeightOfSum(ConstantWeight):
    """The same lam for local logits, while shared ones count whole, as in pFedMoAP: lam local + shared."""

    adds = True


class PerceptronWeight(nn.Module):
    """lam_b = sigmoid(w . relu(W f_b + b) + c) with w = 0 and c = 0 at the start, so lam starts at 1/2."""

    def __init__(self, width: int, hidden: int = 32):
        super().__init__()
        self.hidden, self.out = nn.Linear(width, hidden), nn.Linear(hidden, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, local: Tensor, shared: Tensor, feats: Tensor) -> Tensor:
        """-> lam [B, 1]."""
        return torch.sigmoid(self.out(F.relu(self.hidden(feats)))).to(local.dtype)


# name -> of the joint width, a module (local logits, shared logits, features) -> lam [B, 1]
WEIGHTS: Mapping[str, Callable[[int], nn.Module]] = {
    "entropy": lambda width: EntropyWeight(),
    "constant": lambda width: ConstantWeight(),
    "mlp": PerceptronWeight,
    "sum": lambda width: WeightOfSum(),
}
