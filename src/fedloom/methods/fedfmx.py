"""FedFMX: a pool of experts, routed in training by Fisher information and Shapley values, by a gate at test time.

Source: Yuan, Lin, Chen, Xu, Liu, Ngai, "FedFMX" (ECCV 2026, arXiv 2606.28835v1). Per sample: FRES (eqs. 2-4) ->
expert game (eq. 5) -> Shapley values, exact in closed form -> active experts and weights -> loss (eqs. 8-10). FRES:
scores from Fisher information; AES: adaptive expert selection; RAR: regularisation, by which the gate learns routing.

Left open by the paper; default first. Options: `fisher_scale` (z-score across experts) and `fisher_squash`;
`empty_value` v(empty) ("chance" is -ln classes in scope); `stop` (the literal inequality with the trigger kept; a
number k is Top-k); `scores` of the game (without FRES: the loss alone) and `weights` of the active experts; `fallback`
weights where none of them has a positive value (the literal 0/0 never starts to learn; "skip" reproduces it); which
samples update the Fisher, how often ("batch" forgets within a task, "task" remembers across tasks) and where it lives;
`merge` of the experts; `label_scope`; `mixing`; `balance`.
Not of the paper, and off by default, are two parts of FedAlign-MoE (`fedalign_moe`), for which clients measure their
gates after training, an example being one token and the gate's `inference_experts` its choice: `merge: semantic`
averages an expert over the clients that use it alike, and `align` is the weight that holds gates to their consensus.
Nor are FEDFIP's masks on the backbone (`keep_channels`; `fedloom.methods.pruned_pool` says what differs there) and
Fed-Duet's stability term (`stability_weight`): KL of a batch's mean gate to the client's own running mean, of decay 0.9
per batch, as it was when the client's task before ended; it is 0 in a first task.
Fixed: plasticity gains are divided by their sum over experts (1/K for 0/0); the Fisher averages per-sample squared
gradients, not the square of the mean gradient, and merges like a weight; balance and distillation reach the backbone;
the head has a fixed width and rows of unseen classes take no part in anything; the gate is linear on the backbone's
features; the teacher is over all experts; optimiser state is fresh per round.
Symbols: rho decay of the Fisher; alpha cost against plasticity; mu threshold of the stop; beta weight of the gate's
balance; gamma of its distillation; tau_r temperature of the teacher, `temperature` of the gate.
Switches, the paper's ladder (table 3) as far as its text says what is left: no-fres (experts are valued by their loss
alone), no-aes (all are active, with equal weights), no-rar (the gate learns no routing; all are mixed), bare (none of
the three); top1 and top2 put a fixed number in the place of the adaptive stop.
Preset `tuned`: what helped against `paper` when tried (docs/findings.md): experts are heads on the shared features, all
of them learn from every sample, and old rows of the heads get no gradient. Little of the method is left in it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from fedloom.core import ConfigError
from fedloom.core.errors import pick
from fedloom.local import LocalSGD
from fedloom.local.carries.fisher import CADENCES, HOMES, SAMPLES
from fedloom.local.carries.routing import RoutingUse
from fedloom.local.carries.routing_average import RoutingAverage
from fedloom.local.parts import Carry, Term
from fedloom.local.routing_statistics import RoutingStatistics
from fedloom.local.terms.gate import BALANCES, GateBalance, GateDistillation, gate_probabilities
from fedloom.local.terms.routed import RoutedCrossEntropy
from fedloom.local.terms.routing_alignment import RoutingAlignment
from fedloom.local.terms.routing_stability import RoutingStability
from fedloom.methods.alignment import Alignment
from fedloom.methods.experts import MERGES
from fedloom.methods.fisher_pool import FisherPool
from fedloom.methods.pruned_pool import masked_pool
from fedloom.methods.routing_memory import CARRY
from fedloom.select.fisher import SCALES, SQUASHES, FisherMap
from fedloom.select.routing import FALLBACKS, MIXES, MOST_EXPERTS, WEIGHINGS, FisherShapley, empty_rule, stop_rule
from fedloom.select.utility import UTILITIES

TUNED: dict[str, Any] = {"body": "identity", "label_scope": "current", "stop": "all", "weights": "uniform"}
PRESETS: dict[str, dict[str, Any]] = {"paper": {}, "tuned": TUNED}
WITHOUT_AES: dict[str, Any] = {"stop": "all", "weights": "uniform"}
WITHOUT_RAR: dict[str, Any] = {"gamma": 0.0, "inference_experts": "all"}
ABLATIONS: dict[str, dict[str, Any]] = {
    "no-fres": {"scores": "loss"},
    "no-aes": WITHOUT_AES,
    "no-rar": WITHOUT_RAR,
    "bare": {"scores": "loss", **WITHOUT_AES, **WITHOUT_RAR},
    "top1": {"stop": 1},
    "top2": {"stop": 2},
}
Count = Annotated[int, Ge(1), Le(MOST_EXPERTS)]
Share = Annotated[float, Ge(0), Le(1)]
Weight = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]


def fedfmx(
    *,
    local: LocalSGD,
    experts: Count = 4,
    body: Literal["mlp", "identity"] | tuple[Count, ...] = "mlp",
    rho: Annotated[float, Ge(0), Lt(1)] = 0.95,
    alpha: Share = 0.6,
    mu: Share = 0.5,
    beta: Weight = 0.05,
    gamma: Weight = 0.6,
    tau_r: Positive = 1.0,
    temperature: Positive = 1.0,
    fisher_scale: Literal["experts", "per_expert", "pooled", "trace", "none"] = "experts",
    fisher_squash: Literal["sigmoid", "softplus", "relu", "identity"] = "sigmoid",
    fisher_samples: Literal["active", "all", "weighted"] = "active",
    fisher_cadence: Literal["batch", "epoch", "round", "task"] = "batch",
    fisher_home: Literal["server", "client", "reset"] = "server",
    empty_value: Literal["chance"] | float = 0.0,
    scores: Literal["fres", "loss"] = "fres",
    stop: Literal["literal", "exclude_trigger", "abs", "all"] | Count = "literal",
    weights: Literal["shapley", "uniform"] = "shapley",
    fallback: Literal["softmax", "uniform", "top1", "skip"] = "softmax",
    label_scope: Literal["seen", "current"] = "seen",
    balance: Literal["sample", "batch", "switch"] = "sample",
    mixing: Literal["logits", "probabilities"] = "logits",
    inference_experts: Literal["all"] | Count = 2,
    merge: Literal["client", "usage", "semantic"] = "client",
    align: Weight = 0.0,
    stability_weight: Weight = 0.0,
    keep_channels: Annotated[float, Gt(0), Le(1)] = 1.0,
    uniform: bool = False,
    buffers: Literal["mean", "pooled", "frozen"] = "mean",
) -> FisherPool:
    """Assemble FedFMX.

    experts: number of experts in the pool (K).
    body: what an expert has before its head: an `mlp` of two layers (7/4 and 3/4 of the features' width), nothing
        (`identity`), or layers of these widths.
    rho: decay of the running Fisher.
    alpha: weight of stability cost against plasticity gain in an expert's value.
    mu: threshold of the stop: where values are positive, a larger one lets fewer experts learn from a sample.
    beta: weight of the gate's balance.
    gamma: weight of the gate's distillation from the routing.
    tau_r: temperature of the teacher that the gate learns from.
    temperature: of the gate.
    fisher_scale: what makes Fisher entries comparable: z-scores over `experts`, within each (`per_expert`) or over all
        (`pooled`), a mean entry of 1 (`trace`), or `none`.
    fisher_squash: map of scaled entries to weights: `sigmoid`, `softplus`, `relu` of 1 + z, or `identity`.
    fisher_samples: which samples update an expert's Fisher: those it learnt from (`active`), `all`, or these by routing
        weight (`weighted`).
    fisher_cadence: how often the Fisher moves: every `batch`, `epoch`, `round` or `task`.
    fisher_home: where it lives between rounds: it travels and is averaged (`server`), stays (`client`), or starts at 0
        (`reset`).
    empty_value: value of the game without experts: a number, or `chance`, minus the log of the number of classes.
    scores: value of an expert: by Fisher information and loss (`fres`), or by its `loss` alone.
    stop: how many experts learn from a sample: by the paper's inequality (`literal`), without the expert that triggers
        it (`exclude_trigger`), by one that a larger mu tightens for any sign (`abs`), a number, or `all`.
    weights: of the active experts: their positive Shapley values (`shapley`), or equal ones (`uniform`).
    fallback: weights where no active expert has a positive value: `softmax` of the values, `uniform`, all on the best
        (`top1`), or none (`skip`).
    balance: form of the gate's balance: entropy per `sample`, of the `batch` mean, or that of `switch` Transformers.
    mixing: what is mixed at test time: `logits` or `probabilities`.
    inference_experts: experts of the gate that are mixed at test time: a number, or `all`.
    merge: of experts: over clients (`client`), by how many samples each taught them (`usage`), or over the clients that
        use them alike (`semantic`).
    align: weight of the pull of gates to the clients' consensus; 0 for none.
    stability_weight: weight of the pull of a client's mean gate to what it was in the task before; 0 for none.
    keep_channels: share of the backbone's channels that the mask keeps, for training, messages and prediction; 1 for
        all, without a mask. Below 1 the backbone must have channels that can be pruned, as those of `fedfip`.
    """
    if fisher_home == "reset" and fisher_cadence in ("round", "task"):
        raise ConfigError(f"fisher_cadence '{fisher_cadence}' needs fisher_home server or client, got 'reset'")
    scale, squash = pick("fisher_scale", fisher_scale, SCALES), pick("fisher_squash", fisher_squash, SQUASHES)
    weigh = pick("weights", weights, WEIGHINGS)
    routing = FisherShapley(
        utility=pick("scores", scores, UTILITIES)(alpha, FisherMap(scale, squash)),
        stop=stop_rule(stop, mu),
        weigh=weigh(pick("fallback", fallback, FALLBACKS)(tau_r)),
        empty_value=empty_rule(empty_value),
        tau=tau_r,
        scope=label_scope,
    )
    fisher = pick("fisher_cadence", fisher_cadence, CADENCES)(rho, pick("fisher_samples", fisher_samples, SAMPLES))
    gate = (GateBalance(beta, pick("balance", balance, BALANCES)), GateDistillation(gamma))
    terms: tuple[Term, ...] = (RoutedCrossEntropy(label_scope), *(term for term in gate if term.weight))
    carries: dict[str, Carry] = {"fisher": fisher, "routing": RoutingUse(experts)}
    if stability_weight:
        terms = (*terms, RoutingStability("kl", stability_weight, gate_probabilities))
        carries[CARRY] = RoutingAverage(routing=gate_probabilities)
    local = replace(local, terms=terms, decisions=(routing,), carries=carries)
    top = MOST_EXPERTS if inference_experts == "all" else inference_experts
    mix, home = pick("mixing", mixing, MIXES)(top), pick("fisher_home", fisher_home, HOMES)()
    merging = pick("merge", merge, MERGES)
    pool: dict[str, Any] = {"experts": experts, "body": body, "temperature": temperature, "mix": mix, "merge": merging}
    if merge == "semantic" or align:
        statistics = RoutingStatistics(centroids=merge == "semantic")
        pool |= {"alignment": Alignment(statistics, term=RoutingAlignment(align) if align else None), "chosen": top}
    build = FisherPool if keep_channels == 1 else masked_pool(keep_channels, body, fisher_home)
    return build(local, uniform=uniform, buffers=buffers, home=home, **pool)
