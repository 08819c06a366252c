"""Weights & Biases, offline unless asked: files in the folder `wandb` of the run folder, to send with `wandb sync`."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedloom.trackers import Card

CLOSED = ".closed"  # a file in the folder of a part that has ended
CACHE = "WANDB_CACHE_DIR"


def wandb(card: Card) -> Record:
    """Begin a run of W&B, or another part of the one with the id `card.record`.

    Offline each part is a folder of its own with the same id, which `wandb sync` joins; parts of processes that died
    are removed, for their values come again. Of the machine only what the configuration and the run's rows say is
    recorded; nothing that is printed is.
    """
    options = card.options
    if options["mode"] == "offline":
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read once, when its process starts
    import wandb as package

    name = card.record or secrets.token_hex(4)
    for part in (card.folder / "wandb").glob(f"offline-run-*-{name}"):
        if not (part / CLOSED).exists():
            shutil.rmtree(part)
    with _caching(options["mode"], card.folder):
        run = package.init(
            mode=options["mode"],
            project=options["project"],
            entity=options["entity"],
            group=options["group"],
            tags=list(options["tags"]),
            name=card.title,
            id=name,
            resume="allow" if options["mode"] == "online" else None,
            reinit="create_new",
            dir=str(card.folder),
            config={**card.config, "config_hash": card.config_hash},
            settings=package.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
    offline = f"wandb sync {shlex.quote(str(card.folder / 'wandb'))}/offline-run-*-{name}"
    return Record(run, name, offline if options["mode"] == "offline" else str(run.url))


@contextmanager
def _caching(mode: str, folder: Path) -> Iterator[None]:
    """While W&B starts its process, which would keep a log among the user's own: offline it is in the run folder.

    There is one such process for all runs of this process, so the log of all is in the folder of the first. A cache
    that the user names stays.
    """
    if mode != "offline" or CACHE in os.environ:
        yield
        return
    os.environ[CACHE] = str(folder / "wandb" / "cache")
    try:
        yield
    finally:
        del os.environ[CACHE]


class Record:
    """Passes values on to a run of W&B, whose process keeps them to itself for a while."""

    lasting = False

    def __init__(self, run: Any, record: str, see: str):
        self.run, self.record, self.see = run, record, see

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Values of one step come together, however many calls bring them."""
        self.run.log(dict(values), step=step)

    def finish(self, values: Mapping[str, float], step: int, pictures: Sequence[Path], files: Sequence[Path]) -> None:
        """The summary, the pictures as media, the files as files of the run; W&B keeps a config.yaml of its own."""
        import wandb as package

        self.run.summary.update(dict(values))
        self.run.summary.update({f"pictures/{path.stem}": package.Image(str(path)) for path in pictures})
        for path in files:
            if path.name != "config.yaml":
                shutil.copyfile(path, Path(self.run.dir) / path.name)

    def close(self, how: str) -> None:
        """Wait until everything is written."""
        self.run.finish(exit_code=0 if how == "finished" else 1)
        (Path(self.run.dir).parent / CLOSED).touch()
