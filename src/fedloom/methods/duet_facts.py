"""What a finished run tells of its prompts and routed adapters: which are used by whom, and what they cost to send."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from fedloom.core import ClientId, Payload, Table
from fedloom.core.payload import items
from fedloom.core.tree import Tensors

PROMPTS, CLIENTS = 16, 40  # shown at most: the most used prompts, the first clients
TOWERS = {"image": "pictures", "text": "texts"}
KILO = 1000.0


def prompt_pool(usage: Tensor) -> list[Table]:
    """How clients and tasks use the pool; none before the first dispatch.

    usage: int64 [clients, tasks, K], how often a prompt was sent to a client in a task.
    """
    totals = usage.sum((0, 1))
    if not int(totals.sum()):
        return []
    ids = usage.sum((1, 2)).nonzero()[:, 0][:CLIENTS]
    top = totals.argsort(descending=True, stable=True)[:PROMPTS]
    top = top[totals[top] > 0].sort().values
    tasks = [t for t in range(usage.shape[1]) if int(usage[:, t].sum())]
    shares = _shares(usage[ids])
    shown = f"Share of what the client was sent in the task; of {len(totals)} prompts the {len(top)} most used."
    maps = [
        Table(
            title=f"Prompts sent, task {t}",
            axes=("client", "prompt"),
            rows=ids.tolist(),
            columns=top.tolist(),
            values=_known(shares[:, t, top], usage[ids, t].sum(1) > 0),
            note=shown,
            group="Prompts sent",
        )
        for t in tasks
    ]
    return [_by_task(usage, tasks), _most_used(totals, top), *maps]


def _by_task(usage: Tensor, tasks: list[int]) -> Table:
    rows = []
    for t in tasks:
        here = usage[:, t][usage[:, t].sum(1) > 0]
        shares = _shares(here)
        entropy = torch.special.entr(shares).sum(1).mean()
        used = (here.sum(0) > 0).double().mean()
        rows.append([used, entropy, torch.special.entr(shares.mean(0)).sum() - entropy])
    return Table(
        title="Use of the prompt pool",
        axes=("task", ""),
        rows=tasks,
        columns=["share of the pool in use", "entropy per client", "divergence over clients"],
        values=_listed(torch.tensor(rows)),
        note=(
            f"Entropy in nats: log n for n prompts equally often, at most {math.log(usage.shape[2]):.2f}. "
            "Divergence (Jensen-Shannon, in nats): 0 where all clients are sent the same prompts equally often."
        ),
    )


def _most_used(totals: Tensor, top: Tensor) -> Table:
    order = top[totals[top].argsort(descending=True, stable=True)]
    shares = (totals[order].double() / totals.sum()).unsqueeze(1)
    note = f"Share of all prompts sent; each would have {1 / len(totals):.3f} if all were sent equally often."
    return Table("Most used prompts", ("prompt", ""), order.tolist(), ["share"], _listed(shares), note)


def expert_routing(routing: Mapping[ClientId, Tensors]) -> list[Table]:
    """Routing of pictures against that of texts; none where no client has any.

    routing: per client, "image" and "text" or one of them, distributions over experts [layers, E], the last adapted
    layers of both towers side by side.
    """
    each = {tower: [r[tower].double() for r in routing.values() if tower in r] for tower in TOWERS}
    found = {tower: torch.stack(p) for tower, p in each.items() if p}
    if not found:
        return []
    depth, experts = min(p.shape[1] for p in found.values()), next(iter(found.values())).shape[2]
    found = {tower: p[:, -depth:] for tower, p in found.items()}
    layers = [f"layer {k + 1} of {depth}" for k in range(depth)]
    maps = [
        Table(
            title=f"Routing of pictures and texts, {name}",
            axes=("", "expert"),
            rows=[TOWERS[tower] for tower in found],
            columns=list(range(experts)),
            values=_listed(torch.stack([p[:, k].mean(0) for p in found.values()])),
            note="Mean over the clients of the probability that a router gives each expert.",
            group="Routing of pictures and texts",
        )
        for k, name in enumerate(layers)
    ]
    return [_between_towers(found, routing, depth, layers), *maps]


def _between_towers(
    found: Mapping[str, Tensor], routing: Mapping[ClientId, Tensors], depth: int, layers: list[str]
) -> Table:
    columns = {}
    for tower, p in found.items():
        columns[f"entropy, {TOWERS[tower]}"] = torch.special.entr(p).sum(2).mean(0)
        columns[f"divergence over clients, {TOWERS[tower]}"] = _divergence(p)
    both = [
        torch.stack([r[t][-depth:].double() for t in TOWERS]) for r in routing.values() if r.keys() >= TOWERS.keys()
    ]
    if both:
        columns["divergence of pictures and texts"] = torch.stack([_divergence(pair) for pair in both]).mean(0)
        columns["overlap of pictures and texts"] = torch.stack([pair.amin(0).sum(1) for pair in both]).mean(0)
    note = (
        "Means over the clients. Entropies and divergences (Jensen-Shannon) in nats; overlap: the sum over experts of "
        "the smaller probability, 1 where both towers route alike."
    )
    values = _listed(torch.stack(list(columns.values()), 1))
    return Table("Experts by layer", ("layer", ""), layers, list(columns), values, note)


def sent_by_component(sent: Mapping[str, Payload], components: Mapping[str, str]) -> Table:
    """Kilobytes per component and kind of message.

    sent: kind of message ("adapters, up") -> such a message of one client. components: name -> pattern of parameters'
    names; the first that fits counts. What none fits, and every other field, goes by the name of its field.
    """
    counts: dict[str, dict[str, float]] = {name: dict.fromkeys(sent, 0.0) for name in components}
    for kind, payload in sent.items():
        for field, name, tensor in items(payload):
            fits = (c for c, pattern in components.items() if field == "params" and fnmatchcase(name, pattern))
            row = counts.setdefault(next(fits, field), dict.fromkeys(sent, 0.0))
            row[kind] += tensor.numel() * tensor.element_size() / KILO
    rows = {**counts, "all": {kind: sum(row[kind] for row in counts.values()) for kind in sent}}
    values = [[round(row[kind], 6) for kind in sent] for row in rows.values()]
    note = "Kilobytes (1000 bytes) of one client's message, before any compression."
    return Table("Sent by component, kB", ("component", "message"), list(rows), list(sent), values, note)


def _divergence(p: Tensor) -> Tensor:
    """Jensen-Shannon divergence of the distributions [n, layers, E] with equal weights, [layers]."""
    apart: Tensor = torch.special.entr(p.mean(0)).sum(1) - torch.special.entr(p).sum(2).mean(0)
    return apart


def _shares(counts: Tensor) -> Tensor:
    return counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)


def _known(values: Tensor, known: Tensor) -> list[list[float | None]]:
    """The values, None in the rows that are not known."""
    pairs = zip(_listed(values), known.tolist(), strict=True)
    return [[value if flag else None for value in row] for row, flag in pairs]


def _listed(values: Tensor) -> list[list[float]]:
    return [[round(value, 6) for value in row] for row in values.tolist()]
