"""What vision-language models cost: routed adapters, what is computed once, and many clients on one machine.

    python benchmarks/clip.py [PART ...] [--json]

Parts:

adapters    a training step of a transformer block with eight adapters of which each sample takes two, over the same
            step with one adapter: forward, backward through the frozen block, and AdamW, in the library's loop.
            Target: at most 1.6.
kept        a training step of the compact CLIP with a learnable prompt beside nine received ones, whose texts are
            encoded once a round, and with pictures whose frozen features are kept: over the same step without either.
memory      one process that has trained 1 and then 20 clients of Fed-Duet: resident memory per further client beside
            the bytes of its state, and the frozen model's, which is there once.

Prints CPU milliseconds per step on one thread, and medians over interleaved pairs of their ratio; the pair's order
alternates.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from measure import median, memory_mb, show
from torch import Tensor, nn

from fedloom.core import Batches, Context, Net, Stage
from fedloom.core.payload import nbytes
from fedloom.local import AdamW, LocalSGD
from fedloom.models.clip.adapters import AdapterLayer, Adapters
from fedloom.models.clip.memo import Memo
from fedloom.models.clip.towers import adapted
from fedloom.models.spec import NetworkSpec

CLASSES, BATCH = 10, 32
WORDS = ("cat", "dog", "tree", "sea", "truck", "rose", "lamp", "king", "cloud", "bridge")
Report = tuple[str, list[tuple[str, ...]], dict[str, Any]]


class Block(nn.Module):
    """One block of an image tower with adapters, on tokens [N, L, width]; an offset below it is trained, too."""

    def __init__(self, width: int, options: Adapters):
        super().__init__()
        from open_clip.transformer import ResidualAttentionBlock

        self.block = ResidualAttentionBlock(width, width // 32).requires_grad_(False)
        self.layer, self.offset = AdapterLayer(width, options), nn.Parameter(torch.zeros(width))
        self.head = nn.Linear(width, CLASSES).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [N, CLASSES]."""
        return self.head(adapted(self.block, self.layer, x + self.offset, 0, None)[0][:, 0])


def tokens(count: int, positions: int, width: int) -> Batches:
    """Random tokens and labels."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(count, positions, width, generator=rng), torch.randint(0, CLASSES, (count,), generator=rng)
    return Batches(x, y, torch.arange(count), key=(0, "bench"), prepare=lambda rows, _: rows)


def stepper(width: int, positions: int, options: Adapters, steps: int) -> Callable[[], float]:
    """A function that trains `steps` steps and returns CPU milliseconds per step."""
    local, everything = LocalSGD(AdamW(3e-4), batch_size=BATCH), tuple(range(CLASSES))
    ctx = Context(
        Net(lambda: Block(width, options)), Stage(0, 1, 1, everything, everything), CLASSES, round=0, client=0
    )
    down, data = ctx.init_state(), tokens(BATCH * steps, positions, width)

    def run() -> float:
        start = time.process_time()
        local(down, data, ctx)
        return 1e3 * (time.process_time() - start) / steps

    return run


def interleaved(runs: Mapping[str, Callable[[], float]], repeats: int) -> list[dict[str, float]]:
    """What the runs return, in alternating order, without the first repeat."""
    found = []
    for repeat in range(repeats + 1):
        order = list(runs) if repeat % 2 else list(reversed(runs))
        found.append({name: runs[name]() for name in order})
    return found[1:]


def adapters(args: argparse.Namespace) -> Report:
    """Eight adapters, top-2, over one, without shared adapters beside them."""
    table, result = [("width", "tokens", "one ms/step", "eight ms/step", "ratio")], {}
    for width in args.widths:
        for positions in args.tokens:
            options = {"one": Adapters(experts=1, shared=0), "eight": Adapters(shared=0)}
            runs = {name: stepper(width, positions, each, args.steps) for name, each in options.items()}
            found = interleaved(runs, args.repeats)
            one, eight = (median(each[name] for each in found) for name in runs)
            ratio = median(each["eight"] / each["one"] for each in found)
            table.append((f"{width}", f"{positions}", f"{one:.1f}", f"{eight:.1f}", f"{ratio:.3f}"))
            result[f"adapters_{width}_{positions}"] = round(ratio, 4)
    return f"a block with routed adapters, batch {BATCH}, one thread, {args.repeats} interleaved pairs", table, result


def small(method: str, **options: Any) -> tuple[Any, Context]:
    """A method around the compact CLIP with random values, and a client's context on pictures of ten classes."""
    import importlib

    spec = NetworkSpec("clip_small", CLASSES, (3, 32, 32), words=WORDS, weights="random")
    made = getattr(importlib.import_module(f"fedloom.methods.{method}"), method)(
        local=LocalSGD(AdamW(1e-3), batch_size=BATCH), **options
    )
    everything = tuple(range(CLASSES))
    net = Net(lambda: made.module(spec))
    return made, Context(net, Stage(0, 1, 2, everything, everything), CLASSES, num_clients=20, round=0, client=0)


def pictures(count: int) -> Batches:
    """Random pictures and labels."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.rand(count, 3, 32, 32, generator=rng), torch.randint(0, CLASSES, (count,), generator=rng)
    return Batches(x, y, torch.arange(count), key=(0, "bench"), prepare=lambda rows, _: rows)


def kept(args: argparse.Namespace) -> Report:
    """Both kinds of memory on, one of them, neither."""
    method, ctx = small("pfedmoap", n_ctx=4, pooled=32)
    net: Any = ctx.net.module
    data, down = pictures(BATCH * args.steps), ctx.init_state()
    net.receive(torch.randn(9, 4, net.towers.text_width))
    prefix = net._prefix

    def run(texts: bool, features: bool) -> Callable[[], float]:
        def steps() -> float:
            net._texts = Memo() if texts else lambda key, depends, make: make()
            net._prefix = prefix if features else net._before
            start = time.process_time()
            method.local(down, data, ctx)
            return 1e3 * (time.process_time() - start) / args.steps

        return steps

    runs = {
        "both": run(True, True),
        "texts": run(True, False),
        "pictures": run(False, True),
        "neither": run(False, False),
    }
    found = interleaved(runs, args.repeats)
    table, result = [("kept", "ms/step", "of neither")], {}
    for name in runs:
        cost = median(each[name] for each in found)
        ratio = median(each[name] / each["neither"] for each in found)
        table.append((name, f"{cost:.1f}", f"{ratio:.3f}"))
        result[f"kept_{name}"] = round(ratio, 4)
    return (
        f"a step of pfedmoap on the compact CLIP, {args.steps} steps a round, batch {BATCH}, one thread",
        table,
        result,
    )


def memory(args: argparse.Namespace) -> Report:
    """Resident memory while clients' states pile up."""
    method, ctx = small("fedduet", pooled=32)
    server, data = method.init_server(ctx), pictures(2 * BATCH)
    states, seen = [], []
    for client in range(20):
        here = dataclasses.replace(ctx, client=client)
        states.append(method.client_update(method.send(server, client, here), {}, data, here).state)
        seen.append(1e6 * memory_mb())
    each = (seen[-1] - seen[0]) / (len(states) - 1)
    state, frozen = nbytes(states[0]), sum(4 * p.numel() for p in ctx.net.module.towers.parameters())
    table = [("", "MB"), ("frozen model, once", f"{frozen / 1e6:.1f}"), ("state of a client", f"{state / 1e6:.2f}")]
    table.append(("resident per further client", f"{each / 1e6:.2f}"))
    return (
        "Fed-Duet's clients in one process",
        table,
        {"memory_per_client": round(each), "state": state, "frozen": frozen},
    )


PARTS: dict[str, Callable[[argparse.Namespace], Report]] = {"adapters": adapters, "kept": kept, "memory": memory}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--widths", type=int, nargs="+", default=[160, 768])
    parser.add_argument("--tokens", type=int, nargs="+", default=[17, 197])
    parser.add_argument("--steps", type=int, default=8, help="steps per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one last line of JSON per part")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if unknown := sorted(set(args.parts) - PARTS.keys()):
        parser.error(f"unknown part '{unknown[0]}'; known: {', '.join(PARTS)}")
    for name in args.parts or PARTS:
        title, table, result = PARTS[name](args)
        show(title, table, {"benchmark": f"clip {name}", **result}, args.json)


if __name__ == "__main__":
    main()
