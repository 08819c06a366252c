"""Tables of channels for networks that declare none, from a trace of one forward pass (extra `prune`).

torch-pruning finds the groups; this module writes them down as a table, and refuses what a table cannot say: channels
that are concatenated, shuffled, or live in anything but convolutions, linear layers and batch norms.

Differs from declared tables: a trace does not show where an activation passes its nonlinearity, so the gates of a group
sit at the input of every layer that reads it. For gates of 0 and 1 the forward pass is the same, and a gate at 0 has
the gradient of bringing the channel back too; but what a residual addition carries on is not scaled, so at 1 the
gradient of a residual group is another number. The features that a classifier returns are not gated.

Every table is tried out: compact and gated network must give the same scores.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedloom.core.errors import ConfigError, FedloomError
from fedloom.core.seeds import generator
from fedloom.models.channels import Axis, Channels, Draft
from fedloom.models.compact import compacted
from fedloom.models.gates import gated

MEND = (
    "take a network of convolutions, linear layers and batch normalisation, such as resnet8, or give it a method "
    "channel_groups()"
)
Layer = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear


def traced(module: nn.Module, input_shape: Sequence[int] | None) -> Channels:
    """The table of a classifier by its forward pass on one example of this shape.

    Raises `ConfigError` without torch-pruning, and for a network whose channels no table can describe.
    """
    part = getattr(module, "backbone", module)
    name = type(getattr(part, "body", part)).__name__
    if input_shape is None:
        raise ConfigError(f"tracing the channels of {name} needs the shape of one example; pass input_shape")
    model = copy.deepcopy(module).double().eval()
    with _in_words(name):
        table = _table(model, _example(model, input_shape))
        if not table.groups:
            raise ConfigError(f"{name} has no channels to prune; {MEND}")
        _try_out(model, table, _example(model, input_shape))
    return table


@contextmanager
def _in_words(name: str) -> Iterator[None]:
    try:
        yield
    except FedloomError:
        raise
    except Exception as error:  # of the tracer or of a network that no table fits
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"the channels of {name} cannot be traced ({type(error).__name__}: {reason}); {MEND}"
        ) from error


def _table(model: nn.Module, example: Tensor) -> Channels:
    names = {part: name for name, part in model.named_modules()}
    order = {name: k for k, name in enumerate(names.values())}
    reads: dict[str, Axis] = {}
    writes: dict[str, str] = {}
    norms: dict[str, str] = {}
    for found in _groups(model, example):
        uses = [use for item in found if (use := _use(item, names)) is not None]
        written = {name for name, part, into, _ in uses if isinstance(part, Layer) and not into}
        group = min(written, key=order.__getitem__)
        for name, part, into, repeat in uses:
            if isinstance(part, _BatchNorm):
                norms[name] = group
            elif into or getattr(part, "groups", 1) > 1:
                reads[name] = Axis(group, repeat)
        writes |= dict.fromkeys(written, group)
    draft = Draft(model)
    for name in order:
        if name in norms:
            draft.norm(name, norms[name])
        elif name in reads or name in writes:
            draft.layer(name, reads=reads.get(name), writes=writes.get(name))
            if name in reads and reads[name].group != writes.get(name):
                draft.tap(reads[name].group, name, "input")
    return draft.table()


def _groups(model: nn.Module, example: Tensor) -> list[Any]:
    try:
        import torch_pruning
    except ImportError as error:
        raise ConfigError(
            f"tracing the channels of {type(model).__name__} needs torch-pruning: pip install 'fedloom[prune]'"
        ) from error

    graph = torch_pruning.DependencyGraph()
    with torch.enable_grad():
        graph.build_dependency(model, example, forward_fn=lambda net, x: _logits(net(x)), verbose=False)
    rows: Mapping[str, int] = getattr(model, "class_rows", {})
    heads = [model.get_submodule(name.rpartition(".")[0]) for name in rows]
    if not heads:
        raise ConfigError(f"{type(model).__name__} does not say which rows belong to classes; give it class_rows")
    return [list(group) for group in graph.get_all_groups(ignored_layers=heads)]


def _use(item: Any, names: Mapping[nn.Module, str]) -> tuple[str, nn.Module, bool, int] | None:
    """One layer of a traced group: its name, itself, whether it reads the group, and entries per channel."""
    part = item.dep.target.module
    if isinstance(part, nn.Parameter):
        raise ConfigError(f"a parameter outside of any layer, of shape {list(part.shape)}, has channels; {MEND}")
    if part not in names:
        return None  # an operation of the trace without tensors
    if not isinstance(part, Layer | _BatchNorm):
        raise ConfigError(f"'{names[part]}' is a {type(part).__name__}, whose channels cannot be pruned; {MEND}")
    into = item.dep.handler.__name__ == "prune_in_channels"
    by_channel = isinstance(part, _BatchNorm) or getattr(part, "groups", 1) > 1
    into = into and not by_channel
    size = part.num_features if isinstance(part, _BatchNorm) else part.weight.shape[int(into)]
    repeat = size // (max(item.root_idxs) + 1)
    whole = list(item.idxs) == list(range(size)) and list(item.root_idxs) == [k // repeat for k in range(size)]
    if not whole:
        raise ConfigError(f"'{names[part]}' reads or writes channels of several groups side by side; {MEND}")
    return names[part], part, into, repeat


def _logits(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out["logits"]


def _example(model: nn.Module, input_shape: Sequence[int]) -> Tensor:
    like = next(model.parameters())
    return torch.randn(2, *input_shape, generator=generator(0, "trace"), dtype=like.dtype).to(like.device)


@torch.no_grad()
def _try_out(model: nn.Module, table: Channels, example: Tensor) -> None:
    """Compact and gated network agree, on statistics that let every channel through to the scores."""
    rng = generator(0, "try out a table")
    for norm in (part for part in model.modules() if isinstance(part, _BatchNorm)):
        for tensor in (norm.weight, norm.bias):
            if tensor is not None:
                tensor.copy_(torch.rand(tensor.shape, generator=rng) + 0.5)
    mask = torch.rand(table.total, generator=rng) < 0.5
    for part in table.split(mask):
        part[0] = True
    kept = table.kept(mask)
    small = compacted(model, table, table.widths(kept))
    small.load_state_dict(table.gather(model.state_dict(), kept))
    with gated(model, table, mask.double()):
        expected = _logits(model(example))
    gap = float((_logits(small(example)) - expected).abs().max() / expected.abs().max())
    if not gap <= 1e-9:
        raise ConfigError(f"a compact {type(model).__name__} differs from its gated form by {gap:.1e}; {MEND}")
