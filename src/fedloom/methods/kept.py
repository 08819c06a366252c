"""Fields of the server that clients keep for the length of a stage, so that each travels once per stage and client.

For what does not change while a stage lasts and is as large as the model: an old model to distil from, a Fisher with
its anchor. The server marks who holds the fields, by accepted replies alone: a client whose update was lost or rejected
has lost its new state too, and is sent them again. A mark and a client's copy count for the stage whose number stands
beside them, so nothing has to be reset where a stage begins, whoever was away and whichever rounds merged nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedloom.core import ClientId, Context, Payload, Reply

HOLDERS = "holders"  # server: {"clients": bool [num_clients], "stage": int64}
KEPT = "kept"  # client, beside its copy of the fields: {"stage": int64}


@dataclass(frozen=True)
class KeptFields:
    """names: fields of the server's state. Their values must not change between the train rounds of one stage."""

    names: tuple[str, ...]

    def nobody(self, ctx: Context) -> Payload:
        """What the server's initial state needs besides the fields: no marks, of no stage."""
        return {HOLDERS: {"clients": torch.zeros(ctx.num_clients, dtype=torch.bool), "stage": torch.tensor(-1)}}

    def current(self, server: Payload, ctx: Context) -> bool:
        """Whether replies have been merged at this stage: the marks are of it."""
        return int(server[HOLDERS]["stage"]) == ctx.stage.index

    def sent(self, server: Payload, client: ClientId, ctx: Context) -> Payload:
        """What travels to a client: the fields, or nothing where it holds them."""
        if self.current(server, ctx) and bool(server[HOLDERS]["clients"][client]):
            return {}
        return {name: server[name] for name in self.names}

    def holds(self, state: Payload, ctx: Context) -> bool:
        """Whether a client's state has the fields of this stage."""
        return KEPT in state and int(state[KEPT]["stage"]) == ctx.stage.index

    def kept(self, down: Payload, state: Payload, ctx: Context) -> Payload:
        """A client's state with the fields of this stage, which are read from there.

        The same object where it holds them already, so that nothing is written. Raises `KeyError` where it does not
        and they were not sent.
        """
        if self.holds(state, ctx):
            return state
        return {**state, **{name: down[name] for name in self.names}, KEPT: {"stage": torch.tensor(ctx.stage.index)}}

    def marked(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """The server's marks after clients that use `kept` have replied: these, and who was marked at this stage."""
        before = (server if self.current(server, ctx) else self.nobody(ctx))[HOLDERS]["clients"]
        clients = before.index_fill(0, torch.tensor([reply.client for reply in replies]), True)
        return {HOLDERS: {"clients": clients, "stage": torch.tensor(ctx.stage.index)}}
