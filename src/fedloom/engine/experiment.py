"""What an engine needs to know: the experiment (what is computed) and the options (how it is carried out)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.core import ClientId, Context, DataPlan, Forward, Method, ModelSpec, Net
from fedloom.engine.views import viewed


@dataclass(frozen=True)
class Experiment:
    """Everything that a process needs to do a client's work; equal experiments give equal bits.

    plan: the one that is given, presented as the method's `data_view` says. sampler: `(participants, cohort, *key) ->
    sorted client ids`. cohort: a count or a fraction in (0, 1]. threads: intra-op threads of every step. rebuild:
    picklable function that makes the same experiment in another process; None when that is impossible (`why_not`
    then says why).
    """

    method: Method
    spec: ModelSpec
    forward: Forward
    plan: DataPlan
    sampler: Callable[..., list[ClientId]]
    seed: int = 0
    cohort: int | float = 1.0
    threads: int = 1
    rebuild: Callable[[], Experiment] | None = None
    why_not: str = "it was not built from a configuration"

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", viewed(self.plan, self.method.data_view, self._cohort))

    def net(self) -> Net:
        """The network of one process."""
        return Net(lambda: self.method.module(self.spec), self.forward)

    def context(
        self, net: Net, stage: int, *, round: int | None = None, exchange: str = "train", client: ClientId | None = None
    ) -> Context:
        """The context of one piece of work; `client=None` is the server's."""
        return Context(
            net=net,
            stage=self.plan.stage(stage, client),
            num_classes=self.plan.num_classes,
            num_clients=self.plan.num_clients,
            num_domains=len(self.plan.domains),
            seed=self.seed,
            round=round,
            exchange=exchange,
            client=client,
        )

    def draw(self, stage: int, round: int | None, who: str) -> Sequence[ClientId]:
        """Clients of one trip; trips that share a round share the cohort."""
        participants = self.plan.participants(stage)
        return participants if who == "all" else self._cohort(participants, stage, round)

    def _cohort(self, participants: Sequence[ClientId], stage: int, round: int | None) -> Sequence[ClientId]:
        if not len(participants):
            return participants
        return self.sampler(participants, self.cohort, self.seed, "cohort", stage, round)


@dataclass(frozen=True)
class Options:
    """How a run is carried out; nothing here changes what a fault-free run computes.

    on_client_failure: "fail", "skip" or "retry" (`retries` times, then skip). min_replies: fewer answers end the
    run. deadline: seconds per exchange. engine, runtime, join, reply_limit: as in the section `engine`.
    evaluate_every: "stage" or a number of rounds. checkpoint_every: rounds
    between checkpoints, 0 for none. config_hash: what a checkpoint must agree with.
    """

    engine: str = "serial"
    runtime: str | None = None
    workers: int = 1
    join: float = 600.0
    reply_limit: int | None = None
    on_client_failure: str = "skip"
    retries: int = 0
    min_replies: int = 1
    deadline: float | None = None
    evaluate_every: str | int = "stage"
    personal: bool = True
    checkpoint_every: int = 1
    checkpoint_keep: int = 2
    config_hash: str = ""


class Observer:
    """Watches a run. Observers read; they never change what is computed."""

    def started(self, info: Mapping[str, Any]) -> None:
        """info: stages, rounds per stage, clients, workers, resumed_from (None or a position in words)."""

    def client_done(self, done: int, total: int) -> None:
        """A client of the current exchange has finished."""

    def round_done(self, row: Mapping[str, Any]) -> None:
        """A row of scope "round" was written."""

    def stage_done(self, row: Mapping[str, Any]) -> None:
        """A row of scope "stage" was written."""

    def note(self, text: str) -> None:
        """Something that the user should know."""

    def finished(self, summary: Mapping[str, Any]) -> None:
        """The run ended well."""
