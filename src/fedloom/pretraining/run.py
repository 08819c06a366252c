"""Both stages one after the other, kept up to date in a folder from which they go on after an interruption."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError, Interrupted
from fedloom.environment import processor
from fedloom.models.clip.checkpoint import OPENAI
from fedloom.models.clip.compact import build_clip
from fedloom.pretraining import output
from fedloom.pretraining.images import Normalize, accuracy, class_texts, train_images
from fedloom.pretraining.machine import has_bf16
from fedloom.pretraining.pictures import Pictures, read
from fedloom.pretraining.recipe import Recipe
from fedloom.pretraining.text import train_text
from fedloom.pretraining.training import Tell, Trainer, Watch
from fedloom.pretraining.words import SENTENCE, phrases

PERIOD = 120.0  # seconds between two checkpoints
STAGES = ("text", "images")


def pretrain(
    name: str, recipe: Recipe, folder: Path, *, place: torch.device, force: bool = False, tell: Tell = lambda line: None
) -> dict[str, Any]:
    """Train, evaluate and write the folder; what an interrupted call left there is continued with the same bits.

    name: of the recipe. force: begin anew where the folder holds a model or a checkpoint. tell: takes lines of
    progress. Returns the content of `report.json`. Raises `ConfigError`, `DataError` and `CheckpointError` for what
    cannot be begun, `RunError` for a loss that is not finite, `Interrupted` for Ctrl-C.
    """
    left = output.checkpoint(folder, recipe, force)
    pictures, tests = read(recipe)
    if left is not None and left["data"] != pictures.fingerprint:
        raise ConfigError(f"the pictures of '{pictures.name}' are not those that '{folder}' began with; use --force")
    model = initial(recipe).to(place)
    if left is None:
        output.clear(folder)
    try:
        stages = _train(model, recipe, pictures, left, folder, tell)
        weights = output.stored(model)
        zeroshot = zero_shot(model, weights, tests)
    except KeyboardInterrupt:
        if not (folder / output.CHECKPOINT).exists():
            raise Interrupted("interrupted before the first checkpoint; the same command begins anew") from None
        raise Interrupted(
            f"interrupted; the same command{' without --force' if force else ''} goes on from the last checkpoint in "
            f"'{folder}'"
        ) from None
    parameters = sum(p.numel() for p in model.parameters())
    told = output.report(recipe, parameters, stages, zeroshot, _machine(place))
    output.write(folder, name, weights, told)
    return told


def initial(recipe: Recipe) -> Any:
    """The model with the values that the seed gives it. Raises `ConfigError` for a stem that does not fit."""
    with torch.random.fork_rng([]):
        torch.manual_seed(recipe.seed)
        return build_clip(recipe.as_dict()["model"])


def _train(
    model: Any, recipe: Recipe, pictures: Pictures, left: Mapping[str, Any] | None, folder: Path, tell: Tell
) -> dict[str, Any]:
    """Stage -> what its trainer tells."""
    x, y, words = pictures.x, pictures.y, pictures.words
    train: dict[str, Callable[..., Trainer]] = {
        "text": partial(train_text, model, phrases(words, recipe.text.words), recipe.text, recipe.seed),
        "images": partial(train_images, model, x, y, words, Normalize(*OPENAI), recipe.images, recipe.seed),
    }
    done: dict[str, Any] = {}
    if left is not None:
        done = dict(left["done"])
        model.load_state_dict(left["model"])
    state = left["trainer"] if left is not None else None
    base = {"recipe": recipe.as_dict(), "data": pictures.fingerprint}
    for stage in STAGES[len(done) :]:
        if state is not None:
            tell(f"{stage}: goes on from step {state['step']}")
        save = _Keeper(folder, {**base, "done": dict(done)}, model)
        trainer = train[stage](Watch(tell, save, state))
        done[stage] = trainer.told()
        state = None
        output.save_checkpoint(folder, {**base, "done": done, "model": model.state_dict(), "trainer": None})
    done["images"]["pictures"] = len(x)
    return done


class _Keeper:
    """Writes a checkpoint when the last one is old enough."""

    def __init__(self, folder: Path, base: Mapping[str, Any], model: Any):
        self.folder, self.base, self.model, self.last = folder, base, model, time.monotonic()

    def __call__(self, trainer: Trainer) -> None:
        if time.monotonic() - self.last >= PERIOD:
            content = {**self.base, "model": self.model.state_dict(), "trainer": trainer.state()}
            output.save_checkpoint(self.folder, content)
            self.last = time.monotonic()


def zero_shot(model: Any, weights: Mapping[str, Tensor], tests: Sequence[Pictures]) -> dict[str, Any]:
    """Data set -> classes, pictures, chance and the accuracies by one template and by all, of the stored weights."""
    model.load_state_dict(
        {key: value.float() if value.is_floating_point() else value for key, value in weights.items()}
    )
    model.eval()
    normalize = Normalize(*OPENAI)
    return {
        test.name: {
            "classes": len(test.words),
            "pictures": len(test.x),
            "chance": 1 / len(test.words),
            "one_template": accuracy(model, test.x, test.y, class_texts(model, test.words, [SENTENCE]), normalize),
            "templates": accuracy(model, test.x, test.y, class_texts(model, test.words), normalize),
        }
        for test in tests
    }


def _machine(place: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else processor()
    return {"device": str(place), "name": name, "threads": torch.get_num_threads(), "bf16": has_bf16(place)}
