"""Rounds of a method that prunes, by hand: a server's state, one client's work, what the server makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.core import Context, Payload, Reply, Update
from fedloom.core.payload import raw_bytes
from fedloom.core.seeds import generator
from fedloom.engine.experiment import Experiment
from toys.federation import BlobSpec, experiment


class Hand:
    """An experiment on the blobs whose rounds are called one by one; every context has a network of its own kind."""

    def __init__(
        self,
        name: str,
        *,
        plan: Mapping[str, Any] | None = None,
        change: Callable[[Any], Any] | None = None,
        **options: Any,
    ):
        given = {"num_stages": 1, "rounds": 4, "spec": BlobSpec(residual=True), **(plan or {})}
        self.whole: Experiment = experiment(f"fedloom.methods.{name}:{name}", options=options, **given)
        self.method: Any = change(self.whole.method) if change else self.whole.method
        self.net = self.whole.net()
        self.server: Payload = self.method.init_server(self.ctx())
        self.states: dict[int, Payload] = {}

    def ctx(self, client: int | None = None, round: int | None = 0) -> Context:
        return self.whole.context(self.net, 0, round=round, client=client)

    @property
    def table(self) -> Any:
        return self.net.module.channels

    @property
    def mask(self) -> Tensor:
        return self.server["mask"]["channels"]

    def down(self, client: int | None = None, round: int = 0) -> Payload:
        return self.method.send(self.server, client, self.ctx(client, round))

    def work(self, client: int, round: int = 0) -> Update:
        data = self.whole.plan.train(client, 0, round, "train")
        return self.method.client_update(
            self.down(client, round), self.states.get(client, {}), data, self.ctx(client, round)
        )

    def round(self, clients: Sequence[int], round: int = 0) -> dict[int, Update]:
        """One round: the clients' updates; their states and the server's are the new ones."""
        updates = {k: self.work(k, round) for k in clients}
        self.states |= {k: update.state for k, update in updates.items()}
        replies = [Reply(k, self.examples(k), updates[k].up, {}) for k in clients]
        self.server = self.method.server_update(self.server, replies, self.ctx(None, round))
        return updates

    def examples(self, client: int) -> float:
        return float(self.whole.plan.size(client, 0))

    def own(self, client: int, round: int = 0) -> tuple[Tensor, Tensor, Payload]:
        """The mask, the client's own channels and its dense model, as it would work next."""
        return self.method.own(self.down(client, round), self.states.get(client, {}), self.ctx(client, round))


def masked(hand: Hand, keep: float = 0.5, seed: int = 0) -> Tensor:
    """Give the server a drawn mask with at least one channel of every group; the mask."""
    mask = torch.rand(hand.table.total, generator=generator(seed, "masked")) < keep
    for part in hand.table.split(mask):
        part[0] = True
    hand.server = {**hand.server, "mask": {"channels": mask}}
    return mask


def words(payload: Payload) -> set[bytes]:
    """Every 4 bytes of every float32 tensor."""
    found: set[bytes] = set()
    for tree in payload.values():
        for tensor in tree.values():
            if tensor.dtype == torch.float32:
                data = raw_bytes(tensor).numpy().tobytes()
                found |= {data[i : i + 4] for i in range(0, len(data), 4)}
    return found
