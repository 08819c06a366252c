"""Pictures as the data hold them -> pictures as a CLIP wants them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedloom.core.errors import ConfigError

Normalize = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...], tuple[float, ...]]


def renormalized(x: Tensor, normalize: Normalize | None) -> Tensor:
    """Undo the data's own normalisation and apply the model's: (x std + mean - own mean) / own std, per channel.

    Pictures [..., 1, H, W] become [..., 3, H, W], of three equal channels before the model's normalisation.
    """
    if normalize is None:
        return x
    mean, std, own_mean, own_std = (x.new_tensor(v).view(-1, 1, 1) for v in normalize)
    return (x * std + mean - own_mean) / own_std


def normalization(
    statistics: tuple[Sequence[float], Sequence[float]], own: tuple[Sequence[float], Sequence[float]]
) -> Normalize | None:
    """`Clip.normalize` from the (mean, std) of the data and of the model; None where they agree, and for data that come
    without (numbers that are used as they are)."""
    mean, std = (tuple(map(float, part)) for part in statistics)
    own_mean, own_std = (tuple(map(float, part)) for part in own)
    return None if not mean or (mean, std) == (own_mean, own_std) else (mean, std, own_mean, own_std)


def check_pictures(told: str, input_shape: Sequence[int], size: tuple[int, int], normalize: Normalize | None) -> None:
    """Raise `ConfigError`, with the mend, for data that a CLIP cannot see. size: height and width that it reads."""
    if len(input_shape) != 3:
        raise ConfigError(
            f"model {told} needs pictures [C, H, W], got input_shape {list(input_shape)}; take data of pictures"
        )
    channels, *found = input_shape
    if tuple(found) != size:
        mend = f"set data.image_size: {size[0]}" if size[0] == size[1] else "give the data that size"
        raise ConfigError(
            f"model {told} reads pictures of {size[0]}x{size[1]}, and the data have {found[0]}x{found[1]}; {mend}"
        )
    if channels == 1 and normalize is None:
        raise ConfigError(
            f"model {told} reads pictures of 3 channels, and the data are numbers of 1; repeat the channel three "
            "times, or give 8-bit pictures"
        )
    if channels not in (1, 3):
        raise ConfigError(
            f"model {told} reads pictures of 3 channels, and the data have {channels}; give colour pictures"
        )
