"""FEDFIP: one channel mask from Fisher scores per domain, private channels, and only shared channels averaged.

Source: Lin et al., "Domain Sensitive Federated Learning with Fisher-Informed Pruning" (CVPR 2026). For client i with
n_ik examples of domain k, channel j, M the global mask, p_k the prototypes:

    client   F_ijk = mean (dL/dz_j)^2;  F_ij = sum_k (n_ik / n_i) F_ijk;  trains M or R_i on L + lam L_con
             R_ij = 1[F_ij > phi] (1 - M_j);  V_ijk = F_ijk M_j / sum_j' F_ij'k M_j'
    server   w_j <- sum_i q_i w_ij where M_j = 1;  M = the keep C best of sum_i q_i F_ij
             p_k <- mu p_k + (1 - mu) sum_i n_ik V_ik / sum_i n_ik

`keep` is the share of channels that stay. A shared tensor is the block W[S_out, S_in]; what touches a private channel
stays on its client, in a dense shadow of the model; clients train a compact network of M or R_i.

Decisions: a channel is a coupled group with one gate z_j after every ReLU (`groups`); scores are squared gate gradients
per example at the end of local training, for all channels, so masks lag one round and what was pruned can return
(`importance`, `fisher_samples` per domain); one threshold on scores divided by their group's mean, at least 5 % of a
group, exact count (`threshold`, `min_keep`); every channel in the first `warmup_rounds`, then a new mask every
`refresh_every` rounds up to the share `freeze` of the run, of scores with the memory `fisher_ema`; phi is relative to
the kept channels' mean in the group, with a cap (`reactivation`, `react_max`), and R_i is taken when the client next
works, of its last scores; a prototype starts at its first mean and follows the mask; signatures without signal are not
sent; `client_scores` scales F_i before the mean. Batch-norm statistics of shared channels: "mean", "pooled" as moments,
"local", or "recal", local and measured anew in the shared network at the end of a stage (`batch_norm`). What leaves M
is frozen on the server. With `aggregate` "owned" nothing is private: clients get the dense model and send all that
they train, and entries are means over their owners. With keep 1 scores are not sent; with contrast_weight 0 as well it
is FedAvg. Signatures reveal how domains differ. With batch_norm "local" the global view has no statistics of data.

Switches. The paper's ladder, as we read the names of its rows: bare (FedAvg), dsfp-only (the mask alone), no-sa (mask
and contrast), no-dsr (mask and shared aggregation), full. Beside it no-dsfp, which prunes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le

from fedloom.core import Batches, ClientId, Context, Payload, Reply, Table, Update
from fedloom.core.errors import pick
from fedloom.local import LocalSGD
from fedloom.local.gate_fisher import IMPORTANCES
from fedloom.local.terms import CrossEntropy
from fedloom.local.terms.structure import FORMS, DomainProbe, StructureContrast
from fedloom.methods.channel_facts import prototype_cosines, scores_by_domain
from fedloom.methods.channel_scores import COMBINES, DomainScores, MaskRule, Prototypes, ReopenRule
from fedloom.methods.pruned import Pruned
from fedloom.methods.subnetworks import ENTRIES, SHARINGS, table
from fedloom.models.groupings import GROUPINGS
from fedloom.select.channels import REACTIVATIONS, THRESHOLDS, Refresh

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "stable": {"warmup_rounds": 5, "refresh_every": 5, "freeze": 0.5, "fisher_ema": 0.9},
}
ABLATIONS: dict[str, dict[str, Any]] = {
    "no-dsfp": {"keep": 1.0},
    "no-dsr": {"contrast_weight": 0.0},
    "no-sa": {"aggregate": "owned"},
    "dsfp-only": {"contrast_weight": 0.0, "aggregate": "owned"},
    "bare": {"keep": 1.0, "contrast_weight": 0.0},
}


@dataclass(frozen=True, kw_only=True)
class FedFIP(Pruned):
    """`Pruned` with scores per domain, and on the server "prototypes".

    scores: what clients measure. contrast: L_con, a term of `local` where its weight is above 0, over contrast_batch
    examples of each domain.
    """

    scores: DomainScores
    contrast: StructureContrast
    prototypes: Prototypes
    contrast_batch: int = 16

    needs_domains: ClassVar[bool] = True
    reveals: ClassVar[Mapping[str, str]] = {
        **Pruned.reveals,
        "signatures": "which channels each of the client's domains depends on: the structure of its domains",
        "domains": "how many examples of each domain the client holds",
    }

    def init_server(self, ctx: Context) -> Payload:
        """The model, every channel kept, and no prototypes."""
        return {**super().init_server(ctx), "prototypes": {"values": torch.zeros(ctx.num_domains, table(ctx).total)}}

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """Model, mask and the prototypes over the mask."""
        view = super().send(server, client, ctx)
        if client is None or not self.contrast.weight:
            return view
        return {**view, "prototypes": {"values": server["prototypes"]["values"][:, server["mask"]["channels"]]}}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train the own channels, score all of them, and upload what is shared."""
        mask, mine, model = self.own(down, state, ctx)

        def ref(inside: Context) -> Mapping[str, Any]:
            if not self.contrast.weight:
                return {}
            values = torch.zeros(ctx.num_domains, len(mask))
            values[:, mask] = down["prototypes"]["values"]
            probe = DomainProbe(
                inside, data, values, values.sum(1) > 0, mask, self.entry.within(mine), self.contrast_batch
            )
            return {"structure": probe}

        model, metrics = self.trained(model, mine, data, ctx, ref)
        up, state = self.sent(model, mask, mine, ctx), self.shadow(model, state)
        wanted = self.rule.keep < 1 or self.contrast.weight
        if not (wanted and len(data)) or self.rule.refresh.warm(ctx.global_round + 1):
            return Update(state, up, metrics=metrics)
        found = self.scores.measure(model, data, mine, ctx)
        if self.rule.keep < 1:
            scores = {"channels": self.scores.mixed(found, data)}
            up, state = {**up, "scores": scores}, {**state, "scores": scores}
        if self.contrast.weight:
            up |= self.prototypes.uploads(found, data, mask, ctx.num_domains)
        return Update(state, up, metrics=metrics)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """Merge model and prototypes under this round's mask, then take a new mask."""
        new = dict(super().server_update(server, replies, ctx))
        if self.contrast.weight and not self.rule.refresh.warm(ctx.global_round + 1):
            mask, values = server["mask"]["channels"], server["prototypes"]["values"]
            merged = self.prototypes.merged(replies, values, mask)
            new["prototypes"] = {"values": self.prototypes.under(merged, new["mask"]["channels"])}
        return new

    def facts(self, server: Payload, states: Mapping[ClientId, Payload], ctx: Context) -> Sequence[Table]:
        """Those of the channels, then how alike domains are, and clients and domains."""
        states = {client: {"scores": state["scores"]} for client, state in states.items() if "scores" in state}
        values, mask = server["prototypes"]["values"], server["mask"]["channels"]
        domains = (prototype_cosines(values), scores_by_domain(states, values, mask))
        return [*super().facts(server, states, ctx), *(found for found in domains if found)]


def fedfip(
    *,
    local: LocalSGD,
    keep: Annotated[float, Gt(0), Le(1)] = 0.8,
    min_keep: Annotated[float, Ge(0), Le(1)] = 0.05,
    groups: Literal["coupled", "internal", "conv_out"] = "coupled",
    importance: Literal["gate", "model_labels", "batch_grad", "weight_sum", "weight_mean"] = "gate",
    fisher_samples: Annotated[int, Ge(1)] = 512,
    client_scores: Literal["raw", "client_norm", "equal_domains"] = "raw",
    threshold: Literal["group_mean", "raw_global", "per_group", "flops_aware"] = "group_mean",
    warmup_rounds: Annotated[int, Ge(1)] = 1,
    refresh_every: Annotated[int, Ge(1)] = 1,
    freeze: Annotated[float, Ge(0), Le(1)] = 1.0,
    fisher_ema: Annotated[float, Ge(0), Le(1)] = 0.0,
    reactivation: Literal["relative", "raw", "share", "quantile"] = "relative",
    reactivation_threshold: Annotated[float, Ge(0)] = 1.0,
    react_max: Annotated[float, Ge(0), Le(1)] = 0.1,
    contrast_weight: Annotated[float, Ge(0)] = 0.01,
    contrast_mode: Literal["exact", "norm", "bn", "detach"] = "exact",
    contrast_batch: Annotated[int, Ge(1)] = 16,
    contrast_every: Annotated[int, Ge(1)] = 1,
    prototype_momentum: Annotated[float, Ge(0), Le(1)] = 0.5,
    batch_norm: Literal["mean", "pooled", "local", "recal"] = "mean",
    aggregate: Literal["shared", "owned"] = "shared",
) -> FedFIP:
    """Assemble FEDFIP.

    keep: share of the channels in the global mask; 1 prunes nothing.
    min_keep: least share of every group of channels that stays.
    groups: what a channel is: a `coupled` group over residual streams, `internal` groups of one layer alone, or each
        layer's output (`conv_out`), which can be masked but not cut out.
    importance: score of a channel: mean squared gradient of its gate per example (`gate`), the same for labels that the
        model draws (`model_labels`), of batch means (`batch_grad`), or the Fisher of its weights, summed or averaged
        (`weight_sum`, `weight_mean`).
    fisher_samples: most examples per domain that a client scores channels on.
    client_scores: a client's scores of those of its domains: weighted by examples (`raw`), that scaled to the sum 1
        (`client_norm`), or their plain mean (`equal_domains`).
    threshold: which channels stay: the best of scores over their group's mean (`group_mean`), of scores as they are
        (`raw_global`), of every group (`per_group`), or of scores per operation (`flops_aware`).
    warmup_rounds: first rounds in which every channel is trained.
    refresh_every: rounds from one mask to the next.
    freeze: share of the run's rounds after which the mask stays; 0 makes a single one.
    fisher_ema: memory of the server's scores: share of the old ones in a moving average.
    reactivation: scale of phi: `relative` to the mean of the group's kept channels, `raw` scores, the `share` of all
        scores, or a `quantile` of the pruned ones.
    reactivation_threshold: phi: scores above it make a pruned channel private to the client.
    react_max: most of a group that one client may re-open, as a share.
    contrast_weight: lam, the weight of the structure contrast; 0 leaves it and the prototypes out.
    contrast_mode: how the contrast moves weights: by second derivatives (`exact`), by the norms of weights (`norm`), by
        batch norms' weights (`bn`), or not at all, as a mere measure (`detach`).
    contrast_batch: most examples per domain that the contrast looks at in a step.
    contrast_every: steps from one evaluation of the contrast to the next.
    prototype_momentum: mu: share of the old prototype in the new one.
    batch_norm: statistics of shared channels: `mean`, `pooled` as moments, `local`, or `recal`, local and measured anew
        in the shared network at the end of a stage.
    aggregate: `shared` keeps re-opened channels private; with `owned` every entry is the mean over those that trained
        it.
    """
    contrast = StructureContrast(contrast_weight, pick("contrast_mode", contrast_mode, FORMS), contrast_every)
    terms = (CrossEntropy(), contrast) if contrast_weight else (CrossEntropy(),)
    refresh = Refresh(warmup_rounds, refresh_every, freeze)
    return FedFIP(
        replace(local, terms=terms),
        MaskRule(keep, pick("threshold", threshold, THRESHOLDS), min_keep, refresh, fisher_ema),
        ReopenRule(pick("reactivation", reactivation, REACTIVATIONS), reactivation_threshold, react_max),
        pick("groups", groups, GROUPINGS),
        ENTRIES[groups],
        pick("aggregate", aggregate, SHARINGS),
        batch_norm,
        scores=DomainScores(
            pick("importance", importance, IMPORTANCES), fisher_samples, pick("client_scores", client_scores, COMBINES)
        ),
        contrast=contrast,
        prototypes=Prototypes(prototype_momentum),
        contrast_batch=contrast_batch,
    )
