"""How well pictures and class texts of a finished vision-language run meet, beside the frozen CLIP that it began with.

After every stage of which a checkpoint is left, and at the end: recall at 1 between the test pictures of the classes
seen and the texts of these classes, both ways, and the alignment score of `fedloom.models.clip.measures`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedloom.core.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.core import Context, DataPlan, Net, Payload
    from fedloom.engine.checkpoint import Progress
    from fedloom.engine.experiment import Experiment

TEMPLATE = "a photo of a {}."
TRAINED, ZERO_SHOT = "trained", "zero-shot"
BATCH = 250


class View(NamedTuple):
    """What is served after a stage: what travels down, and the client's own state."""

    stage: int
    down: Payload
    state: Payload


@dataclass(frozen=True)
class Alignment:
    """Numbers of one model after one stage, over the test pictures of the classes seen by then.

    model: "trained", or "zero-shot" for the frozen CLIP with a fixed template. image_to_text, text_to_image: recall at
    1, see `fedloom.evaluate.retrieval`. alignment, matched_cosine: see `fedloom.models.clip.measures`. None where there
    is nothing to measure.
    """

    stage: int
    model: str
    classes: int
    pictures: int
    image_to_text: float | None
    text_to_image: float | None
    alignment: float | None
    matched_cosine: float | None


def alignment(folder: str | Path, *, client: int | None = None, template: str = TEMPLATE) -> list[Alignment]:
    """Two rows per stage, of the global view or of that of one client, and of the frozen CLIP.

    Earlier stages have rows where the run kept their checkpoints (`checkpoint.keep`). template: of the frozen CLIP's
    texts. Raises `CheckpointError` for a folder without a finished run, and `ConfigError` for a method without CLIP.
    """
    from fedloom.build import experiment_from_dict
    from fedloom.config import read_yaml, resolve
    from fedloom.served import open_view

    served = open_view(Path(folder), client)
    if not served.method.needs_clip:
        raise ConfigError(
            f"'{folder}' is a run of {served.meta['method']}, which has no texts of classes; name the folder of a run "
            "with a vision-language model"
        )
    config = resolve(read_yaml(Path(folder) / "config.yaml"), {"engine": {"device": "auto"}})
    experiment, net = experiment_from_dict(config.as_dict()), served.context.net
    last = View(experiment.plan.num_stages - 1, served.view, served.client_state())
    views = [*kept_views(Path(folder), experiment, net, client), last]
    return list(compared(experiment, net, views, client, template))


def kept_views(folder: Path, experiment: Experiment, net: Net, client: int | None = None) -> Iterator[View]:
    """Views after the stages before the last one whose checkpoint, and state of the client, lie in the folder."""
    from fedloom.engine.files import load_payload
    from fedloom.engine.store import ClientStore

    method, store = experiment.method, ClientStore(folder / "clients")
    for path in sorted((folder / "checkpoints").glob("stage*-trip00000")):
        with suppress(CheckpointError):  # a damaged checkpoint is as good as none
            progress = _progress(path / "meta.json")
            if not 0 < progress.stage < experiment.plan.num_stages:
                continue
            ctx = experiment.context(net, progress.stage - 1, exchange="evaluate", client=client)
            version = None if client is None else progress.versions.get(client)
            down = method.send(load_payload(path / "server.safetensors"), client, ctx)
            state = load_payload(store.path(client, version)) if client is not None and version is not None else None
            yield View(progress.stage - 1, down, method.init_client(ctx) if state is None else state)


def _progress(path: Path) -> Progress:
    from fedloom.engine.checkpoint import Progress

    try:
        return Progress.of(json.loads(path.read_text(encoding="utf-8"))["progress"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path.parent} is damaged ({type(error).__name__}: {error})") from error


def compared(
    experiment: Experiment, net: Net, views: Iterable[View], client: int | None = None, template: str = TEMPLATE
) -> Iterator[Alignment]:
    """Rows of the views and, after each, of the frozen CLIP at the same stage."""
    frozen = _zero_shot(net, template)
    for view in views:
        ctx = experiment.context(net, view.stage, exchange="evaluate", client=client)
        yield measured(TRAINED, experiment.method.deployed(view.down, view.state, ctx), experiment.plan)
        frozen.module.show(ctx.stage.seen)  # type: ignore[operator]  # torch types attributes of modules as tensors
        yield measured(ZERO_SHOT, replace(ctx, net=frozen), experiment.plan)


def _zero_shot(net: Net, template: str) -> Net:
    """The frozen towers of a network, with fixed sentences."""
    from fedloom.core import Net
    from fedloom.models.clip.network import Clip, ClipNetwork
    from fedloom.models.clip.words import fixed

    module: Any = net.module
    clip = Clip(module.towers, module.words, normalize=module.normalize, repeats=module.repeats)
    return Net(lambda: ClipNetwork(clip, fixed(clip.words, template, clip.towers.length)), net.forward)


def measured(name: str, ctx: Context, plan: DataPlan) -> Alignment:
    """Numbers of the bound network over the test pictures that have arrived by the context's stage."""
    from fedloom.evaluate.measures import values
    from fedloom.evaluate.retrieval import retrieval
    from fedloom.models.clip.measures import agreement

    feats, labels, texts, shown = _gallery(ctx, plan)
    known = values(agreement(feats, texts, shown, labels))
    found = retrieval(feats, labels, texts, shown)
    return Alignment(
        stage=ctx.stage.index,
        model=name,
        classes=found.texts,
        pictures=found.pictures,
        image_to_text=found.image_to_text,
        text_to_image=found.text_to_image,
        alignment=known["alignment"],
        matched_cosine=known["matched_cosine"],
    )


def _gallery(ctx: Context, plan: DataPlan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features [n, d] and labels [n] of the pictures, features [C, d] and ids [C] of the classes; on the CPU."""
    import torch

    seen = torch.tensor(ctx.stage.seen, dtype=torch.long)
    out: Any = None
    feats, labels = [], []
    with ctx.evaluating():
        for batch in _pictures(ctx, plan):
            known = torch.isin(batch.y, seen)
            out = ctx.apply(batch.x)
            feats.append(out["feats"].cpu()[known])
            labels.append(batch.y[known])
    if out is None:
        raise ConfigError(f"there are no test pictures of the classes seen by stage {ctx.stage.index}; nothing to rank")
    if out["texts"].dim() != 2:
        raise ConfigError("the method makes other texts for every picture, and retrieval needs one text per class")
    return torch.cat(feats), torch.cat(labels), out["texts"].cpu(), out["shown"].cpu()


def _pictures(ctx: Context, plan: DataPlan) -> Iterator[Any]:
    """Batches of the tasks and domains that have arrived."""
    for task, classes in enumerate(plan.tasks):
        if set(classes) & set(ctx.stage.seen):
            for domain in ctx.stage.seen_domains if plan.domains else (None,):
                yield from plan.test(task, domain).epoch(batch_size=BATCH, purpose="evaluate", shuffle=False)


def as_json(rows: Iterable[Alignment]) -> list[dict[str, Any]]:
    """Rows as plain mappings."""
    return [asdict(row) for row in rows]


def text(rows: Iterable[Alignment]) -> str:
    """A table for a terminal or a file."""
    from fedloom.report.units import NONE, percent

    def cosine(value: float | None) -> str:
        return NONE if value is None else f"{value:.4f}".replace("-", "−")

    head = ("stage", "model", "classes", "pictures", "I2T R@1", "T2I R@1", "alignment", "matched cosine")
    lines = [head] + [
        (
            str(row.stage),
            row.model,
            str(row.classes),
            str(row.pictures),
            percent(row.image_to_text),
            percent(row.text_to_image),
            cosine(row.alignment),
            cosine(row.matched_cosine),
        )
        for row in rows
    ]
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(size) for cell, size in zip(line, wide, strict=True)) for line in lines)
