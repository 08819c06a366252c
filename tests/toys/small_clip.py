"""CLIPs of open_clip and transformers small enough to build in a test, on pictures of 32x32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from fedloom.core.seeds import seeded
from fedloom.models.clip.compact import build_clip

ARCHITECTURE: dict[str, Any] = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "layers": 2, "width": 32, "head_width": 16},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 24, "heads": 2, "layers": 2},
}
STEM = {"stem": {"widths": [8, 16, 24, 32], "blocks": [1, 0, 1]}}
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def architecture(*, quick_gelu: bool = False, stem: bool = False, **vision: Any) -> dict[str, Any]:
    """A fresh copy with changes to the image tower."""
    found = json.loads(json.dumps({**ARCHITECTURE, **(STEM if stem else {})}))
    found["vision_cfg"] |= vision
    return found | ({"quick_gelu": True} if quick_gelu else {})


def small_model(seed: int = 0, **changes: Any) -> nn.Module:
    """The model with random values."""
    with seeded(seed, "small-clip"):
        return build_clip(architecture(**changes)).eval()


def write_folder(
    folder: Path, seed: int = 0, *, file: str = "model.safetensors", half: bool = True, **changes: Any
) -> Any:
    """Write a folder as open_clip does, in fp16; the model as it comes back, in fp32."""
    model = small_model(seed, **changes)
    model = (model.half() if half else model).float()
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: (t.half() if half and t.is_floating_point() else t) for key, t in model.state_dict().items()}
    save_file(state, folder / file)
    config = {"model_cfg": architecture(**changes), "preprocess_cfg": {"mean": MEAN, "std": STD}}
    (folder / "open_clip_config.json").write_text(json.dumps(config), encoding="utf-8")
    return model
