"""What channel pruning saves and what FEDFIP's parts cost, for ResNet-18 on images of 32 x 32.

Compact networks keep ceil(keep x c) channels of every group. Against the dense network: parameters, FLOPs of a forward
pass per example, bytes of the payload as a file, and the time of a training step and of inference. Against a plain
training step of the dense network: a step with each form of the contrastive term, which draws `--per-domain` examples
of each domain beside the batch, and the Fisher pass by the gates over as many examples as a step has.

    python benchmarks/pruning.py [--keep 0.2 0.5 0.8] [--quick] [--json]

Times are CPU milliseconds on one thread (with `--device cuda`, wall milliseconds), ratios medians over interleaved
pairs. Target: a training step at keep 0.5 takes at most 0.55 of the dense one.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import median, show

from fedloom.core import Batches, Context, Forward, Net, Payload, Stage
from fedloom.engine.files import save_payload
from fedloom.evaluate.cost import flops_per_example, parameters
from fedloom.local import SGD, LocalSGD
from fedloom.local.gate_fisher import gate_fisher
from fedloom.local.terms import CrossEntropy
from fedloom.local.terms.structure import FORMS, DomainProbe, StructureContrast
from fedloom.methods.subnetworks import gathered
from fedloom.models.channels import Channels
from fedloom.models.compact import prunable
from fedloom.models.spec import NetworkSpec

CLASSES, SHAPE, BUDGET = 10, (3, 32, 32), 0.55
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
Timed = Callable[[], float]


class Sizes(NamedTuple):
    """How much is measured. per_domain: examples of each domain that the contrastive term draws in a step."""

    batch: int
    steps: int
    repeats: int
    domains: int
    per_domain: int

    @property
    def examples(self) -> int:
        """Of a repeat; every domain has enough for the term."""
        return max(self.batch * self.steps, 8 * self.domains)


class Network(NamedTuple):
    """A network and the values that are sent for it."""

    ctx: Context
    payload: Payload

    @property
    def channels(self) -> Channels:
        """Its table."""
        module: Any = self.ctx.net.module
        return module.channels


def federation(model: str, forward: Forward, domains: int) -> Context:
    """A context with all classes, around the dense network."""
    net = Net(lambda: prunable(NetworkSpec(model, CLASSES, SHAPE).classifier(), SHAPE), forward)
    everything = tuple(range(CLASSES))
    return Context(net, Stage(0, 1, 1, everything, everything), CLASSES, num_domains=domains, round=0, client=0)


def examples(count: int, domains: int) -> Batches:
    """Random images and labels, dealt out to the domains in turn."""
    rng, index = torch.Generator().manual_seed(0), torch.arange(count)
    x, y = torch.randn(count, *SHAPE, generator=rng), torch.randint(0, CLASSES, (count,), generator=rng)
    return Batches(x, y, index, key=(0, "bench"), prepare=lambda rows, _: rows, domains=index % domains)


def compact(ctx: Context, keep: float) -> Network:
    """The network that keeps the first ceil(keep c) channels of every group."""
    channels = Network(ctx, {}).channels
    kept = {group.name: torch.arange(math.ceil(keep * group.size)) for group in channels.groups}
    inside = ctx if keep == 1 else ctx.rebuild(channels.widths(kept))
    return Network(inside, gathered(ctx.init_state(), kept, channels))


def size(network: Network) -> dict[str, int]:
    """What a network holds, computes and weighs."""
    ctx, one = network.ctx, torch.zeros(1, *SHAPE)
    ctx.bind(network.payload["params"], network.payload["buffers"])
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "payload.safetensors"
        save_payload(path, network.payload)
        weight = path.stat().st_size
    flops = flops_per_example(lambda: ctx.scores(one))
    return {"parameters": parameters(ctx.net.module), "flops": flops, "bytes": weight}


def timed(work: Callable[[], object], ctx: Context, steps: int) -> Timed:
    """Milliseconds per step of `work`, which makes that many."""
    on_gpu = ctx.net.forward.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time

    def run() -> float:
        start = clock()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        return 1e3 * (clock() - start) / steps

    return run


def training(network: Network, data: Batches, sizes: Sizes, term: StructureContrast | None = None) -> Timed:
    """A training step, with the contrastive term where one is given."""
    ctx, count = network.ctx, network.channels.total
    local = LocalSGD(optimizer=SGD(0.01, momentum=0.9), batch_size=sizes.batch)
    local = replace(local, terms=(CrossEntropy(), term)) if term else local
    prototypes = torch.rand(sizes.domains, count, generator=torch.Generator().manual_seed(1))
    whole, valid = torch.ones(count, dtype=torch.bool), torch.ones(sizes.domains, dtype=torch.bool)

    def work() -> None:
        probe = DomainProbe(ctx, data, prototypes, valid, whole, whole, sizes.per_domain)
        local(network.payload, data, ctx, ref={"structure": probe} if term else {})

    return timed(work, ctx, data.steps(sizes.batch))


def inference(network: Network, data: Batches, sizes: Sizes) -> Timed:
    """The scores of a batch."""

    def work() -> None:
        network.ctx.bind(network.payload["params"], network.payload["buffers"])
        for batch in data.epoch(batch_size=sizes.batch, shuffle=False):
            network.ctx.scores(batch.x)

    return timed(work, network.ctx, data.steps(sizes.batch))


def fisher(network: Network, data: Batches, sizes: Sizes) -> Timed:
    """The Fisher pass over the examples of a step, from each of its domains apart."""
    ctx, gates = network.ctx, torch.ones(network.channels.total)

    def work() -> None:
        ctx.bind(network.payload["params"], network.payload["buffers"])
        for part in data.by_domain().values():
            gate_fisher(ctx, part, gates, samples=len(part))

    return timed(work, ctx, data.steps(sizes.batch))


def ratios(base: Timed, others: Mapping[str, Timed], repeats: int) -> tuple[float, dict[str, float]]:
    """Median milliseconds of the base, and of every other's time over the base's in interleaved repeats.

    The first repeat is not counted; the order alternates.
    """
    runs, found = {"base": base, **others}, []
    for repeat in range(repeats + 1):
        names = list(runs) if repeat % 2 else list(reversed(runs))
        found.append({name: runs[name]() for name in names})
    counted = found[1:]
    times = median(one["base"] for one in counted)
    return times, {name: median(one[name] / one["base"] for one in counted) for name in others}


def pruned(ctx: Context, keeps: Sequence[float], data: Batches, sizes: Sizes) -> list[dict[str, Any]]:
    """A row for the dense network and one for every compact one."""
    networks = {keep: compact(ctx, keep) for keep in (1.0, *keeps)}
    rows = [{"keep": keep, **size(network)} for keep, network in networks.items()]
    for name, kind in (("step", training), ("inference", inference)):
        runs = {str(keep): kind(network, data, sizes) for keep, network in networks.items()}
        _, found = ratios(runs.pop("1.0"), runs, sizes.repeats)
        for row in rows:
            row[f"{name}_ratio"] = found.get(str(row["keep"]), 1.0)
    return rows


def parts(ctx: Context, data: Batches, sizes: Sizes) -> tuple[float, dict[str, float]]:
    """Milliseconds of a plain dense step, and over it the Fisher pass and steps with every form of the term."""
    dense = compact(ctx, 1.0)
    forms = {
        f"step, {name}": training(dense, data, sizes, StructureContrast(0.01, form)) for name, form in FORMS.items()
    }
    others = {"fisher pass": fisher(dense, data, sizes), **forms}
    return ratios(training(dense, data, sizes), others, sizes.repeats)


def report(
    rows: Sequence[Mapping[str, Any]], step: float, found: Mapping[str, float], head: str, as_json: bool
) -> None:
    """Print both tables."""
    table = [("keep", "parameters", "FLOPs/example", "payload, bytes", "of dense", "step", "inference")]
    for row in rows:
        share = f"{row['bytes'] / rows[0]['bytes']:.3f}"
        numbers = (f"{row['parameters']:,}", f"{row['flops']:,}", f"{row['bytes']:,}", share)
        table.append((f"{row['keep']:g}", *numbers, f"{row['step_ratio']:.3f}", f"{row['inference_ratio']:.3f}"))
    show(f"{head}: times over those of the dense network", table, {}, False)
    costs = [("part", "of a plain step"), *((name, f"{ratio:.3f}") for name, ratio in found.items())]
    result = {"benchmark": "pruning", "rows": list(rows), "step_ms": step, "parts": dict(found), "budget": BUDGET}
    show(f"a plain dense step takes {step:.1f} ms", costs, result, as_json)


def arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.2, 0.5, 0.8])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4, help="steps per repeat")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--domains", type=int, default=2, help="domains of a client")
    parser.add_argument("--per-domain", type=int, default=16, help="examples of each domain in the contrastive term")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layout", choices=LAYOUTS, default="contiguous")
    parser.add_argument("--quick", action="store_true", help="a few small steps, once: to see that it runs")
    parser.add_argument("--json", action="store_true", help="print one last line of JSON")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = arguments()
    torch.set_num_threads(1)
    sizes = Sizes(args.batch_size, args.steps, args.repeats, args.domains, args.per_domain)
    if args.quick:
        sizes = Sizes(4, 1, 1, args.domains, 2)
    ctx = federation(args.model, Forward(torch.device(args.device), LAYOUTS[args.layout]), sizes.domains)
    data = examples(sizes.examples, sizes.domains)
    rows = pruned(ctx, args.keep, data, sizes)
    step, found = parts(ctx, data, sizes)
    where = "one thread" if args.device == "cpu" else args.device
    head = f"{args.model}, batch {sizes.batch}, {where}, {args.layout}, {sizes.repeats} interleaved repeats"
    report(rows, step, found, head, args.json)


if __name__ == "__main__":
    main()
