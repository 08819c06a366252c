"""facts.json of a run folder: the tables that a method tells about its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from fedloom.core import ClientId, Context, Payload
from fedloom.core.seeds import seeded
from fedloom.engine.checkpoint import Progress
from fedloom.engine.experiment import Experiment
from fedloom.engine.files import load_payload, write_json
from fedloom.engine.folder import RunFolder
from fedloom.engine.store import ClientStore, Versions

FACTS = "facts.json"


class StoredStates(Mapping[ClientId, Payload]):
    """The states that lie in this store, by client id; each is read from disk when it is asked for."""

    def __init__(self, store: ClientStore, versions: Versions):
        found = {client: store.path(client, version) for client, version in sorted(versions.items())}
        self._paths = {client: path for client, path in found.items() if path.is_file()}

    def __getitem__(self, client: ClientId) -> Payload:
        return load_payload(self._paths[client])

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def save_facts(
    experiment: Experiment, store: ClientStore, folder: RunFolder, server: Payload, progress: Progress, ctx: Context
) -> None:
    """Write {"tables": [...]} of the method's `Table`s, unless it has none. Raises what the method raises.

    In a federation client states lie on the nodes, so the method is shown none.
    """
    with seeded(experiment.seed, "facts"):
        tables = experiment.method.facts(server, StoredStates(store, progress.versions), ctx)
    if tables:
        write_json(folder.path / FACTS, {"tables": [asdict(table) for table in tables]})
