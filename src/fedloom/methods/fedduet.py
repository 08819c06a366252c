"""Fed-Duet: prompt experts and adapter experts around a frozen CLIP, orchestrated by the server.

Source: Guo, Chen, Cui, "Fed-Duet: Dual Expert-Orchestrated Framework for Continual Federated Vision-Language Learning"
(ICLR 2026). In a round r of R of a task, client c

    receives   the shared adapters and routers, and n of the K prompts of the server's pool, chosen by the gate g;
    trains     local and shared adapters with their routers while r < floor(R / 2), then its prompt and the fusion, on
               L = CE(logits) + alpha L_moe + eta L_crossmodal + gamma L_stability;
    sends      what of this is shared, n_c, its feature summary f_c (mean feature of a batch) and the mean of L.

The server averages by n_c; in a task's last round also what is local, which starts the next task. The gate takes one
Adam step per round on mean_c w_c BCE(g(f_c), dispatched to c), w_c = 1 / (loss_c + 1e-6) over its mean. The network and
its fusion of both kinds of prompts are in `fedloom.models.clip.duet`, the losses in `fedloom.local.terms`, the
server's side in `fedloom.methods.orchestrator`, the client's in `fedloom.methods.duet`.

Decisions beyond the options:

- The pool is frozen (no update towards the clients' prompts). The local prompt starts from the same words as the
  pool's, "a photo of a", or from N(0, 0.02^2) with `layout` copies.
- A client's own adapters, prompt, fusion and last received prompts are its state and are restored in every round; the
  first round of a task starts from the server's averages. A client that was away then starts from them whenever it
  comes. Its own view is what it has after its last round; the global view has the averages of the last task's end and
  the n prompts that the gate scores highest on average.
- Shared prompts are encoded once at the start of a client's round, in evaluation mode, and anew for evaluation.
- Frozen adapters work as in evaluation: no dropout, no noise of the router.
- Routing is per sample, A12; unselected experts do not move. The last small batch of an epoch is trained on.
- Text tokens behind the EOT are cut, which changes nothing. A prompt never leaves the classes of its task in training;
  every class that has arrived is scored in evaluation.
- `vocabulary` classes names the classes of all tasks from the first round on. `shared_width` null is bottleneck times
  experts. What is frozen in a round is sent to clients all the same.
- The presets `code_*` do not bring back the gate's dropout when it dispatches, crops in evaluation, dropped last
  batches, nor, of 2025, the stability target from one batch of one client. The code's warm-up of 30 steps and cosine
  is the section `training` (schedule cosine per step, warmup 30; warm-up is a factor on the cosine here).
- All three losses on routing are skipped while the routers are frozen, stability also in the first task, crossmodal
  with adapters in one tower alone.

Switches, the paper's ladder: no-adapters (prompts alone), no-prompts (adapters alone) and base (both), all three
without the losses on two towers and on stability; base-crossmodal and base-stability add one of these, full has both.
Beside it random-dispatch, mean-fusion and no-balance take away one part each.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from fedloom.core.errors import ConfigError, pick
from fedloom.local import LocalSGD
from fedloom.local.carries.attention_mass import AttentionMass
from fedloom.local.carries.routing_average import RoutingAverage
from fedloom.local.terms import CrossEntropy
from fedloom.local.terms.expert_balance import ExpertBalance
from fedloom.local.terms.routing_consistency import RoutingConsistency
from fedloom.local.terms.routing_stability import RoutingStability
from fedloom.methods import duet_stages as stages
from fedloom.methods.clip_based import LabelScope
from fedloom.methods.duet import FedDuet, Summary
from fedloom.methods.orchestrator import Orchestrator, Pool
from fedloom.methods.routing_memory import CARRY
from fedloom.models.clip.adapters import Adapters
from fedloom.models.clip.duet import DuetParts
from fedloom.select.dispatch import DISPATCHES, check_dispatch

CODE: dict[str, Any] = {
    "layout": "copies",
    "anchors": "noise",
    "router_std": 0.0,
    "token": "sot",
    "local_weight": "constant",
    "served": "local",
    "kept": "released",
    "across_tasks": "reset",
    "explore": 0.0,
    "alpha": 0.0,
}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "code_2025": {
        **CODE,
        "eta": 10.0,
        "consistency": "cosine_of_means",
        "gamma": 0.1,
        "stability": "weighted_l2",
        "routing_decay": 0.0,
    },
    "code_2026": {**CODE, "eta": 0.0, "gamma": 0.0},
}
PLAIN: dict[str, Any] = {"eta": 0.0, "gamma": 0.0}
ABLATIONS: dict[str, dict[str, Any]] = {
    "no-adapters": {**PLAIN, "adapters": False},
    "no-prompts": {**PLAIN, "prompts": False},
    "base": PLAIN,
    "base-crossmodal": {"gamma": 0.0},
    "base-stability": {"eta": 0.0},
    "random-dispatch": {"dispatch_by": "random"},
    "mean-fusion": {"fusion": "mean"},
    "no-balance": {"alpha": 0.0},
}
Weight = Annotated[float, Ge(0)]
Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]


def fedduet(
    *,
    local: LocalSGD,
    adapters: bool = True,
    experts: Count = 8,
    top_k: Count = 2,
    bottleneck: Count = 64,
    shared_width: Count | None = None,
    adapter_scale: Annotated[float, Gt(0)] = 0.3,
    adapter_dropout: Annotated[float, Ge(0), Lt(1)] = 0.4,
    adapted: Literal["both", "vision", "text"] = "both",
    last_blocks: Natural = 0,
    router_std: Weight = 0.02,
    gate_norm: Literal["selected", "masked"] = "selected",
    token: Literal["eot", "sot", "mean"] = "eot",
    prompts: bool = True,
    layout: Literal["template", "copies"] = "template",
    fusion: Literal["attention", "mean"] = "attention",
    pooled: Count = 128,
    heads: Count = 8,
    attention_scale: Literal["ten", "sqrt"] = "ten",
    pooling: Literal["slice", "none", "learned"] = "slice",
    residual: bool = False,
    local_weight: Literal["entropy", "constant", "mlp", "sum"] = "entropy",
    served: Literal["fused", "local", "shared"] = "fused",
    alpha: Weight = 0.01,
    balance: Literal["switch", "cv", "entropy"] = "switch",
    eta: Weight = 1.0,
    consistency: Literal["contrastive", "batch", "dot", "cosine_of_means", "js"] = "contrastive",
    tau: Annotated[float, Gt(0)] = 0.1,
    gamma: Weight = 0.1,
    stability: Literal["kl", "reverse_kl", "js", "weighted_l2"] = "kl",
    routing_decay: Annotated[float, Ge(0), Lt(1)] = 0.9,
    stability_target: Literal["own", "common"] = "own",
    pool_size: Count = 64,
    dispatch: Count = 8,
    dispatch_by: Literal["gate", "random", "fixed"] = "gate",
    explore: Share = 0.1,
    vocabulary: str = "imagenet",
    word_vectors: Literal["content", "padded", "single", "unit"] = "content",
    anchors: Literal["rescaled", "raw", "spherical", "random", "noise"] = "rescaled",
    gate_target: Literal["dispatched", "attention", "better"] = "dispatched",
    gate_over: Literal["all", "dispatched"] = "all",
    gate_hidden: Count = 512,
    gate_lr: Annotated[float, Gt(0)] = 1e-3,
    across_tasks: Literal["persist", "reset"] = "persist",
    summary_batches: Count = 1,
    summary_clip: Annotated[float, Gt(0)] = 1.0,
    noise_sigma: Weight = 0.0,
    noise: Literal["gaussian", "laplace"] = "gaussian",
    train: Literal["halves", "alternate", "inside", "together"] = "halves",
    first_share: Share = 0.5,
    kept: Literal["own", "released", "routers_too", "nothing"] = "own",
    label_scope: LabelScope = "current",
    uniform: bool = False,
) -> FedDuet:
    """Assemble Fed-Duet; the options that are not named here are FedAvg's.

    adapters: put adapters into the towers.
    experts: local adapters per block.
    top_k: adapters that a sample passes.
    bottleneck: hidden units of an adapter.
    shared_width: hidden units of the shared adapter; null: bottleneck times experts.
    adapter_scale: factor of an adapter's output.
    adapter_dropout: of hidden units in training.
    adapted: towers with adapters: `both`, `vision` or `text`.
    last_blocks: only so many last blocks get adapters; 0: all.
    router_std: deviation of the routers' weights at the start; 0 starts in a tie.
    gate_norm: softmax of the router: over the chosen adapters (`selected`), or over all, cut to these (`masked`).
    token: what the router of a text reads: the end token (`eot`), the start (`sot`) or the `mean`.
    prompts: train a local prompt and fuse it with shared ones.
    layout: of the local prompt: the words "a photo of a" (`template`), or 16 random vectors (`copies`).
    fusion: of the prompts' texts: by a learned `attention`, or their `mean`.
    pooled: entries to which features are pooled before the fusion; it divides the joint width.
    heads: of the attention.
    attention_scale: factor of its scores: 10 (`ten`), or one over the root of a head's width (`sqrt`).
    pooling: every n-th entry (`slice`), a `learned` map that starts so, or `none`.
    residual: add what the attention reads to what it gives.
    local_weight: of local against shared logits: by their entropies (`entropy`), one number (`constant`), by features
        (`mlp`), or local ones on top of shared ones (`sum`).
    served: logits that count in evaluation: `fused`, `local` or `shared`.
    alpha: weight of the load balance of adapters.
    balance: its form: that of `switch` Transformers, variation of importance and load (`cv`), or `entropy`.
    eta: weight of the consistency of routing between pictures and texts.
    consistency: its form: `contrastive` over the classes of a batch, over its pictures (`batch`), with scalar products
        (`dot`), the cosine of mean routings (`cosine_of_means`), or their divergence (`js`).
    tau: temperature of the consistency.
    gamma: weight of the stability of routing.
    stability: divergence from the target: `kl`, `reverse_kl`, `js` or `weighted_l2`.
    routing_decay: memory of the running routing that is the next target.
    stability_target: what routing is held to: the client's `own` past one, or all clients' (`common`).
    pool_size: prompts in the server's pool (K).
    dispatch: prompts that a client is sent (n).
    dispatch_by: who chooses them: the server's `gate`, `random`, or the first of the pool (`fixed`).
    explore: probability with which the gate's choice is drawn at random instead.
    vocabulary: words that the pool is made of: `imagenet`, `torchvision`, `vocabulary`, `classes` or `file:PATH`.
    word_vectors: vector of a word: mean over its own tokens (`content`), over 16 positions (`padded`), words of one
        token alone (`single`), or at length 1 (`unit`).
    anchors: prompts of the pool: centroids of words at their members' length (`rescaled`) or as they are (`raw`), of
        directions (`spherical`), `random` words, or one prompt and `noise`.
    gate_target: what the gate learns: what was `dispatched`, the `attention` it got, or which did `better` than before.
    gate_over: prompts that its loss counts: `all`, or those `dispatched`.
    gate_hidden: its hidden units.
    gate_lr: its rate.
    across_tasks: pool and gate `persist`, or `reset` with every task.
    summary_batches: batches whose mean feature a client sends.
    summary_clip: largest norm of that feature.
    noise_sigma: deviation of noise on it, in units of summary_clip; 0 for none.
    noise: its kind: `gaussian` or `laplace`.
    train: when: adapters in the first rounds of a task (`halves`), in every other one (`alternate`), in the first
        epochs of each (`inside`), or `together` with prompts.
    first_share: share of a task's rounds in which adapters train, of `halves`.
    kept: what stays with a client: its `own` adapters, prompt and fusion, the same lost in every round (`released`),
        `routers_too`, or `nothing`.
    label_scope: classes that a client scores in training: those of its task (`current`) or all so far (`seen`).
    """
    check_dispatch(dispatch, pool_size)
    _check(adapters, prompts, fusion, gate_target)
    if adapters and prompts and train == "inside":
        stages.check_epochs(local.epochs)
    _warn(kept, served, token, router_std, anchors, across_tasks)
    routed = Adapters(
        experts=experts, top_k=top_k, bottleneck=bottleneck, scale=adapter_scale, dropout=adapter_dropout,
        shared_width=shared_width, router_std=router_std, gate_norm=gate_norm,
    )  # fmt: skip
    parts = DuetParts(
        routed if adapters else None, adapted, last_blocks, token, prompts, layout, fusion == "attention",
        pooled, heads, attention_scale, pooling, residual, local_weight, served,
    )  # fmt: skip
    terms = [
        CrossEntropy(label_scope),
        *([ExpertBalance(balance, alpha)] if alpha else []),
        *([RoutingConsistency(consistency, eta, tau)] if eta else []),
        *([RoutingStability(stability, gamma)] if gamma else []),
    ]
    carries: dict[str, Any] = {CARRY: RoutingAverage(routing_decay)}
    if prompts and gate_target == "attention":
        carries["attention"] = AttentionMass()
    pool = Pool(vocabulary, word_vectors, anchors, layout)
    orchestrator = Orchestrator(
        pool, pool_size if prompts else 0, dispatch, pick("dispatch_by", dispatch_by, DISPATCHES)(explore),
        gate_target, gate_over, gate_hidden, gate_lr, across_tasks == "persist",
    )  # fmt: skip
    return FedDuet(
        replace(local, terms=tuple(terms), carries=carries), uniform, build=parts, label_scope=label_scope,
        rounds=pick("train", train, stages.STAGES), share=first_share,
        kept=tuple(stages.COMPONENTS[name] for name in pick("kept", kept, stages.KEPT)), restores=kept != "released",
        common_target=stability_target == "common",
        summary=Summary(summary_batches, summary_clip, noise_sigma, noise), orchestrator=orchestrator,
    )  # fmt: skip


def _check(adapters: bool, prompts: bool, fusion: str, target: str) -> None:
    """Raises `ConfigError` for options that leave nothing to train or nothing to learn from."""
    if not adapters and not prompts:
        raise ConfigError("fedduet without adapters and without prompts trains nothing; set one of them to true")
    if target == "attention" and (not prompts or fusion == "mean"):
        raise ConfigError(
            "gate_target 'attention' needs the attention of the fusion; set prompts to true and fusion to attention, "
            "or gate_target to dispatched"
        )


def _warn(kept: str, served: str, token: str, router_std: float, anchors: str, across: str) -> None:
    """One sentence per defect of the public code that the options reproduce."""
    found = {
        "kept 'released' resets every client's own adapters and prompt in each round, so local adapters never learn": (
            kept == "released"
        ),
        "served 'local' leaves shared prompts and fusion out of every prediction": served == "local",
        "token 'sot' routes all classes alike, since the first position of a causal text sees only itself": (
            token == "sot"
        ),
        "router_std 0 starts every router in a tie, where the crossmodal loss has no gradient": router_std == 0,
        "anchors 'noise' fills the pool with one prompt plus noise, which knows no concepts": anchors == "noise",
        "across_tasks 'reset' forgets pool and gate with every task, so the gate sees one task's rounds": across
        == "reset",
    }
    for sentence in (text for text, holds in found.items() if holds):
        warnings.warn(f"fedduet follows the public code: {sentence}", stacklevel=3)
