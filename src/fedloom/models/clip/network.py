"""A network that scores classes by their names: frozen towers and the few parts that a method trains around them.

logits[b, c] = exp(ls) f_b . t_c for the classes that are shown, -inf for all others; f and t have length 1. Methods put
in what they train: context vectors, adapters, or, in a subclass, more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedloom.models.clip.measures import agreement
from fedloom.models.clip.memo import FrozenPrefix, Memo
from fedloom.models.clip.pictures import renormalized
from fedloom.models.clip.towers import Layers, Towers
from fedloom.models.clip.words import Phrases

Token = Literal["eot", "sot", "mean"]


@dataclass(frozen=True)
class Clip:
    """What a method builds its network from.

    towers: frozen. words: of the classes, for sentences. seed: of initial values. normalize: (mean, std) of the
    pictures as they come, per channel, and (mean, std) as the model wants them; None where they agree. repeats: the
    training pictures come without augmentation, so that what frozen parts make of them can be kept.
    """

    towers: Towers
    words: tuple[str, ...]
    seed: int = 0
    normalize: tuple[tuple[float, ...], ...] | None = None
    repeats: bool = True


class ClipNetwork(nn.Module):
    """Pictures [batch, 3, H, W] -> "logits" [batch, classes], "feats" [batch, d] and "texts" [shown, d] of length 1.

    With adapters also, in the order of their blocks, "image_routing" [layers, batch, E], "text_routing" [layers, shown,
    E] (clean logits of the routers), "image_gates" and "text_gates" of the same shapes; "shown" [shown], class ids.

    phrases: sentences about all classes. context: their context vectors, [n, text width] or [classes, n, text width];
    None for fixed sentences. image_layers, text_layers: adapters per block, None entries for blocks without; empty for
    none. token: which position of a text routes; of pictures it is the class token, or the mean for "mean".
    """

    memory_format = "contiguous"

    def __init__(
        self,
        clip: Clip,
        phrases: Phrases,
        *,
        context: Tensor | None = None,
        image_layers: Sequence[nn.Module | None] = (),
        text_layers: Sequence[nn.Module | None] = (),
        token: Token = "eot",
    ):
        super().__init__()
        self.towers, self.words, self.phrases = clip.towers, clip.words, phrases
        self.context = None if context is None else nn.Parameter(context)
        self.image_adapters, self.text_adapters = _by_block(image_layers), _by_block(text_layers)
        self.token, self.repeats, self.normalize = token, clip.repeats, clip.normalize
        self.show(range(len(clip.words)))
        self._texts = Memo()
        self._start = _first(image_layers, len(clip.towers.image_blocks))
        self._prefix = FrozenPrefix(self._before)

    def show(self, classes: Sequence[int]) -> None:
        """Score these classes only, ids ascending: those of a task in training, all that arrived in evaluation."""
        self.shown_ids = tuple(sorted(classes))
        self.shown = torch.tensor(self.shown_ids, dtype=torch.long)

    @property
    def num_classes(self) -> int:
        """Width of the logits."""
        return len(self.words)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """See the class."""
        feats, image_routing = self.image(x)
        texts, text_routing = self.texts(self.context)
        out = {"logits": self.widened(self.similarity(feats, texts)), "feats": feats, "texts": texts}
        return out | self.told(image_routing, text_routing)

    def image(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        """Features [batch, d] and the routing of the image tower's adapters."""
        keep = x.device.type == "cpu" and (self.repeats or not self.training)
        tokens = self._prefix(x) if keep else self._before(x)
        if self._start == len(self.towers.image_blocks):
            return tokens, []
        layers = _listed(self.image_adapters, len(self.towers.image_blocks))
        tokens, routing = self.towers.image_through(tokens, layers, self._image_token(tokens), self._start)
        return self.towers.image_end(tokens), routing

    def _before(self, x: Tensor) -> Tensor:
        """What is frozen of the way of a picture: tokens before the first adapted block, features without any."""
        with torch.no_grad():
            tokens = self.towers.image_start(self._normalized(x), self._start)
            whole = self._start == len(self.towers.image_blocks)
            return self.towers.image_end(tokens) if whole else tokens

    def _normalized(self, x: Tensor) -> Tensor:
        return renormalized(x, self.normalize)

    def _image_token(self, tokens: Tensor) -> Tensor | int:
        if self.token != "mean":
            return 0
        return tokens.new_full(tokens.shape[:2], 1 / tokens.shape[1])

    def texts(self, context: Tensor | None, phrases: Phrases | None = None) -> tuple[Tensor, list[Any]]:
        """Features [shown, d] of the shown classes with these context vectors, and the routing of the adapters.

        Where nothing that they depend on is trained at the moment, they are computed once and kept until it changes.
        """
        parts = list(self.text_adapters.parameters())
        inputs = parts if context is None else [*parts, context]
        trained = torch.is_grad_enabled() and any(t.requires_grad for t in inputs) and not torch.compiler.is_exporting()
        if trained or (self.training and any(t.requires_grad for t in parts)):
            return self._texts_of(context, phrases)
        key = (self.shown_ids, self.token)
        with torch.no_grad():
            return self._texts(key, [*inputs, phrases], lambda: self._texts_of(context, phrases))

    def _texts_of(self, context: Tensor | None, phrases: Phrases | None) -> tuple[Tensor, list[Any]]:
        each = context[self.shown.to(context.device)] if context is not None and context.dim() == 3 else context
        return self._encoded_texts(self.shown, each, phrases or self.phrases)

    @torch.no_grad()
    def texts_in(self, prompts: Tensor) -> Tensor:
        """Features of the shown classes in each of several prompts [n, context, text width]: [n, shown, d].

        Computed once and kept until prompts, classes or adapters change; in evaluation mode where adapters train.
        """
        key = ("prompts", self.shown_ids, self.token)
        found: Tensor = self._texts(key, [*self.text_adapters.parameters(), prompts], lambda: self._texts_in(prompts))
        return found

    def _texts_in(self, prompts: Tensor) -> Tensor:
        count, classes = len(prompts), len(self.shown)
        each = prompts.repeat_interleave(classes, 0)
        return self._encoded_texts(self.shown.repeat(count), each, self.phrases)[0].unflatten(0, (count, classes))

    def _encoded_texts(self, classes: Tensor, context: Tensor | None, phrases: Phrases) -> tuple[Tensor, list[Any]]:
        part, device = phrases.of(classes), self.towers.scale.device
        part = Phrases(*(tensor.to(device) for tensor in (part.ids, part.eot, part.slots, part.words)))
        layers = _listed(self.text_adapters, len(self.towers.text_blocks))
        return self.towers.text(self.towers.embedded(part, context), part.eot, layers, self._text_token(part))

    def _text_token(self, phrases: Phrases) -> Tensor | int:
        if self.token == "eot":
            return phrases.eot
        if self.token == "sot":
            return 0
        valid = torch.arange(phrases.ids.shape[1], device=phrases.eot.device) <= phrases.eot[:, None]
        return valid / valid.sum(1, keepdim=True)

    def similarity(self, feats: Tensor, texts: Tensor) -> Tensor:
        """exp(ls) f . t, [batch, shown]; in fp32 whatever the precision."""
        with torch.autocast(feats.device.type, enabled=False):
            return self.towers.scale.float() * feats.float() @ texts.float().T

    def widened(self, logits: Tensor) -> Tensor:
        """[batch, shown] -> [batch, classes] with -inf for classes that are not shown."""
        if logits.shape[1] == self.num_classes:
            return logits
        full = logits.new_full((logits.shape[0], self.num_classes), -torch.inf)
        return full.index_copy(1, self.shown.to(logits.device), logits)

    def told(self, image_routing: list[Any], text_routing: list[Any]) -> dict[str, Tensor]:
        """What the outputs say about routing."""
        out = {"shown": self.shown.to(self.towers.scale.device)}
        for name, routing in (("image", image_routing), ("text", text_routing)):
            if routing:
                out[f"{name}_routing"] = torch.stack([r.logits for r in routing])
                out[f"{name}_gates"] = torch.stack([r.gates for r in routing])
        return out

    def measures(self, out: Mapping[str, Tensor], y: Tensor) -> dict[str, tuple[float, float]]:
        """How well the pictures of a batch agree with the texts of their classes."""
        return agreement(out["feats"], out["texts"], out["shown"], y)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of each block in the backward pass."""
        self.towers.checkpointing = enable


def _by_block(layers: Sequence[nn.Module | None]) -> nn.ModuleDict:
    return nn.ModuleDict({str(i): layer for i, layer in enumerate(layers) if layer is not None})


def _listed(layers: nn.ModuleDict, count: int) -> Layers:
    found = dict(layers.items())
    return [found.get(str(i)) for i in range(count)]  # type: ignore[misc]


def _first(layers: Sequence[nn.Module | None], count: int) -> int:
    """The first block with adapters; the number of blocks where there is none."""
    return next((i for i, layer in enumerate(layers) if layer is not None), count)
