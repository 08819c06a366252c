"""What the machine has: versions, processor, devices, disk. For env.json and for `fedloom doctor`."""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.build import Built
    from fedloom.config import Config

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
    "trackers": ("tensorboard", "wandb", "mlflow-skinny"),
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
        **sources(built.config),
    }


_imported: dict[str, tuple[Any, str | None]] = {}  # module -> its import and the SHA-256 of its file then


def sources(config: Config) -> dict[str, str | None]:
    """SHA-256 of the files that define a method and a network of the user's own (`module:attribute`).

    They are read when first asked for after an import, so that an edit after it, which this process does not run, does
    not count. None for those of the package, for objects passed from Python, and where there is no file.
    """
    found: dict[str, str | None] = {}
    for section, module in _own_modules(config).items():
        found[f"{section}_source"] = None
        if module is not None:
            name, spec = module.__name__, getattr(module, "__spec__", None)  # a reload makes another one
            if name not in _imported or _imported[name][0] is not spec:
                _imported[name] = spec, _digest(module)
            found[f"{section}_source"] = _imported[name][1]
    return found


def edited(config: Config) -> list[str]:
    """Files of an own method and network that are no longer what this process imported."""
    known = sources(config)
    modules = {f"{section}_source": module for section, module in _own_modules(config).items()}
    return [str(m.__file__) for key, m in modules.items() if m is not None and _digest(m) != known[key]]


def _own_modules(config: Config) -> dict[str, Any]:
    """`method` and `model` -> the module that defines the user's own one, else None."""
    from fedloom.methods import load_attribute

    found: dict[str, Any] = {}
    for section, name in (("method", config.method["name"]), ("model", config.model.name)):
        head, colon, _ = name.partition(":")
        if not colon or head == "object":
            found[section] = None
            continue
        part = load_attribute(name, f"{section}.name")
        plain = inspect.isfunction(part) or inspect.isclass(part)
        found[section] = sys.modules.get(part.__module__ if plain else head)
    return found


def _digest(module: Any) -> str | None:
    try:
        return hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()
    except (AttributeError, TypeError, OSError):  # written in C, made by hand, inside an archive
        return None


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
