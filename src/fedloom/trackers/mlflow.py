"""MLflow: a file store in the folder `mlruns` of the run folder, or wherever `uri` says."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.trackers import Card

BATCH = 100  # entries of a request: what MLflow takes of parameters
LONGEST = 500  # characters of a parameter's value; config.yaml, which is kept too, has all
SET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
ENDS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


def mlflow(card: Card) -> Record:
    """Begin a run in the experiment, or continue that with the id `card.record`.

    Sets variables of the environment that are not set, for the rest of the process: MLflow sends no telemetry, and
    gives up a server that does not answer within seconds instead of minutes, for the run waits. A database keeps files
    beside itself where it is a file, and else in the run folder of the experiment's first run.
    """
    for variable, value in SET.items():
        os.environ.setdefault(variable, value)
    uri = card.options["uri"]
    where = str(card.folder / "mlruns") if uri is None else uri
    if ":" not in where:  # a path; MLflow wants to be told that a store of files will do
        where = Path(where).expanduser().absolute().as_uri()
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(where)
    see = _shown_by(where)
    if card.record is not None:
        client.update_run(card.record, status="RUNNING")
        return Record(client, card.record, see)
    experiment = _experiment(client, card.options["experiment"], _files_of(where, card.folder))
    run = client.create_run(experiment, run_name=card.title)
    record = Record(client, run.info.run_id, see)
    record.describe({"config_hash": card.config_hash, **dict(_leaves(card.config))})
    return record


def _shown_by(store: str) -> str:
    """The address of a server, or the command that shows another store; without user and password."""
    told = re.sub(r"(?<=//)[^/@]*@", "", store)
    return told if told.startswith("http") else f"mlflow ui --backend-store-uri {shlex.quote(told)}"


def _files_of(store: str, folder: Path) -> str | None:
    """Where an experiment in a database keeps files, for MLflow would take the working folder; None for other stores.

    folder: of the run.
    """
    from mlflow.store.db.db_types import DATABASE_ENGINES

    engine = store.partition(":")[0].partition("+")[0]
    if engine not in DATABASE_ENGINES:
        return None
    from sqlalchemy.engine import make_url

    file = make_url(store).database if engine == "sqlite" else None
    return (Path(file).absolute().parent if file else folder.absolute()).joinpath("mlartifacts").as_uri()


def _experiment(client: Any, name: str, files: str | None) -> str:
    """The id of the experiment with that name, which another run may be making right now."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, artifact_location=files))
        except MlflowException as error:
            exists = error.error_code == "RESOURCE_ALREADY_EXISTS"
            if not exists or (found := client.get_experiment_by_name(name)) is None:
                raise
    return str(found.experiment_id)


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value if isinstance(value, str) else json.dumps(value)


class Record:
    """Passes values on to a run of MLflow."""

    lasting = True

    def __init__(self, client: Any, record: str, see: str):
        self.client, self.record, self.see, self.answers = client, record, see, True

    def describe(self, params: Mapping[str, str]) -> None:
        """The configuration as parameters, long values cut."""
        from mlflow.entities import Param

        self._send("params", [Param(_name(key), value[:LONGEST]) for key, value in params.items()])

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One point per value."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._send("metrics", [Metric(_name(key), value, now, step) for key, value in values.items()])

    def finish(self, values: Mapping[str, float], step: int, pictures: Sequence[Path], files: Sequence[Path]) -> None:
        """The summary at the step, pictures and files as artifacts."""
        self.log(values, step)
        for path in (*pictures, *files):
            self._ask(self.client.log_artifact, str(path))

    def close(self, how: str) -> None:
        """Say how the run ended, unless the store has failed."""
        if self.answers:
            self._ask(self.client.set_terminated, ENDS[how])

    def _send(self, kind: str, entries: Sequence[Any]) -> None:
        for start in range(0, len(entries), BATCH):
            self._ask(self.client.log_batch, **{kind: entries[start : start + BATCH]})

    def _ask(self, request: Callable[..., object], *values: Any, **more: Any) -> None:
        """Make a request about the run, and know whether the store still answers."""
        self.answers = False
        request(self.record, *values, **more)
        self.answers = True


def _name(key: str) -> str:
    """A key as MLflow takes it; in a store of files `accuracy` and `accuracy/current` would be a file and a folder."""
    return re.sub(r"[^\w\-. ]", "_", key.replace("/", "."))
