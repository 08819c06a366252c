"""A client's work and the server's round of Fed-Duet; the method and its options are in `fedloom.methods.fedduet`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedloom.core import Batches, ClientId, Context, Payload, Reply, Table, Update
from fedloom.core.seeds import generator
from fedloom.local.summary import feature_summary, privatised
from fedloom.merge.mean import replies_mean
from fedloom.methods import duet_stages as stages
from fedloom.methods.clip_based import ClipMethod, show
from fedloom.methods.duet_facts import expert_routing, prompt_pool, sent_by_component
from fedloom.methods.orchestrator import Orchestrator
from fedloom.methods.routing_memory import CARRY, recalled, remembered
from fedloom.models.clip.duet import DuetNetwork


@dataclass(frozen=True)
class Summary:
    """What a client tells of its pictures; see `fedloom.local.summary`. sigma 0: no noise."""

    batches: int = 1
    clip: float = 1.0
    sigma: float = 0.0
    noise: str = "gaussian"

    def __call__(self, ctx: Context, data: Batches, batch_size: int) -> Tensor:
        """[d], with noise that is drawn anew in every round."""
        module: DuetNetwork = ctx.net.module  # type: ignore[assignment]
        found = feature_summary(ctx, data, width=module.towers.width, batches=self.batches, batch_size=batch_size)
        rng = generator(ctx.seed_for("summary noise"))
        return privatised(found, sigma=self.sigma, rng=rng, clip=self.clip, noise=self.noise)


@dataclass(frozen=True)
class FedDuet(ClipMethod):
    """Server: the model and the fields of `Orchestrator`. Client: "personal", "prompts", fields of `routing_memory`.

    rounds, share: which parameters train in a round (see `fedloom.methods.duet_stages`). kept: patterns of what stays
    on the clients. restores: whether it is given back to them in every round. common_target: the target of the
    stability loss is the mean of the clients' routing, and not the client's own.
    """

    rounds: stages.Rounds = stages.halves
    share: float = 0.5
    kept: tuple[str, ...] = ()
    restores: bool = True
    common_target: bool = False
    summary: Summary = Summary()
    orchestrator: Orchestrator | None = None

    personal: ClassVar[bool] = True
    reveals: ClassVar[Mapping[str, str]] = {
        **ClipMethod.reveals,
        "summary": "the mean feature of a batch under the client's model and its mean loss; its attention to prompts",
        "routing": "how a client's pictures and classes spread over the experts",
    }

    def init_server(self, ctx: Context) -> Payload:
        """The model, the pool and what the orchestrator knows."""
        model = super().init_server(ctx)
        return {**model, **self.orchestrator.initial(ctx, model["params"])}

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The shared part of the model and the prompts that were chosen for the client.

        A client that has not taken part in this task yet, and whoever evaluates, is also sent what clients keep.
        """
        common = {field: server[field] for field in ("params", "buffers", "routing") if field in server}
        goes_on = client is not None and int(server["clients"]["begun"][client]) == ctx.stage.index
        if goes_on and self.restores and ctx.exchange != "evaluate":
            kept = stages.part(server["params"], self.kept)
            common["params"] = {name: tensor for name, tensor in server["params"].items() if name not in kept}
        return {**common, **self.orchestrator.sent(server, client)}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train the experts whose turn it is; upload what is shared of them, in the last round of a task all."""
        begun = bool(state) and int(state["task"]["stage"]) == ctx.stage.index
        params = {**down["params"], **(state.get("personal", {}) if begun and self.restores else {})}
        start = {"params": params, "buffers": down["buffers"]}
        summary = self._prepare(start, down, data, ctx)
        common = down.get("routing", {}) if self.common_target else None
        chosen = stages.phases(self.rounds(ctx.round or 0, ctx.stage.rounds, self.share), params, self.local.epochs)
        ref = {**recalled(state, ctx, common), "prompts": down["prompts"]["shared"]}
        end = replace(self.local, phases=chosen)(start, data, ctx, ref=ref)
        up: dict[str, Any] = {"params": self._upload(end.params, chosen, ctx)}
        up["summary"] = {"feature": summary, "loss": torch.tensor([end.metrics.get("loss", 0.0)])}
        up["summary"] |= {"attention": end.carry["attention"]["mean"]} if "attention" in end.carry else {}
        if self.common_target and _is_last(ctx):
            up["routing"] = end.carry[CARRY]
        own = {"personal": stages.part(end.params, self.kept), "prompts": down["prompts"]}
        return Update({**own, **remembered(end.carry, ref, ctx)}, up, metrics=end.metrics)

    def _prepare(self, start: Payload, down: Payload, data: Batches, ctx: Context) -> Tensor:
        """Bind the model, encode the shared prompts, and give the feature summary."""
        show(ctx, self.label_scope)
        ctx.bind(start["params"], start["buffers"])
        module: DuetNetwork = ctx.net.module  # type: ignore[assignment]
        module.receive(down["prompts"]["shared"])
        with ctx.evaluating():
            module.encode()
        return self.summary(ctx, data, self.local.batch_size)

    def _upload(self, params: Mapping[str, Any], chosen: Sequence[Any], ctx: Context) -> dict[str, Tensor]:
        """What was trained and is shared; in the last round of a task also what is not."""
        moved = stages.part(params, [pattern for phase in chosen for pattern in phase.trainable])
        own = stages.part(params, self.kept)
        return {**moved, **own} if _is_last(ctx) else {n: t for n, t in moved.items() if n not in own}

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """Average what came; one step of the gate; prompts for the next round."""
        new = {**server, "params": replies_mean(replies, "params", server["params"], uniform=self.uniform)}
        new |= self.orchestrator.updated(new, replies, ctx)
        if self.common_target and _is_last(ctx):
            sent = [reply for reply in replies if reply.up.get("routing")]
            if sent:
                new["routing"] = replies_mean(sent, "routing", dict(sent[0].up["routing"]), uniform=self.uniform)
        return new

    def deployed(self, down: Payload, state: Payload, ctx: Context) -> Context:
        """The network with the client's own parts and prompts, or with the server's."""
        own = state.get("personal", {})
        ctx = super().deployed({**down, "params": {**down["params"], **own}}, state, ctx)
        module: DuetNetwork = ctx.net.module  # type: ignore[assignment]
        module.receive((state or down)["prompts"]["shared"])
        return ctx

    def facts(self, server: Payload, states: Mapping[ClientId, Payload], ctx: Context) -> Sequence[Table]:
        """Who was sent which prompts, how both towers route, and what the components cost to send."""
        routing = {client: state["routing"] for client, state in states.items() if state.get("routing")}
        whole = self.send(server, None, ctx)
        kept = stages.part(server["params"], self.kept if self.restores else ())
        shared = {name: tensor for name, tensor in server["params"].items() if name not in kept}
        sent: dict[str, Payload] = {"down, first": whole, "down, later": {**whole, "params": shared}}
        told = {"feature": server["clients"]["summary"][0], "loss": torch.zeros(1)}
        for number in sorted({0, ctx.stage.rounds - 1}):
            chosen = stages.phases(self.rounds(number, ctx.stage.rounds, self.share), server["params"], 2)
            params = self._upload(server["params"], chosen, replace(ctx, round=number))
            sent[f"up, round {number + 1} of a task"] = {"params": params, "summary": told}
        used, cost = prompt_pool(server["usage"]["count"]), sent_by_component(sent, stages.COMPONENTS)
        return [*used, *expert_routing(routing), cost]


def _is_last(ctx: Context) -> bool:
    return ctx.round == ctx.stage.rounds - 1
