"""Bringing a client's experts into the server's order before a merge.

Networks whose experts are numbered differently compute the same function, and their mean does not: experts that play
the same role are found by an optimal assignment per client and layer (Kuhn 1955), and experts, the gate's rows and the
client's routing statistics are put in the server's order together.
Source: the choice of index or role is open in Fang et al. (arXiv 2603.21276), who compare experts of the same index.
Decisions: the cost is the squared distance of centroids, or of parameters where no reference centroids are known; an
expert that either side has not used has no centroid: its pairs cost more than all known ones, the more the further the
parameters are apart; ties go to the identity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedloom.core.errors import PayloadError
from fedloom.core.moe import MoELayer, Slice
from fedloom.core.tree import Tensors
from fedloom.merge.gram import Gram
from fedloom.merge.similarity import TINY

PER_EXPERT = ("mean", "margin", "count", "centroid")  # routing statistics [L, E, ...]
TIE = 1e-9  # of the dearest pair: what the identity may cost more


class Permuted(Mapping[str, Tensor]):
    """A tree whose experts and gate rows are in another order: the one in place e is order[l, e] of the tree.

    orders: int64 [L, E]. Tensors are put in order when they are read; `located` tells where a single expert lies.
    """

    def __init__(self, tree: Tensors, layers: Sequence[MoELayer], orders: Tensor):
        self.tree = tree
        self._places: dict[str, Slice] = {}  # by text, as slices have no hash
        self._names: dict[str, str] = {}
        self._rows: dict[str, Tensor] = {}
        for layer, order in zip(layers, orders, strict=True):
            self._rows.update(dict.fromkeys(layer.gate, order))
            for parts, source in zip(layer.experts, order.tolist(), strict=True):
                for part, place in zip(parts, layer.experts[source], strict=True):
                    self._places[repr(part)] = place
                    if part.index:
                        self._rows[part.name] = order
                    else:
                        self._names[part.name] = place.name

    def place(self, part: Slice) -> Slice:
        """Where the tree holds an expert's slice."""
        return self._places.get(repr(part), part)

    def __getitem__(self, name: str) -> Tensor:
        value = self.tree[self._names.get(name, name)]
        return value[self._rows[name]] if name in self._rows else value

    def __iter__(self) -> Iterator[str]:
        names = {source: name for name, source in self._names.items()}
        return (names.get(name, name) for name in self.tree)

    def __len__(self) -> int:
        return len(self.tree)


def located(tree: Tensors, part: Slice) -> tuple[Tensors, Slice]:
    """The tree that holds an expert's slice, and where: reads one expert of a `Permuted` without the others."""
    return (tree.tree, tree.place(part)) if isinstance(tree, Permuted) else (tree, part)


class Matched(NamedTuple):
    """Clients in the server's order. orders: int64 [C, L, E], which of its experts the client has in place e."""

    trees: list[Tensors]
    statistics: list[Tensors]
    orders: Tensor


class Cost(Protocol):
    """(server's, client's) of one layer -> [E, E], the cost of server expert (row) and client expert (column)."""

    def __call__(self, layer: MoELayer, at: int, server: Side, client: Side) -> Tensor:
        """Costs in float64, at least 0."""
        ...


class Side(NamedTuple):
    """Parameters and routing statistics of the server or of a client; None where there are none yet."""

    tree: Tensors
    statistics: Tensors | None


def centroid_distance(layer: MoELayer, at: int, server: Side, client: Side) -> Tensor:
    """Squared distances of the centroids, M at most; M (1 + share of the largest parameter distance) without one.

    `parameter_distance` while the server knows no centroids at all.
    """
    if server.statistics is None or client.statistics is None:
        return parameter_distance(layer, at, server, client)
    rows, columns = (side["centroid"][at].double() for side in (server.statistics, client.statistics))
    used = [side["count"][at] > 0 for side in (server.statistics, client.statistics)]
    known = used[0][:, None] & used[1]
    cost = torch.cdist(rows, columns, compute_mode="donot_use_mm_for_euclid_dist").square()
    if bool(known.all()):
        return cost
    rest = parameter_distance(layer, at, server, client)
    most = cost[known].max() if bool(known.any()) else 1.0
    return cost.where(known, most * (1 + rest / rest.max().clamp(min=TINY)))


def parameter_distance(layer: MoELayer, at: int, server: Side, client: Side) -> Tensor:
    """Squared distances of all parameters of the experts."""
    count, gram = layer.num_experts, Gram()
    products = torch.zeros(2 * count, 2 * count, dtype=torch.float64)
    for parts in zip(*layer.experts, strict=True):
        values = [value for side in (server, client) for value in _slices(side.tree, parts)]
        products += gram([values], [values[0]])
    norms = products.diagonal()
    return (norms[:count, None] + norms[None, count:] - 2 * products[:count, count:]).clamp(min=0)


def _slices(tree: Tensors, parts: Sequence[Slice]) -> list[Tensor]:
    """One tensor of every expert; a stacked one is read once."""
    read = {name: tree[name].detach() for name in dict.fromkeys(part.name for part in parts)}
    return [part.of(read) for part in parts]


COSTS: Mapping[str, Cost] = {"centroid": centroid_distance, "parameters": parameter_distance}


@torch.no_grad()
def match(
    layers: Sequence[MoELayer],
    trees: Sequence[Tensors],
    statistics: Sequence[Tensors],
    old: Tensors,
    reference: Tensors | None = None,
    *,
    cost: Cost = centroid_distance,
) -> Matched:
    """Put every client's experts into the server's order.

    trees and statistics: per client, its parameters and its routing statistics: "count" [L, E] and "centroid"
    [L, E, H] at least. old: the server's parameters. reference: its "count" and "centroid", such as `pooled_centroids`
    of an earlier round; None while there are none, and parameters are compared.
    A client that is in order already keeps its tree and statistics, the same objects. Raises `PayloadError` when
    numbers of trees and statistics differ.
    """
    if len(trees) != len(statistics):
        raise PayloadError(f"{len(trees)} trees but {len(statistics)} clients' routing statistics")
    identity = torch.arange(layers[0].num_experts).expand(len(layers), -1)
    found = Matched([], [], torch.empty(len(trees), *identity.shape, dtype=torch.int64))
    for i, (tree, stats) in enumerate(zip(trees, statistics, strict=True)):
        for at, layer in enumerate(layers):
            found.orders[i, at] = assignment(cost(layer, at, Side(old, reference), Side(tree, stats)))
        same = torch.equal(found.orders[i], identity)
        found.trees.append(tree if same else Permuted(tree, layers, found.orders[i]))
        found.statistics.append(stats if same else permuted_statistics(stats, found.orders[i]))
    return found


def assignment(cost: Tensor) -> Tensor:
    """The cheapest one-to-one assignment of columns to rows [E], ties to the identity."""
    from scipy.optimize import linear_sum_assignment

    tie = TIE * (float(cost.max()) or 1.0)
    return torch.from_numpy(linear_sum_assignment((cost - tie * torch.eye(len(cost))).numpy())[1])


def permuted_statistics(statistics: Tensors, orders: Tensor) -> dict[str, Tensor]:
    """Routing statistics with experts in another order, as in `Permuted`."""
    layers = torch.arange(len(orders))[:, None]
    return {name: value[layers, orders] if name in PER_EXPERT else value for name, value in statistics.items()}


def pooled_centroids(statistics: Sequence[Tensors]) -> dict[str, Tensor]:
    """ "count" [L, E] and "centroid" [L, E, H] of all clients' tokens taken together; zeros where there are none."""
    count = torch.stack([one["count"].double() for one in statistics])
    centroid = torch.stack([one["centroid"].double() for one in statistics])
    total = count.sum(0)
    mean = (count[..., None] * centroid).sum(0) / total[..., None].clamp(min=1.0)
    return {"count": total.float(), "centroid": mean.float()}
