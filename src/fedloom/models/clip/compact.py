"""A compact CLIP: open_clip's own two towers, with a convolutional stem in place of the patch embedding.

A plain patch embedding learns little from tens of thousands of small pictures; a few residual convolutions do. All
other attributes keep open_clip's names, so that prompts, adapters and weight maps do not know the difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.errors import ConfigError
from fedloom.models.clip.packages import open_clip

# The model `clip_small`, 7.9 M parameters for pictures of 32x32; what `fedloom pretrain-clip` trains by default.
CLIP_SMALL: Mapping[str, Any] = {
    "embed_dim": 128,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "layers": 4, "width": 160, "head_width": 40},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 96, "heads": 4, "layers": 3},
    "stem": {"widths": [48, 96, 160, 160], "blocks": [1, 2, 0]},
}


def conv_norm(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    """A 3x3 convolution without bias, then batch normalisation."""
    conv = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels_out))


class Residual(nn.Module):
    """x -> gelu(x + norm(conv(gelu(norm(conv(x)))))), of the same shape."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = conv_norm(width, width), conv_norm(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width, H, W] -> the same."""
        return F.gelu(x + self.second(F.gelu(self.first(x))))


class ConvStem(nn.Sequential):
    """A convolution at full size, then one halving per further width with `blocks` residual blocks after it.

    [batch, 3, H, W] -> [batch, widths[-1], H / 2^s, W / 2^s] for s = len(widths) - 1.
    """

    def __init__(self, widths: Sequence[int], blocks: Sequence[int]):
        layers: list[nn.Module] = [conv_norm(3, widths[0]), nn.GELU()]
        for (before, after), count in zip(pairwise(widths), blocks, strict=True):
            layers += [conv_norm(before, after, stride=2), nn.GELU(), *(Residual(after) for _ in range(count))]
        super().__init__(*layers)


def build_clip(config: Mapping[str, Any]) -> nn.Module:
    """The model of a configuration in open_clip's form, `embed_dim`, `vision_cfg`, `text_cfg` and more.

    `stem` (`widths`, `blocks`) puts a `ConvStem` in place of the patch embedding; its halvings must give the patch
    size and its last width that of the tower. Raises `ConfigError` where they do not.
    """
    config = {**config}
    stem = config.pop("stem", None)
    model = open_clip().CLIP(**config)
    if stem is None:
        return model
    _check_stem(stem)
    vision = config["vision_cfg"]
    patch, width = 2 ** (len(stem["widths"]) - 1), stem["widths"][-1]
    own = tuple(getattr(open_clip().CLIPVisionCfg(**vision), key) for key in ("patch_size", "width"))
    if (patch, width) != own:
        raise ConfigError(
            f"the stem gives patches of {patch} and width {width}, the image tower has patch_size {own[0]} and width "
            f"{own[1]}; make them equal"
        )
    model.visual.conv1 = ConvStem(stem["widths"], stem["blocks"])
    return model


def _check_stem(stem: Any) -> None:
    """Raise `ConfigError` for what describes no stem."""
    parts = [stem.get(key) if isinstance(stem, Mapping) else None for key in ("widths", "blocks")]
    whole = all(isinstance(part, list | tuple) and all(type(n) is int for n in part) for part in parts)
    if not whole or min(parts[0], default=0) < 1 or min(parts[1], default=0) < 0 or len(parts[0]) != len(parts[1]) + 1:
        raise ConfigError(
            "stem must hold widths, whole numbers from 1 on, and blocks, a whole number from 0 on for each width but "
            f"the first; it is {repr(stem)[:120]}"
        )
