"""Which class rows travel at a stage, as both sides find out by themselves."""

from __future__ import annotations

from torch import Tensor

from fedloom.core import ConfigError, Payload
from fedloom.core.payload import canonical_payload, check_structure, digest
from fedloom.core.seeds import seeded
from fedloom.engine.flower.wire import Cut
from fedloom.engine.runtime import Runtime, blame


def initial_rows(runtime: Runtime) -> dict[str, dict[str, Tensor]]:
    """The server's tensors with class rows before the first round; `ConfigError` when the method cannot start."""
    method, ctx = runtime.experiment.method, runtime.context(0)
    try:
        with seeded(runtime.experiment.seed, "init"):
            server = method.init_server(ctx)
        check_structure(server, "the server state")
        kept: dict[str, dict[str, Tensor]] = {}
        for field, name in method.class_rows(ctx):
            if name in server.get(field, {}):
                kept.setdefault(field, {})[name] = server[field][name].detach().cpu().clone()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"the method cannot start: {blame(error, runtime.log)}") from error
    return kept


class Rows:
    """The initial rows of one process, and the cuts that follow from them."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self.initial: Payload = canonical_payload(initial_rows(runtime))
        self.digest = digest(self.initial)

    def cut(self, stage: int) -> Cut:
        """What travels at a stage: the rows of the classes that the server has seen by then."""
        plan, method = self._runtime.experiment.plan, self._runtime.experiment.method
        return Cut(method.class_rows(self._runtime.context(stage)), plan.stage(stage).seen, self.initial)
