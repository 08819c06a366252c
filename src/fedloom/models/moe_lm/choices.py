"""Multiple choice: a question with C options, of which one is right.

Inputs are {"input_ids": int64 [B, C, S], "attention_mask": bool [B, C, S], "scored": int64 [B, C, S]}: each row is the
question followed by one option, padded on the right; "scored" is 0 outside the option and inside it the option's number
of characters. Logits are [B, C]: the options are the classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.errors import pick
from fedloom.core.moe import MoELayer, moe_layers
from fedloom.models.moe_lm.text import TextBackbone

Score = Callable[[Tensor, Tensor, Tensor], Tensor]

SCORES: dict[str, Score] = {
    "sum": lambda nll, tokens, characters: -nll,
    "tokens": lambda nll, tokens, characters: -nll / tokens.clamp(min=1),
    "characters": lambda nll, tokens, characters: -nll / characters.clamp(min=1),
}


class _Choices(nn.Module):
    """What both kinds have in common."""

    memory_format = "contiguous"
    class_rows: Mapping[str, int] = {}

    def __init__(self, backbone: TextBackbone, num_classes: int):
        super().__init__()
        self.backbone, self.num_features, self.num_classes = backbone, backbone.num_features, num_classes

    @property
    def moe_layers(self) -> tuple[MoELayer, ...]:
        """The backbone's layers, as this network names them."""
        return moe_layers(self.backbone, "backbone.")

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of each layer in the backward pass."""
        self.backbone.set_grad_checkpointing(enable)


class ChoiceScorer(_Choices):
    """A causal language model; the logit of an option is the log-likelihood of its tokens, as `backbone.score` says.

    score: "sum" over its scored tokens of log p(token | all before), or that divided by the number of its "tokens" or
    "characters". The first token of a row has nothing before it and is never scored.
    """

    def __init__(self, backbone: TextBackbone, num_classes: int):
        super().__init__(backbone, num_classes)
        self.score = pick("model.options.score", backbone.score, SCORES)

    def forward(self, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """ "logits", and per option [B, C] "choice_nll" (sum of -log p), "choice_tokens" and "choice_characters"."""
        ids, mask, scored = (x[name].flatten(0, 1) for name in ("input_ids", "attention_mask", "scored"))
        states = self.backbone.states(ids, mask)
        row, place = (scored[:, 1:] > 0).nonzero(as_tuple=True)
        logits = self.backbone.body.get_output_embeddings()(states[row, place]).float()
        each = F.cross_entropy(logits, ids[row, place + 1], reduction="none")
        nll = torch.zeros(len(ids), device=each.device).index_add(0, row, each).view(x["scored"].shape[:2])
        tokens = (scored[:, 1:] > 0).sum(1).to(nll).view_as(nll)
        characters = scored.amax(1).to(nll).view_as(nll)
        return {
            "logits": self.score(nll, tokens, characters),
            "choice_nll": nll,
            "choice_tokens": tokens,
            "choice_characters": characters,
        }

    def measures(self, out: Mapping[str, Tensor], y: Tensor) -> dict[str, tuple[float, float]]:
        """Sums and counts over a batch of what the logits do not tell.

        "accuracy_norm": hits of the likelihood per character, examples. "nll": -log p of the right options, their
        tokens; exp(sum / count) is the perplexity.
        """
        rows = torch.arange(len(y), device=y.device)
        hits = (out["choice_nll"] / out["choice_characters"].clamp(min=1)).argmin(1) == y
        return {
            "accuracy_norm": (float(hits.sum()), float(len(y))),
            "nll": (
                float(out["choice_nll"].detach()[rows, y].double().sum()),
                float(out["choice_tokens"][rows, y].sum()),
            ),
        }


class ChoiceHead(_Choices):
    """An encoder; the logit of an option is linear in the features of the question with that option."""

    def __init__(self, backbone: TextBackbone, num_classes: int):
        super().__init__(backbone, num_classes)
        self.head = nn.Linear(backbone.num_features, 1)

    def forward(self, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """ "logits" [B, C]."""
        shape = x["input_ids"].shape[:2]
        flat = {name: x[name].flatten(0, 1) for name in ("input_ids", "attention_mask")}
        return {"logits": self.head(self.backbone(flat)).view(shape)}


def choices(backbone: TextBackbone, num_classes: int) -> ChoiceScorer | ChoiceHead:
    """The network for multiple choice on this backbone: by likelihood where it is causal."""
    return (ChoiceScorer if backbone.causal else ChoiceHead)(backbone, num_classes)
