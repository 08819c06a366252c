"""The trips of every stage, asked of the method once and checked before the first of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fedloom.core import ConfigError, FedloomError, Trip
from fedloom.core.errors import origin, unknown
from fedloom.engine.experiment import Experiment


def agenda(experiment: Experiment, exchanges: Collection[str]) -> list[list[Trip]]:
    """Trips per stage; `ConfigError` for a plan that raises or names what does not exist.

    A method without exchanges has none to plan; one that names some must plan a trip.
    """
    plan = experiment.plan
    trips: list[list[Trip]] = []
    for index in range(plan.num_stages):
        try:
            trips.append(list(experiment.method.plan(plan.stage(index))))
        except FedloomError:
            raise
        except Exception as error:
            where = f"{type(error).__name__}: {error} ({origin(error)})"
            raise ConfigError(f"the method's plan of stage {index} failed: {where}") from error
        for trip in trips[-1]:
            _check(trip, index, exchanges)
    if exchanges and not any(trips):
        raise ConfigError("the method plans no trip in any stage, so there is nothing to do")
    return trips


def _check(trip: Any, stage: int, exchanges: Collection[str]) -> None:
    if not isinstance(trip, Trip):
        raise ConfigError(f"the method's plan of stage {stage} must yield Trips, got {type(trip).__name__}")
    if trip.exchange not in exchanges:
        raise ConfigError(f"the method's plan of stage {stage}: {unknown('exchange', trip.exchange, exchanges)}")
    if trip.who not in ("cohort", "all"):
        raise ConfigError(f"the method's plan of stage {stage}: who must be cohort or all, got {trip.who!r}")
    if trip.round is not None and not (isinstance(trip.round, int) and trip.round >= 0):
        raise ConfigError(f"the method's plan of stage {stage}: round must be None or from 0 up, got {trip.round!r}")
