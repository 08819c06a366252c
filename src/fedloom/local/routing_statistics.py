"""What a client's tokens tell about the routing of its trained network.

Source: Fang et al., "Aggregation Alignment for Federated Learning with Mixture-of-Experts under Data Heterogeneity"
(FedAlign-MoE, arXiv 2603.21276), whose clients record routing distributions and margins. Everything is a sum over
tokens, taken in float64 and divided once at the end, so neither the order of the batches nor padding shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.batches import Batch, Batches, Inputs
from fedloom.core.context import Context, Outputs
from fedloom.core.errors import ConfigError
from fedloom.core.moe import MoELayer, inputs_recorded, moe_layers
from fedloom.core.seeds import generator, seed_for
from fedloom.core.tree import Tensors
from fedloom.local.parts import Ref

SMALLEST = 1e-6  # probabilities below count as this much where a logarithm is taken


class Tokens(NamedTuple):
    """The tokens of a batch that are no padding.

    log_probs, selected, dispatched: [L, T, E], as in `fedloom.core.moe`; float64 the first. example: int64 [T], the
    example that a token is of. inputs: [L, T, H] float64, None where they were not recorded.
    """

    log_probs: Tensor
    selected: Tensor
    dispatched: Tensor
    example: Tensor
    inputs: Tensor | None


def real_tokens(out: Outputs, examples: int) -> Tokens:
    """Those of a network's outputs for `examples` examples."""
    real = out["token_mask"].nonzero()[:, 0]
    every = len(out["token_mask"])
    inputs = out["expert_inputs"][:, real].double() if "expert_inputs" in out else None
    cut = (out[name][:, real] for name in ("routing", "selected", "dispatched"))
    log_probs, selected, dispatched = cut
    return Tokens(log_probs.double(), selected, dispatched, real // max(1, every // max(1, examples)), inputs)


Share = Callable[[Tokens], tuple[Tensor, Tensor]]
Margin = Callable[[Tokens, Sequence[int]], Tensor]


def soft(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The gate's probabilities, every token counting the same."""
    return tokens.log_probs.exp(), _ones(tokens)


def hard(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The experts that processed a token, each 1/k; sums to less than 1 where a capacity drops some."""
    chosen = tokens.selected.sum(2, keepdim=True).clamp(min=1)
    return tokens.dispatched.double() / chosen, _ones(tokens)


def topk_renorm(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Probabilities of the chosen experts, divided by their sum."""
    kept = tokens.log_probs.exp() * tokens.selected
    return kept / kept.sum(2, keepdim=True).clamp(min=torch.finfo(kept.dtype).tiny), _ones(tokens)


def per_sample_mean(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The gate's probabilities, every example counting the same whatever its length."""
    return tokens.log_probs.exp(), 1 / tokens.example.bincount()[tokens.example].double()


def boundary(tokens: Tokens, top_k: Sequence[int]) -> Tensor:
    """p(e|t) less the (k+1)-th largest probability, 0 where there is none."""
    probs = tokens.log_probs.exp()
    return probs - _after(probs, top_k)


def top1_top2(tokens: Tokens, top_k: Sequence[int]) -> Tensor:
    """The largest probability less the second, the same for every expert of a token."""
    probs = tokens.log_probs.exp()
    return probs.amax(2, keepdim=True) - _after(probs, [1] * len(top_k))


def entropy(tokens: Tokens, top_k: Sequence[int]) -> Tensor:
    """1 - H(p) / ln E: 0 for a uniform gate, 1 for one that is sure."""
    return 1 - _entropies(tokens).unsqueeze(2) / max(math.log(tokens.log_probs.shape[2]), SMALLEST)


def logit_margin(tokens: Tokens, top_k: Sequence[int]) -> Tensor:
    """ln p(e|t) less that of the (k+1)-th expert: the difference of the logits of a softmax gate."""
    return tokens.log_probs - _after(tokens.log_probs.exp(), top_k).clamp(min=SMALLEST).log()


SHARES: dict[str, Share] = {"soft": soft, "hard": hard, "topk_renorm": topk_renorm, "per_sample_mean": per_sample_mean}
MARGINS: dict[str, Margin] = {
    "boundary": boundary,
    "top1_top2": top1_top2,
    "entropy": entropy,
    "logit_margin": logit_margin,
}


@dataclass(frozen=True)
class RoutingStatistics:
    """Sums over tokens, and what a client uploads of them.

    share: the form of pbar. margin: the form of m. centroids: whether mu and hbar are measured; they tell most about a
    client's texts (a mu of one token is its hidden state), hence: min_count, tokens below which an expert's mu is
    withheld (zeros, though its count is not); clip, the largest norm of a hidden state that enters, 0 for any; noise,
    times 2 clip / tokens the standard deviation of Gaussian noise on every entry of mu and hbar; dims, the width that a
    random projection common to all clients brings both to, 0 for none.
    """

    share: Share = soft
    margin: Margin = boundary
    centroids: bool = True
    min_count: int = 1
    clip: float = 0.0
    noise: float = 0.0
    dims: int = 0

    def __post_init__(self) -> None:
        if self.noise and not self.clip:
            raise ConfigError(
                f"mu_noise {self.noise} is measured in multiples of mu_clip, which is 0; set mu_clip above 0"
            )

    def nothing(self, layers: Sequence[MoELayer], device: torch.device) -> dict[str, Tensor]:
        """The sums over no token."""
        shape = (len(layers), layers[0].num_experts)
        sizes: dict[str, tuple[int, ...]] = dict.fromkeys(("mean", "margin", "chosen", "count"), shape)
        sizes |= {"weight": (1,), "tokens": (1,), "entropy": shape[:1]}
        if self.centroids:
            sizes |= {"centroid": (*shape, layers[0].hidden), "hidden": (len(layers), layers[0].hidden)}
        return {name: torch.zeros(size, dtype=torch.float64, device=device) for name, size in sizes.items()}

    def sums(self, out: Outputs, examples: int, layers: Sequence[MoELayer]) -> dict[str, Tensor]:
        """The sums over a batch."""
        tokens = real_tokens(out, examples)
        values, weights = self.share(tokens)
        used = tokens.dispatched.double()
        margins = self.margin(tokens, [layer.top_k for layer in layers]) * tokens.selected
        found = {
            "mean": torch.einsum("lte,t->le", values, weights),
            "weight": weights.sum(0, keepdim=True),
            "margin": margins.sum(1),
            "chosen": tokens.selected.double().sum(1),
            "count": used.sum(1),
            "tokens": weights.new_full((1,), len(weights)),
            "entropy": _entropies(tokens).sum(1),
        }
        if self.centroids:
            assert tokens.inputs is not None
            hidden = tokens.inputs
            if self.clip:
                hidden = hidden * (self.clip / hidden.norm(dim=2, keepdim=True).clamp(min=self.clip))
            found |= {"centroid": used.mT @ hidden, "hidden": hidden.sum(1)}
        return found

    def closed(self, sums: Tensors, ctx: Context) -> dict[str, Tensor]:
        """The upload "routing", fp32 on the CPU: "mean", "margin", "count" [L, E], "tokens" [1] and, with centroids,
        "centroid" [L, E, H] and "hidden" [L, H]. An expert that nothing chose has margin 0 and centroid 0; no margin is
        below 0."""
        sums = {name: value.cpu() for name, value in sums.items()}
        count, tokens = sums["count"], sums["tokens"]
        found = {
            "mean": sums["mean"] / sums["weight"].clamp(min=torch.finfo(torch.float64).tiny),
            "margin": (sums["margin"] / sums["chosen"].clamp(min=1)).clamp(min=0),
            "count": count,
            "tokens": tokens,
        }
        if "product" in sums:
            found["product"] = sums["product"] / tokens.clamp(min=1)
        if self.centroids:
            found["hidden"] = sums["hidden"] / tokens.clamp(min=1)
            found["centroid"] = sums["centroid"] / count.unsqueeze(2).clamp(min=1)
            self._hide(found, ctx)
        return {name: value.float() for name, value in found.items()}

    def _hide(self, found: dict[str, Tensor], ctx: Context) -> None:
        count = found["count"].unsqueeze(2)
        if self.noise:
            rng, scale = generator(ctx.seed_for("centroid noise")), 2 * self.clip * self.noise
            for name, of in (("centroid", count), ("hidden", found["tokens"])):
                drawn = torch.randn(found[name].shape, generator=rng, dtype=torch.float64)
                found[name] = found[name] + drawn * (scale / of.clamp(min=1))
        if self.dims:
            rng = generator(seed_for(ctx.seed, "centroid projection"))
            width = found["hidden"].shape[1]
            matrix = torch.randn(width, self.dims, generator=rng, dtype=torch.float64) / self.dims**0.5
            found |= {name: found[name] @ matrix for name in ("centroid", "hidden")}
        found["centroid"] = found["centroid"] * (count >= max(1, self.min_count))


def measured_routing(
    ctx: Context,
    data: Batches,
    statistics: RoutingStatistics,
    *,
    batch_size: int,
    max_batches: int,
    received: Callable[[Inputs], Outputs] | None = None,
) -> dict[str, Tensor]:
    """The sums over at most `max_batches` batches of the examples, for the bound network in evaluation mode.

    Of more batches some are drawn, from a stream of the pass's own. received: another network (the downloaded one, say)
    that is shown the same batches; the sums then hold "product", that over tokens of both gates' probabilities [L, E].
    """
    layers, sums = moe_layers(ctx.net.module), statistics.nothing(moe_layers(ctx.net.module), ctx.net.forward.device)
    if received is not None:
        sums["product"] = torch.zeros_like(sums["mean"])
    if len(data) > max_batches * batch_size:
        drawn = torch.randperm(len(data), generator=generator(ctx.seed_for("routing statistics")))
        data = data.subset(drawn[: max_batches * batch_size].sort().values)
    with ctx.evaluating(), _recording(ctx, statistics):
        for batch in data.epoch(batch_size=batch_size, purpose="routing", shuffle=False):
            out = ctx.apply(batch.x)
            found = statistics.sums(out, len(batch.y), layers)
            if received is not None:
                theirs = real_tokens(received(batch.x), len(batch.y)).log_probs
                found["product"] = (real_tokens(out, len(batch.y)).log_probs + theirs).exp().sum(1)
            sums = {name: value + found[name] for name, value in sums.items()}
    return sums


@dataclass(frozen=True)
class RoutingRecord:
    """A carry: the sums over the tokens of the last epoch of training, as the network was before each step.

    Costs no pass, and includes dropout and a router's jitter. Trained inside `inputs_recorded` where the statistics
    have centroids.
    """

    statistics: RoutingStatistics

    def init(self, ref: Ref, ctx: Context) -> Tensors:
        """Sums over nothing, and the layers' top-k."""
        layers = moe_layers(ctx.net.module)
        none = self.statistics.nothing(layers, ctx.net.forward.device)
        return {**{f"now.{name}": value for name, value in none.items()}, **none}

    def update(self, value: Tensors, out: Outputs, batch: Batch, ref: Ref) -> Tensors:
        """Add the batch."""
        found = self.statistics.sums(out, len(batch.y), ref["moe_layers"])
        return {**value, **{f"now.{name}": value[f"now.{name}"] + new for name, new in found.items()}}

    def close_epoch(self, value: Tensors) -> Tensors:
        """The epoch's sums become the result, and start anew."""
        now = {name: tensor for name, tensor in value.items() if name.startswith("now.")}
        done = {name.removeprefix("now."): tensor for name, tensor in now.items()}
        return {**{name: torch.zeros_like(tensor) for name, tensor in now.items()}, **done}

    def close(self, value: Tensors) -> Tensors:
        """The sums over the last epoch."""
        return {name: tensor for name, tensor in value.items() if not name.startswith("now.")}

    needs = ("moe_layers",)


def routing_numbers(sums: Tensors) -> dict[str, float]:
    """Metrics of a client, means over layers: the gate's entropy (nats), and the coefficient of variation of the
    experts' loads (0 when all process as many tokens)."""
    count = sums["count"]
    spread = count.std(1, correction=0) / count.mean(1).clamp(min=1e-12)
    per_token = sums["entropy"].mean(0, keepdim=True) / sums["tokens"].clamp(min=1)
    return {"gate_entropy": float(per_token), "load_cv": float(spread.mean())}


def _ones(tokens: Tokens) -> Tensor:
    return torch.ones(len(tokens.example), dtype=torch.float64, device=tokens.example.device)


def _entropies(tokens: Tokens) -> Tensor:
    """H(p(.|t)) in nats, [L, T]."""
    found: Tensor = torch.special.entr(tokens.log_probs.exp()).sum(2)
    return found


def _after(probs: Tensor, top_k: Sequence[int]) -> Tensor:
    """The (k+1)-th largest probability of every token, k by layer: [L, T, 1]; 0 where there are k experts."""
    ordered = F.pad(probs.sort(2, descending=True).values, (0, 1))
    ranks = torch.tensor(list(top_k), device=probs.device).view(-1, 1, 1)
    return ordered.gather(2, ranks.expand(-1, probs.shape[1], 1))


def _recording(ctx: Context, statistics: RoutingStatistics) -> AbstractContextManager[None]:
    return inputs_recorded(ctx.net.module) if statistics.centroids else nullcontext()
