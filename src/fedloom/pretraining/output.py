"""The folder of a pretrained model: weights, configuration, report, and the checkpoint while it is being made."""

from __future__ import annotations

import io
import pickle
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom import __version__
from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.engine.files import write_bytes, write_json
from fedloom.environment import installed
from fedloom.models.clip.checkpoint import CONFIG, Design
from fedloom.pretraining.recipe import Recipe
from fedloom.pretraining.text import TEACHER
from fedloom.pretraining.words import SENTENCE, TEMPLATES

WEIGHTS, REPORT, README = "model.safetensors", "report.json", "README.md"
FILES = (WEIGHTS, CONFIG, README, REPORT)  # in the order in which they are written
CHECKPOINT = "checkpoint.pt"
PACKAGES = ("torch", "open_clip_torch", "transformers", TEACHER)
_IMAGENET = "its pictures are ImageNet's, under ImageNet's terms: non-commercial research and education"
LICENCES = {"local/tiny-imagenet-32": _IMAGENET, "zh-plus/tiny-imagenet": _IMAGENET}


def checkpoint(folder: Path, recipe: Recipe, force: bool) -> dict[str, Any] | None:
    """What an interrupted training left in the folder, None where one may begin.

    Raises `ConfigError` for a folder that is no folder, holds other files, a finished model (unless `force`), or the
    checkpoint of another recipe; `CheckpointError` for a damaged one.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out '{folder}' is a file; name a folder")
    found = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    other = next((name for name in found if name not in (*FILES, CHECKPOINT) and not name.startswith(".")), None)
    if other is not None:
        raise ConfigError(f"--out '{folder}' holds other files, such as '{other}'; name a folder of its own")
    if force or not found:
        return None
    if CHECKPOINT in found:
        return _read(folder / CHECKPOINT, recipe)
    if done := [name for name in found if name in FILES]:
        raise ConfigError(
            f"--out '{folder}' holds a finished model ({done[0]}); name another folder, or make it anew with --force"
        )
    return None


def _read(path: Path, recipe: Recipe) -> dict[str, Any]:
    try:
        left: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        before, now = _flat(left["recipe"]), _flat(recipe.as_dict())
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"'{path}' is damaged and cannot be continued; begin anew with --force") from error
    where = {"data.root"}  # the same data may have moved; their content is compared
    changed = next((key for key in {**before, **now} if key not in where and before.get(key) != now.get(key)), None)
    if changed is not None:
        raise ConfigError(
            f"'{path}' was made with {changed} {before.get(changed)}, now it is {now.get(changed)}; set it back, begin "
            "anew with --force, or name another folder with --out"
        )
    return left


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def save_checkpoint(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the checkpoint over the last one. content: tensors and plain values."""
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    write_bytes(folder / CHECKPOINT, buffer.getvalue())


def clear(folder: Path) -> None:
    """Take away what an earlier training left."""
    for name in (*FILES, CHECKPOINT):
        (folder / name).unlink(missing_ok=True)


def stored(model: Any) -> dict[str, Tensor]:
    """The values that are written: floating point in fp16, counters as they are; on the CPU."""
    state = model.state_dict().items()
    return {name: (v.half() if v.is_floating_point() else v).cpu().contiguous() for name, v in state}


def report(recipe: Recipe, parameters: int, stages: Any, zeroshot: Any, machine: Mapping[str, Any]) -> dict[str, Any]:
    """What `report.json` holds. stages: name -> `Trainer.told`; zeroshot: see `run.zero_shot`."""
    versions = {"fedloom": __version__, "python": platform.python_version()}
    return {
        "parameters": parameters,
        "zeroshot": zeroshot,
        "one_template": SENTENCE,
        "templates": list(TEMPLATES),
        "stages": stages,
        "machine": dict(machine),
        "versions": versions | {name: installed(name) for name in PACKAGES},
        "recipe": recipe.as_dict(),
    }


def write(folder: Path, name: str, weights: Mapping[str, Tensor], told: Mapping[str, Any]) -> None:
    """Write the four files; the report comes last, and with it the checkpoint goes.

    name: of the recipe. weights: see `stored`. told: see `report`.
    """
    from safetensors.torch import save

    write_bytes(folder / WEIGHTS, save(dict(weights), metadata={"format": "pt"}))
    architecture = {key: value for key, value in told["recipe"]["model"].items() if value is not None}
    write_json(folder / CONFIG, Design(architecture).config())
    write_bytes(folder / README, _readme(name, told).encode())
    write_json(folder / REPORT, told)
    (folder / CHECKPOINT).unlink(missing_ok=True)


def _readme(name: str, told: Mapping[str, Any]) -> str:
    data = told["recipe"]["data"]["name"]
    rows = [
        f"| `{key}` | {row['classes']} | {row['pictures']:,} | {row['one_template']:.2%} | {row['templates']:.2%} | "
        f"{row['chance']:.2%} |"
        for key, row in told["zeroshot"].items()
    ]
    head = ("data", "classes", "pictures", "one template", "all templates", "chance")
    table = [f"| {' | '.join(head)} |", "| --- | --- | --- | --- | --- | --- |", *rows, ""]
    minutes, busy = (sum(stage[key] for stage in told["stages"].values()) / 60 for key in ("seconds", "cpu_seconds"))
    return "\n".join(
        [
            f"# A CLIP of {told['parameters'] / 1e6:.1f} M parameters",
            "",
            f"Made by `fedloom pretrain-clip {name}` in {minutes:.0f} minutes ({busy:.0f} processor minutes) from the "
            f"pictures of `{data}`. Weights in fp16, configuration in open_clip's form (`stem` is FedLoom's own), "
            f"every setting and number in `{REPORT}`.",
            "",
            *(["Zero-shot accuracy on test pictures, with these weights:", "", *table] if rows else []),
            "Where it comes from, and under which terms:",
            "",
            f"- `{data}`: {LICENCES.get(data, 'the terms of these pictures are for their user to look up')}.",
            "- The text tower learnt from the sentence embeddings of all-MiniLM-L6-v2 (Apache-2.0).",
            "- The tokeniser's vocabulary and ImageNet's class names are those of open_clip (MIT).",
            "",
        ]
    )
