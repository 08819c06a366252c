"""Context vectors that are made from what an early block of the image tower sees.

Source: the public code of MoAFCL (`bear-zd/MoAFCL`; ICMR 2025). With h the mean token behind an early block:

    context = mean_b W2 relu(drop(W1 h_b + b1)) + b2, n vectors before every class name of a batch.

The mean over the batch makes a text depend on all pictures of a batch, so it is for training alone: what is evaluated
is `ContextMixture`, whose contexts are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.batches import Batches
from fedloom.core.context import Context
from fedloom.core.errors import ConfigError
from fedloom.core.seeds import seeded
from fedloom.core.tree import Tensors
from fedloom.models.clip.measures import agreement
from fedloom.models.clip.network import Clip, ClipNetwork
from fedloom.models.clip.words import Phrases, learnable

HIDDEN, DROPOUT = 1024, 0.1
GATE_HIDDEN = 512


class EarlyTokens(ClipNetwork):
    """A frozen CLIP that also tells h [batch, image width], the mean of all tokens behind block `layer` (from 1)."""

    def __init__(self, clip: Clip, phrases: Phrases, layer: int):
        blocks = len(clip.towers.image_blocks)
        if not 1 <= layer <= blocks:
            raise ConfigError(f"method.extract_layer must be in 1 .. {blocks}, the image tower's blocks, got {layer}")
        super().__init__(clip, phrases)
        self.layer = layer

    def _before(self, x: Tensor) -> Tensor:
        """Features and h beside each other, so that both are kept."""
        with torch.no_grad():
            early = self.towers.image_start(self._normalized(x), self.layer)
            tokens, _ = self.towers.image_through(early, [None] * len(self.towers.image_blocks), start=self.layer)
            return torch.cat([self.towers.image_end(tokens), early.mean(1)], -1)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features [batch, d] of length 1 and h of pictures."""
        row, _ = super().image(x)
        feats, early = row.split([self.towers.width, self.towers.image_width], -1)
        return feats, early

    def image(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        """Features [batch, d]; no routing."""
        return self.parts(x)[0], []


class ContextGenerator(EarlyTokens):
    """One generator of context vectors, which is all that trains; outputs also "early", h [batch, image width].

    context: n, context vectors. Two linear layers, width -> 1024 -> n * text width, start as torch starts them.
    """

    def __init__(self, clip: Clip, context: int = 8, layer: int = 1):
        super().__init__(clip, learnable(clip.words, context, clip.towers.length), layer)
        self.clip, self.shape = clip, (context, clip.towers.text_width)
        with seeded(clip.seed, "generator"):
            first, second = nn.Linear(clip.towers.image_width, HIDDEN), nn.Linear(HIDDEN, context * self.shape[1])
        self.generator = nn.Sequential(first, nn.Dropout(DROPOUT), nn.ReLU(), second)

    def contexts(self, early: Tensor) -> Tensor:
        """Context vectors [batch, n, text width] of each picture's h [batch, image width]."""
        made: Tensor = self.generator(early)
        return made.view(len(early), *self.shape)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Logits with the mean context of the batch."""
        feats, early = self.parts(x)
        texts, _ = self.texts(self.contexts(early).mean(0))
        out = {"logits": self.widened(self.similarity(feats, texts)), "feats": feats, "texts": texts, "early": early}
        return out | self.told([], [])

    def rebuild(self, adapters: int) -> ContextMixture:
        """The network that is evaluated: a gate over the contexts of so many generators, around the same towers."""
        return ContextMixture(self.clip, self.phrases, self.layer, adapters, self.shape)


class ContextMixture(EarlyTokens):
    """Contexts [adapters, n, text width] and a gate that chooses one for every picture by its h.

    Outputs also "chosen", int64 [batch]; "texts" are [adapters, shown, d]. A picture's logits depend on it alone.
    """

    def __init__(self, clip: Clip, phrases: Phrases, layer: int, adapters: int, shape: tuple[int, int]):
        super().__init__(clip, phrases, layer)
        with seeded(clip.seed, "gate"):
            hidden, out = nn.Linear(clip.towers.image_width, GATE_HIDDEN), nn.Linear(GATE_HIDDEN, adapters)
        self.gate = nn.ModuleDict({"hidden": hidden, "out": out})
        self.contexts = nn.Parameter(torch.zeros(adapters, *shape))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Logits with the context of the gate's first choice."""
        feats, early = self.parts(x)
        chosen = self.gate["out"](self.gate["hidden"](early).relu()).argmax(-1)
        texts, _ = self.texts(self.contexts)
        every = self.similarity(feats, texts.flatten(0, 1)).unflatten(1, texts.shape[:2])
        place = chosen[:, None, None].expand(-1, 1, texts.shape[1])
        logits = self.widened(every.gather(1, place).squeeze(1))
        return {"logits": logits, "feats": feats, "texts": texts, "chosen": chosen} | self.told([], [])

    def _texts_of(self, context: Tensor | None, phrases: Phrases | None) -> tuple[Tensor, list[Any]]:
        assert context is not None
        found = [super(ContextMixture, self)._texts_of(each, phrases)[0] for each in context]
        return torch.stack(found), []

    def measures(self, out: dict[str, Tensor], y: Tensor) -> dict[str, tuple[float, float]]:
        """Those of `ClipNetwork`, each picture with the texts of its own context."""
        groups = [out["chosen"] == k for k in range(len(out["texts"]))]
        told = [
            agreement(out["feats"][mine], texts, out["shown"], y[mine])
            for mine, texts in zip(groups, out["texts"], strict=True)
        ]
        return {name: tuple(map(sum, zip(*(each[name] for each in told), strict=True))) for name in told[0]}


@dataclass(frozen=True)
class Generator:
    """Makes a `ContextGenerator`."""

    context: int = 8
    layer: int = 1

    def __call__(self, clip: Clip) -> ContextGenerator:
        """The network."""
        return ContextGenerator(clip, self.context, self.layer)


def early_features(ctx: Context, data: Batches, batch_size: int = 250) -> Tensor:
    """h [n, image width] of all examples in stored order under the context's `EarlyTokens`, on the CPU.

    A pass: in evaluation mode, without augmentation; the network and what training sees stay as they were.
    """
    module: EarlyTokens = ctx.net.module  # type: ignore[assignment]
    found = [torch.zeros(0, module.towers.image_width)]
    with ctx.evaluating():
        for batch in data.epoch(batch_size=batch_size, purpose="features", shuffle=False):
            found.append(module.parts(batch.x.to(ctx.net.forward.device))[1].float().cpu())  # type: ignore[union-attr]
    return torch.cat(found)


def mean_context(ctx: Context, params: Tensors, early: Tensor, batch_size: int = 1000) -> Tensor:
    """Mean context [n, text width] that a generator with these parameters makes of h [batch, image width], on the CPU.

    Binds the context's `ContextGenerator`. In evaluation mode.
    """
    module: ContextGenerator = ctx.net.module  # type: ignore[assignment]
    ctx.bind(params)
    with ctx.evaluating():
        sums = [module.contexts(rows.to(ctx.net.forward.device)).double().sum(0) for rows in early.split(batch_size)]
    return (torch.stack(sums).sum(0) / len(early)).float().cpu()
