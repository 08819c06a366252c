"""Small networks without residual connections.

Initial values are torch's defaults for `Linear` and `Conv2d`: Kaiming-uniform with a = sqrt(5), that is uniform in
+-1/sqrt(fan_in), for weights and biases (He et al. 2015 with the gain of LeCun's rule).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.errors import ConfigError
from fedloom.models.channels import Axis, Channels, Draft
from fedloom.models.checkpointing import set_checkpointing


class Flatten(nn.Module):
    """No parameters: [batch, ...] -> [batch, num_features]; with a linear head, multinomial regression."""

    memory_format = "contiguous"

    def __init__(self, input_shape: Sequence[int]):
        super().__init__()
        self.num_features = math.prod(input_shape)

    def forward(self, x: Tensor) -> Tensor:
        """Features [batch, num_features]."""
        return x.flatten(1)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """There is nothing to recompute, so both values of the switch give the same pass."""

    def channel_groups(self) -> Channels:
        """There are none."""
        return Draft(self).table()


class Mlp(nn.Module):
    """Linear layers of the given widths, each followed by ReLU, on the flattened input."""

    memory_format = "contiguous"

    def __init__(self, input_shape: Sequence[int], hidden: Sequence[int] = (128,)):
        super().__init__()
        hidden = (hidden,) if isinstance(hidden, int) else tuple(hidden)
        if not hidden or any(not isinstance(width, int) or width < 1 for width in hidden):
            raise ConfigError(f"mlp: hidden must be one or more widths of at least 1, got {list(hidden)}")
        widths = (math.prod(input_shape), *hidden)
        layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
        self.layers = nn.Sequential(*layers)
        self.num_features = widths[-1]

    def forward(self, x: Tensor) -> Tensor:
        """Features [batch, num_features] of inputs [batch, ...]."""
        return self.layers(x.flatten(1))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of each layer in the backward pass."""
        set_checkpointing(self.layers, enable)

    def channel_groups(self) -> Channels:
        """One group per layer."""
        draft, reads = Draft(self), None
        for name, _ in self.layers.named_children():
            layer = f"layers.{name}.0"
            draft.layer(layer, reads=reads, writes=layer)
            draft.tap(layer, f"layers.{name}", "output")
            reads = layer
        return draft.table()


class ConvPool(nn.Module):
    """3x3 convolution, optional 2x2 max pooling, ReLU.

    Pooling comes first because ReLU is monotone: values and gradients are the same and ReLU sees a quarter of them.
    """

    def __init__(self, channels_in: int, channels_out: int, pool: bool):
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels_in, H, W] -> [batch, channels_out, H or H // 2, W or W // 2]."""
        x = self.conv(x)
        return F.relu(F.max_pool2d(x, 2) if self.pool else x)


class ConvNet(nn.Module):
    """Convolutions, then one hidden linear layer of `width` with ReLU. The two networks below fix the rest."""

    memory_format = "contiguous"
    channels: Sequence[int] = ()
    pooled: Sequence[bool] = ()

    def __init__(self, input_shape: Sequence[int], width: int):
        super().__init__()
        if width < 1:
            raise ConfigError(f"{type(self).__name__}: width must be at least 1, got {width}")
        chain = (input_shape[0], *self.channels)
        layers = [ConvPool(a, b, p) for (a, b), p in zip(pairwise(chain), self.pooled, strict=True)]
        self.convs = nn.Sequential(*layers)
        shrink = 2 ** sum(self.pooled)
        height, wide = input_shape[1] // shrink, input_shape[2] // shrink
        if min(height, wide) < 1:
            raise ConfigError(
                f"{type(self).__name__} needs images of at least {shrink}x{shrink}, "
                f"got input_shape {tuple(input_shape)}"
            )
        self.fc = nn.Linear(chain[-1] * height * wide, width)
        self.num_features = width

    def forward(self, x: Tensor) -> Tensor:
        """Features [batch, num_features] of images [batch, C, H, W]."""
        return F.relu(self.fc(self.convs(x).flatten(1)))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of each convolution in the backward pass."""
        set_checkpointing(self.convs, enable)

    def channel_groups(self) -> Channels:
        """One group per convolution, and the hidden layer."""
        draft, reads = Draft(self), None
        for name, _ in self.convs.named_children():
            layer = f"convs.{name}.conv"
            draft.layer(layer, reads=reads, writes=layer)
            draft.tap(layer, f"convs.{name}", "output")
            reads = layer
        draft.layer("fc", reads=Axis(reads, self.fc.in_features // self.channels[-1]), writes="fc")
        draft.tap("fc", "", "output")
        return draft.table()


class SmallCnn(ConvNet):
    """conv 32, pool, conv 64, pool, fc 128: 545,098 parameters with a 10-class head on 3x32x32."""

    memory_format = "channels_last"
    channels, pooled = (32, 64), (True, True)

    def __init__(self, input_shape: Sequence[int], width: int = 128):
        super().__init__(input_shape, width)


class DigitsCnn(ConvNet):
    """conv 16, conv 32, pool, fc 64: 37,632 parameters without head on 1x8x8."""

    channels, pooled = (16, 32), (False, True)

    def __init__(self, input_shape: Sequence[int], width: int = 64):
        super().__init__(input_shape, width)
