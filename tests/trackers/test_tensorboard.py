"""TensorBoard's own reader finds what a run has written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedloom.trackers import Card
from fedloom.trackers.following import how_to_see

pytest.importorskip("tensorboard", reason="needs the extra 'trackers'")


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    return found.Reload()


def text(events: Any, tag: str) -> str:
    (event,) = events.Tensors(f"{tag}/text_summary")
    return event.tensor_proto.string_val[0].decode()


@pytest.mark.parametrize("every", [1, 0], ids=["from a checkpoint", "from the start"])
def test_a_resumed_run_has_every_point_once(
    resumed: Callable[..., Path], points: Callable[..., Any], every: int
) -> None:
    folder = resumed("tensorboard", checkpoint={"every": every})
    assert how_to_see(folder) == f"tensorboard --logdir {folder}"
    events = read(folder / "tensorboard")
    found = [(tag, e.step, e.value) for tag in events.Tags()["scalars"] for e in events.Scalars(tag)]
    rows = {(tag, step): value for tag, step, value in found if not tag.startswith(("summary/", "seconds"))}
    assert rows == pytest.approx(points(folder), rel=1e-6)
    assert len(rows) == len([tag for tag, *_ in found if not tag.startswith(("summary/", "seconds"))])
    assert [e.step for e in events.Scalars("summary/final_accuracy")] == [3]
    assert len(list((folder / "tensorboard").iterdir())) == 2, "a file of events per part"
    assert "tasks: 2" in text(events, "config") and text(events, "config").startswith("    configuration ")


def test_pictures_and_the_place_of_the_report_are_kept(tmp_path: Path) -> None:
    from fedloom.trackers.tensorboard import tensorboard

    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    Image.fromarray(pixels).save(tmp_path / "accuracy.png")
    tracker = tensorboard(Card({"name": "tensorboard"}, tmp_path, "title", {"seed": 3}, "abc"))
    tracker.finish({"summary/final_accuracy": 0.5}, 7, [tmp_path / "accuracy.png"], [tmp_path / "report.html"])
    tracker.close("finished")
    events = read(tmp_path / "tensorboard")
    (image,) = events.Images("pictures/accuracy")
    (tmp_path / "back.png").write_bytes(image.encoded_image_string)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "back.png")), pixels) and image.step == 7
    assert [e.step for e in events.Scalars("summary/final_accuracy")] == [7]
    assert text(events, "files").strip() == str(tmp_path / "report.html")
    assert text(events, "config").split() == ["configuration", "abc", "seed:", "3"]


def test_what_is_logged_is_on_disk_at_once(tmp_path: Path) -> None:
    from fedloom.trackers.tensorboard import tensorboard

    tracker = tensorboard(Card({"name": "tensorboard"}, tmp_path, "title", {}, "abc"))
    tracker.log({"accuracy": 0.25}, 0)
    assert [e.value for e in read(tmp_path / "tensorboard").Scalars("accuracy")] == [0.25]
    tracker.close("stopped")
