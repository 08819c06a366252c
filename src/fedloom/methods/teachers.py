"""FedAvg with a teacher: from the second stage on, clients distil the global model of the end of the last stage.

The base of methods that rehearse what the old model knew. The teacher is what the server held before its first merge of
a stage. Until then it is the model that is sent, so it need not travel; a client that takes part later in the stage is
sent it once. It stays with the client until the stage ends (`fedloom.methods.kept`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fedloom.core import Batches, ClientId, Context, Payload, Reply, Update
from fedloom.core.payload import ClassRows
from fedloom.local.terms import Distillation, TeacherLogits
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.kept import KeptFields

MODEL = ("params", "buffers")
TEACHER = KeptFields(("teacher_params", "teacher_buffers"))


def as_teacher(model: Payload) -> Payload:
    """The model's fields under the teacher's names."""
    return dict(zip(TEACHER.names, (model[name] for name in MODEL), strict=True))


@dataclass(frozen=True)
class TaughtFedAvg(FedAvg):
    """Server state: the model, the teacher and who holds it. Client state: the teacher.

    distillation: the term that a teacher adds; with weight 0 nobody is taught, and nothing but the model travels.
    """

    distillation: Distillation = field(default_factory=lambda: Distillation(scope="old", scale=False))

    def class_rows(self, ctx: Context) -> ClassRows:
        """The teacher has the class rows of the parameters."""
        return {**super().class_rows(ctx), **{("teacher_params", name): dim for name, dim in ctx.class_rows.items()}}

    def init_server(self, ctx: Context) -> Payload:
        """The model; it stands in for the teacher as well."""
        model = ctx.init_state()
        return {**model, **as_teacher(model), **TEACHER.nobody(ctx)}

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The model, and the teacher where it is another and the client lacks it; the global view is the model."""
        model = {name: server[name] for name in MODEL}
        if client is None or not TEACHER.current(server, ctx):
            return model
        return {**model, **TEACHER.sent(server, client, ctx)}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train as FedAvg does, with the teacher's term where there is a teacher."""
        if not self._taught(ctx):
            return super().client_update(down, state, data, ctx)
        state = TEACHER.kept({**as_teacher(down), **down}, state, ctx)
        teacher = TeacherLogits(ctx.teacher(*(state[name] for name in TEACHER.names)))
        terms, decisions = (*self.local.terms, self.distillation), (*self.local.decisions, teacher)
        return FedAvg(replace(self.local, terms=terms, decisions=decisions)).client_update(down, state, data, ctx)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """FedAvg's merge; the first one of a stage makes the model from before it the teacher."""
        new = super().server_update(server, replies, ctx)
        if not self._taught(ctx):
            return new
        teacher = {} if TEACHER.current(server, ctx) else as_teacher(server)
        return {**new, **teacher, **TEACHER.marked(server, replies, ctx)}

    def _taught(self, ctx: Context) -> bool:
        return bool(ctx.stage.old) and self.distillation.weight > 0
