"""The one client runtime: carries out a client's work or a piece of evaluation, in whatever process it lives."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedloom.core import (
    Batches,
    ClientId,
    ConfigError,
    Context,
    FedloomError,
    Method,
    Payload,
    PayloadError,
    RunError,
    Update,
)
from fedloom.core.batches import Inputs
from fedloom.core.errors import origin
from fedloom.core.payload import check_structure, not_finite
from fedloom.core.seeds import seeded
from fedloom.engine.experiment import Experiment
from fedloom.engine.spool import Ref
from fedloom.engine.store import ClientStore
from fedloom.evaluate.measures import Sums, checked, summed
from fedloom.evaluate.predict import Counts, count_correct

CHUNK = 1000  # test examples per piece of evaluation: the same whatever the number of workers
BATCH = 250  # examples per forward of an evaluation


class Work(NamedTuple):
    """Instruction to a client. start: version of its state to begin from; version: name of the one it leaves."""

    client: ClientId
    stage: int
    round: int | None
    exchange: str
    start: str | None
    version: str
    size: int


class Probe(NamedTuple):
    """Instruction to evaluate examples [start, stop) of a task, of all its domains or of one.

    client None is the global view.
    """

    client: ClientId | None
    stage: int
    task: int
    start: int
    stop: int
    state: str | None
    size: int
    domain: int | None = None


class Done(NamedTuple):
    """A client's answer. stored: it left a new state under the instruction's version. visits: examples it trained on,
    passes: those it looked at without training, each time counted. spoilt: "field/name" of the first tensor of its new
    state that is not finite, in which case that is not stored."""

    client: ClientId
    ref: Ref
    weight: float
    metrics: Mapping[str, float]
    stored: bool
    seconds: float
    visits: int = 0
    passes: int = 0
    spoilt: str | None = None


class Failed(NamedTuple):
    """A client, or a piece of evaluation, that raised. trace is for the log. fatal: no fault of the client.

    lost: nothing was computed, or it did not arrive: the method is not to blame.
    """

    client: ClientId | None
    reason: str
    trace: str
    fatal: bool = False
    lost: bool = False


class Measured(NamedTuple):
    """Counts of a probe, and of the global view what its network measures itself."""

    client: ClientId | None
    task: int
    counts: Counts
    domain: int | None = None
    measures: Sums = {}


Instruction = Work | Probe
Answer = Done | Failed | Measured


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use that many intra-op threads: their number changes bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Outbox(Protocol):
    """Where uploads are put: a spool file, or a message that is being made."""

    def write(self, payload: Payload) -> Ref:
        """Take a payload; the answer says where it is and whether it is finite."""
        ...


class Runtime:
    """A process's network, its outbox and its access to client states. log: where tracebacks go."""

    def __init__(self, experiment: Experiment, store: ClientStore, outbox: Outbox, log: Path):
        self.experiment, self.net = experiment, experiment.net()
        self.exchanges = experiment.method.exchanges()
        if self.exchanges and not self.net.trainable:
            raise ConfigError(
                "the network has no trainable parameter, so there is nothing to train; take another model"
            )
        self.store, self.outbox, self.log = store, outbox, log

    def context(
        self, stage: int, round: int | None = None, exchange: str = "train", client: ClientId | None = None
    ) -> Context:
        """The context of one piece of work."""
        return self.experiment.context(self.net, stage, round=round, exchange=exchange, client=client)

    def carry_out(self, instruction: Instruction, down: Payload) -> Answer:
        """Do one piece of work; whatever it raises becomes `Failed`."""
        try:
            if isinstance(instruction, Probe):
                return self._measure(instruction, down)
            return self._work(instruction, down)
        except RunError as error:  # a full disk, say: the run cannot go on, whoever was at work
            return Failed(instruction.client, str(error), traceback.format_exc(), fatal=True)
        except (Exception, SystemExit) as error:  # a method's sys.exit() must not pass for a finished run
            return Failed(instruction.client, _reason(error, self.log), traceback.format_exc())

    def _work(self, todo: Work, down: Payload) -> Done:
        began = time.perf_counter()
        ctx = self.context(todo.stage, todo.round, todo.exchange, todo.client)
        data = self.experiment.plan.train(todo.client, todo.stage, todo.round, todo.exchange)
        with seeded(self.experiment.seed, "work", todo.stage, todo.round, todo.exchange, todo.client):
            state = self._state(todo.client, todo.start, ctx)
            update = self.exchanges[todo.exchange].work(down, state, data, ctx)
        if not isinstance(update, Update):
            raise PayloadError(f"the client's work must return an Update, got {type(update).__name__}")
        check_structure(update.up, "the upload")
        check_structure(update.state, "the client state")
        ref = self.outbox.write(update.up)
        fresh = update.state is not state and bool(update.state or state)
        spoilt = not_finite(update.state) if fresh else None
        if stored := fresh and ref.not_finite is None and spoilt is None:
            self.store.save(todo.client, todo.version, update.state)
        weight = float(data.num_examples if update.weight is None else update.weight)
        metrics = {str(name): float(value) for name, value in update.metrics.items()}
        seconds = time.perf_counter() - began
        return Done(todo.client, ref, weight, metrics, stored, seconds, data.visits.count, data.visits.passes, spoilt)

    def _state(self, client: ClientId, version: str | None, ctx: Context) -> Payload:
        found = self.store.load(client, version)
        return self.experiment.method.init_client(ctx) if found is None else found

    def _measure(self, todo: Probe, down: Payload) -> Measured:
        plan, ctx = self.experiment.plan, self.context(todo.stage, exchange="evaluate", client=todo.client)
        with seeded(self.experiment.seed, "evaluate", todo.stage, todo.client):
            state: Payload = self._state(todo.client, todo.state, ctx) if todo.client is not None else {}
            if todo.client is None:
                state = self.experiment.method.init_client(ctx)
            counts = Counts.zero(plan.num_classes)
            data: Batches = plan.test(todo.task, todo.domain).part(todo.start, todo.stop)
            score = self._scorer(down, state, ctx)
            for batch in data.epoch(batch_size=BATCH, purpose="evaluate", shuffle=False):
                scores = score(batch.x).detach().cpu()
                if scores.shape != (len(batch.y), plan.num_classes):
                    shapes = f"{list(scores.shape)}, expected {[len(batch.y), plan.num_classes]}"
                    raise PayloadError(f"predict returned scores of shape {shapes}")
                counts += count_correct(scores, batch.y, plan.tasks, seen=ctx.stage.seen, num_classes=plan.num_classes)
            measures = self._own_measures(down, state, data, ctx) if todo.client is None else {}
        return Measured(todo.client, todo.task, counts, todo.domain, measures)

    def _scorer(self, down: Payload, state: Payload, ctx: Context) -> Callable[[Inputs], Tensor]:
        """`predict` of this view; where that is the default, the network is bound once for all batches."""
        method = self.experiment.method
        if type(method).predict is Method.predict:
            return method.deployed(down, state, ctx).scores
        return lambda x: method.predict(down, state, x, ctx)

    def _own_measures(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Sums:
        """What the network that a view is served with measures; empty where it has no `measures`."""
        if not hasattr(ctx.net.module, "measures"):  # most have none: nothing is bound a second time
            return {}
        served = deployed(self.experiment.method, down, state, ctx)
        measure = getattr(served.net.module, "measures", None) if served else None
        if served is None or measure is None:
            return {}
        with served.evaluating():
            return summed(
                checked(measure(served.apply(batch.x), batch.y.to(served.net.forward.device)))
                for batch in data.epoch(batch_size=BATCH, purpose="evaluate", shuffle=False)
            )


def deployed(method: Method, view: Payload, state: Payload, ctx: Context) -> Context | None:
    """The context around the network that a view is served with; None where the view is no single network.

    That is so for a method which says nothing of it and whose view lacks parameters, or has some that do not fit.
    """
    if type(method).deployed is not Method.deployed:
        return method.deployed(view, state, ctx)
    try:
        return method.deployed(view, state, ctx) if "params" in view else None
    except PayloadError:
        return None


def _reason(error: Exception, log: Path) -> str:
    if "more than 1 value per channel" in str(error):  # torch's words for a batch that has no variance
        return (
            "batch normalisation cannot train on a batch of one example; set partition.min_size and "
            "training.batch_size to 2 or more, or take a model with group normalisation, such as resnet8_gn"
        )
    return blame(error, log)


def blame(error: BaseException, log: Path) -> str:
    """What a method raised, the line that raised it, and where the traceback is."""
    text = f"{type(error).__name__}: {error}"
    line = origin(error, own=not isinstance(error, FedloomError))
    return f"{text} ({line}; traceback in {log})" if line else text
