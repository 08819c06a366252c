"""Which engine carries a run out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.core import ConfigError
from fedloom.engine.experiment import Experiment, Observer, Options
from fedloom.engine.folder import RunFolder


def carry_out(
    experiment: Experiment,
    options: Options,
    folder: RunFolder,
    observers: Sequence[Observer],
    card: Mapping[str, Any],
) -> dict[str, Any]:
    """Carry out a run on the engine of its options; see `fedloom.engine.loop.run`.

    card: the configuration (`config`) and the description of the model (`model`) that go with models left on nodes.
    Raises `ConfigError` when the engine is not installed or is not one that runs from here.
    """
    if options.engine == "serial":
        from fedloom.engine.loop import run

        return run(experiment, options, folder, observers)
    if options.runtime == "deployment":
        raise ConfigError(
            "engine.runtime deployment is started through Flower: write the app with `fedloom deploy`, then `flwr run` "
            "it; to continue a run set run.out and run.resume=true, or give `fedloom deploy local-demo` both --out "
            "and --resume"
        )
    from fedloom.engine.flower.compat import require

    require(ray=options.runtime == "simulation")
    if options.runtime == "simulation":
        from fedloom.engine.flower import simulation

        return simulation.run(experiment, options, folder, observers, card)
    from fedloom.engine.flower import inprocess

    return inprocess.run(experiment, options, folder, observers, card)
