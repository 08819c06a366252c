"""What a model and a run cost: parameters, operations per example, memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn


def parameters(module: nn.Module) -> int:
    """Number of parameters, trainable or frozen, each shared one once; buffers are not counted."""
    return sum(p.numel() for p in module.parameters())


def active_parameters(module: nn.Module) -> int:
    """Number of parameters that one example uses when the model is deployed.

    A module that uses only a part of itself says so by an attribute or method `active_parameters` (backbone,
    gate and top-k experts, say); any other uses all of them.
    """
    own = getattr(module, "active_parameters", None)
    if own is None:
        return parameters(module)
    return int(own() if callable(own) else own)


def flops_per_example(forward: Callable[[], Any]) -> int:
    """Floating-point operations of one call of `forward`, which runs the model on a batch of one example.

    Counted by `torch.utils.flop_counter`: matrix products, convolutions and attention, a multiply-add as two;
    element-wise work is left out, as is usual. Runs without gradients.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        forward()
    return int(counter.get_total_flops())


def peak_rss_bytes(workers: Iterable[int] = ()) -> int | None:
    """Peak resident memory of this process and its children so far, in bytes; None where it is not known.

    workers: peaks that other processes measured themselves, for systems without /proc; with /proc, living
    children are found and need not be given. The peaks are summed, although they need not coincide and pages
    that processes share are in each of them, so this is an upper bound. Of children that have ended the
    system keeps only the largest; it is taken where it exceeds all others together.
    """
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    ended = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
    return own + max(ended, sum(workers), sum(_living_children(Path("/proc/self"))))


def _living_children(process: Path) -> list[int]:
    """Peaks of all living descendants, bytes; empty without /proc. Processes that end meanwhile are left out."""
    peaks = []
    for pid in (pid for file in process.glob("task/*/children") for pid in _read(file).split()):
        child = Path("/proc") / pid
        peak = [line.split()[1] for line in _read(child / "status").splitlines() if line.startswith("VmHWM:")]
        peaks += [int(kib) * 1024 for kib in peak] + _living_children(child)
    return peaks


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
