"""Which class rows travel at a stage, as both sides find out by themselves."""

from __future__ import annotations

from fedloom.core import Payload
from fedloom.core.payload import canonical_payload, digest
from fedloom.core.seeds import seeded
from fedloom.engine.flower.wire import Cut
from fedloom.engine.runtime import Runtime


def initial_rows(runtime: Runtime) -> dict[str, dict[str, object]]:
    """The server's tensors with class rows before the first round."""
    method, ctx = runtime.experiment.method, runtime.context(0)
    with seeded(runtime.experiment.seed, "init"):
        server = method.init_server(ctx)
    kept: dict[str, dict[str, object]] = {}
    for field, name in method.class_rows(ctx):
        if name in server.get(field, {}):
            kept.setdefault(field, {})[name] = server[field][name].detach().clone()
    return kept


class Rows:
    """The initial rows of one process, and the cuts that follow from them."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self.initial: Payload = canonical_payload(initial_rows(runtime))  # type: ignore[arg-type]
        self.digest = digest(self.initial)

    def cut(self, stage: int) -> Cut:
        """What travels at a stage: the rows of the classes that the server has seen by then."""
        plan, method = self._runtime.experiment.plan, self._runtime.experiment.method
        return Cut(method.class_rows(self._runtime.context(stage)), plan.stage(stage).seen, self.initial)
