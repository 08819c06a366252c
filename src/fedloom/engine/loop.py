"""The one loop: stages, trips, cohorts, merging, evaluation, checkpoints. It knows no method by name."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor

from fedloom.core import ClientId, ConfigError, Context, Interrupted, Payload, Reply, RunError, Trip
from fedloom.core.errors import FedloomError, PayloadError
from fedloom.core.payload import canonical, check_finite, check_like, check_structure, nbytes
from fedloom.core.seeds import seeded
from fedloom.engine import serial
from fedloom.engine.agenda import agenda
from fedloom.engine.audience import Audience
from fedloom.engine.checkpoint import Checkpoints, Progress
from fedloom.engine.evaluation import evaluate_stage, own_views
from fedloom.engine.experiment import Experiment, Observer, Options
from fedloom.engine.folder import RunFolder
from fedloom.engine.force import Force, Hire
from fedloom.engine.replies import means, size_of, skeleton
from fedloom.engine.result import conclude
from fedloom.engine.runtime import Answer, Done, Failed, Probe, Work, blame
from fedloom.engine.spool import Reader
from fedloom.engine.store import version_of

Absorb = Callable[[Payload, Sequence[Reply], Context], Payload]


def run(
    experiment: Experiment,
    options: Options,
    folder: RunFolder,
    observers: Sequence[Observer] = (),
    hire: Hire = serial.hire,
) -> dict[str, Any]:
    """Carry out a run from its newest checkpoint, or from the start, and return what it measured.

    hire: finds who carries out the instructions; this process by default.
    Writes metrics.jsonl, accuracy_matrix.csv, facts.json, checkpoints/ and model/ in the folder. Raises `RunError` when
    the run cannot go on, `Interrupted` when the user stopped it; what was committed stays and can be resumed.
    """
    audience = Audience(folder, observers)
    with hire(experiment, options, folder, audience.note) as force:
        return Loop(experiment, options, folder, audience, force).run()


class Loop:
    """The state of a run in progress. Created by `run`."""

    def __init__(
        self,
        experiment: Experiment,
        options: Options,
        folder: RunFolder,
        audience: Audience,
        force: Force,
    ):
        self.experiment, self.options, self.folder, self.force = experiment, options, folder, force
        self.audience, self.reader = audience, Reader()
        self.agenda = agenda(experiment, force.runtime.exchanges)
        self.checkpoints = Checkpoints(folder.path, options.checkpoint_keep, options.config_hash, force.states)
        self.stop = threading.Event()
        self.saved: tuple[int, int] | None = None
        self.told: set[tuple[ClientId | None, str]] = set()

    def run(self) -> dict[str, Any]:
        """Every stage, then the result."""
        self._began = time.perf_counter()
        self._start()
        self._wall_before = self.progress.wall_seconds
        try:
            with _graceful(self.stop):
                for stage in range(self.progress.stage, self.experiment.plan.num_stages):
                    self._stage(stage)
        except Interrupted:
            self._rescue()
            raise
        except Exception:
            with suppress(RunError):  # what ended the run matters more
                self._rescue()
            raise
        self.progress.wall_seconds = self._wall()
        if self.progress.rejected_updates and self.progress.degraded_rounds >= self.progress.rounds:
            self.audience.note(
                "no round has changed the model, because every update was rejected; lower training.optimizer.lr or set "
                "training.clip_norm"
            )
        if self.options.personal:
            self._deliver()
        return conclude(self.experiment, self.force.runtime, self.folder, self.server, self.progress)

    def _deliver(self) -> None:
        """Let clients keep what they can predict with."""
        last, versions = self.experiment.plan.num_stages - 1, self.progress.versions

        def down(client: ClientId | None) -> Payload:
            ctx = self.force.runtime.context(last, exchange="evaluate", client=client)
            return self.experiment.method.send(self.server, client, ctx)

        views = (Probe(k, last, 0, 0, 0, versions.get(k), 0) for k in own_views(self.experiment, self.progress, down))
        self.force.deliver(views, down)

    def _rescue(self) -> None:
        """Checkpoint the last committed round, unless that was done."""
        server, progress = self._committed
        if self.options.checkpoint_every and self.saved != (progress.stage, progress.trip):
            self._checkpoint(server, progress)

    def context(self, stage: int, trip: Trip, client: ClientId | None = None) -> Context:
        """A context in this process."""
        return self.force.runtime.context(stage, trip.round, trip.exchange, client)

    def _start(self) -> None:
        found = self.checkpoints.load(self.audience.note)
        if found is None:
            self.force.states.clear()
            self.server, self.progress = self._initial(), Progress()
        else:
            self.server, self.progress = found
            self.saved = (self.progress.stage, self.progress.trip)
        self.folder.rewind(self.progress.metrics_size)
        self._committed = self.server, _copy(self.progress)
        info = {
            "stages": self.experiment.plan.num_stages,
            "rounds": self.experiment.plan.rounds,
            "clients": self.experiment.plan.num_clients,
            "workers": self.options.workers,
            "resumed_from": self._position() if self.saved else None,
        }
        self.audience.tell("started", info)

    def _initial(self) -> Payload:
        """The server's state before the first round; what is wrong with it is wrong with the method."""
        ctx = self.context(0, Trip())
        try:
            with seeded(self.experiment.seed, "init"):
                server = self.experiment.method.init_server(ctx)
            check_structure(server, "the server state")
            check_finite(server)
            nbytes(server, self.experiment.method.class_rows(ctx), ctx.stage.seen)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(f"the method cannot start: {blame(error, self.folder.path / 'log.txt')}") from error
        return _fresh(server, self.reader)

    def _position(self) -> str:
        """Where the run goes on, counted as everywhere on disk."""
        stage, plan = self.progress.stage, self.experiment.plan
        if stage >= plan.num_stages:
            return "the end"
        trip = self.agenda[stage][self.progress.trip] if self.agenda[stage] else Trip()
        named = [f"stage {stage}"] + ([] if trip.round is None else [f"round {trip.round}"])
        return ", ".join(named + ([] if trip.exchange == "train" else [f"exchange '{trip.exchange}'"]))

    def _stage(self, stage: int) -> None:
        trips = self.agenda[stage]
        for k in range(self.progress.trip, len(trips)):
            row = self._trip(stage, k, trips[k])
            last, every = k + 1 == len(trips), self.options.evaluate_every
            if not last and isinstance(every, int) and trips[k].round is not None and (trips[k].round + 1) % every == 0:
                found = self._evaluate(stage, final=False)
                beside = ("accuracy", "accuracy/domains", "measures")
                row |= {key: found[key] for key in beside if found.get(key) is not None}
            self._record(row, "round_done")
            if not last:
                self._commit(stage, k + 1)
        self._record(self._evaluate(stage, final=True), "stage_done")
        self._commit(stage + 1, 0)

    def _trip(self, stage: int, k: int, trip: Trip) -> dict[str, Any]:
        """Make one trip: move the server state on, and return the row that tells of it."""
        began, progress = time.perf_counter(), self.progress
        exchange = self.force.runtime.exchanges[trip.exchange]
        work = [self._work(stage, k, trip, client) for client in self.experiment.draw(stage, trip.round, trip.who)]
        rows = self.experiment.method.class_rows(self.context(stage, trip))
        seen, sent = self.experiment.plan.stage(stage).seen, dict[ClientId | None, int]()

        def down(client: ClientId | None) -> Payload:
            payload = exchange.send(self.server, client, self.context(stage, trip, client))
            sent[client] = nbytes(payload, rows, seen)
            return payload

        answers = self._answers(work, down, began)
        failures = [answer for answer in answers if isinstance(answer, Failed)]
        done = sorted((answer for answer in answers if isinstance(answer, Done)), key=lambda answer: answer.client)
        self._report(failures, stage, trip, len(work))
        accepted = [answer for answer in done if self._acceptable(answer, stage, trip)]
        versions = {item.client: item.version for item in work}
        up = sum(size_of(answer.ref, rows, len(seen)) for answer in done)
        gone = sum(sent.values())
        merged = self._absorb(accepted, exchange.absorb, stage, trip)
        self.reader.forget()
        progress.versions |= {a.client: versions[a.client] for a in accepted if a.stored}
        progress.served = sorted({*progress.served, *(answer.client for answer in accepted)})
        visits, passes = sum(answer.visits for answer in done), sum(answer.passes for answer in done)
        row = {"stage": stage, "round": trip.round, "exchange": trip.exchange, "scope": "round", "clients": len(work)}
        row |= {"failed": len(failures), "rejected": len(done) - len(accepted), "degraded": not merged}
        row |= {"bytes_up": up, "bytes_down": gone, "sample_visits": visits, "pass_visits": passes}
        row["seconds"] = time.perf_counter() - began
        _count(progress, row)
        return row | means(accepted)

    def _work(self, stage: int, k: int, trip: Trip, client: ClientId) -> Work:
        version = version_of(stage, k, trip.exchange)
        size = self.experiment.plan.size(client, stage)
        return Work(client, stage, trip.round, trip.exchange, self.progress.versions.get(client), version, size)

    def _answers(self, work: Sequence[Work], down: Callable[[ClientId | None], Payload], began: float) -> list[Answer]:
        deadline = self.options.deadline

        def late() -> bool:
            return deadline is not None and time.perf_counter() - began > deadline

        def progress(done: int, total: int) -> None:
            self.audience.tell("client_done", done, total)

        def ask(some: Sequence[Work], again: bool) -> list[Answer]:
            return self.force.carry_out(some, down, stop=self.stop.is_set, late=late, progress=progress, again=again)

        answers = ask(work, False)
        for _ in range(self.options.retries if self.options.on_client_failure == "retry" else 0):
            failed = [k for k, answer in enumerate(answers) if isinstance(answer, Failed)]
            if not failed or late():
                break
            for k, answer in zip(failed, ask([work[k] for k in failed], True), strict=True):
                answers[k] = answer
        return answers

    def _report(self, failures: Sequence[Failed], stage: int, trip: Trip, asked: int) -> None:
        for failure in failures:
            where, cause = self._where(failure.client, stage, trip), (failure.client, failure.reason)
            tell = self.folder.log if cause in self.told else self.audience.note  # once is enough on the screen
            tell(f"{where} failed: {failure.reason}")
            self.told.add(cause)
            if failure.trace:
                self.folder.log(failure.trace)
            if failure.fatal:
                raise RunError(failure.reason)
        if failures and self.options.on_client_failure == "fail":
            where = self._where(failures[0].client, stage, trip)
            raise RunError(f"{where} failed: {failures[0].reason}; engine.on_client_failure is 'fail'")
        answered = asked - len(failures)
        if asked and answered < self.options.min_replies:
            causes = f"; first cause: {failures[0].reason}" if failures else ""
            raise RunError(
                f"stage {stage}, round {trip.round}, exchange '{trip.exchange}': {answered} of {asked} clients "
                f"replied, engine.min_replies is {self.options.min_replies}{causes}"
            )

    def _acceptable(self, answer: Done, stage: int, trip: Trip) -> bool:
        try:
            if answer.ref.not_finite is not None:
                raise PayloadError(f"'{answer.ref.not_finite}' holds NaN or infinite values")
            if answer.spoilt is not None:
                raise PayloadError(f"'{answer.spoilt}' of the client's state holds NaN or infinite values")
            if not (0 <= answer.weight < float("inf")):
                raise PayloadError(f"the weight must be a finite number of at least 0, got {answer.weight}")
            check_like(skeleton(answer.ref), self.server, self.experiment.method.ragged)
        except PayloadError as error:
            where = self._where(answer.client, stage, trip)
            if self.options.on_client_failure == "fail":
                raise RunError(f"{where}: update rejected: {error}; engine.on_client_failure is 'fail'") from error
            self.audience.note(f"{where}: update rejected: {error}")
            return False
        return True

    def _absorb(self, accepted: Sequence[Done], absorb: Absorb, stage: int, trip: Trip) -> bool:
        """Merge into a new server state; False when there is nothing to merge or the result is not usable."""
        counted = [answer for answer in accepted if answer.weight > 0]
        if not counted:
            self.audience.note(
                f"stage {stage}, round {trip.round}, exchange '{trip.exchange}': no update to merge, state kept"
            )
            return False
        replies = [Reply(a.client, a.weight, self.reader.open(a.ref), a.metrics) for a in counted]
        with seeded(self.experiment.seed, "absorb", stage, trip.round, trip.exchange):
            new = self._merge(absorb, replies, stage, trip)
        check_structure(new, "the server state")
        try:
            check_finite({f: {n: t for n, t in tree.items() if not self._has(t, f, n)} for f, tree in new.items()})
        except PayloadError as error:
            self.audience.note(f"stage {stage}, round {trip.round}: the merged state is unusable, state kept: {error}")
            return False
        self.server = _fresh(new, self.reader)
        return True

    def _merge(self, absorb: Absorb, replies: Sequence[Reply], stage: int, trip: Trip) -> Payload:
        try:
            return absorb(self.server, replies, self.context(stage, trip))
        except FedloomError:
            raise
        except (Exception, SystemExit) as error:
            where = f"stage {stage}, round {trip.round}, exchange '{trip.exchange}'"
            reason = blame(error, self.folder.path / "log.txt")
            raise RunError(f"{where}: the server's update failed: {reason}") from error

    def _has(self, tensor: Tensor, field: str, name: str) -> bool:
        return self.server.get(field, {}).get(name) is tensor

    def _evaluate(self, stage: int, *, final: bool) -> dict[str, Any]:
        personal = self.options.personal and final
        return evaluate_stage(
            self.experiment,
            self.force,
            self.server,
            self.progress,
            stage,
            personal=personal,
            final=final,
            stop=self.stop.is_set,
            lose=None if self.options.on_client_failure == "fail" else self.audience.note,
        )

    def _record(self, row: Mapping[str, Any], event: str) -> None:
        self.folder.append(row)
        self.audience.tell(event, row)

    def _commit(self, stage: int, trip: int) -> None:
        progress = self.progress
        progress.stage, progress.trip = stage, trip
        progress.metrics_size, progress.wall_seconds = self.folder.metrics_size(), self._wall()
        self._committed = self.server, _copy(progress)
        every = self.options.checkpoint_every
        if every and (trip == 0 or progress.rounds % every == 0):
            self._checkpoint(self.server, progress)
        elif not every:
            self.force.states.prune([progress.versions])

    def _checkpoint(self, server: Payload, progress: Progress) -> None:
        self.checkpoints.save(server, progress)
        self.saved = (progress.stage, progress.trip)

    def _wall(self) -> float:
        return self._wall_before + time.perf_counter() - self._began

    def _where(self, client: ClientId, stage: int, trip: Trip) -> str:
        return f"client {client} (stage {stage}, round {trip.round}, exchange '{trip.exchange}')"


def _fresh(state: Payload, reader: Reader) -> dict[str, dict[str, Tensor]]:
    """The state in canonical tensors that no spool file will overwrite."""
    return {
        f: {n: canonical(t.clone() if reader.holds(t) else t) for n, t in tree.items()} for f, tree in state.items()
    }


def _copy(progress: Progress) -> Progress:
    from copy import deepcopy

    return deepcopy(progress)


def _count(progress: Progress, row: Mapping[str, Any]) -> None:
    progress.rounds += row["round"] is not None
    progress.bytes_up += row["bytes_up"]
    progress.bytes_down += row["bytes_down"]
    progress.sample_visits += row["sample_visits"]
    progress.pass_visits += row["pass_visits"]
    progress.rejected_updates += row["rejected"]
    progress.failed_clients += row["failed"]
    progress.degraded_rounds += row["degraded"]
    progress.train_seconds += row["seconds"]


@contextmanager
def _graceful(stop: threading.Event) -> Iterator[None]:
    """First Ctrl-C (or SIGTERM): finish the current client, then stop. The second one stops at once."""

    def ask(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
