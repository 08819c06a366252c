"""Which versions of Flower will do, and what is set before it is imported.

Supported: flwr 1.28 to 1.x. The in-process grid and the simulation (on the Ray that each version pins, 2.51 or 2.55)
were run on every minor version from 1.28 to 1.42. `make.py test` takes the newest, `make.py test-oldest-flower` 1.28.
What differs within the range: who sets the ids of a message (see `identify`), and nothing else that is used here.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from fedloom.core import ConfigError

OLDEST, BELOW = (1, 28), (2, 0)
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def require(*, ray: bool = False) -> tuple[int, ...]:
    """The version of Flower; `ConfigError` when it, or with `ray` Ray, is missing, too old or too new.

    Turns telemetry and update checks off, unless the user has set them.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    found = _installed("flwr")
    if found is None:
        raise ConfigError("the engine flower needs Flower; install the extra: pip install 'fedloom[flower]'")
    number = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not OLDEST <= number < BELOW:
        low, high = (".".join(map(str, bound)) for bound in (OLDEST, BELOW))
        raise ConfigError(f"flwr {found} is installed, and FedLoom needs flwr >= {low} and < {high}; install another")
    if ray and _installed("ray") is None:
        raise ConfigError(
            "engine.runtime simulation needs Ray; install the extra: pip install 'fedloom[flower-sim]', "
            "or set engine.runtime to grid"
        )
    return number


def identify(run_id: int, node_id: int) -> None:
    """Say who makes messages in this process; newer versions of Flower refuse to make any without."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:  # older versions fill the ids in when a message is sent
        return
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run_id, node_id


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
