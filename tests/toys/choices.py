"""A federation of multiple-choice questions: every question has four options of unequal length, one of them right.

A label is the position of the right option. The network scores an option by the log-likelihood of its tokens, each
given the one before it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedloom.core import Batches, Forward
from fedloom.core.batches import Inputs
from fedloom.core.seeds import generator, seeded
from fedloom.engine.experiment import Experiment
from fedloom.select.sampling import uniform_cohort
from toys.federation import BlobPlan, _domains, method_of

VOCABULARY, OPTIONS, LENGTH = 12, 4, 6


@dataclass(frozen=True)
class ChoicePlan(BlobPlan):
    """Questions as int32 [2, options, tokens]: ids or -1, and where a token is scored the option's characters."""

    num_classes: int = OPTIONS
    num_stages: int = 1

    def _pool(self, what: str) -> tuple[Tensor, Tensor]:
        return _questions(self.per_class, self.seed, what)

    def train(self, client: int, stage: int, round: int | None, exchange: str) -> Batches:
        x, y = self._pool("train")
        key = (self.seed, "batches", stage, round, client, exchange)
        return Batches(x, y, self._indices(client, stage), key=key, prepare=prepare, domains=_domains(y))

    def test(self, task: int, domain: int | None = None) -> Batches:
        x, y = self._pool("test")
        chosen = _domains(y) == domain if domain is not None else torch.ones(len(y), dtype=torch.bool)
        return Batches(x, y, chosen.nonzero().flatten(), key=(self.seed, "test"), prepare=prepare, domains=_domains(y))


@functools.cache
def _questions(per_class: int, seed: int, what: str) -> tuple[Tensor, Tensor]:
    """Wrong options are random; tokens of a right one go up by one."""
    rng, y = generator(seed, "questions", what), torch.arange(OPTIONS).repeat_interleave(per_class)
    ids = torch.randint(0, VOCABULARY, (len(y), OPTIONS, LENGTH), generator=rng)
    rows = torch.arange(len(y))
    ids[rows, y] = (ids[rows, y, :1] + torch.arange(LENGTH)) % VOCABULARY
    sizes = torch.randint(3, LENGTH + 1, (len(y), OPTIONS, 1), generator=rng)
    inside = torch.arange(LENGTH) < sizes
    scored = torch.where(inside & (torch.arange(LENGTH) > 0), 5 * sizes, 0)
    return torch.stack([torch.where(inside, ids, -1), scored], 1).int(), y


def prepare(x: Inputs, rng: torch.Generator | None) -> Inputs:
    """The planes as the network reads them."""
    assert isinstance(x, Tensor)
    ids, scored = x.long().unbind(1)
    return {"input_ids": ids.clamp(min=0), "attention_mask": ids >= 0, "scored": scored}


class Likelihood(nn.Module):
    """A logit per pair of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        ids, scored = x["input_ids"], x["scored"]
        told = self.pairs(ids[..., :-1]).log_softmax(-1).gather(-1, ids[..., 1:, None])[..., 0]
        kept = scored[..., 1:] > 0
        nll = -(told * kept).sum(-1)
        return {"logits": -nll, "choice_nll": nll, "tokens": kept.sum(-1), "characters": scored.amax(-1)}

    def measures(self, out: dict[str, Tensor], y: Tensor) -> dict[str, tuple[float, float]]:
        hits = (out["choice_nll"] / out["characters"]).argmin(1) == y
        right = [out[name].gather(1, y[:, None]).sum() for name in ("choice_nll", "tokens")]
        return {"accuracy_norm": (hits.sum(), len(y)), "nll": (right[0], right[1])}


@dataclass(frozen=True)
class ChoiceSpec:
    """A `ModelSpec` for the questions."""

    num_classes: int = OPTIONS
    seed: int = 0

    def backbone(self) -> nn.Module:
        raise NotImplementedError("the questions are scored by a whole network")

    def classifier(self) -> nn.Module:
        with seeded(self.seed, "likelihood"):
            return Likelihood()


def questions(method: str = "fedloom.methods.fedavg:fedavg", **plan: int) -> Experiment:
    """An experiment on the questions that any process can rebuild."""
    return Experiment(
        method=method_of(method),
        spec=ChoiceSpec(),
        forward=Forward(),
        plan=ChoicePlan(**plan),
        sampler=uniform_cohort,
        rebuild=functools.partial(questions, method, **plan),
    )
