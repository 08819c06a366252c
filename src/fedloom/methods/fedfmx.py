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
from fedloom.local.terms.gate import BALANCES, GateBalance, GateDistillation
from fedloom.local.terms.routed import RoutedCrossEntropy
from fedloom.methods.experts import MERGES
from fedloom.methods.fisher_pool import FisherPool
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
    merge: Literal["client", "usage"] = "client",
    uniform: bool = False,
    buffers: Literal["mean", "pooled", "frozen"] = "mean",
) -> FisherPool:
    """Assemble FedFMX. Symbols are the paper's; temperature is the gate's T; the rest is in the module docstring."""
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
    terms = (RoutedCrossEntropy(label_scope), *(term for term in gate if term.weight))
    carries = {"fisher": fisher, "routing": RoutingUse(experts)}
    local = replace(local, terms=terms, decisions=(routing,), carries=carries)
    top = MOST_EXPERTS if inference_experts == "all" else inference_experts
    mix, home = pick("mixing", mixing, MIXES)(top), pick("fisher_home", fisher_home, HOMES)()
    merging = pick("merge", merge, MERGES)
    pool = {"experts": experts, "body": body, "temperature": temperature, "mix": mix, "merge": merging}
    return FisherPool(local, uniform=uniform, buffers=buffers, home=home, **pool)
