"""A client-stateful method whose clients fail on purpose: at a client, stage and round, in a way that is named."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedloom.core import Batches, Context, Payload, Update
from fedloom.local import LocalSGD
from toys.tally import Tally


@dataclass(frozen=True)
class Fault:
    """kind: a key of `AFTER`, or "raise", "kill", "kill_worker", "interrupt", "sleep".

    client, stage, round: None is any. once: a file that is made when the fault happens; it then never happens again.
    """

    kind: str
    client: int | None = None
    stage: int | None = None
    round: int | None = None
    once: str | None = None

    def due(self, ctx: Context) -> bool:
        """True when it must happen now."""
        place = ((self.client, ctx.client), (self.stage, ctx.stage.index), (self.round, ctx.round))
        if any(want is not None and want != have for want, have in place):
            return False
        if self.kind == "kill_worker" and "fedloom.engine.worker" not in " ".join(sys.orig_argv):
            return False
        if self.once is not None:
            if Path(self.once).exists():
                return False
            Path(self.once).touch()
        return True

    def before(self) -> None:
        """What happens before the work."""
        if self.kind in ("kill", "kill_worker"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "interrupt":
            signal.raise_signal(signal.SIGINT)
        if self.kind == "raise":
            raise ValueError("broken on purpose")
        if self.kind == "sleep":
            time.sleep(0.3)


def _changed(update: Update, **params: torch.Tensor) -> Update:
    return update._replace(up={**update.up, "params": {**update.up["params"], **params}})


AFTER: Mapping[str, Any] = {
    "nan": lambda u: _changed(u, **{"head.bias": u.up["params"]["head.bias"] * float("nan")}),
    "nan_state": lambda u: u._replace(
        state={**u.state, "memory": {name: tensor * float("nan") for name, tensor in u.state["memory"].items()}}
    ),
    "inf": lambda u: _changed(u, **{"head.bias": u.up["params"]["head.bias"] + float("inf")}),
    "shape": lambda u: _changed(u, **{"head.bias": torch.zeros(1)}),
    "dtype": lambda u: _changed(u, **{"head.bias": u.up["params"]["head.bias"].double()}),
    "extra": lambda u: _changed(u, surprise=torch.zeros(1)),
    "missing": lambda u: u._replace(
        up={**u.up, "params": {n: t for n, t in u.up["params"].items() if n != "head.bias"}}
    ),
    "not_tensor": lambda u: _changed(u, **{"head.bias": [1.0]}),
    "negative": lambda u: u._replace(weight=-1.0),
    "nan_weight": lambda u: u._replace(weight=float("nan")),
    "zero_weight": lambda u: u._replace(weight=0.0),
}


@dataclass(frozen=True)
class Faulty(Tally):
    """`Tally` with faults in its train exchange."""

    faults: tuple[Fault, ...] = ()

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        due = [fault for fault in self.faults if fault.due(ctx)]
        for fault in due:
            fault.before()
        update = super().client_update(down, state, data, ctx)
        for fault in due:
            update = AFTER.get(fault.kind, lambda same: same)(update)
        return update


def faulty(*, local: LocalSGD, faults: tuple[Fault, ...] = ()) -> Faulty:
    """Assemble the method."""
    return Faulty(local, faults=faults)
