"""FedLoom: federated learning when clients differ.

`run` trains a method, `compare` sets methods against each other, `sweep` does so in several settings, `ablate` sets a
method against itself without its parts; `load_run` opens what a run left. The names are imported on first use, so that
`import fedloom` is instant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["Comparison", "FedloomError", "Run", "Sweep", "__version__", "ablate", "compare", "load_run", "run", "sweep"]

_HOMES = {
    "Comparison": "fedloom.comparison",
    "FedloomError": "fedloom.core.errors",
    "Run": "fedloom.api",
    "Sweep": "fedloom.comparison",
    "ablate": "fedloom.comparison",
    "compare": "fedloom.comparison",
    "load_run": "fedloom.api",
    "run": "fedloom.api",
    "sweep": "fedloom.comparison",
}

if TYPE_CHECKING:
    from fedloom.api import Run, load_run, run
    from fedloom.comparison import Comparison, Sweep, ablate, compare, sweep
    from fedloom.core.errors import FedloomError


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedloom' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
