"""A method that carries out another one and checks, call by call, that the protocol is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core import Batches, Context, Exchange, Method, ModelSpec, Payload, Reply, Stage, Trip, Update
from fedloom.core.batches import Inputs, take
from fedloom.core.payload import ClassRows, check_structure, digest, items, narrow, nbytes, widen


def same(a: Payload, b: Payload) -> bool:
    """Equal names, and values up to rounding."""
    left, right = list(items(a)), list(items(b))
    names = [(f, n) for f, n, _ in left] == [(f, n) for f, n, _ in right]
    return names and all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for (_, _, x), (_, _, y) in zip(left, right))  # noqa: B905


@dataclass(frozen=True)
class Watched(Method):
    """inner: the method under test. seen: what was counted on the way."""

    inner: Method
    seen: dict[str, Any] = field(default_factory=lambda: {"up": 0, "uploads": set(), "calls": []}, repr=False)

    @property
    def reveals(self) -> Mapping[str, str]:  # type: ignore[override]
        return self.inner.reveals

    @property
    def ragged(self) -> Any:  # type: ignore[override]
        return self.inner.ragged

    @property
    def data_view(self) -> str:  # type: ignore[override]
        return self.inner.data_view

    @property
    def needs_domains(self) -> bool:  # type: ignore[override]
        return self.inner.needs_domains

    def module(self, spec: ModelSpec) -> nn.Module:
        return self.inner.module(spec)

    def deployed(self, down: Payload, state: Payload, ctx: Context) -> Context:
        return self.inner.deployed(down, state, ctx)

    def class_rows(self, ctx: Context) -> ClassRows:
        return self.inner.class_rows(ctx)

    def init_server(self, ctx: Context) -> Payload:
        first, second = self.inner.init_server(ctx), self.inner.init_server(ctx)
        assert digest(first) == digest(second)
        return first

    def init_client(self, ctx: Context) -> Payload:
        first = self.inner.init_client(ctx)
        check_structure(first, "the client state")
        assert digest(first) == digest(self.inner.init_client(ctx))
        return first

    def send(self, server: Payload, client: int | None, ctx: Context) -> Payload:
        return self._send(self.inner.send, server, client, ctx)

    def _send(self, send: Any, server: Payload, client: int | None, ctx: Context) -> Payload:
        before = digest(server)
        down = send(server, client, ctx)
        check_structure(down, "the download")
        assert digest(server) == before, "send changed the server state"
        assert digest(down) == digest(send(server, client, ctx)), "send is not deterministic"
        return down

    def _work(self, work: Any, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        before = digest(down), digest(state), repr(self.inner)
        draws = torch.get_rng_state()  # the engine seeds it for this work: dropout and noise draw from it
        update = work(down, state, data, ctx)
        assert (digest(down), digest(state), repr(self.inner)) == before, "client work is not pure"
        first = digest(update.up), digest(update.state)
        torch.set_rng_state(draws)
        again = work(down, state, data, ctx)
        assert (digest(again.up), digest(again.state)) == first, "the same work gave another result"
        assert (digest(update.up), digest(update.state)) == first, "a second call wrote into the result of the first"
        rows = self.inner.class_rows(ctx)
        self.seen["up"] += nbytes(update.up, rows, ctx.stage.seen)
        self.seen["uploads"] |= set(update.up)
        self._check_rows(down, update, rows, ctx)
        return update

    def _check_rows(self, down: Payload, update: Update, rows: ClassRows, ctx: Context) -> None:
        """Rows of classes that have not arrived do not move, and what travels restores the whole.

        Uploads of another shape than the download's, of smaller networks, have rows that are only seen on the server.
        """
        like = {
            f: {n: t for n, t in tree.items() if n in update.up.get(f, {}) and t.shape == update.up[f][n].shape}
            for f, tree in down.items()
        }
        cut = narrow(update.up, rows, ctx.stage.seen)
        assert nbytes(cut) == nbytes(update.up, rows, ctx.stage.seen)
        for (name, tensor), dim in ((key, dim) for key, dim in rows.items()):
            if tensor in like.get(name, {}):
                a, b = like[name][tensor], update.up[name][tensor]
                assert torch.equal(a.index_select(dim, ctx.unseen), b.index_select(dim, ctx.unseen))
        fill = {f: {n: like.get(f, {}).get(n, t) for n, t in tree.items()} for f, tree in update.up.items()}
        assert digest(widen(cut, rows, ctx.stage.seen, fill)) == digest(update.up)

    def _absorb(self, absorb: Any, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        before = digest(server), [digest(reply.up) for reply in replies], repr(self.inner)
        new = absorb(server, replies, ctx)
        check_structure(new, "the server state")
        assert (digest(server), [digest(reply.up) for reply in replies], repr(self.inner)) == before
        assert [reply.client for reply in replies] == sorted(reply.client for reply in replies)
        assert digest(absorb(server, replies, ctx)) == digest(new), "the server's update is not deterministic"
        assert same(absorb(server, replies[::-1], ctx), new), "the order of the replies matters"
        doubled = [reply._replace(weight=2.5 * reply.weight) for reply in replies]
        assert same(absorb(server, doubled, ctx), new), "only proportions of weights may matter"
        for (field_, name), dim in self.inner.class_rows(ctx).items():
            if name in server.get(field_, {}):
                a, b = server[field_][name], new[field_][name]
                assert torch.equal(a.index_select(dim, ctx.unseen), b.index_select(dim, ctx.unseen))
        return new

    def exchanges(self) -> Mapping[str, Exchange]:
        def watch(name: str, inner: Exchange) -> Exchange:
            self.seen["calls"].append(name)
            return Exchange(
                lambda server, client, ctx: self._send(inner.send, server, client, ctx),
                lambda down, state, data, ctx: self._work(inner.work, down, state, data, ctx),
                lambda server, replies, ctx: self._absorb(inner.absorb, server, replies, ctx),
            )

        return {name: watch(name, exchange) for name, exchange in self.inner.exchanges().items()}

    def plan(self, stage: Stage) -> Iterable[Trip]:
        trips = list(self.inner.plan(stage))
        assert trips == list(self.inner.plan(stage))
        assert {trip.exchange for trip in trips} <= set(self.inner.exchanges())
        return trips

    def predict(self, down: Payload, state: Payload, x: Inputs, ctx: Context) -> Tensor:
        before = digest(down), digest(state)
        scores = self.inner.predict(down, state, x, ctx)
        assert not scores.requires_grad and scores.shape[-1] == ctx.num_classes
        assert torch.equal(scores, self.inner.predict(down, state, x, ctx)), "predict is not deterministic"
        order = torch.arange(len(scores)).flip(0)
        assert torch.allclose(self.inner.predict(down, state, take(x, order), ctx), scores[order], atol=1e-5)
        alone = self.inner.predict(down, state, take(x, order[:1]), ctx)
        assert torch.allclose(alone, scores[order[:1]], atol=1e-5), "an example's scores depend on the others"
        assert torch.isneginf(scores[:, ctx.unseen]).all()
        assert torch.isfinite(scores[:, list(ctx.stage.seen)]).all()
        assert (digest(down), digest(state)) == before, "predict is not pure"
        return scores
