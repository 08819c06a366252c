"""The device that trains, and whether it multiplies in bf16."""

from __future__ import annotations

import re

import torch

from fedloom.core.errors import ConfigError


def device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises `ConfigError` for a device that is unknown or not there."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", name):
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N, got '{name[:60]}'")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    if name != "cpu" and int(name.partition(":")[2] or 0) >= count:
        raise ConfigError(f"--device is {name}, but this machine has {count} CUDA devices; use auto or cpu")
    return torch.device(name)


def has_bf16(place: torch.device) -> bool:
    """Whether the device has instructions for bf16, without which it would only be slower."""
    if place.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    known: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(there is True for name, there in known.items() if name.endswith("bf16"))
