"""The two frozen towers of a CLIP, run block by block so that adapters can stand between their parts.

The model is one of open_clip's class `CLIP`, or built like one (`fedloom.models.clip.compact`). Shapes: N texts or
pictures, L positions, d the joint width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fedloom.models.clip.words import Phrases


class Layer(Protocol):
    """What may stand beside the perceptron of a block; see `fedloom.models.clip.adapters.AdapterLayer`."""

    def __call__(self, x: Tensor, token: Tensor) -> tuple[Tensor, Any]:
        """x [N, L, width], token [N, width] that routes it -> what is added [N, L, width], and the routing."""
        ...


Layers = Sequence[Layer | None]  # one per block


def adapted(block: Any, layer: Layer | None, x: Tensor, token: Tensor | int, mask: Tensor | None) -> tuple[Tensor, Any]:
    """One residual block, x + attention, then + perceptron + adapters, which read the stream after attention.

    token: position per text or picture whose state routes, int64 [N] or one for all; float [N, L] for a weighted mean.
    """
    x = x + block.ls_1(block.attention(q_x=block.ln_1(x), attn_mask=mask))
    through = block.ls_2(block.mlp(block.ln_2(x)))
    if layer is None:
        return x + through, None
    added, routing = layer(x, routed_by(x, token))
    return x + through + added, routing


def routed_by(x: Tensor, token: Tensor | int) -> Tensor:
    """The state [N, width] of one position, or a weighted mean of all."""
    if isinstance(token, int):
        return x[:, token]
    if token.is_floating_point():
        return torch.einsum("nl,nlw->nw", token, x)
    return x[torch.arange(len(x), device=x.device), token]


class Towers(nn.Module):
    """A frozen CLIP: features of length 1 from pictures and from texts."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model.eval()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self.checkpointing = False

    @property
    def width(self) -> int:
        """Joint width d."""
        return int(self.model.text_projection.shape[1])

    @property
    def text_width(self) -> int:
        """Width of the text tower."""
        return int(self.model.token_embedding.weight.shape[1])

    @property
    def image_width(self) -> int:
        """Width of the image tower."""
        return int(self.model.visual.class_embedding.shape[0])

    @property
    def length(self) -> int:
        """Positions that the text tower reads."""
        return int(self.model.positional_embedding.shape[0])

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the pictures."""
        size = self.model.visual.image_size
        return (size, size) if isinstance(size, int) else tuple(size)

    @property
    def image_blocks(self) -> Any:
        """Residual blocks of the image tower."""
        return self.model.visual.transformer.resblocks

    @property
    def text_blocks(self) -> Any:
        """Residual blocks of the text tower."""
        return self.model.transformer.resblocks

    @property
    def scale(self) -> Tensor:
        """exp of the frozen log temperature."""
        return self.model.logit_scale.exp()

    def image_start(self, x: Tensor, blocks: int = 0) -> Tensor:
        """Pictures [N, 3, H, W] -> their tokens [N, 1 + patches, image width] behind the first few blocks."""
        x = self.model.visual._embeds(x)
        for block in self.image_blocks[:blocks]:
            x = block(x)
        return x

    def image_end(self, tokens: Tensor) -> Tensor:
        """Tokens behind the last block -> features [N, d] of length 1."""
        pooled, _ = self.model.visual._pool(tokens)
        return F.normalize(pooled @ self.model.visual.proj, dim=-1)

    def image_through(
        self, tokens: Tensor, layers: Layers, token: Tensor | int = 0, start: int = 0
    ) -> tuple[Tensor, list[Any]]:
        """The blocks from `start` on, with their adapters, and the routing of each that has some."""
        return self._through(self.image_blocks[start:], layers[start:], tokens, token, None)

    def embedded(self, phrases: Phrases, context: Tensor | None = None) -> Tensor:
        """Token embeddings [C, L, text width], with `context` [n, text width] or [C, n, text width] in the slots."""
        x = self.model.token_embedding(phrases.ids)
        if context is None or not phrases.slots.shape[1]:
            return x
        each = context if context.dim() == 3 else context.expand(len(x), *context.shape)
        index = phrases.slots[..., None].expand(-1, -1, x.shape[-1])
        return x.scatter(1, index, each.to(x.dtype))

    def text(
        self, embedded: Tensor, eot: Tensor, layers: Layers = (), token: Tensor | int | None = None
    ) -> tuple[Tensor, list[Any]]:
        """Token embeddings [C, L, text width] -> features [C, d] of length 1, and the routing of the adapters.

        eot: position of the feature. token: what routes, the EOT by default.
        """
        length = embedded.shape[1]
        x = embedded + self.model.positional_embedding[:length]
        layers = layers or [None] * len(self.text_blocks)
        mask = self.model.attn_mask[:length, :length]
        x, routing = self._through(self.text_blocks, layers, x, eot if token is None else token, mask)
        x = self.model.ln_final(x)[torch.arange(len(x), device=x.device), eot]
        return F.normalize(x @ self.model.text_projection, dim=-1), routing

    def _through(
        self, blocks: Any, layers: Layers, x: Tensor, token: Tensor | int, mask: Tensor | None
    ) -> tuple[Tensor, list[Any]]:
        found = []
        for block, layer in zip(blocks, layers, strict=True):
            if self.checkpointing and torch.is_grad_enabled():
                x, routing = checkpoint(adapted, block, layer, x, token, mask, use_reentrant=False)
            else:
                x, routing = adapted(block, layer, x, token, mask)
            if routing is not None:
                found.append(routing)
        return x, found
