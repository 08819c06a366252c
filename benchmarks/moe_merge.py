"""The semantic merge of experts against a plain streaming average, at the size of Switch-base-16.

The state has the shapes of that model (1,072 M parameters in bf16: 12 layers of 16 experts, the rest dense) and random
values. Ten clients are lazy views over two memory-mapped safetensors files; view i holds another expert of its file in
every place, so that no two clients share a tensor. Both runs merge the dense tensors by the mean, tensor by tensor, and
write into a memory-mapped safetensors file; they differ in the experts. Anonymous memory is that of the whole process,
mapped files not counted. Each run is a process of its own; the files are read once before.

On a machine that others use too, OMP_NUM_THREADS=1 and the CPU seconds tell more than the wall.

    python benchmarks/moe_merge.py [--pairs 3] [--scale 1.0] [--folder /tmp] [--json]

Needs three times the model's size on disk (6.5 GB at scale 1) and about as much memory for the system's file cache.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from measure import median, run_json, show

CLIENTS, LAYERS, EXPERTS, VOCABULARY = 10, 12, 16, 32128


def shapes(scale: float) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the state; scale: of the widths."""
    width, inner = int(768 * scale), int(3072 * scale)
    found: dict[str, tuple[int, ...]] = {"shared": (VOCABULARY, width)}
    for stack, attentions in (("encoder", 1), ("decoder", 2)):
        found[f"{stack}.bias"] = (32, 12)
        found[f"{stack}.norm"] = (width,)
        for block in range(LAYERS):
            at = f"{stack}.{block}"
            for k in range(attentions):
                found |= {f"{at}.attention{k}.{part}": (width, width) for part in "qkvo"}
            found |= {f"{at}.norm{k}": (width,) for k in range(attentions + 1)}
            if block % 2 == 0:
                found |= {f"{at}.wi": (inner, width), f"{at}.wo": (width, inner)}
                continue
            found[f"{at}.router"] = (EXPERTS, width)
            for e in range(EXPERTS):
                found |= {f"{at}.experts.{e}.wi": (inner, width), f"{at}.experts.{e}.wo": (width, inner)}
    return found


def moe_layers(scale: float) -> list[Any]:
    """Where the experts of that state are."""
    from fedloom.core.moe import MoELayer, Slice

    blocks = [f"{stack}.{block}" for stack in ("encoder", "decoder") for block in range(1, LAYERS, 2)]
    return [
        MoELayer(
            at,
            tuple(tuple(Slice(f"{at}.experts.{e}.{part}") for part in ("wi", "wo")) for e in range(EXPERTS)),
            (f"{at}.router",),
            1,
            int(768 * scale),
        )
        for at in blocks
    ]


def create(path: Path, scale: float) -> dict[str, Any]:
    """A safetensors file of the state, mapped into memory to be written: name -> tensor."""
    import torch

    header, at = {}, 0
    for name, shape in shapes(scale).items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(begin + at)
    storage = torch.UntypedStorage.from_file(str(path), True, begin + at)
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    parts = {
        name: flat[begin + row["data_offsets"][0] : begin + row["data_offsets"][1]] for name, row in header.items()
    }
    return {name: part.view(torch.bfloat16).view(header[name]["shape"]) for name, part in parts.items()}


def fill(path: Path, seed: int, scale: float) -> None:
    """A file of random values."""
    import torch

    rng = torch.Generator().manual_seed(seed)
    for tensor in create(path, scale).values():
        tensor.copy_(0.02 * torch.randn(tensor.shape, generator=rng, dtype=torch.float32))


class View(Mapping[str, Any]):
    """A client: the tensors of a file, of which every expert is `shift` places away."""

    def __init__(self, file: Any, shift: int):
        self.file, self.names = file, {name: self.source(name, shift) for name in file.keys()}  # noqa: SIM118

    @staticmethod
    def source(name: str, shift: int) -> str:
        if ".experts." not in name:
            return name
        front, back = name.split(".experts.")
        expert, part = back.split(".")
        return f"{front}.experts.{(int(expert) + shift) % EXPERTS}.{part}"

    def __getitem__(self, name: str) -> Any:
        return self.file.get_tensor(self.names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class Peak:
    """The most anonymous memory of this process in MB, looked at 50 times a second."""

    def __enter__(self) -> Peak:
        self.most, self.done = 0.0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.done.wait(0.02):
            rows = Path("/proc/self/status").read_text().splitlines()
            self.most = max(self.most, *(int(row.split()[1]) / 1024 for row in rows if row.startswith("RssAnon")))

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.thread.join()


def statistics(scale: float) -> list[dict[str, Any]]:
    """Routing statistics of ten clients."""
    import torch

    rng, depth = torch.Generator().manual_seed(0), len(moe_layers(scale))
    return [
        {
            "count": torch.randint(1, 1000, (depth, EXPERTS), generator=rng).float(),
            "centroid": torch.randn(depth, EXPERTS, int(768 * scale), generator=rng),
        }
        for _ in range(CLIENTS)
    ]


def plain(trees: list[Any], weights: list[float], old: Any, out: dict[str, Any], names: list[str]) -> None:
    """The weighted mean of some tensors, one after the other, chunk by chunk over the clients' views."""
    from fedloom.merge.accumulate import Accumulator

    accumulator = Accumulator()
    for name in names:
        out[name].copy_(accumulator.mean_of([tree[name] for tree in trees], weights, old[name]))


def merge(kind: str, folder: Path, scale: float) -> dict[str, float]:
    """One merge into a file: seconds of wall and CPU, and the most anonymous memory in MB."""
    from safetensors import safe_open

    from fedloom.merge.semantic import SemanticMerge

    files = [safe_open(str(folder / name), framework="pt") for name in ("a.safetensors", "b.safetensors")]
    trees = [View(files[i % 2], 1 + i // 2) for i in range(CLIENTS)]
    weights, old, layers = [float(100 + i) for i in range(CLIENTS)], View(files[0], 0), moe_layers(scale)
    experts = {name for layer in layers for name in layer.expert_names}
    result = folder / f"{kind}.safetensors"
    out = create(result, scale)
    with Peak() as peak:
        began, worked = time.perf_counter(), time.process_time()
        if kind == "plain":
            plain(trees, weights, old, out, list(old))
        else:
            plain(trees, weights, old, out, [name for name in old if name not in experts])
            for part, value in SemanticMerge().stream(trees, weights, old, layers, statistics(scale)):
                part.of(out).copy_(value)
        seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    del out
    result.unlink()
    return {"seconds": seconds, "cpu": cpu, "anonymous_mb": peak.most}


def main() -> None:
    """Make the files, run both merges in processes of their own and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the widths")
    parser.add_argument("--folder", help="where the files are made and removed again")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runner", choices=["plain", "semantic"], help="one merge alone, with --files")
    parser.add_argument("--files", type=Path)
    options = parser.parse_args()
    if options.runner:
        print(json.dumps(merge(options.runner, options.files, options.scale)))
        return
    pairs = []
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        for seed, name in enumerate(("a", "b")):
            fill(Path(place) / f"{name}.safetensors", seed, options.scale)
        os.sync()
        model_mb = (Path(place) / "a.safetensors").stat().st_size / 2**20
        for _ in range(options.pairs):
            one = ("--files", place, "--scale", options.scale)
            pairs.append([run_json(__file__, "--runner", kind, *one) for kind in ("plain", "semantic")])
    result = {
        "model_mb": model_mb,
        "plain_seconds": median(a["seconds"] for a, _ in pairs),
        "semantic_seconds": median(b["seconds"] for _, b in pairs),
        "ratio": median(b["seconds"] / a["seconds"] for a, b in pairs),
        "plain_cpu": median(a["cpu"] for a, _ in pairs),
        "semantic_cpu": median(b["cpu"] for _, b in pairs),
        "cpu_ratio": median(b["cpu"] / a["cpu"] for a, b in pairs),
        "plain_memory": max(a["anonymous_mb"] for a, _ in pairs) / model_mb,
        "semantic_memory": max(b["anonymous_mb"] for _, b in pairs) / model_mb,
    }
    rows = [("merge", "seconds", "CPU seconds", "anonymous memory / model")]
    for kind in ("plain", "semantic"):
        rows.append((kind, *(f"{result[f'{kind}_{what}']:.2f}" for what in ("seconds", "cpu", "memory"))))
    rows.append(("ratio", f"{result['ratio']:.2f}", f"{result['cpu_ratio']:.2f}", ""))
    title = f"{CLIENTS} clients of a model of {model_mb:.0f} MB, median of {options.pairs} interleaved pairs"
    show(title, rows, result, options.json)


if __name__ == "__main__":
    main()
