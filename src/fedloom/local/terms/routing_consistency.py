"""A pull of pictures and texts of one class to the same experts (`fedloom.local.tower_routing`).

A form gives one number per layer, of image [layers, B, E] and text [layers, shown, E] (softmax of noiseless logits),
own [B, shown] (bool, a picture's class) and tau. The layers of both towers are paired in their order; a longer tower's
rest does not count.

Source: Guo et al., "Fed-Duet" (ICLR 2026): 1/2 (CE(S / tau, y) + CE(S^T / tau, y)), with S the similarity of the
routing of pictures and texts in a batch. What S's columns and y are is not said there: by default the distinct classes
of the batch, and the pictures of each alike, as two pictures of a class are no negatives of one another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.context import Outputs
from fedloom.core.errors import ConfigError, pick
from fedloom.core.tree import Tensors
from fedloom.local.parts import Carried, Ref
from fedloom.local.terms.routing_stability import js
from fedloom.local.tower_routing import check_weight, learning, nothing, probabilities

Form = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def by_class(image: Tensor, text: Tensor, own: Tensor, tau: float) -> Tensor:
    """S of cosines, its columns the classes that the batch holds."""
    return contrast(F.normalize(image, dim=2), F.normalize(text, dim=2), own, tau)


def by_picture(image: Tensor, text: Tensor, own: Tensor, tau: float) -> Tensor:
    """S of cosines, square: every picture has its class's text to itself, and two of one class cost log 2 at least."""
    mine = text[:, own.long().argmax(1)]
    alone = torch.eye(len(own), dtype=torch.bool, device=own.device)
    return by_class(image, mine, alone, tau)


def dot(image: Tensor, text: Tensor, own: Tensor, tau: float) -> Tensor:
    """As `by_class`, with scalar products of the distributions in place of cosines."""
    return contrast(image, text, own, tau)


def cosine_of_means(image: Tensor, text: Tensor, own: Tensor, tau: float) -> Tensor:
    """1 - cos(mean over pictures, mean over shown classes): the form of Fed-Duet's release of 2025, without tau."""
    return 1 - F.cosine_similarity(image.mean(1), text.mean(1), dim=1)


def js_of_means(image: Tensor, text: Tensor, own: Tensor, tau: float) -> Tensor:
    """The Jensen-Shannon divergence of the same two means."""
    return js(image.mean(1), text.mean(1))


FORMS: dict[str, Form] = {
    "contrastive": by_class,
    "batch": by_picture,
    "dot": dot,
    "cosine_of_means": cosine_of_means,
    "js": js_of_means,
}


def contrast(image: Tensor, text: Tensor, own: Tensor, tau: float) -> Tensor:
    """1/2 (CE over the classes of the batch + CE over its pictures, the target those of a class alike); [layers]."""
    scores = image @ text.transpose(1, 2) / tau
    present = own.any(0)
    to_text = scores.masked_fill(~present, -torch.inf).log_softmax(2).masked_fill(~own, 0).sum((1, 2)) / own.sum()
    alike = own / own.sum(0).clamp(min=1)
    to_image = (scores.log_softmax(1) * alike).sum((1, 2)) / present.sum()
    return -(to_text + to_image) / 2


@dataclass(frozen=True)
class RoutingConsistency:
    """weight * mean over layers of form; 0 where a tower has no adapters or the routers are held still.

    Labels are among the shown classes. form: a key of `FORMS`. tau: temperature of the forms that contrast.
    """

    form: str
    weight: float
    tau: float = 0.1

    def __post_init__(self) -> None:
        pick("consistency", self.form, FORMS)
        check_weight("eta", self.weight)
        if not self.tau > 0:
            raise ConfigError(f"tau of the routing's consistency must be above 0, got {self.tau}")

    def __call__(self, params: Tensors, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Tensor:
        """Return the scalar."""
        probs = probabilities(out)
        if len(probs) < 2 or not learning(out):
            return nothing(out)
        own = batch.y[:, None] == out["shown"]
        layers = min(map(len, probs.values()))
        found = FORMS[self.form](probs["image"][:layers], probs["text"][:layers], own, self.tau)
        return self.weight * found.mean()
