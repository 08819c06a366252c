"""Which other clients' vectors a client is given.

Source: Luo, Chen, Wu, "Mixture of Experts Made Personalized: Federated Prompt Learning for Vision-Language Models"
(ICLR 2025, arXiv 2410.10114): the nearest ones by Euclidean distance. Its release draws them at random.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedloom.core.seeds import generator

# (vectors [clients, ...], known bool [clients], client, how many, seed) -> ids of known others, ascending
Neighbours = Callable[[Tensor, Tensor, int, int, int], Tensor]


def nearest(vectors: Tensor, known: Tensor, client: int, count: int, seed: int) -> Tensor:
    """The `count` known others whose vectors lie nearest to the client's own by L2, in float64; of equals the first.

    vectors: [clients, ...]. known: bool [clients], whose vectors count. seed: not read. Returns int64 ids, ascending;
    all others where there are fewer.
    """
    others = _others(known, client)
    flat = vectors.flatten(1).double()
    distances = (flat[others] - flat[client]).square().sum(1)
    found: Tensor = others[distances.argsort(stable=True)[:count]].sort().values
    return found


def drawn(vectors: Tensor, known: Tensor, client: int, count: int, seed: int) -> Tensor:
    """As `nearest`, but `count` known others drawn evenly without replacement by the seed."""
    others = _others(known, client)
    order = torch.randperm(len(others), generator=generator(seed, "neighbours"))
    found: Tensor = others[order[:count]].sort().values
    return found


def _others(known: Tensor, client: int) -> Tensor:
    ids = known.nonzero().flatten()
    return ids[ids != client]


NEIGHBOURS: dict[str, Neighbours] = {"nearest": nearest, "random": drawn}
