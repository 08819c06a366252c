"""Examples at the end of each command's help; tests/cli/test_examples.py carries them out."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "fedloom run",
        "fedloom compare quickstart --methods fedavg,fedprox --seeds 0,1,2",
        "fedloom list recipes",
    ),
    "run": (
        "fedloom run",
        "fedloom run quickstart --method fedprox --set method.mu=0.1 --seed 1",
        "fedloom run quickstart --set training.rounds=2 --set tracker=tensorboard --out runs/first",
        "fedloom run quickstart --engine flower --dry-run",
    ),
    "resume": ("fedloom resume runs/first", "fedloom resume runs/first --workers 2"),
    "compare": (
        "fedloom compare quickstart --methods fedavg,fedprox,fedfmx --seeds 0,1,2",
        "fedloom compare quickstart --methods fedavg,fedprox+mu=1 --reference fedavg --dry-run",
    ),
    "ablate": ("fedloom ablate fedfmx quickstart --seeds 0,1,2",),
    "sweep": ("fedloom sweep quickstart --methods fedavg,fedprox --grid partition.alpha=0.1,1 --seeds 0,1,2",),
    "reproduce": ("fedloom reproduce X10 --scale smoke",),
    "list": (
        "fedloom list methods",
        "fedloom list methods fedfmx",
        "fedloom list options training",
    ),
    "show-data": (
        "fedloom show-data quickstart --out data.png",
        "fedloom show-data quickstart --set partition.alpha=0.1 --json",
    ),
    "predict": ("fedloom predict runs/first --input digits.npy --top 1",),
    "report": ("fedloom report runs/first", "fedloom report runs/first runs/second --out both.html"),
    "export": ("fedloom export runs/first --format safetensors --out model.safetensors",),
    "alignment": ("fedloom alignment runs/clip", "fedloom alignment runs/clip --client 0 --json"),
    "pretrain-clip": ("fedloom pretrain-clip clip-small --device cpu --out examples/clip-small",),
    "doctor": ("fedloom doctor", "fedloom doctor --data-root data --json"),
    "new method": (
        "fedloom new method my_method",
        "fedloom new method my_method --out methods",
    ),
    "deploy": ("fedloom deploy quickstart --out my-app", "fedloom deploy quickstart --method fedprox"),
    "deploy certs": ("fedloom deploy certs --out certs --host server.example.org --nodes 3",),
    "deploy local-demo": ("fedloom deploy local-demo quickstart --nodes 2 --out runs/demo",),
}


def shown(command: str) -> str:
    """The examples of a command, indented lines under a title; empty where it has none. "" is the whole program."""
    lines = EXAMPLES.get(command, ())
    return "\n".join(["Examples:", *(f"  {line}" for line in lines)]) if lines else ""
