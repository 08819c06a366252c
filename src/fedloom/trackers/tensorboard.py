"""TensorBoard: event files in the folder `tensorboard` of the run folder; see them with `tensorboard --logdir runs`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedloom.engine.files import yaml_text
from fedloom.trackers import Card

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


def tensorboard(card: Card) -> Events:
    """Begin a file of events beside those of the parts of the run before; a new record opens with the configuration."""
    from torch.utils.tensorboard import SummaryWriter

    events = Events(SummaryWriter(card.folder / FOLDER), f"tensorboard --logdir {shlex.quote(str(card.folder))}")
    if card.record is None:
        text = f"configuration {card.config_hash}\n\n{yaml_text(dict(card.config))}"
        events.text("config", text)
    return events


class Events:
    """Writes scalars, and at the end pictures and where the report lies."""

    record, lasting = FOLDER, True

    def __init__(self, writer: SummaryWriter, see: str):
        self.writer, self.see = writer, see

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One point per value, on disk at once."""
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def text(self, tag: str, text: str) -> None:
        """A text as it is, which TensorBoard would read as Markdown."""
        self.writer.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()))

    def finish(self, values: Mapping[str, float], step: int, pictures: Sequence[Path], files: Sequence[Path]) -> None:
        """The summary and the pictures at the step, and where the files lie."""
        from PIL import Image

        self.log(values, step)
        for path in pictures:
            with Image.open(path) as picture:
                pixels = np.asarray(picture.convert("RGB"))
            self.writer.add_image(f"pictures/{path.stem}", pixels, step, dataformats="HWC")
        self.text("files", "\n".join(map(str, files)))

    def close(self, how: str) -> None:
        """Close the file."""
        self.writer.close()
