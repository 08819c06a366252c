"""FedCLIP: FedAvg of one attention adapter on the picture features of a frozen CLIP.

Source: Lu et al., "FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning" (IEEE Data
Engineering Bulletin 2023, arXiv 2302.13485). With f a picture's feature and t_c that of the sentence about class c:

    a(f) = softmax(W2 tanh(W1 f + b1) + b2),   f' = normalise(a(f) * f),   logits_c = exp(ls) f' . t_c

Clients train W1, b1, W2, b2; the server takes their plain mean (`uniform`), whatever the clients' numbers of examples.

Decisions:

- `loss="ce"` is the cross-entropy over the classes, which a stream of classes needs: in the paper's own loss,
  `"contrastive"`, which the preset `published` takes, the pictures of a batch that share a class are each other's
  negatives, and no class outside the batch is seen (`fedloom.local.terms.in_batch`). It skips batches of one picture: a
  client with a single example returns what it received; a single last picture joins the batch before it.
- The attention reads features of length 1, the release those before they get it.
- The paper trains with Adam 5e-5, betas (0.9, 0.98), eps 1e-6, weight decay 0.2, batches of 32 and one pass per round
  for 200 to 300 rounds; here that is the section `training`. Optimiser state is fresh in every call.
- There is no mechanism against forgetting but that so little trains.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from fedloom.core import Batches, ConfigError, Context, Payload, Update
from fedloom.local import LocalSGD
from fedloom.local.parts import Term
from fedloom.local.terms import CrossEntropy
from fedloom.local.terms.in_batch import InBatchContrast
from fedloom.methods.clip_based import ClipMethod
from fedloom.models.clip.image_attention import Attention

PRESETS: dict[str, dict[str, Any]] = {"paper": {}, "published": {"loss": "contrastive"}}


@dataclass(frozen=True)
class FedClip(ClipMethod):
    """pairs: the loss compares pictures, so that one alone teaches nothing."""

    pairs: bool = False

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train; a client with a single picture returns what it received where the loss needs two."""
        if self.pairs and len(data) < 2:
            return Update(state, {field: down[field] for field in ("params", "buffers")})
        return super().client_update(down, state, data, ctx)


def fedclip(
    *,
    local: LocalSGD,
    loss: Literal["ce", "contrastive"] = "ce",
    template: str = "a photo of a {}.",
    label_scope: Literal["current", "seen"] = "current",
    uniform: bool = True,
) -> FedClip:
    """Assemble FedCLIP; the options that are not named here are FedAvg's.

    loss: cross-entropy over the classes (`ce`), or the paper's contrast within a batch (`contrastive`).
    template: the sentence about a class, with {} for its name.
    label_scope: classes that a client scores in training: those of its task (`current`) or all so far (`seen`).
    """
    if loss == "contrastive" and local.batch_size < 2:
        raise ConfigError(
            f"loss 'contrastive' compares the pictures of a batch, and training.batch_size is {local.batch_size}; set "
            "it to 2 or more, or loss to ce"
        )
    terms: dict[str, Term] = {"ce": CrossEntropy(label_scope), "contrastive": InBatchContrast()}
    return FedClip(
        replace(local, terms=(terms[loss],)),
        uniform,
        build=Attention(template),
        label_scope=label_scope,
        pairs=loss == "contrastive",
    )
