"""What routing costs: a training step of FedFMX over the same step with all experts trained equally.

Both train the same expert pool on the same batches through the same loop; the reference has no Fisher, no Shapley
values, no gate terms, and weighs every expert 1/K. Sizes are those of CIFAR-100 with a small residual network.

    python benchmarks/routing.py [--json]

Prints CPU milliseconds per step on one thread, and the median over interleaved pairs of their ratio; the pair's
order alternates. Target: at most 1.10 at K = 4.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from measure import median, show

from fedloom.core import Batch, Batches, Context, Net, Stage
from fedloom.local import SGD, LocalSGD
from fedloom.local.terms.routed import RoutedCrossEntropy
from fedloom.methods.fedfmx import fedfmx
from fedloom.models.spec import NetworkSpec

CLASSES, SHAPE = 100, (3, 32, 32)


@dataclass(frozen=True)
class EqualWeights:
    """Decision of the reference: every expert counts 1/K for every sample."""

    experts: int

    def __call__(self, out: object, batch: Batch, ref: object, carry: object) -> dict[str, torch.Tensor]:
        """Return the weights [batch, experts]."""
        return {"weights": torch.full((len(batch.y), self.experts), 1 / self.experts)}


def examples(count: int) -> Batches:
    """Random images and labels with the sizes of CIFAR-100."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(count, *SHAPE, generator=rng), torch.randint(0, CLASSES, (count,), generator=rng)
    return Batches(x, y, torch.arange(count), key=(0, "bench"), prepare=lambda rows, _: rows)


def steppers(model: str, experts: int, batch_size: int, steps: int) -> dict[str, Callable[[], float]]:
    """Functions that train `steps` steps and return CPU milliseconds per step, by name."""
    local = LocalSGD(optimizer=SGD(0.05, momentum=0.9), epochs=1, batch_size=batch_size)
    method = fedfmx(local=local, experts=experts)
    reference = replace(local, terms=(RoutedCrossEntropy(),), decisions=(EqualWeights(experts),))
    everything = tuple(range(CLASSES))
    net = Net(lambda: method.module(NetworkSpec(model, CLASSES, SHAPE)))
    ctx = Context(net, Stage(0, 1, 1, everything, everything), CLASSES, round=0, client=0)
    server, data = method.init_server(ctx), examples(batch_size * steps)

    def timed(work: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            start = time.process_time()
            work()
            return 1e3 * (time.process_time() - start) / steps

        return run

    return {
        "routed": timed(lambda: method.client_update(server, {}, data, ctx)),
        "equal": timed(lambda: reference(server, data, ctx)),
    }


def measure(model: str, experts: int, batch_size: int, steps: int, repeats: int) -> dict[str, float]:
    """Medians over interleaved repeats, after one that is not counted."""
    runs = steppers(model, experts, batch_size, steps)
    pairs = []
    for repeat in range(repeats + 1):
        order = ("routed", "equal") if repeat % 2 else ("equal", "routed")
        pairs.append({name: runs[name]() for name in order})
    pairs = pairs[1:]
    return {
        "experts": experts,
        "routed_ms": median(pair["routed"] for pair in pairs),
        "equal_ms": median(pair["equal"] for pair in pairs),
        "ratio": median(pair["routed"] / pair["equal"] for pair in pairs),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="resnet8_gn")
    parser.add_argument("--experts", type=int, nargs="+", default=[4, 8, 64])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8, help="steps per repeat")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print one last line of JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(args.model, experts, args.batch_size, args.steps, args.repeats) for experts in args.experts]
    table = [("experts", "routed ms/step", "equal ms/step", "ratio")]
    for row in rows:
        table.append((f"{row['experts']}", f"{row['routed_ms']:.2f}", f"{row['equal_ms']:.2f}", f"{row['ratio']:.3f}"))
    ratios = {f"ratio_{row['experts']}": round(row["ratio"], 4) for row in rows}
    title = f"{args.model}, {CLASSES} classes, batch {args.batch_size}, one thread, {args.repeats} interleaved pairs"
    show(title, table, {"benchmark": "routing", **ratios, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
