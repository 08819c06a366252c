"""Methods whose clients measure batch-norm statistics in the finished model: nothing is tracked while they train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fedloom.core import Batches, ClientId, Context, Exchange, Method, Payload, Reply, Stage, Trip, Update
from fedloom.local.statistics import measured_statistics
from fedloom.merge.buffers import pooled_buffers


class Remeasured(Method):
    """Adds the exchange "statistics": every client passes over its data once, the server pools what they find.

    statistics: it follows the last round of a "stage", or every "round". The server's state holds "params" and
    "buffers"; a network without buffers is not sent.
    Source: Diao et al., "HeteroFL" (ICLR 2021), static batch normalisation (sBN). Theirs is one cumulative mean over
    shuffled batches of all data; the moments of all data taken together are what this estimates.
    """

    statistics: str

    def exchanges(self) -> Mapping[str, Exchange]:
        """The method's own, and the measurement."""
        return {**super().exchanges(), "statistics": Exchange(self.send_model, self.measure, self.pool)}

    def plan(self, stage: Stage) -> Iterable[Trip]:
        """The rounds, each followed by a measurement or all of them by one."""
        rounds, measure = list(super().plan(stage)), Trip("statistics", None, "all")
        return [*rounds, measure] if self.statistics == "stage" else [t for trip in rounds for t in (trip, measure)]

    def send_model(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The model that serves; nothing where it has no statistics."""
        return self.send(server, None, ctx) if server["buffers"] else {}

    def measure(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Statistics on the client's data; an example counts as a visit of a pass."""
        return Update(state, {"buffers": measured_statistics(self.deployed(down, state, ctx), data)} if down else {})

    def pool(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """Moments of all clients' data taken together."""
        return {**server, "buffers": pooled_buffers(replies, server["buffers"])}
