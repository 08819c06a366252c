"""The network of Fed-Duet: adapters in both towers, a local prompt, and shared prompts fused with it per picture.

Source: Guo, Chen, Cui, "Fed-Duet: Dual Expert-Orchestrated Framework for Continual Federated Vision-Language Learning"
(ICLR 2026). With f_b the feature of a picture, t_c of a class in the local prompt, u_c^j in shared prompt j (without
gradient) and pi a pooling to d_g entries:

    e_bc = attention(pi(f_b); pi(t_c), pi(u_c^1), ..., pi(u_c^n))
    local_bc = exp(ls) f_b . t_c,   shared_bc = exp(ls) pi(f_b) . e_bc,   logits = lam_b local + (1 - lam_b) shared
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedloom.core.errors import pick
from fedloom.core.seeds import seeded
from fedloom.models.clip.adapters import Adapters, Where, adapter_layers
from fedloom.models.clip.anchors import PADDED
from fedloom.models.clip.fusion import WEIGHTS, CrossAttention, MeanOfTexts
from fedloom.models.clip.network import Clip, ClipNetwork, Token
from fedloom.models.clip.words import Phrases, encoded, fixed, learnable

Served = Literal["fused", "local", "shared"]
START = "a photo of a"  # the words of a template, as those of the pool
SENTENCE = "a photo of a {}."


class DuetNetwork(ClipNetwork):
    """`ClipNetwork` whose logits fuse the local prompt's with those of the shared prompts.

    Further outputs, where there are shared prompts: "attention" [1 + n], the share of attention that the local prompt
    and each shared one get, and "local_weight" [batch], lam. attention, mix: see `fedloom.models.clip.fusion`; None for
    local logits alone. served: which logits count in evaluation.
    """

    def __init__(
        self,
        clip: Clip,
        phrases: Phrases,
        *,
        context: Tensor | None,
        attention: nn.Module | None = None,
        mix: nn.Module | None = None,
        served: Served = "fused",
        image_layers: Sequence[nn.Module | None] = (),
        text_layers: Sequence[nn.Module | None] = (),
        token: Token = "eot",
    ):
        super().__init__(
            clip, phrases, context=context, image_layers=image_layers, text_layers=text_layers, token=token
        )
        self.fusion = None if attention is None else nn.ModuleDict({"attention": attention, "mix": mix})
        self.served = served
        self.shared_prompts: Tensor | None = None
        self._encoded: Tensor | None = None

    def receive(self, prompts: Tensor) -> None:
        """Take shared prompts [n, context, text width]; they are encoded when they are needed next.

        In training this is once: with `encode` at the start of a round, in evaluation mode.
        """
        self.shared_prompts = prompts.detach().to(self.towers.scale.device)
        self._encoded = None

    @torch.no_grad()
    def encode(self) -> None:
        """Features of the shown classes in every shared prompt, [n, shown, d], kept for the steps of a round.

        In evaluation mode, into which `Context.evaluating` puts the network.
        """
        if self.shared_prompts is not None and len(self.shared_prompts):
            self._encoded = self.texts_in(self.shared_prompts)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """See the class and `ClipNetwork`."""
        feats, image_routing = self.image(x)
        texts, text_routing = self.texts(self.context)
        logits, told = self._logits(feats, texts)
        out = {"logits": self.widened(logits), "feats": feats, "texts": texts}
        return out | told | self.told(image_routing, text_routing)

    def _logits(self, feats: Tensor, texts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        local = self.similarity(feats, texts)
        if self.fusion is None or self.shared_prompts is None or not len(self.shared_prompts):
            return local, {}
        if not self.training and self.served == "local":
            return local, {}
        others = self._encoded if self.training and self._encoded is not None else self.texts_in(self.shared_prompts)
        found, mass = self.fusion["attention"].similarity(feats, torch.cat([texts[None], others.to(texts.dtype)]))
        shared = self.towers.scale.float() * found
        if not self.training and self.served == "shared":
            return shared, {"attention": mass}
        weight = self.fusion["mix"](local, shared, feats)
        other = 1.0 if getattr(self.fusion["mix"], "adds", False) else 1 - weight
        return weight * local + other * shared, {"attention": mass, "local_weight": weight.squeeze(1)}


@dataclass(frozen=True)
class DuetParts:
    """What the network is made of; a callable from `Clip` to the network.

    adapters, where, last: see `fedloom.models.clip.adapters`; None for none. prompts: a local prompt and its fusion
    with shared ones; without them classes are named in "a photo of a {}.". layout: of the local prompt, as of the pool:
    "template" (4 vectors that start as the words "a photo of a") or "copies" (16 vectors from N(0, 0.02^2)). pooled,
    heads, scale, pooling, residual: of `CrossAttention`; attends: False for the mean of the texts in its place. weight:
    lam, of `fedloom.models.clip.fusion.WEIGHTS`.
    """

    adapters: Adapters | None = None
    where: Where = "both"
    last: int = 0
    token: Token = "eot"
    prompts: bool = True
    layout: Literal["template", "copies"] = "template"
    attends: bool = True
    pooled: int = 128
    heads: int = 8
    scale: str = "ten"
    pooling: str = "slice"
    residual: bool = False
    weight: str = "entropy"
    served: Served = "fused"

    def __call__(self, clip: Clip) -> DuetNetwork:
        """The network with its initial values."""
        image, text = [], []
        if self.adapters is not None:
            image, text = adapter_layers(clip.towers, self.adapters, clip.seed, where=self.where, last=self.last)
        layers = {"image_layers": image, "text_layers": text, "token": self.token, "served": self.served}
        if not self.prompts:
            return DuetNetwork(clip, fixed(clip.words, SENTENCE, clip.towers.length), context=None, **layers)
        context = self.start(clip)
        phrases = learnable(clip.words, len(context), clip.towers.length)
        width = clip.towers.width
        with seeded(clip.seed, "fusion"):
            attention = (
                CrossAttention(
                    width, self.pooled, self.heads, scale=self.scale, pooling=self.pooling, residual=self.residual
                )
                if self.attends
                else MeanOfTexts(width, self.pooled, pooling=self.pooling)
            )
            mix = pick("local_weight", self.weight, WEIGHTS)(width)
        return DuetNetwork(clip, phrases, context=context, attention=attention, mix=mix, **layers)

    def start(self, clip: Clip) -> Tensor:
        """Initial context vectors [n, text width]."""
        if self.layout == "copies":
            with seeded(clip.seed, "prompt"):
                return 0.02 * torch.randn(PADDED, clip.towers.text_width)
        table: Tensor = clip.towers.model.token_embedding.weight
        return table.detach()[encoded(START)].clone()
