"""What a finished run tells of its experts: who routes where, how far clients agree, and how alike they use experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedloom.core import ClientId, Table
from fedloom.core.moe import MoELayer
from fedloom.core.tree import Tensors
from fedloom.merge.semantic import Region
from fedloom.methods.alignment import Agreed

LAYERS, CLIENTS, ROUNDS = 4, 50, 50  # drawn at most
KINDS = {
    "means": ("Routing distribution", "Mean probability that the client's gate gives each expert."),
    "overlap": (
        "Overlap with the consensus",
        "Of the client's routing distribution with the reference, in its last round.",
    ),
    "margin": ("Routing margin", "How far the gate's choice stands above the next expert, over tokens that choose it."),
    "weights": ("Consistency weight", "Weight of the client in the common distribution, in its last round."),
    "alpha": ("Strength of the pull", "Weight of the client's and the expert's part in the regulariser, next round."),
    "load": ("Expert load", "Share of the client's dispatched tokens that the expert processes."),
}


def routing_tables(consensus: Tensors, region: Tensors, layers: Sequence[MoELayer]) -> list[Table]:
    """Tables of the statistics that clients have uploaded; none before the first round.

    consensus: "known" bool [N], "means" and "count" [N, L, E], and perhaps "overlap", "margin", "weights", of each
    client's last round; perhaps "routing" [L, E]. region: see `region_numbers`; empty where experts were averaged. Of
    many layers and clients some are shown.
    """
    ids = consensus["known"].nonzero()[:, 0][:CLIENTS]
    if not len(ids):
        return []
    shown = {
        name: consensus[name][ids].double()
        for name in ("means", "overlap", "margin", "weights", "alpha")
        if name in consensus
    }
    count = consensus["count"][ids].double()
    shown["load"] = count / count.sum(2, keepdim=True).clamp(min=1)
    found = [_by_layer(consensus, shown, region, layers)]
    if "routing" in consensus:
        rows, columns = [layer.name for layer in layers], list(range(layers[0].num_experts))
        note = "The distribution over experts that clients are held to."
        found.append(Table("Consensus", ("layer", "expert"), rows, columns, _listed(consensus["routing"]), note))
    for at in _spread(len(layers)):
        name = f"layer {at + 1} of {len(layers)}"
        experts = list(range(layers[at].num_experts))
        for key, value in shown.items():
            title, note = KINDS[key]
            found.append(
                Table(f"{title}, {name}", ("client", "expert"), ids.tolist(), experts, _listed(value[:, at]), note)
            )
        if len(region.get("clients", ())) > 1:
            found += _pairs(region, at, name)
    return found


def region_numbers(region: Region, who: Sequence[ClientId]) -> dict[str, Tensor]:
    """What the server keeps of a merge of experts over C clients, in ascending order.

    "clients" int64 [C'] (the first 50), "similarity" and "direction" [L, C', C'], means over the experts in which both
    clients take part, 0 without any; "kappa" [L], the mean of S max(0, D) over pairs, and "rejected" [L], the share of
    pairs whose gate is 0; "thresholds" [2, L, E].
    """
    pairs = _pairs_taking(region)
    upper = torch.triu(pairs, 1)
    count = upper.sum((1, 2, 3)).clamp(min=1)
    alike = region.similarity * region.direction.clamp(min=0)
    shared = pairs.sum(1).clamp(min=1)
    ids = torch.tensor(list(who))
    cut = ids.argsort()[:CLIENTS]
    rows, columns = cut[:, None], cut
    return {
        "clients": ids[cut],
        "similarity": ((region.similarity * pairs).sum(1) / shared)[:, rows, columns].float(),
        "direction": ((region.direction * pairs).sum(1) / shared)[:, rows, columns].float(),
        "kappa": ((alike * upper).sum((1, 2, 3)) / count).float(),
        "rejected": (((region.gates == 0) * upper).sum((1, 2, 3)) / count).float(),
        "thresholds": region.thresholds.float(),
    }


NOTE = "Mean over layers and experts. Entropy in nats; kappa and rejected pairs as in the table by layer."
HISTORY = ("entropy of the weights", "kappa", "rejected pairs")


def blank_history() -> dict[str, Tensor]:
    """Of no round yet: "rounds" int64 [0], "numbers" [0, 3] in the order of `HISTORY`."""
    return {"rounds": torch.zeros(0, dtype=torch.int64), "numbers": torch.zeros(0, len(HISTORY))}


def longer_history(history: Tensors, agreed: Agreed | None, region: Tensors | None, number: int) -> dict[str, Tensor]:
    """The history with one more round: means over layers and experts, -1 where there is no number."""
    weights = -1.0 if agreed is None else float(torch.special.entr(agreed.found.weights).sum(0).mean())
    merged = [-1.0, -1.0] if region is None else [float(region[name].mean()) for name in ("kappa", "rejected")]
    row = torch.tensor([[weights, *merged]])
    return {
        "rounds": torch.cat([history["rounds"], torch.tensor([number])]),
        "numbers": torch.cat([history["numbers"], row]),
    }


def history_tables(history: Tensors) -> list[Table]:
    """One table per number, of at most 50 rounds evenly spread; none before the first."""
    count = len(history["rounds"])
    if not count:
        return []
    at = sorted({round(i * (count - 1) / max(1, min(count, ROUNDS) - 1)) for i in range(min(count, ROUNDS))})
    rounds = history["rounds"][at].tolist()
    found = []
    for name, column in zip(HISTORY, _listed(history["numbers"][at].T), strict=True):
        if max(column) >= 0:
            values = [[None if value < 0 else value] for value in column]
            found.append(Table(f"Agreement over the rounds, {name}", ("round", ""), rounds, [name], values, NOTE))
    return found


def _pairs_taking(region: Region) -> Tensor:
    """Which pairs of clients take part in an expert, [L, E, C, C] of 0 and 1."""
    taking = (region.prior > 0).permute(1, 2, 0).double()
    return taking.unsqueeze(3) * taking.unsqueeze(2)


def _by_layer(consensus: Tensors, shown: Tensors, region: Tensors, layers: Sequence[MoELayer]) -> Table:
    columns = {"gate entropy of the clients' means": torch.special.entr(shown["means"]).sum(2).mean(0)}
    if "routing" in consensus:
        columns["gate entropy of the consensus"] = torch.special.entr(consensus["routing"].double()).sum(1)
    if "weights" in shown:
        columns["entropy of the weights"] = torch.special.entr(shown["weights"]).sum(0).mean(1)
    load = shown["load"]
    columns["load, coefficient of variation"] = (load.std(2, correction=0) * load.shape[2]).mean(0)
    if "kappa" in region:
        columns |= {"kappa": region["kappa"], "rejected pairs": region["rejected"]}
    return Table(
        title="Routing by layer",
        axes=("layer", ""),
        rows=[layer.name for layer in layers],
        columns=list(columns),
        values=_listed(torch.stack([value.double() for value in columns.values()], 1)),
        note="Entropies in nats. kappa: mean over pairs of clients of semantic similarity times agreement of updates.",
    )


def _pairs(region: Tensors, at: int, name: str) -> list[Table]:
    ids, axes = region["clients"].tolist(), ("client", "client")
    notes = {
        "similarity": ("Similarity of the experts' inputs", "Mean over the experts that both clients use."),
        "direction": ("Cosine of the experts' updates", "Mean over the experts that both clients use."),
    }
    return [
        Table(f"{title}, {name}", axes, ids, ids, _listed(region[key][at].double()), note)
        for key, (title, note) in notes.items()
    ]


def _spread(count: int) -> list[int]:
    """At most `LAYERS` positions, first and last among them."""
    if count <= LAYERS:
        return list(range(count))
    return [round(i * (count - 1) / (LAYERS - 1)) for i in range(LAYERS)]


def _listed(values: Tensor) -> list[list[float]]:
    return [[round(value, 6) for value in row] for row in values.tolist()]
