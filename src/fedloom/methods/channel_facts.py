"""What a finished run tells of its channels and weights: which are kept, and how far clients and domains agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from fedloom.core import ClientId, Context, Payload, Table
from fedloom.core.tree import Tensors
from fedloom.merge.similarity import cosines
from fedloom.models.channels import Channels
from fedloom.select.rates import fixed

Of = TypeVar("Of")


def kept_channels(mask: Tensor, channels: Channels) -> Table:
    """The share of every group's channels that a mask bool [C] keeps."""
    kept = [int(part.sum()) for part in channels.split(mask)]
    groups = list(zip(channels.groups, kept, strict=True))
    return Table(
        title="Channels kept",
        axes=("group", ""),
        rows=[f"{group.name}, {count} of {group.size}" for group, count in groups],
        columns=["share"],
        values=[[count / group.size] for group, count in groups],
        note=f"The mask of the global view keeps {sum(kept)} of {channels.total} channels.",
    )


def dealt(found: Mapping[float, Of], rates: Sequence[float], ctx: Context) -> dict[ClientId, Of]:
    """Client id -> what is found for its rate, where `rates` are dealt by client id."""
    return {k: found[fixed(rates, replace(ctx, client=k))] for k in range(ctx.num_clients)}


def widths_kept(
    title: str, axis: str, widths: Mapping[ClientId | str, Sequence[int]], channels: Channels, note: str
) -> Table:
    """The share of every group's channels in networks of these widths, [groups] each. axis: what a label stands for."""
    return Table(
        title=title,
        axes=(axis, "group"),
        rows=list(widths),
        columns=[f"{name} of {size}" for name, size in zip(_inside(channels.names), channels.sizes, strict=True)],
        values=[[round(w / size, 6) for w, size in zip(row, channels.sizes, strict=True)] for row in widths.values()],
        note=note,
    )


def kept_weights(masks: Tensors) -> Table:
    """The share of every tensor's entries that its mask, bool of any shape, keeps."""
    kept = {name: (int(mask.sum()), mask.numel()) for name, mask in masks.items()}
    counts, totals = (sum(column) for column in zip(*kept.values(), strict=True))
    return Table(
        title="Weights kept",
        axes=("tensor", ""),
        rows=[f"{name}, {count} of {total}" for name, (count, total) in kept.items()],
        columns=["share"],
        values=[[count / total] for count, total in kept.values()],
        note=f"The masks keep {counts} of the {totals} weights that may be pruned.",
    )


def weights_by_client(shares: Mapping[ClientId, Mapping[str, float]], note: str) -> Table:
    """The share of every layer's weights that each client keeps. shares: by name of the weight; 1 if absent."""
    names = list(dict.fromkeys(name for found in shares.values() for name in found))
    values = [[round(found.get(name, 1.0), 6) for name in names] for found in shares.values()]
    layers = [name.removesuffix(".weight") for name in names]
    return Table("Weights kept by the clients", ("client", "layer"), list(shares), layers, values, note)


def overlaps(title: str, masks: Mapping[ClientId, Tensor], note: str) -> Table:
    """Jaccard index |A and B| / |A or B| of the clients' masks, bool [C] each with some channel."""
    held = torch.stack(list(masks.values())).double()
    both, sizes = held @ held.T, held.sum(1)
    values = _listed(both / (sizes[:, None] + sizes - both))
    return Table(title, ("client", "client"), list(masks), list(masks), values, f"Jaccard index. {note}")


def mask_overlaps(alone: Mapping[ClientId, Tensor], own: Mapping[ClientId, Tensor], mask: Tensor) -> list[Table]:
    """Overlaps between at least two clients of what each would keep, and of what each has, bool [C] both.

    alone: the masks that the clients' scores give one by one. own: `mask` with the channels that a client has re-opened
    for itself; left out where no client has any.
    """
    if len(alone) < 2:
        return []
    found = [
        overlaps("Overlap of the clients' masks", alone, "Each is the mask that a client's own scores would give.")
    ]
    counts = [int((channels & ~mask).sum()) for channels in own.values()]
    if any(counts):
        note = f"The mask with the {min(counts)} to {max(counts)} channels that each has re-opened for itself."
        found.append(overlaps("Overlap of the clients' channels", own, note))
    return found


def prototype_cosines(prototypes: Tensor) -> Table | None:
    """Cosines of the domains' prototypes [K, C]; None where fewer than two exist."""
    ids = prototypes.sum(1).nonzero().flatten()
    if len(ids) < 2:
        return None
    values = _listed(cosines(prototypes[ids].double()))
    return Table("Cosine of the domains' prototypes", ("domain", "domain"), ids.tolist(), ids.tolist(), values)


def scores_by_domain(states: Mapping[ClientId, Payload], prototypes: Tensor, mask: Tensor) -> Table | None:
    """Cosines of the clients' "scores" [C], over the mask, with the domains' prototypes [K, C]; None without either."""
    ids = prototypes.sum(1).nonzero().flatten()
    if not states or not len(ids):
        return None
    scores = torch.stack([state["scores"]["channels"] for state in states.values()]) * mask
    found = cosines(torch.cat([scores, prototypes[ids]]).double())[: len(states), len(states) :]
    return Table(
        title="Cosine of the clients' scores with the domains' prototypes",
        axes=("client", "domain"),
        rows=list(states),
        columns=ids.tolist(),
        values=_listed(found),
        note="Over the channels of the mask.",
    )


def _inside(names: Sequence[str]) -> list[str]:
    """The names without their first part, a module that holds all of them, for columns have little room."""
    first, _, rest = zip(*(name.partition(".") for name in names), strict=True)
    return list(rest) if len(set(first)) == 1 and all(rest) else list(names)


def _listed(values: Tensor) -> list[list[float]]:
    return [[round(value, 6) for value in row] for row in values.tolist()]
