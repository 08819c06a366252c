"""PruneFL: federated training of one sparse model whose mask follows the gradients.

Source: Jiang et al., "Model Pruning Enables Efficient Federated Learning on Edge Devices" (TNNLS 2022, arXiv
1909.12326), algorithm 1. A mask M keeps single weights; t_j is the time that weight j takes, c that of all else:

    client   w_i <- SGD on M w from M w;  g_ij^2 summed over its steps, for all weights j
    server   w <- sum_i q_i w_i;  M <- greedily, the largest (sum_M g_j^2) / (c + sum_M t_j), with sum_i q_i g_ij^2

First one client prunes alone: it trains and makes a new mask until the number of weights has changed by less than 10 %
five times in a row. Then all train, and every `adjust_every` rounds the server makes a new mask: of each layer's active
weights the smallest `adjust_share` * 0.5^(round / `half_life`) have to prove themselves again. Decisions:

- Weights of convolutions and linear layers are pruned, the head excepted, whose rows arrive with their classes. What
  returns starts at 0. At most `max_density` of the weights are active; a run starts from that share of every layer.
- In the paper a clock on the device measures t and c. Here, where equal runs give equal bits, t is the number of
  multiply-adds per example (`time="macs"`) or 1 ("uniform"), and c is `fixed_time` of the dense sum of t.
- Only a round that ends with a new mask records the gradients of all weights and sends their squares, dense; the last
  round makes none. Kept weights travel up and down, the bits of M down.
- The public code squares the sum of the gradients over the steps of a round (`importance="summed"`, preset
  "code_2022"); the client that prunes alone squares each there too.
- That is `initial_client`; its checks, at most `initial_checks` (0: none), follow local training each, in one trip
  before the first round; without data in the first stage it prunes nothing.
- Without checks and new masks (`adjust_every=0`) it is FedAvg at full density, bit for bit. The model that serves is
  dense with zeros: `active_parameters` counts what is not 0, operations are the dense network's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le
from torch import Tensor

from fedloom.core import Batches, ClientId, Context, Exchange, Payload, Reply, Stage, Trip, Update
from fedloom.core.errors import ConfigError, pick
from fedloom.core.tree import zeros_like
from fedloom.local import LocalSGD
from fedloom.local.terms import CrossEntropy
from fedloom.local.transforms.recorded import RECORDS, PerStep, Record
from fedloom.merge.mean import replies_mean
from fedloom.methods.sparse import SparseMethod, remade
from fedloom.models.sparse import TIMES
from fedloom.select.unstructured import Reconfiguration

PRESETS: dict[str, dict[str, Any]] = {"paper": {}, "code_2022": {"importance": "summed"}}
ABLATIONS: dict[str, dict[str, Any]] = {"no-initial": {"initial_checks": 0}, "no-adaptation": {"adjust_every": 0}}


@dataclass(frozen=True)
class PruneFL(SparseMethod):
    """`SparseMethod` whose masks change. record: what the clients' gradients add up to."""

    record: type[Record] = PerStep
    adjust_every: int = 50
    initial_checks: int = 20
    initial_client: int = 0

    reveals: ClassVar[Mapping[str, str]] = {
        **SparseMethod.reveals,
        "squares": "squared gradients of the client's loss, for every weight",
        "bits": "which weights the client that prunes alone keeps",
        "pruned": "the weights that it keeps, trained on its data",
    }

    def init_server(self, ctx: Context) -> Payload:
        """The model at its largest density; `ConfigError` for a client that there is not."""
        if self.initial_client >= ctx.num_clients:
            last = ctx.num_clients - 1
            raise ConfigError(f"method.initial_client must be a client from 0 to {last}, got {self.initial_client}")
        return super().init_server(ctx)

    def due(self, ctx: Context) -> bool:
        """Whether the context's round ends with a new mask."""
        done = ctx.global_round + 1
        return self.adjust_every > 0 and done % self.adjust_every == 0 and done < ctx.total_rounds

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train; before a new mask send the squared gradients, too."""
        record = self.record(list(down["values"])) if self.due(ctx) else None
        end, metrics = self.trained(self.model(down, ctx), data, ctx, record)
        squares = {} if record is None else {"squares": record.squares()}
        return Update(state, {**end.upload(), **squares}, metrics=metrics)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """Means, and a new mask where one is due."""
        new = super().server_update(server, replies, ctx)
        if not self.due(ctx):
            return new
        model = self.model(new, ctx)
        squares = replies_mean(replies, "squares", zeros_like(model.weights))
        return remade(model, self.rule, squares, ctx.global_round, ctx).payload()

    def exchanges(self) -> Mapping[str, Exchange]:
        """Training, and what one client does before it."""
        return {**super().exchanges(), "initial": Exchange(self.send_one, self.prune_alone, self.adopt)}

    def plan(self, stage: Stage) -> Iterable[Trip]:
        """The rounds; before those of the first stage one client prunes."""
        first = stage.index == 0 and self.initial_checks > 0
        return [*([Trip("initial", None, "all")] if first else []), *super().plan(stage)]

    def send_one(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The sparse model to the client that prunes, nothing to others."""
        return server if client == self.initial_client else {}

    def prune_alone(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train and make a new mask, until its size is steady; a client that was sent nothing does nothing."""
        if not down or not len(data):
            return Update(state, {}, weight=0.0)
        model, metrics = self.settled(self.model(down, ctx), data, ctx, self.initial_checks)
        return Update(state, _renamed(model.payload(), "values", "pruned"), metrics=metrics)

    def adopt(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """The model of the client that pruned, the only one whose reply counts."""
        return self.model(_renamed(replies[0].up, "pruned", "values"), ctx).payload()


def _renamed(payload: Payload, old: str, new: str) -> dict[str, dict[str, Tensor]]:
    return {new if field == old else field: dict(tree) for field, tree in payload.items()}


def prunefl(
    *,
    local: LocalSGD,
    adjust_every: Annotated[int, Ge(0)] = 50,
    adjust_share: Annotated[float, Ge(0), Le(1)] = 0.3,
    half_life: Annotated[float, Gt(0)] = 10_000.0,
    max_density: Annotated[float, Gt(0), Le(1)] = 1.0,
    importance: Literal["per_step", "summed"] = "per_step",
    time: Literal["macs", "uniform"] = "macs",
    fixed_time: Annotated[float, Ge(0)] = 0.1,
    initial_checks: Annotated[int, Ge(0)] = 20,
    initial_client: Annotated[int, Ge(0)] = 0,
) -> PruneFL:
    """Assemble PruneFL.

    adjust_every: rounds from one mask to the next; 0 never makes a new one.
    adjust_share: share of the active weights that have to prove themselves again, as it is in round 0.
    half_life: rounds after which that share has halved; checks, while a client prunes alone.
    max_density: most of the weights that may be active, as a share; a run starts from it.
    importance: squared gradients of weights: summed over the steps (`per_step`), or the square of their sum (`summed`).
    time: what a weight costs: its multiply-adds per example (`macs`), or 1 (`uniform`).
    fixed_time: cost of everything but weights, as a share of the dense network's cost.
    initial_checks: most masks that one client makes by itself before the first round; 0 for none.
    initial_client: the client that prunes first, by id.
    """
    if importance == "summed":
        warnings.warn("prunefl follows the public code where it differs: it squares summed gradients", stacklevel=2)
    return PruneFL(
        replace(local, terms=(CrossEntropy(),)),
        Reconfiguration(adjust_share, half_life, fixed_time, max_density),
        pick("time", time, TIMES),
        pick("importance", importance, RECORDS),
        adjust_every,
        initial_checks,
        initial_client,
    )
