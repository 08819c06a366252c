"""The protocol: a method is a frozen dataclass of hyper-parameters and parts, with pure methods.

The engine calls the method; the method never calls the engine. State is a return value. No method may alter
`down`, `state`, `self` or anything global: inside `client_update` the network of the process is the only thing
that is written (see `fedloom.core.context.Net`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor, nn

from fedloom.core.batches import Batches, Inputs
from fedloom.core.context import ClientId, Context, Stage
from fedloom.core.payload import ClassRows, Payload
from fedloom.core.table import Table


class Update(NamedTuple):
    """What a client returns: its new state, its upload, its weight (None: number of examples), its metrics."""

    state: Payload
    up: Payload
    weight: float | None = None
    metrics: Mapping[str, float] = {}


class Reply(NamedTuple):
    """One client's upload as the server sees it. Tensors of `up` are read when accessed."""

    client: ClientId
    weight: float
    up: Payload
    metrics: Mapping[str, float]


class Exchange(NamedTuple):
    """One trip server -> clients -> server; the three functions have the signatures of `Method`'s."""

    send: Callable[[Payload, ClientId | None, Context], Payload]
    work: Callable[[Payload, Payload, Batches, Context], Update]
    absorb: Callable[[Payload, Sequence[Reply], Context], Payload]


class Trip(NamedTuple):
    """One exchange in a stage's plan. who: "cohort" (sampled per round) or "all". Trips of a round share it."""

    exchange: str = "train"
    round: int | None = None
    who: str = "cohort"


class ModelSpec(Protocol):
    """How a method gets a network: the configured backbone, or the default classifier on it."""

    num_classes: int
    seed: int

    def backbone(self) -> nn.Module:
        """A feature extractor [batch, ...] -> [batch, num_features] with the attribute `num_features`."""
        ...

    def classifier(self) -> nn.Module:
        """The backbone with a fixed-width linear head."""
        ...

    def clip(self) -> Any:
        """The frozen towers of a vision-language model and the words of the classes, `fedloom.models.clip.Clip`.

        Raises `ConfigError` where the configured network is none.
        """
        ...


@dataclass(frozen=True)
class Method:
    """Base of all methods: one model each way and nothing kept on clients; override what differs.

    Class attributes. `reveals`: per upload field, what it tells about a client's data. `ragged`: upload fields
    whose tensors may differ in shape from the server's. `personal`: a client may predict otherwise than the global
    view does, by its state or by what it is sent; False spares the evaluation of every client's own view.
    data_view: how the clients' data are presented: "stream" as the plan says, "pooled_cumulative" as one client that
    holds all data of the stages seen so far, at the stream's budget, "pooled_cumulative_all" at full budget (see
    `fedloom.engine.views`); no real federation can grant the last two. A property where an option chooses it.
    needs_domains: the method reads the domain of every training example; data without domains are refused.
    needs_experts: the network must have mixture-of-experts layers (see `fedloom.core.moe`); others are refused.
    needs_clip: the network is built from a vision-language model, `ModelSpec.clip`; others are refused.
    """

    reveals: ClassVar[Mapping[str, str]] = {}
    ragged: ClassVar[Collection[str]] = ()
    personal: ClassVar[bool] = True
    data_view: ClassVar[str] = "stream"
    needs_domains: ClassVar[bool] = False
    needs_experts: ClassVar[bool] = False
    needs_clip: ClassVar[bool] = False

    def module(self, spec: ModelSpec) -> nn.Module:
        """The network that every process builds once; the same values each time it is called."""
        return spec.classifier()

    def class_rows(self, ctx: Context) -> ClassRows:
        """(field, name) -> dimension of the class rows, for tensors that grow with the seen classes."""
        return {("params", name): dim for name, dim in ctx.class_rows.items()}

    def init_server(self, ctx: Context) -> Payload:
        """State of the server before the first round."""
        return ctx.init_state()

    def init_client(self, ctx: Context) -> Payload:
        """State of a client that has not taken part yet; it must not depend on when it is asked for."""
        return {}

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """What a client receives; `client=None` asks for the global view, used for evaluation and export."""
        return server

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Work of one client in the default exchange."""
        raise TypeError(f"{type(self).__name__} defines no client_update")

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """New server state from the accepted replies, which come in client-id order and may be read again."""
        raise TypeError(f"{type(self).__name__} defines no server_update")

    def exchanges(self) -> Mapping[str, Exchange]:
        """Named exchanges; `plan` refers to them. A method without any trains nothing and plans no trip."""
        return {"train": Exchange(self.send, self.client_update, self.server_update)}

    def plan(self, stage: Stage) -> Iterable[Trip]:
        """Every trip of a stage, in order."""
        return [Trip("train", r) for r in range(stage.rounds)]

    def predict(self, down: Payload, state: Payload, x: Inputs, ctx: Context) -> Tensor:
        """Scores [batch, classes] without label, task id or domain id; classes not seen yet are -inf."""
        return self.deployed(down, state, ctx).scores(x)

    def deployed(self, down: Payload, state: Payload, ctx: Context) -> Context:
        """The context around the network that this view is served with, bound to its values.

        A method that prunes or adapts rebuilds the network here: what `predict` runs, the summary counts and
        `fedloom export` writes is then the smaller one.
        """
        ctx.bind(down["params"], down.get("buffers"))
        return ctx

    def facts(self, server: Payload, states: Mapping[ClientId, Payload], ctx: Context) -> Sequence[Table]:
        """What a finished run's report shows of this method, written to facts.json of the run folder.

        states: of the clients that have one, read when they are asked for; empty where they lie on other machines.
        """
        return ()


class DataPlan(Protocol):
    """Who holds what, when; implemented by `fedloom.data.plan`. Clients are numbered 0 .. num_clients - 1."""

    num_classes: int
    num_clients: int
    num_stages: int
    rounds: int
    tasks: Sequence[Sequence[int]]
    domains: Sequence[str]

    def stage(self, index: int, client: ClientId | None = None) -> Stage:
        """The stage as the server (None) or as one client sees it."""
        ...

    def participants(self, stage: int) -> Sequence[ClientId]:
        """Clients that hold data at this stage, ascending; may be a range."""
        ...

    def size(self, client: ClientId, stage: int) -> int:
        """Number of examples of a client at a stage."""
        ...

    def train(self, client: ClientId, stage: int, round: int | None, exchange: str) -> Batches:
        """A client's data for one piece of work."""
        ...

    def test(self, task: int, domain: int | None = None) -> Batches:
        """Held-out examples of one task, of all its domains or of one."""
        ...

    def label_counts(self, client: ClientId, stage: int) -> Tensor:
        """int64 [classes]: examples per class that the client has held up to and including the stage."""
        ...

    def domain_counts(self, client: ClientId, stage: int) -> Tensor:
        """int64 [domains, classes]: the same per domain; one row where the data have no domains."""
        ...

    def fingerprint(self) -> str:
        """Hash of the data and of every assignment, for the record of a run."""
        ...
