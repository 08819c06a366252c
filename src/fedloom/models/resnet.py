"""Residual networks for small images, with batch or group normalisation.

Source: He et al. 2016, "Deep Residual Learning for Image Recognition", section 4.2 (depth 6n + 2: three groups of n
blocks, widths 16, 32, 64) and table 1 (ResNet-18: four groups of two blocks, widths 64 to 512). Differs: shortcuts
that change the shape are 1x1 convolutions (their option B), and ResNet-18 has a 3x3 stem of stride 1 without max
pooling, as is usual on 32x32 images.

Initial values: convolutions Kaiming-normal with fan_out and the gain of ReLU; norms weight 1, bias 0. Group
normalisation (Wu and He 2018) uses `groups` = 8 groups by default, so 2 channels a group at width 16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.errors import ConfigError
from fedloom.models.channels import Channels, Draft
from fedloom.models.checkpointing import set_checkpointing

Norm = Callable[[int], nn.Module]


class Block(nn.Module):
    """Two 3x3 convolutions with norms, and a shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, norm: Norm):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.norm1 = norm(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.norm2 = norm(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            project = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, norm(channels_out))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels_in, H, W] -> [batch, channels_out, ceil(H / stride), ceil(W / stride)]."""
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """3x3 stem, groups of blocks (every group but the first halves the image), global average pooling.

    groups: number of groups of group normalisation, which must divide every width; None for batch normalisation.
    stem_stride: 2 halves the image in the stem already, for a quarter of the operations.
    """

    memory_format = "channels_last"

    def __init__(
        self,
        input_shape: Sequence[int],
        blocks: Sequence[int],
        widths: Sequence[int],
        groups: int | None = 8,
        stem_stride: int = 1,
    ):
        super().__init__()
        if stem_stride not in (1, 2):
            raise ConfigError(f"stem_stride must be 1 or 2, got {stem_stride}")
        make = _norm(groups, widths)
        self.stem = nn.Conv2d(input_shape[0], widths[0], 3, stem_stride, padding=1, bias=False)
        self.norm = make(widths[0])
        layers: list[nn.Module] = []
        channels = widths[0]
        for group, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            for i in range(count):
                layers.append(Block(channels, width, 2 if i == 0 and group > 0 else 1, make))
                channels = width
        self.blocks = nn.Sequential(*layers)
        self.num_features = channels
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Features [batch, num_features] of images [batch, C, H, W]."""
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return x.mean((2, 3))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of each block in the backward pass."""
        set_checkpointing(self.blocks, enable)

    def channel_groups(self) -> Channels:
        """One group per stream of one width, and one inside every block; `ConfigError` for group normalisation."""
        if isinstance(self.norm, nn.GroupNorm):
            own = f"resnet{2 * len(self.blocks) + 2}"
            raise ConfigError(
                f"channels under group normalisation cannot be pruned one by one: take {own} instead of {own}_gn"
            )
        draft, stream = Draft(self), "stem"
        draft.layer("stem", reads=None, writes=stream)
        draft.norm("norm", stream)
        draft.tap(stream, "blocks", "input")
        for name, block in self.blocks.named_children():
            shortcut = None if isinstance(block.shortcut, nn.Identity) else "shortcut"
            stream = draft.residual_block(f"blocks.{name}", [("conv1", "norm1"), ("conv2", "norm2")], shortcut, stream)
        return draft.table()


def _norm(groups: int | None, widths: Sequence[int]) -> Norm:
    if groups is None:
        return nn.BatchNorm2d
    if not isinstance(groups, int) or groups < 1 or any(width % groups for width in widths):
        raise ConfigError(f"groups must divide the widths {list(widths)} of the network, got {groups}")
    return partial(nn.GroupNorm, groups)


def thin(
    input_shape: Sequence[int], *, depth: int, groups: int | None = 8, stem_stride: int = 1, width: int = 16
) -> ResNet:
    """ResNet-8 or ResNet-20: depth = 6n + 2, channels width, 2 width, 4 width."""
    return ResNet(input_shape, ((depth - 2) // 6,) * 3, _doubled(width, 3), groups, stem_stride)


def resnet18(input_shape: Sequence[int], *, groups: int | None = 8, stem_stride: int = 1, width: int = 64) -> ResNet:
    """ResNet-18 with the small-image stem; channels from width to 8 width."""
    return ResNet(input_shape, (2, 2, 2, 2), _doubled(width, 4), groups, stem_stride)


def _doubled(width: int, times: int) -> tuple[int, ...]:
    if width < 1:
        raise ConfigError(f"model.options.width must be at least 1, got {width}")
    return tuple(width * 2**k for k in range(times))
