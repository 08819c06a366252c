"""Training step by step, which can stop after any step and go on with the same bits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.errors import RunError

Tell = Callable[[str], None]
EVERY = 200  # steps between two lines about the progress
COUNTED = ("step", "total", "loss", "seconds", "cpu_seconds")  # numbers of a trainer's state


class Trainer:
    """AdamW with gradients clipped to length 1, and everything that changes from step to step.

    section: of the recipe, for sentences; measure: what the loss is called. plain: those of the parameters that do not
    decay. rng: of all draws, on the CPU. memory: tensors that the loss keeps from one step to the next. loss: mean over
    the last steps told of; seconds: spent, by the clock and by all cores together (`cpu_seconds`).
    """

    def __init__(
        self, section: str, measure: str, parameters: Sequence[nn.Parameter], plain: Sequence[nn.Parameter] = (), *,
        lr: float, weight_decay: float, warmup: int, steps: int, seed: int,
    ):  # fmt: skip
        self.section, self.measure, self.steps, self.parameters = section, measure, steps, parameters
        apart = {id(p) for p in plain}
        groups: list[dict[str, Any]] = [{"params": [p for p in parameters if id(p) not in apart]}]
        groups += [{"params": plain, "weight_decay": 0.0}] if plain else []
        self.optimizer = torch.optim.AdamW(groups, lr, weight_decay=weight_decay)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_cosine(warmup, steps))
        self.rng = torch.Generator().manual_seed(seed)
        self.memory: dict[str, Tensor] = {}
        self.step, self.total, self.loss = 0, 0.0, math.nan
        self.seconds, self.cpu_seconds = 0.0, 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time that the block takes."""
        begun = time.monotonic(), time.process_time()
        yield
        self.seconds += time.monotonic() - begun[0]
        self.cpu_seconds += time.process_time() - begun[1]

    def state(self) -> dict[str, Any]:
        """What `load` takes, as tensors and plain values."""
        parts = {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}
        numbers = {key: getattr(self, key) for key in COUNTED}
        return {**parts, **numbers, "rng": self.rng.get_state(), "memory": self.memory}

    def told(self) -> dict[str, Any]:
        """Its steps, seconds and last mean loss, for the report."""
        spent = {key: round(getattr(self, key), 1) for key in ("seconds", "cpu_seconds")}
        return {"steps": self.steps, **spent, self.measure: self.loss}

    def load(self, state: Mapping[str, Any]) -> None:
        """Stand where the trainer stood that gave the state."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(dict(state["schedule"]))
        self.rng.set_state(state["rng"])
        self.memory = dict(state["memory"])
        for key in COUNTED:
            setattr(self, key, state[key])

    def run(self, loss: Callable[[int], Tensor], watch: Watch) -> None:
        """Take the steps that are left. loss: of a step, from 0 on. Raises `RunError` for one that is not finite."""
        pace = _Pace(self.step, self.steps)
        while self.step < self.steps:
            with self.timed():
                self._descend(loss(self.step))
            self.step += 1
            if self.step % EVERY == 0 or self.step == self.steps:
                self.loss, self.total = self.total / ((self.step - 1) % EVERY + 1), 0.0
                watch.tell(
                    f"{self.section}: step {self.step} of {self.steps}, {self.measure} {self.loss:.3f}, "
                    f"{pace.left(self.step)}"
                )
            watch.keep(self)

    def _descend(self, value: Tensor) -> None:
        number = float(value.detach())
        if not math.isfinite(number):
            raise RunError(
                f"the loss of stage {self.section} became {number} in step {self.step + 1}; begin anew with a lower "
                f"rate, --set {self.section}.lr={self.optimizer.defaults['lr'] / 2:g} --force"
            )
        self.optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.total += number


@dataclass(frozen=True)
class Watch:
    """Who looks on. tell: takes lines of progress. keep: called after every step.

    left: state of the trainer of the same stage that was interrupted.
    """

    tell: Tell = lambda line: None
    keep: Callable[[Trainer], None] = lambda trainer: None
    left: Mapping[str, Any] | None = None


class _Pace:
    def __init__(self, step: int, steps: int):
        self.first, self.steps, self.begun = step, steps, time.monotonic()

    def left(self, step: int) -> str:
        """Time left at the mean pace up to now, in words."""
        seconds = (time.monotonic() - self.begun) / max(1, step - self.first) * (self.steps - step)
        return f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"


def warm_cosine(warmup: int, steps: int) -> Callable[[int], float]:
    """Factor of the learning rate: linear from 1 / warmup to 1, then half a cosine to 0."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    return factor
