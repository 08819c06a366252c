"""MLflow's own client finds what a run has written."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedloom.trackers import Card, mlflow
from fedloom.trackers.following import Following, how_to_see
from fedloom.trackers.mlflow import SET, Record, _files_of

pytest.importorskip("mlflow", reason="needs the extra 'trackers'")
OPTIONS = {"name": "mlflow", "uri": None, "experiment": "fedloom"}


def the_run(store: Path, experiment: str = "fedloom") -> tuple[Any, Any]:
    """(client, the only run of an experiment); the tracker has allowed stores of files in this process."""
    from mlflow import MlflowClient

    client = MlflowClient(store.absolute().as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return client, run


def test_a_resumed_run_has_every_point_once(resumed: Callable[..., Path], points: Callable[..., Any]) -> None:
    folder = resumed("mlflow")
    assert how_to_see(folder) == f"mlflow ui --backend-store-uri {(folder / 'mlruns').absolute().as_uri()}"
    client, run = the_run(folder / "mlruns")
    keys = [key for key in run.data.metrics if not key.startswith(("summary.", "seconds"))]
    found = [(key, m.step, m.value) for key in keys for m in client.get_metric_history(run.info.run_id, key)]
    expected = {(key.replace("/", "."), step): value for (key, step), value in points(folder).items()}
    assert {(key, step): value for key, step, value in found} == expected and len(found) == len(expected)
    assert run.data.metrics["summary.rounds"] == 4
    assert (run.info.status, run.info.run_name) == ("FINISHED", "fedavg, seed 0")
    assert run.data.params["stream.tasks"] == "2" and len(run.data.params["config_hash"]) == 64
    assert {f.path for f in client.list_artifacts(run.info.run_id)} == {"config.yaml", "summary.json"}


@pytest.mark.parametrize(
    ("store", "told"),
    [
        ("file:///a/b c", "mlflow ui --backend-store-uri 'file:///a/b c'"),
        ("sqlite:////a/b@c.db", "mlflow ui --backend-store-uri sqlite:////a/b@c.db"),
        ("postgresql://me:secret@host:5432/db", "mlflow ui --backend-store-uri postgresql://host:5432/db"),
        ("https://me:secret@host/mlflow", "https://host/mlflow"),
    ],
)
def test_how_a_store_is_seen_tells_no_password(store: str, told: str) -> None:
    assert mlflow._shown_by(store) == told


def test_runs_share_a_store_that_is_named(tmp_path: Path) -> None:
    from fedloom.trackers.mlflow import mlflow

    options = {**OPTIONS, "uri": str(tmp_path / "shared"), "experiment": "one"}
    ends = {}
    for title, how in (("a", "stopped"), ("b", "failed")):
        tracker = mlflow(Card(options, tmp_path / title, title, {"data": {"name": "x" * 900}, "seed": None}, "abc"))
        tracker.log({"accuracy/domains/a:b (c)": 0.5}, 0)
        tracker.close(how)
        ends[tracker.record] = (title, how)
    client = tracker.client
    runs = client.search_runs([client.get_experiment_by_name("one").experiment_id])
    assert {run.info.run_id: run.info.run_name for run in runs} == {k: title for k, (title, _) in ends.items()}
    assert {run.info.run_name: run.info.status for run in runs} == {"a": "KILLED", "b": "FAILED"}
    assert all(run.data.metrics == {"accuracy.domains.a_b _c_": 0.5} for run in runs)
    assert runs[0].data.params == {"config_hash": "abc", "data.name": "x" * 500, "seed": "null"}


def test_more_values_than_a_request_takes(tmp_path: Path) -> None:
    from fedloom.trackers.mlflow import mlflow

    tracker = mlflow(Card(OPTIONS, tmp_path, "title", {f"k{k}": k for k in range(250)}, "abc"))
    tracker.log({f"accuracy/tasks/{k}": k / 1500 for k in range(1500)}, 0)
    tracker.close("finished")
    _, run = the_run(tmp_path / "mlruns")
    assert len(run.data.params) == 251 and len(run.data.metrics) == 1500


def test_the_end_is_at_the_step_that_it_is_told(tmp_path: Path) -> None:
    from fedloom.trackers.mlflow import mlflow

    first = mlflow(Card(OPTIONS, tmp_path, "title", {}, "abc"))
    again = mlflow(Card(OPTIONS, tmp_path, "title", {}, "abc", first.record))
    again.finish({"summary/rounds": 4.0}, 7, [], [])
    client, run = the_run(tmp_path / "mlruns")
    assert [m.step for m in client.get_metric_history(run.info.run_id, "summary.rounds")] == [7]


class Failing:
    """A client whose requests end with an error from the given one on."""

    def __init__(self, at: int):
        self.at, self.asked = at, []

    def __getattr__(self, name: str) -> Callable[..., None]:
        def request(*values: object, **more: object) -> None:
            self.asked.append(name)
            if len(self.asked) > self.at:
                raise ConnectionError("nobody answers")

        return request


@pytest.mark.parametrize("at", range(5))
def test_no_request_follows_one_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    client = Failing(at)
    monkeypatch.setattr("fedloom.trackers.following.begin", lambda card: Record(client, "id", "see"))
    assert len(followed(tmp_path)) == 1
    whole = ["log_batch", "log_batch", "log_batch", "log_artifact", "set_terminated"]
    assert client.asked == whole[: at + 1]


def followed(folder: Path, **options: str) -> list[str]:
    """What is told of a tracker that sees a whole run with two rows and a file."""
    (folder / "summary.json").write_text("{}")
    told: list[str] = []
    card = Card({**OPTIONS, **options}, folder, "title", {"seed": 3}, "abc")
    follower = Following(card, tell=told.append, log=lambda text: None, files=["summary.json"])
    follower.open()
    follower.started({"rounds": 2})
    for number in range(2):
        follower.round_done({"stage": 0, "round": number, "scope": "round", "accuracy": 0.5})
    follower.finished({"rounds": 2})
    follower.close("finished")
    return told


@pytest.fixture
def server() -> Iterator[tuple[str, list[int]]]:
    """(address, a number per connection) of a server that hangs up at once."""
    calls: list[int] = []
    listening = socket.create_server(("127.0.0.1", 0))

    def hang_up() -> None:
        with suppress(OSError):  # closed at the end of the test
            while True:
                listening.accept()[0].close()
                calls.append(len(calls))

    thread = threading.Thread(target=hang_up, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}", calls
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join()


@pytest.mark.parametrize(("given", "tries"), [(None, 3), ("1", 2)])
def test_a_server_that_does_not_answer_is_given_up_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Any, given: str | None, tries: int
) -> None:
    uri, calls = server
    for variable in SET:
        monkeypatch.delenv(variable, raising=False)
    for name in ("BACKOFF_FACTOR", "BACKOFF_JITTER"):  # no waiting between tries
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", "0")
    if given is not None:
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", given)
    told = followed(tmp_path, uri=uri)
    assert len(calls) == tries and len(told) == 1, "one request with its retries"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "10"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # between MLflow and SQLAlchemy
def test_a_database_keeps_files_beside_it_and_not_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sqlalchemy")
    for name in ("work", "run", "base"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    base = tmp_path / "base" / "mlflow.db"
    assert not followed(tmp_path / "run", uri=f"sqlite:///{base}") and not list((tmp_path / "work").iterdir())
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"summary.json", "tracker.json"}
    assert len(list((tmp_path / "base" / "mlartifacts").rglob("summary.json"))) == 1


@pytest.mark.parametrize(
    ("store", "place"),
    [
        ("sqlite:///a/b.db", "work/a/mlartifacts"),
        ("sqlite+pysqlite:///b.db?timeout=3", "work/mlartifacts"),
        ("sqlite://", "run/mlartifacts"),
        ("postgresql://me:secret@host:5432/name", "run/mlartifacts"),
        ("mysql+pymysql://host/name", "run/mlartifacts"),
        ("https://host/path", None),
        ("file:///x", None),
        ("databricks", None),
        ("databricks://profile", None),
    ],
)
def test_only_databases_are_told_where_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str, place: str | None
) -> None:
    pytest.importorskip("sqlalchemy")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert _files_of(store, tmp_path / "run") == (None if place is None else (tmp_path / place).as_uri())
