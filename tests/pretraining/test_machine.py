"""Where training runs, and in what precision."""

from __future__ import annotations

import pytest
import torch

from fedloom.core.errors import ConfigError
from fedloom.pretraining.images import Normalize, train_images
from fedloom.pretraining.machine import device, has_bf16
from fedloom.pretraining.recipe import ImageStage, resolve
from fedloom.pretraining.run import initial
from fedloom.pretraining.training import Watch
from toys.pretraining import TINY


def test_auto_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device("auto") == device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="--device is cuda, but this machine has 0 CUDA devices; use auto or cpu"):
        device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device("auto") == torch.device("cuda") and device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="--device is cuda:2, but this machine has 2 CUDA devices"):
        device("cuda:2")
    for name in ("mps", "cuda:", "CPU", ""):
        with pytest.raises(ConfigError, match="--device must be auto, cpu, cuda or cuda:N"):
            device(name)


@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        ({"avx2": True, "avx512_bf16": False}, False),
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
        ({}, False),
    ],
)
def test_the_image_tower_is_trained_in_bf16_where_the_processor_has_it(
    known: dict[str, bool], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    assert has_bf16(torch.device("cpu")) is wanted
    model, seen = initial(resolve("clip-small", {"data": {"name": "x"}}, TINY)), set()
    model.visual.conv1.register_forward_hook(lambda module, given, found: seen.add(found.dtype))
    x, y = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
    half = Normalize((0.5,) * 3, (0.5,) * 3)
    train_images(model, x, y, ["red", "blue"], half, ImageStage(epochs=1, batch_size=4), 0, Watch())
    assert seen == {torch.bfloat16 if wanted else torch.float32}
    assert all(p.dtype == torch.float32 for p in model.parameters())
