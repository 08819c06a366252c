"""FedAlign-MoE: routing is aligned as distributions, and an expert is averaged over the clients that use it alike.

Source: Z. Fang, Q. Wang, H. An, Z. Lin, Y. Deng, X. Chen, Y. Fang, "Aggregation Alignment for Federated Learning with
Mixture-of-Experts under Data Heterogeneity" (arXiv 2603.21276). No code is public and the method's own equations could
not be reached: what follows is our reading. Per layer, expert e and client i, with pbar_i the mean routing
distribution, m_i the margin, n_i(e) the tokens, mu_i the mean input of the expert, and Delta_i its update:

    client   loss + lambda_reg * mean_l mean_t sum_e alpha_i(e) D(p_i(e|t), p_g(e)) [e in top-k of p_i(.|t)],
             D(a, b) = a ln(a/b) - a + b;   then a pass in evaluation mode for pbar_i, m_i, n_i(e), mu_i
    server   o_i(e) = 2 pbar_i q / (pbar_i^2 + q^2), q = sum_i n_i pbar_i / N;   omega_i(e) = o_i m_i / sum_j o_j m_j
             p_g(e) = sum_i omega_i(e) pbar_i(e) / sum_e ...;   alpha_i(e) = overlap of pbar_i and p_g, in [0.05, 1]
             gate: sum_i omegabar_i W_i, omegabar_i = sum_e p_g(e) omega_i(e)
             expert e: see `fedloom.merge.semantic`;   all else, shared experts too: FedAvg

Decisions, the default first; options are in code, and A-numbers are those of our specification:

- A1 `pbar`, A6 `margin`: see `fedloom.local.routing_statistics`. A2 `stats_source`: a pass after training on at most
  `stats_max_batches` batches and `stats_share` of an epoch's (one batch at least), which keeps it below 15 % of the
  time of an epoch of three batches or more; "train_pass" records the last epoch and costs no pass. Tokens that are
  padding never count, and an expert is used by a client if a token of these reached it.
- A3 p_g has a floor of 1e-6; `pg_renorm`, `pg_ema`. A4 `overlap_ref`. A5 `overlap`; "token_product" is the mean over
  tokens of p_i(e|t) times the probability that the received model's gate gives the same token, each with its own hidden
  states; it costs a second forward pass, and alpha then takes the normalised product, since it needs an overlap with
  p_g. A7 `combine`, `size_power`, `omega_norm`: weights are normalised over clients; "softmax" first makes the scores a
  softmax over each client's experts. Where nobody has a score, omega_i(e) = n_i / N.
- A8 `kl_direction`, A9 `kl_form` ("renorm_topk" is 0 where one expert is masked), A10 `reg_level`, A11 `mask` and
  `mask_k`.
- A12 `alpha`, `alpha_min`: of the last upload of a client against the newest p_g, by the server (A13); 1 for a client
  without upload. A14 `reg_start_round`: the first round has no p_g; with 1 it is held to the uniform one. A15
  `reg_layers`. A22: layers never mix.
- Gates, `gate_mode`: "pooled"; "row_weighted" (row e by omega_i(e), rows centred first); "fedavg"; "frozen" (never
  trained); "local": they stay with the clients, and the global view, for evaluation and whoever is no client, has the
  initial gate, as no other has reached the server; "distill": a linear gate fitted to sum_i omega_i(e) p_i(e|h) on the
  hidden states that the server has, the clients' centroids, weighted by tokens, from the pooled gate on.
- Experts, `expert_mode` (A19), `semantic_sim` (A16), `update_direction` (A17), `region_gate` (A18), `threshold` with
  `beta`, `quantile`, `threshold_decay`, `tau_s`, `tau_d` (A20), `expert_prior`, `n_min`: see `fedloom.merge.semantic`.
  "personalized": the server keeps for every client experts of its own, of its last round, beside the common ones, from
  which all updates count. An expert that nobody used keeps the server's values (A23). `expert_matching` (A21):
  "hungarian" puts each client's experts in the order of the centroids that the server knows, "hungarian_parameters" by
  parameters; both are refused where experts are frozen or have adapters.
- A24: mu_i tells most about a client's texts. `mu_min_count` withholds those of few tokens; `mu_clip`, `mu_noise`:
  noise of standard deviation mu_noise * 2 mu_clip / n_i(e) on hidden states of norm at most mu_clip, drawn from the
  run's seed (who knows it can take the noise off); `mu_dims`: a random projection. Where nothing reads mu
  (`semantic_sim: none`, `expert_mode: fedavg`), it is not uploaded.
- A client whose pass saw no token has no part in routing, gates and experts. Clients are sent p_g and their own alpha.
- A26: the global view is evaluated, and clients' own views where gates are local or experts personalized.

Switches, the paper's ladder: l0-direct is FedAvg, l1-distribution adds alignment with equal weights, l2-consistency the
weights, l3-adaptive alpha; all of them average experts. overlap-only and margin-only halve the weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from fedloom.core import ConfigError
from fedloom.core.errors import pick
from fedloom.local import LocalSGD
from fedloom.local.routing_statistics import MARGINS, SHARES, RoutingStatistics
from fedloom.local.terms import CrossEntropy
from fedloom.local.terms.routing_alignment import DIRECTIONS, FORMS, LEVELS, RoutingAlignment
from fedloom.merge import semantic_parts as parts
from fedloom.merge.matching import COSTS, Cost
from fedloom.merge.routing import COMBINES, OVERLAPS, REFERENCES, STRENGTHS, RoutingConsensus
from fedloom.merge.semantic import SemanticMerge
from fedloom.methods.aligned import AlignedFedAvg
from fedloom.methods.alignment import Alignment
from fedloom.methods.gate_modes import GATE_MODES

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}
RUNGS: dict[str, Any] = {"alpha": "const", "expert_mode": "fedavg"}
ABLATIONS: dict[str, dict[str, Any]] = {
    "l0-direct": {**RUNGS, "gate_mode": "fedavg", "lambda_reg": 0.0},
    "l1-distribution": {**RUNGS, "combine": "uniform"},
    "l2-consistency": RUNGS,
    "l3-adaptive": {"expert_mode": "fedavg"},
    "overlap-only": {"combine": "o_only"},
    "margin-only": {"combine": "m_only"},
}
MATCHINGS: dict[str, Cost | None] = {
    "index": None,
    "hungarian": COSTS["centroid"],
    "hungarian_parameters": COSTS["parameters"],
}
Share = Annotated[float, Ge(0), Le(1)]
Decay = Annotated[float, Ge(0), Lt(1)]
Weight = Annotated[float, Ge(0)]
Natural = Annotated[int, Ge(0)]
Count = Annotated[int, Ge(1)]


def fedalign_moe(
    *,
    local: LocalSGD,
    lambda_reg: Weight = 0.1,
    kl_form: Literal["generalized", "pointwise", "bernoulli", "renorm_topk"] = "generalized",
    kl_direction: Literal["forward", "reverse", "js"] = "forward",
    reg_level: Literal["token", "batch"] = "token",
    reg_layers: Literal["mean", "sum"] = "mean",
    reg_start_round: Count = 2,
    mask: Literal["local", "global", "union"] = "local",
    mask_k: Literal["model", "all"] | Count = "model",
    alpha: Literal["overlap", "const", "omega", "consistency"] = "overlap",
    alpha_min: Share = 0.05,
    pbar: Literal["soft", "hard", "topk_renorm", "per_sample_mean"] = "soft",
    margin: Literal["boundary", "top1_top2", "entropy", "logit_margin"] = "boundary",
    stats_source: Literal["post_pass", "train_pass"] = "post_pass",
    stats_max_batches: Count = 16,
    stats_share: Annotated[float, Gt(0), Le(1)] = 0.35,
    overlap: Literal["normalized_product", "product", "min", "token_product"] = "normalized_product",
    overlap_ref: Literal["current_mean", "prev_global", "leave_one_out", "fixed_point"] = "current_mean",
    combine: Literal["product", "o_only", "m_only", "uniform"] = "product",
    size_power: Weight = 0.0,
    omega_norm: Literal["clients", "softmax"] = "clients",
    pg_renorm: bool = True,
    pg_ema: Decay = 0.0,
    gate_mode: Literal["pooled", "row_weighted", "local", "fedavg", "frozen", "distill"] = "pooled",
    expert_mode: Literal["consensus", "component", "personalized", "fedavg"] = "consensus",
    expert_matching: Literal["index", "hungarian", "hungarian_parameters"] = "index",
    expert_prior: Literal["samples", "tokens"] = "samples",
    semantic_sim: Literal["rbf", "cosine_centered", "cosine_raw", "none"] = "rbf",
    update_direction: Literal["whole", "last_tensor", "sign"] = "whole",
    update_sketch_dim: Natural = 0,
    region_gate: Literal["gated", "mean", "hard_only", "soft_only"] = "gated",
    threshold: Literal["mean_std", "quantile", "ema", "const"] = "mean_std",
    beta: Weight = 1.0,
    quantile: Share = 0.25,
    threshold_decay: Decay = 0.9,
    tau_s: Share = 0.5,
    tau_d: Share = 0.0,
    n_min: Count = 1,
    mu_min_count: Count = 1,
    mu_clip: Weight = 0.0,
    mu_noise: Weight = 0.0,
    mu_dims: Natural = 0,
    label_scope: Literal["seen", "current"] = "seen",
    uniform: bool = False,
    buffers: Literal["mean", "pooled", "frozen"] = "mean",
) -> AlignedFedAvg:
    """Assemble FedAlign-MoE; the options that are not named here are FedAvg's.

    lambda_reg: weight of the alignment of gates with the consensus; 0 for none.
    kl_form: divergence per expert: `generalized` KL, the bare summand (`pointwise`), of a choice by itself
        (`bernoulli`), or of distributions cut to the mask (`renorm_topk`).
    kl_direction: from the client's gate (`forward`), from the consensus (`reverse`), or from their mean (`js`).
    reg_level: what is compared: every `token`, or the mean of a `batch`.
    reg_layers: layers count by their `mean` or `sum`.
    reg_start_round: first round with alignment, from 1.
    mask: experts that count: the largest of the client's gate (`local`), of the consensus (`global`), or either
        `union`.
    mask_k: how many of them: as many as the `model` chooses, a number, or `all`.
    alpha: weight of a client and expert in the alignment: `overlap` with the consensus, 1 (`const`), its share
        (`omega`), or its `consistency`.
    alpha_min: least of these.
    pbar: what is averaged over tokens: probabilities (`soft`), choices (`hard`), probabilities of the chosen
        (`topk_renorm`), or probabilities with every example alike (`per_sample_mean`).
    margin: how sure a gate is: probability over the first expert left out (`boundary`), first over second
        (`top1_top2`), low `entropy`, or in logits (`logit_margin`).
    stats_source: when routing is measured: in a pass after training (`post_pass`), or in its last epoch (`train_pass`).
    stats_max_batches: most batches of the pass.
    stats_share: most of an epoch that the pass sees.
    overlap: of a client's routing q and the reference p: 2pq / (p^2 + q^2) (`normalized_product`), pq (`product`),
        `min`, or token by token (`token_product`).
    overlap_ref: reference: `current_mean`, the last consensus (`prev_global`), the others' mean (`leave_one_out`), or
        the consensus itself (`fixed_point`).
    combine: score of a client: overlap times margin (`product`), one of them (`o_only`, `m_only`), or 1 (`uniform`).
    size_power: power of the number of examples in it.
    omega_norm: scores are normalised over `clients`, or first made a `softmax` over each client's experts.
    pg_renorm: divide the consensus by its sum.
    pg_ema: share of the last consensus in the new one.
    gate_mode: merge of gates: `pooled` by consistency, expert by expert (`row_weighted`), kept `local`, as in `fedavg`,
        `frozen`, or fitted to the clients' (`distill`).
    expert_mode: merge of experts: all that agree count (`consensus`), the largest group that does (`component`), such a
        merge per client (`personalized`), or as in `fedavg`.
    expert_matching: order of the clients' experts: by `index`, or matched by centroids (`hungarian`) or parameters
        (`hungarian_parameters`).
    expert_prior: weight of a client before that: its `samples`, or its `tokens` at the expert.
    semantic_sim: likeness of experts' inputs: `rbf` or cosine of centroids (`cosine_centered`, `cosine_raw`), or
        `none`.
    update_direction: what of updates is compared: the `whole`, the `last_tensor`, or the `sign` of entries.
    update_sketch_dim: width of a random projection of updates before they are compared; 0 for none.
    region_gate: weight of a pair: product of both likenesses above their thresholds (`gated`), their `mean` there, 1
        there (`hard_only`), or the product everywhere (`soft_only`).
    threshold: of pairs: mean minus beta deviations (`mean_std`), a `quantile`, a moving `ema`, or fixed (`const`).
    beta: deviations below the mean, of `mean_std` and `ema`.
    quantile: of `threshold: quantile`.
    threshold_decay: memory of `ema`.
    tau_s: fixed threshold of inputs' likeness, of `const`.
    tau_d: fixed threshold of updates' cosine, of `const`.
    n_min: fewest tokens with which a client takes part in an expert.
    mu_min_count: fewest tokens of which a centroid is sent.
    mu_clip: largest norm of a hidden state in it; 0 for no bound.
    mu_noise: deviation of noise on centroids, in units of their sensitivity, 2 mu_clip / tokens.
    mu_dims: width of a random projection of centroids; 0 sends them whole.
    """
    _check(gate_mode, expert_matching, overlap, stats_source, mu_dims)
    read = (expert_mode != "fedavg" and semantic_sim != "none") or gate_mode == "distill"
    form, direction = pick("kl_form", kl_form, FORMS), pick("kl_direction", kl_direction, DIRECTIONS)
    top = {"model": None, "all": 0}[mask_k] if isinstance(mask_k, str) else mask_k
    term = RoutingAlignment(lambda_reg, form, direction, pick("reg_level", reg_level, LEVELS), mask, top, reg_layers)
    alignment = Alignment(
        statistics=RoutingStatistics(
            pick("pbar", pbar, SHARES),
            pick("margin", margin, MARGINS),
            read or expert_matching == "hungarian",
            *(mu_min_count, mu_clip, mu_noise, mu_dims),
        ),
        train_pass=stats_source == "train_pass",
        max_batches=stats_max_batches,
        share=stats_share,
        compare=overlap == "token_product",
        term=term if lambda_reg else None,
        start=reg_start_round,
        consensus=RoutingConsensus(
            pick("overlap", "normalized_product" if overlap == "token_product" else overlap, OVERLAPS),
            pick("overlap_ref", overlap_ref, REFERENCES),
            pick("combine", combine, COMBINES),
            *(size_power, omega_norm == "softmax", pg_renorm, pg_ema),
        ),
        strength=pick("alpha", alpha, STRENGTHS),
        least=alpha_min,
    )
    given = {"mean_std": (beta,), "quantile": (quantile,), "ema": (beta, threshold_decay), "const": (tau_s, tau_d)}
    experts = _semantic(
        expert_mode,
        (semantic_sim, update_direction, region_gate, expert_prior),
        pick("threshold", threshold, parts.THRESHOLDS)(*given[threshold]),
        n_min,
        update_sketch_dim,
    )
    matching = pick("expert_matching", expert_matching, MATCHINGS)
    local = replace(local, terms=(CrossEntropy(label_scope),))
    return AlignedFedAvg(
        local, uniform, buffers, alignment, GATE_MODES[gate_mode], experts, expert_mode == "personalized", matching
    )


def _semantic(
    mode: str, chosen: tuple[str, str, str, str], threshold: parts.Threshold, n_min: int, sketch: int
) -> SemanticMerge | None:
    if mode == "fedavg":
        return None
    similarity, direction, region, prior = chosen
    return SemanticMerge(
        similarity=pick("semantic_sim", similarity, parts.SIMILARITIES),
        direction=pick("update_direction", direction, parts.DIRECTIONS),
        threshold=threshold,
        region=pick("region_gate", region, parts.REGIONS),
        rule=pick("expert_mode", mode, parts.RULES),
        prior=pick("expert_prior", prior, parts.PRIORS),
        n_min=n_min,
        sketch=sketch,
    )


def _check(gate_mode: str, matching: str, overlap: str, source: str, dims: int) -> None:
    """Raises `ConfigError` for options that cannot go together."""
    if not pick("gate_mode", gate_mode, GATE_MODES).travels and matching != "index":
        raise ConfigError(
            f"expert_matching '{matching}' reorders gate rows with the experts, and with gate_mode '{gate_mode}' no "
            "gate travels; set expert_matching to index"
        )
    if overlap == "token_product" and (matching != "index" or source != "post_pass"):
        raise ConfigError(
            "overlap 'token_product' compares the received gate in the pass after training, expert by index; set "
            f"stats_source to post_pass and expert_matching to index (now '{source}' and '{matching}')"
        )
    if gate_mode == "distill" and dims:
        raise ConfigError(f"gate_mode 'distill' needs the clients' centroids whole, and mu_dims is {dims}; set it to 0")
