"""Which tensors of a network hold which channels, so that channels can be kept, removed and put back.

Channels that only exist together form a group: the outputs of a layer with its norm, and on a residual stream the
outputs of every layer that is added to it. A table says for each dimension of each tensor which group it follows. The
same table cuts a dense network into a compact one (`gather`), writes it back (`scatter`), names the part for merging
(`index`) and places the gates (`fedloom.models.gates`).

Networks declare their table by `channel_groups()`, with names relative to themselves; `channels_of` adds the head.
Other networks are traced (`fedloom.models.traced`). A group is named after the first module that writes it, and stands
where its last writer stands in the forward pass, so the features that the head reads are the last group.

Source: the grouping is that of Fang et al., "DepGraph: Towards Any Structural Pruning" (CVPR 2023), section 3, written
down per architecture; channels that pass a residual addition are coupled. ResNet-18 has 12 groups, 2880 channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedloom.core.errors import ConfigError, PayloadError
from fedloom.core.tree import Tensors

Kept = Mapping[str, Tensor]
Positions = tuple[Tensor | None, ...]


class Axis(NamedTuple):
    """A dimension that holds `repeat` entries for each channel of a group, channel after channel.

    repeat is above 1 where a linear layer reads flattened maps of a convolution.
    """

    group: str
    repeat: int = 1


class Tap(NamedTuple):
    """Where the activation of a group passes: "input" or "output" of a submodule; channels are its dimension 1."""

    module: str
    side: str


@dataclass(frozen=True)
class Group:
    """Channels that are kept or removed together.

    taps: see `fedloom.models.gates`. norms: modules that normalise the channels. writers: names of the weights whose
    dimension 0 makes the channels.
    """

    name: str
    size: int
    taps: tuple[Tap, ...]
    norms: tuple[str, ...]
    writers: tuple[str, ...]


@dataclass(frozen=True)
class Channels:
    """The table of a network. Vectors over channels [C] are the groups one after the other.

    axes: name of a parameter or buffer -> the axis of each of its dimensions, None for one that follows no group;
    tensors that are not named stay whole.
    """

    groups: tuple[Group, ...]
    axes: Mapping[str, tuple[Axis | None, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the groups."""
        return tuple(group.name for group in self.groups)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Channels of each group."""
        return tuple(group.size for group in self.groups)

    @property
    def total(self) -> int:
        """C, the number of channels."""
        return sum(self.sizes)

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """[..., C] -> one [..., c_g] per group."""
        return torch.split(values, list(self.sizes), dim=-1)

    def full(self) -> Kept:
        """Every channel."""
        return {group.name: torch.arange(group.size) for group in self.groups}

    def kept(self, mask: Tensor) -> Kept:
        """Positions, ascending within each group, of the channels where the mask bool [C] is true."""
        if mask.shape != (self.total,) or mask.dtype != torch.bool:
            raise ConfigError(
                f"a mask of channels must be bool [{self.total}], got {mask.dtype} {list(mask.shape)}; compare scores "
                "with a threshold to make one"
            )
        return {name: part.nonzero().flatten() for name, part in zip(self.names, self.split(mask.cpu()), strict=True)}

    def mask(self, kept: Kept) -> Tensor:
        """bool [C]: the inverse of `kept`."""
        parts = [torch.zeros(group.size, dtype=torch.bool) for group in self.groups]
        for part, name in zip(parts, self.names, strict=True):
            part[kept[name]] = True
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)

    def widths(self, kept: Kept) -> tuple[int, ...]:
        """Number of kept channels of each group, as `rebuild` of a prunable module takes them."""
        return tuple(len(kept[name]) for name in self.names)

    def index(self, name: str, kept: Kept) -> Positions | None:
        """Positions along each dimension of a tensor, None for all of them; None for a tensor that stays whole.

        What `fedloom.merge.by_index.indexed_mean` takes for a client that holds the kept channels.
        """
        axes = self.axes.get(name)
        return None if axes is None else tuple(None if axis is None else _positions(axis, kept) for axis in axes)

    def gather(self, tree: Tensors, kept: Kept) -> dict[str, Tensor]:
        """Dense -> compact: of every tensor the part of the kept channels; whole tensors are passed on as they are."""
        return {name: _take(tensor, self.index(name, kept) or ()) for name, tensor in tree.items()}

    def scatter(self, part: Tensors, kept: Kept, into: Tensors) -> dict[str, Tensor]:
        """Compact -> dense: `into` with the entries of the kept channels replaced by those of `part`.

        part: compact tensors, on any device; names of `into` that it lacks keep their values. `into` stays as it is.
        Raises `PayloadError` for a tensor of another shape than that of the kept channels.
        """
        return {
            name: _put_back(name, dense, self.index(name, kept) or (), part[name]) if name in part else dense
            for name, dense in into.items()
        }

    def prefixed(self, prefix: str) -> Channels:
        """The table of a network that holds this one under `prefix` (empty: the same table)."""
        groups = tuple(
            Group(
                name=_join(prefix, group.name),
                size=group.size,
                taps=tuple(Tap(_join(prefix, tap.module), tap.side) for tap in group.taps),
                norms=tuple(_join(prefix, norm) for norm in group.norms),
                writers=tuple(_join(prefix, writer) for writer in group.writers),
            )
            for group in self.groups
        )
        moved = {_join(prefix, name): axes for name, axes in self.axes.items()}
        return Channels(
            groups,
            {n: tuple(a and a._replace(group=_join(prefix, a.group)) for a in axes) for n, axes in moved.items()},
        )

    def narrowed(self, widths: Sequence[int]) -> Channels:
        """The table of the compact network with these numbers of channels, one per group.

        Raises `ConfigError` for a number below 1 (the network would be cut in two) or above the size of its group.
        """
        if len(widths) != len(self.groups):
            raise ConfigError(f"widths must hold one number for each of {len(self.groups)} groups, got {len(widths)}")
        for group, width in zip(self.groups, widths, strict=True):
            if not 1 <= width <= group.size:
                raise ConfigError(
                    f"the channels kept in {group.name} must be 1 to {group.size}, got {width}; keep at least one "
                    "channel of every group"
                )
        groups = tuple(replace(group, size=width) for group, width in zip(self.groups, widths, strict=True))
        return replace(self, groups=groups)


def pack(mask: Tensor) -> Tensor:
    """bool [C] -> uint8 [ceil(C / 8)]: eight channels a byte, the first in the lowest bit; the last byte is filled up
    with zeros."""
    bits = torch.zeros(-(-len(mask) // 8) * 8, dtype=torch.uint8, device=mask.device)
    bits[: len(mask)] = mask
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (bits.view(-1, 8) << shifts).sum(1).to(torch.uint8)


def unpack(bits: Tensor, count: int) -> Tensor:
    """uint8 [ceil(count / 8)] -> bool [count]: the inverse of `pack`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] >> shifts) & 1).bool().flatten()[:count]


class Draft:
    """A table that a network writes down layer by layer, in the order of its forward pass.

    root: the network that declares it. All names are relative to it.
    """

    def __init__(self, root: nn.Module):
        self.root = root
        self._sizes: dict[str, int] = {}
        self._taps: dict[str, list[Tap]] = {}
        self._norms: dict[str, list[str]] = {}
        self._writers: dict[str, list[str]] = {}
        self._axes: dict[str, tuple[Axis | None, ...]] = {}

    def layer(self, name: str, *, reads: Axis | str | None, writes: str | None) -> None:
        """A convolution or linear layer that reads one group, or none, and writes one, or none.

        Raises `ConfigError` for a grouped convolution, unless it works channel by channel and writes what it reads.
        """
        module: Any = self.root.get_submodule(name)
        source = Axis(reads) if isinstance(reads, str) else reads
        if getattr(module, "groups", 1) > 1:
            by_channel = module.weight.shape[1] == 1 and module.in_channels == module.out_channels
            if not (by_channel and source is not None and writes == source.group):
                raise ConfigError(
                    f"'{name}' is a convolution in {module.groups} groups, whose channels cannot be pruned one by one; "
                    "take a network without grouped convolutions"
                )
            source = None
        rest = (None,) * (module.weight.dim() - 2)
        target = None if writes is None else Axis(writes)
        self._axes[f"{name}.weight"] = (target, source, *rest)
        if module.bias is not None and target is not None:
            self._axes[f"{name}.bias"] = (target,)
        if writes is not None:
            self._write(writes, f"{name}.weight", len(module.weight))

    def _write(self, group: str, weight: str, size: int) -> None:
        self._sizes.pop(group, None)  # so that the group stands where its last writer stands
        self._sizes[group] = size
        self._writers.setdefault(group, []).append(weight)

    def norm(self, name: str, group: str) -> None:
        """Batch normalisation of a group; the identity is passed over. Raises `ConfigError` for any other norm."""
        module = self.root.get_submodule(name)
        if isinstance(module, nn.Identity):
            return
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                f"'{name}' is a {type(module).__name__}, which mixes channels, so that they cannot be pruned one by "
                "one; take a network with batch normalisation"
            )
        for leaf in ("weight", "bias", "running_mean", "running_var"):
            if getattr(module, leaf) is not None:
                self._axes[f"{name}.{leaf}"] = (Axis(group),)
        self._norms.setdefault(group, []).append(name)

    def tap(self, group: str, module: str, side: str) -> None:
        """Say where the activation of a group passes, after its ReLU."""
        self._taps.setdefault(group, []).append(Tap(module, side))

    def residual_block(self, name: str, layers: Iterable[tuple[str, str]], shortcut: str | None, stream: str) -> str:
        """A block of layers with norms and ReLU, whose last output is added to a stream, then ReLU.

        layers: pairs of convolution and norm. shortcut: a `Sequential` of convolution and norm that starts a new
        stream, None where the block adds to the one that it reads. Returns the stream that leaves the block.
        """
        pairs = [(f"{name}.{conv}", f"{name}.{norm}") for conv, norm in layers]
        out = stream if shortcut is None else pairs[-1][0]
        reads = stream
        for (conv, norm), (following, _) in pairwise(pairs):
            self.layer(conv, reads=reads, writes=conv)
            self.norm(norm, conv)
            self.tap(conv, following, "input")
            reads = conv
        self.layer(pairs[-1][0], reads=reads, writes=out)
        self.norm(pairs[-1][1], out)
        if shortcut is not None:
            self.layer(f"{name}.{shortcut}.0", reads=stream, writes=out)
            self.norm(f"{name}.{shortcut}.1", out)
        self.tap(out, name, "output")
        return out

    def table(self) -> Channels:
        """The table as far as it has been told."""
        groups = tuple(
            Group(
                name=name,
                size=size,
                taps=tuple(self._taps.get(name, ())),
                norms=tuple(self._norms.get(name, ())),
                writers=tuple(self._writers[name]),
            )
            for name, size in self._sizes.items()
        )
        return Channels(groups, dict(self._axes))


def channels_of(module: Any, input_shape: Sequence[int] | None = None) -> Channels:
    """The table of a classifier: what a part of it declares, with what reads its last group, or a trace.

    The readers are those that the module names by `feature_readers` (name of a parameter -> the dimension), else its
    head. A network without such a part, or with further layers beside the part and a head, is traced as a whole.
    input_shape: of one example; needed for a network that is traced. Raises `ConfigError` for a network whose
    channels cannot be pruned one by one (group normalisation), that has none, or that cannot be traced.
    """
    parts = ((name, part) for name, part in module.named_modules() if hasattr(part, "channel_groups"))
    name, part = next(parts, ("", None))
    table: Channels | None = None if part is None else part.channel_groups()
    readers: Mapping[str, int] = getattr(module, "feature_readers", {})
    if not readers and (table is None or not _is_headed(module, name)):
        from fedloom.models.traced import traced

        return traced(module, input_shape)
    if table is None:
        backbone = getattr(module, "backbone", module)
        raise ConfigError(
            f"{type(getattr(backbone, 'body', backbone)).__name__} does not declare its channels, and under a "
            f"{type(module).__name__} they are not traced; take another network, such as resnet8, or give it a method "
            "channel_groups()"
        )
    if not table.groups:
        raise ConfigError(f"{type(part).__name__} has no channels to prune; take a network with hidden layers")
    return _read(table.prefixed(name), module, readers or {"head.weight": 1}) if name else table


def _is_headed(module: nn.Module, part: str) -> bool:
    """Whether a module is the part of this name and a linear head that reads it, or the part itself."""
    own = (f"{part}.", "head.")
    headed = isinstance(getattr(module, "head", None), nn.Linear)
    return not part or (headed and all(name.startswith(own) for name, _ in module.named_parameters()))


def _read(table: Channels, module: nn.Module, readers: Mapping[str, int]) -> Channels:
    """The table with the axes of the parameters that read the last group."""
    last, axes = table.groups[-1], dict(table.axes)
    for name, dim in readers.items():
        reads = Axis(last.name, module.get_parameter(name).shape[dim] // last.size)
        axes[name] = tuple(reads if d == dim else None for d in range(dim + 1))
    return replace(table, axes=axes)


def _positions(axis: Axis, kept: Kept) -> Tensor:
    first = kept[axis.group] * axis.repeat
    return (first[:, None] + torch.arange(axis.repeat, device=first.device)).flatten()


def _take(tensor: Tensor, index: Positions) -> Tensor:
    for dim, positions in enumerate(index):
        if positions is not None and len(positions) < tensor.shape[dim]:  # all of them need no copy
            tensor = tensor.index_select(dim, positions.to(tensor.device))
    return tensor


def _put_back(name: str, dense: Tensor, index: Positions, value: Tensor) -> Tensor:
    sizes = [*index, *(None,) * (dense.dim() - len(index))]
    want = tuple(n if at is None else len(at) for n, at in zip(dense.shape, sizes, strict=True))
    if tuple(value.shape) != want:
        raise PayloadError(f"'{name}' has shape {tuple(value.shape)}, the kept channels of the network need {want}")
    return _put(dense, index, value)


def _put(dense: Tensor, index: Positions, value: Tensor) -> Tensor:
    named = [(dim, at) for dim, at in enumerate(index) if at is not None and len(at) < dense.shape[dim]]
    if not named:
        return value.to(dense.device)
    dim, positions = named[0][0], named[0][1].to(dense.device)
    rest = tuple(None if d <= dim else p for d, p in enumerate(index))
    return dense.index_copy(dim, positions, _put(dense.index_select(dim, positions), rest, value))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
