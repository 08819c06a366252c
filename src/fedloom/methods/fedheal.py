"""FedHEAL: a server that drops entries of updates whose sign is inconsistent, and listens more to clients far away.

Source: Chen et al., "Fair Federated Learning under Domain Skew with Local Consistency and Domain Diversity" (CVPR 2024,
arXiv 2405.16585), as in its public code. Clients are those of FedAvg. Of client i's model theta_i the server takes
u_i = theta - theta_i, a mask m_i per entry (`fedloom.merge.consistency`) and, with ||.|| summed over tensors,

    d_i = ||m_i u_i||;   Delta_i <- (1 - beta) Delta_i + beta (|S| / N) d_i / sum_S d;   p_i <- p_i + Delta_i
    theta <- theta - sum_S (p_i m_i / sum_S p m) m_i u_i      per entry; one that everybody masks stays

Delta starts at 0 and p at 1 / N. p is kept as it is and normalised where it is used, so that it grows over the rounds.
With tau below 0 and beta = 0 this is FedAvg with `uniform`, bit for bit. Examples are not counted.

Decisions:

- A client's history covers the rounds in which it took part (`history="own"`); its first keeps everything. The code
  divides by the rounds of the run instead ("round"), which draws the shares of clients that were away towards what they
  were. Both agree where everybody takes part in every round.
- Sums are over the clients of the round. (The code's sum of distances also holds the last ones of absent clients.)
- The code starts p at 1 / |S| and has no |S| / N: the same after normalising, while |S| does not change.
- Buffers have no mask of their own and are averaged with the weights p (`buffers="mean"`; "pooled" and "frozen" as in
  FedAvg). "masked" treats them like parameters, counters too, as the code does; d never counts them.
- Rows of classes that have not arrived have no history: a class's first round with a client keeps its rows whole.
- The server keeps h for every client and entry, 4 bytes each (0.9 GB for 20 clients with a ResNet-18), and hence may
  not hide which upload is whose: not for secure aggregation.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Le, Lt
from torch import Tensor

from fedloom.core import Batches, ClientId, Context, Method, Payload, Reply, Update
from fedloom.local import LocalSGD
from fedloom.local.terms import CrossEntropy
from fedloom.merge.buffers import buffer_policy
from fedloom.merge.consistency import ConsistencyMasks, diversity_step
from fedloom.merge.masked import masked_mean
from fedloom.methods.fedavg import FedAvg

RELEASE: dict[str, Any] = {"history": "round", "buffers": "masked"}
PRESETS: dict[str, dict[str, Any]] = {"paper": {}, "code_2024": RELEASE}
ABLATIONS: dict[str, dict[str, Any]] = {"no-mask": {"tau": -1.0}, "no-diversity": {"beta": 0.0}}
CLIENTS = "clients"  # "weight" p and "step" Delta, float64 [N]; "rounds" int64 [N], "class_rounds" int64 [N, classes]


def history_of(client: ClientId) -> str:
    """The field of the server's state with a client's h: name -> float32; absent until it has taken part."""
    return f"history.{client}"


@dataclass(frozen=True)
class FedHEAL(Method):
    """Server state: the model, "clients" and a history per client. Clients keep nothing."""

    local: LocalSGD
    tau: float = 0.3
    beta: float = 0.4
    history: str = "own"
    buffers: str = "mean"

    personal: ClassVar[bool] = False
    reveals: ClassVar[Mapping[str, str]] = FedAvg.reveals

    def init_server(self, ctx: Context) -> Payload:
        """The model; p = 1 / N, Delta = 0 and no rounds for every client."""
        n = ctx.num_clients
        weight, step = torch.full((n,), 1 / n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
        rounds, class_rounds = torch.zeros(n, dtype=torch.int64), torch.zeros(n, ctx.num_classes, dtype=torch.int64)
        clients = {"weight": weight, "step": step, "rounds": rounds, "class_rounds": class_rounds}
        return {**ctx.init_state(), CLIENTS: clients}

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The model alone."""
        return {field: server[field] for field in ("params", "buffers")}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """FedAvg's."""
        end = self.local(down, data, ctx)
        return Update(state, {"params": end.params, "buffers": end.buffers}, metrics=end.metrics)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """Two walks over the replies: distances and histories, then the masked mean; one tensor of one at a time."""
        who = [reply.client for reply in replies]
        fields = ("params", "buffers") if self.buffers == "masked" else ("params",)
        masks = {field: [self._masks(server, reply, field, ctx) for reply in replies] for field in fields}
        seen = {field: [mask.observed() for mask in masks[field]] for field in fields}
        distances = torch.tensor([distance for _, distance in seen["params"]], dtype=torch.float64)
        clients = self._clients(server[CLIENTS], who, distances, ctx)
        weights = (clients["weight"][who] / clients["weight"][who].max()).tolist()  # equal ones are exactly 1
        merged = {
            field: masked_mean([mask.tree for mask in masks[field]], masks[field], weights, server[field], who=who)
            for field in fields
        }
        if "buffers" not in merged:
            weighted = [reply._replace(weight=weight) for reply, weight in zip(replies, weights, strict=True)]
            merged["buffers"] = dict(buffer_policy(self.buffers)(weighted, server["buffers"]))
        histories = {
            history_of(client): {name: h for field in fields for name, h in seen[field][i][0].items()}
            for i, client in enumerate(who)
        }
        return {**server, **merged, CLIENTS: clients, **histories}

    def _masks(self, server: Payload, reply: Reply, field: str, ctx: Context) -> ConsistencyMasks:
        """The masks of one client's field, with how often each class row has been seen."""
        counts, client, tree = server[CLIENTS], reply.client, server[field]
        rounds = {name: self._past(counts["rounds"][client], ctx) for name in tree}
        for name in ctx.class_rows.keys() & tree.keys():
            shape = [1] * tree[name].dim()
            shape[ctx.class_rows[name]] = -1
            rounds[name] = self._past(counts["class_rounds"][client], ctx).view(shape)
        return ConsistencyMasks(tree, reply.up[field], server.get(history_of(client), {}), rounds, self.tau)

    def _past(self, taken: Tensor, ctx: Context) -> Tensor:
        """Rounds before this one, 0 where there is no history."""
        return taken if self.history == "own" else torch.where(taken > 0, ctx.global_round, 0)

    def _clients(self, old: Mapping[str, Tensor], who: list[int], distances: Tensor, ctx: Context) -> dict[str, Tensor]:
        """Weights, steps and rounds with this one."""
        new = {name: tensor.clone() for name, tensor in old.items()}
        new["step"][who] = diversity_step(distances, old["step"][who], self.beta, len(who) / ctx.num_clients)
        new["weight"][who] += new["step"][who]
        new["rounds"][who] += 1
        new["class_rounds"][torch.tensor(who).unsqueeze(1), torch.tensor(ctx.stage.seen)] += 1
        return new


def fedheal(
    *,
    local: LocalSGD,
    tau: Annotated[float, Lt(1)] = 0.3,
    beta: Annotated[float, Ge(0), Le(1)] = 0.4,
    history: Literal["own", "round"] = "own",
    buffers: Literal["mean", "pooled", "frozen", "masked"] = "mean",
    label_scope: Literal["seen", "current"] = "seen",
) -> FedHEAL:
    """Assemble FedHEAL; the options that are not named here are FedAvg's.

    tau: consistency that an entry of an update must exceed to count, a share of past rounds; below 0 all count.
    beta: how fast the clients' weights follow their distances from the global model; 0 leaves them equal.
    history: rounds over which signs are counted: the client's `own`, or those of the run (`round`), as the code does.
    buffers: `mean` by the clients' weights, `pooled` and `frozen` as in FedAvg, `masked` like parameters, as the code
        does.
    """
    if {"history": history, "buffers": buffers} == RELEASE:
        warnings.warn(
            "fedheal follows the public code where it differs: histories are divided by the rounds of the run, "
            "and buffers are masked",
            stacklevel=2,
        )
    return FedHEAL(replace(local, terms=(CrossEntropy(label_scope),)), tau, beta, history, buffers)
