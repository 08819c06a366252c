"""What the machine has: versions, processor, devices, disk. For env.json and for `fedloom doctor`."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.build import Built

CORE = (
    "torch",
    "torchvision",
    "numpy",
    "scipy",
    "scikit-learn",
    "datasets",
    "safetensors",
    "pydantic",
    "typer",
    "rich",
)
DRAWING = ("matplotlib", "jinja2", "pillow")
EXTRAS = {
    "vision": ("timm", "open_clip_torch", "torchmetrics"),
    "llm": ("transformers", "tokenizers", "peft"),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "flower": ("flwr", "flwr-datasets"),
    "trackers": ("tensorboard", "wandb", "mlflow"),
    "prune": ("torch-pruning",),
    "privacy": ("opacus", "dp-accounting"),
}


def environment(built: Built) -> dict[str, Any]:
    """Everything that equal bits depend on, and the hashes that name configuration, data and assignment."""
    from fedloom import __version__

    return {
        "fedloom": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": cores(),
        "device": device_name(str(built.experiment.forward.device)),
        "packages": {name: installed(name) for name in (*CORE, *DRAWING)},
        "workers": built.options.workers,
        "threads": built.experiment.threads,
        "config_hash": built.hash,
        "data_sha256": built.source.fingerprint,
        "plan_sha256": built.experiment.plan.fingerprint(),
    }


def installed(package: str) -> str | None:
    """Version of a package, None when it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def from_checkout() -> bool:
    """Whether this package lies in a checkout of its sources."""
    return (Path(__file__).parents[2] / "pyproject.toml").is_file()


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return found or platform.machine()


def device_name(device: str) -> str:
    """The device, with the product's name where it has one."""
    if not device.startswith("cuda"):
        return device
    import torch

    return f"{device} ({torch.cuda.get_device_name(device)})"


def python_ok() -> bool:
    """Whether this Python is new enough."""
    return sys.version_info >= (3, 11)
