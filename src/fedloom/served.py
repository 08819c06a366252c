"""The model that a run left, ready to predict without the data set: the global view, or one client's own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.core.errors import CheckpointError, ConfigError, DataError, PayloadError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedloom.build import Built
    from fedloom.core import Context, Method, Payload
    from fedloom.core.batches import Inputs
    from fedloom.data.text import Text

MODEL = "model"
STORED = ("uint8", "float32", "int32")
WEIGHTS, META, STATE = "model.safetensors", "model.json", "state.safetensors"


@dataclass(frozen=True)
class Served:
    """A method bound to the final global view, or to that of one client.

    state: the client's own, None for the initial one. meta: class_names, input_shape, mean, std, seen, tasks and what
    else `model/model.json` records.
    """

    method: Method
    view: Payload
    context: Context
    meta: Mapping[str, Any]
    state: Payload | None = None

    @property
    def class_names(self) -> list[str]:
        """Names of the classes by id."""
        return list(self.meta["class_names"])

    def scores(self, x: Any, batch_size: int = 250) -> Tensor:
        """Scores [n, classes] of stored inputs (as the data set holds them), or of texts; classes never seen are -inf.

        Texts: a list of str, of a model of questions a list of `fedloom.data.choices.Question`.
        """
        import torch

        x, state = self.inputs(x), self.client_state()
        batches = (self.prepare(part) for part in x.split(batch_size))
        with _fitting():
            return torch.cat([self.method.predict(self.view, state, batch, self.context).cpu() for batch in batches])

    def client_state(self) -> Payload:
        """The client's own state, or the initial one."""
        return self.method.init_client(self.context) if self.state is None else self.state

    def deployed(self) -> Context:
        """The context around the network that is served, with its values and in evaluation mode.

        `ConfigError` where the method has no one network.
        """
        from fedloom.engine.result import deployed

        with _fitting():
            found = deployed(self.method, self.view, self.client_state(), self.context)
        if found is None:
            raise ConfigError("the global view of this method is no single network; use scores() or predict() instead")
        found.net.train(False)
        return found

    @property
    def text(self) -> Text | None:
        """What the texts are that the model reads, None for a model of images or vectors."""
        from fedloom.data.text import Text

        return Text(**self.meta["text"]) if "text" in self.meta else None

    def prepare(self, x: Tensor) -> Inputs:
        """Stored inputs -> model inputs."""
        from fedloom.data.augment import Prepare
        from fedloom.data.text import PrepareText

        if self.text is not None:
            return PrepareText()(x)
        return Prepare(tuple(self.meta["mean"]), tuple(self.meta["std"]))(x)

    def inputs(self, x: Any) -> Tensor:
        """Arrays or tensors as a batch of the run's input shape; `DataError` names both shapes when they differ.

        Texts as `scores` takes them become stored token ids.
        """
        import torch

        if self.text is not None and isinstance(x, list | tuple) and x:
            return _encoded(self.text, x)
        found = x.detach().cpu() if isinstance(x, torch.Tensor) else torch.from_numpy(_array(x))
        want = tuple(self.meta["input_shape"])
        if found.dim() == len(want) and found.dim() == 3 and want[0] == 1 and tuple(found.shape[1:]) == want[1:]:
            found = found[:, None]
        elif len(want) == 3 and found.dim() == 4 and tuple(found.shape[1:]) == (*want[1:], want[0]):
            found = found.permute(0, 3, 1, 2)
        if tuple(found.shape[1:]) != want:
            needed = ", ".join(map(str, want))
            raise DataError(f"inputs have shape {list(found.shape)}, the model needs [batch, {needed}]")
        if not len(found):
            raise DataError("inputs are empty; give at least one example")
        if found.dtype.is_floating_point and not bool(found.isfinite().all()):
            bad = int((~found.isfinite()).flatten(1).any(1).nonzero()[0])
            kind = "NaN" if bool(found[bad].isnan().any()) else "infinite values"
            raise DataError(f"inputs hold {kind}, the first at position {bad}; fill or drop them")
        if self.text is not None:
            return _token_ids(found, self.text)
        return _eight_bits(found) if self.meta["stored"] == "uint8" else found.to(torch.float32)


def _encoded(text: Text, x: Sequence[Any]) -> Tensor:
    import torch

    from fedloom.data.choices import Question
    from fedloom.data.texts import checked_texts, encode

    def where(row: int) -> str:
        return f"input {row}"

    if text.kind == "choices":
        other = next((row for row, v in enumerate(x) if not isinstance(v, Question)), None)
        if other is not None:
            raise DataError(f"input {other} is a {type(x[other]).__name__}; the model needs questions with options")
    else:
        x = checked_texts(x, "the inputs", where)
    return torch.from_numpy(encode(text, x, where)[0])


def _token_ids(x: Tensor, text: Text) -> Tensor:
    import torch

    ids = x if text.kind == "tokens" else x[:, 0]
    if x.dtype.is_floating_point or bool((ids >= text.vocab_size).any()):
        raise DataError(f"the model reads texts; give a list of them, or token ids below {text.vocab_size} as integers")
    return x.to(torch.int32)


@contextmanager
def _fitting() -> Iterator[None]:
    """Tensors that do not fit the network are those of another configuration."""
    try:
        yield
    except (PayloadError, IndexError, KeyError) as error:
        raise CheckpointError(
            f"the model's tensors do not fit the network that config.yaml of the run folder names ({error}); restore "
            "config.yaml as the run wrote it"
        ) from error


def _eight_bits(x: Tensor) -> Tensor:
    """Numbers as uint8; refuses what is scaled otherwise, which would be read as nearly black images."""
    import torch

    whole = not x.dtype.is_floating_point or bool((x == x.round()).all())
    scaled = x.dtype == torch.bool or (x.dtype.is_floating_point and 0 < float(x.max()) <= 1)
    if not whole or scaled or x.min() < 0 or x.max() > 255:
        raise DataError(
            "the model was trained on 8-bit images; give their values from 0 to 255 (integers, or floats that are "
            f"whole numbers), got {_kind(x.dtype)} from {float(x.min()):.3g} to {float(x.max()):.3g}"
        )
    return x.to(torch.uint8)


def _kind(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return "booleans" if name == "bool" else "floats" if dtype.is_floating_point else "integers"


def _array(x: Any) -> Any:
    """Anything as an array of numbers; `DataError` for what is none."""
    import numpy as np

    if isinstance(x, str | Path):
        raise DataError(
            f"inputs must be an array or a tensor, got the text '{x}'; for files use `fedloom predict DIR --input {x}`"
        )
    try:
        found = np.array(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"inputs must be an array or a tensor, and a {type(x).__name__} makes none ({error})"
        ) from error
    if found.dtype.kind == "u" and found.itemsize > 1:
        found = found.astype(np.int64)  # torch has few operations for wide unsigned integers
    if found.dtype.kind not in "fiub":
        raise DataError(f"inputs must be numbers in an array or a tensor, got a {type(x).__name__} of {found.dtype}")
    return found


def open_served(folder: str | Path, model: Any = None) -> Served:
    """Open the model of a run folder. model: the user's own network, where the run was given one as an object.

    Raises `CheckpointError` when the folder holds no finished model.
    """
    from fedloom.build import device, method
    from fedloom.config import read_yaml, resolve
    from fedloom.engine.files import load_payload

    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise CheckpointError(f"'{folder}' is not a run folder: it has no config.yaml")
    if not (folder / MODEL / WEIGHTS).is_file():
        raise CheckpointError(f"'{folder}' holds no model yet; let the run end (`fedloom resume {folder}`)")
    meta = _meta(folder / MODEL / META)
    config = resolve(read_yaml(folder / "config.yaml"))
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"device": str(device("auto"))})})
    made = method(config)
    context = _context(config, made, meta, model)
    state = load_payload(folder / MODEL / STATE) if (folder / MODEL / STATE).is_file() else None
    return Served(made, load_payload(folder / MODEL / WEIGHTS), context, meta, state)


def open_personal(folder: Path, client: int, model: Any = None) -> Served:
    """Open what one client of a finished run predicts with: the view it is sent, with its own state.

    Of a federation only what nodes of this machine hold below the run folder can be opened. Raises `CheckpointError`.
    """
    from fedloom.build import experiment_from_dict
    from fedloom.config import read_yaml, resolve
    from fedloom.engine.checkpoint import newest
    from fedloom.engine.files import load_payload
    from fedloom.engine.store import ClientStore

    served = open_served(folder, model)
    kept = sorted(folder.glob(f"nodes/*/*/personal/{client}"))
    if kept:
        return open_served(kept[-1], model)
    config = resolve(read_yaml(folder / "config.yaml"), {"engine": {"device": "auto"}})
    plan = experiment_from_dict(config.as_dict(), None, model).plan
    if not 0 <= client < plan.num_clients:
        raise ConfigError(f"--client is {client}, but the run has the clients 0 to {plan.num_clients - 1}")
    server, progress = newest(folder)
    stage = plan.stage(plan.num_stages - 1, client)
    context = replace(served.context, client=client, num_clients=plan.num_clients, stage=stage)
    version = progress.versions.get(client)
    store = ClientStore(folder / "clients")
    if version is not None and not store.path(client, version).is_file():
        raise CheckpointError(
            f"the state of client {client} lies on its node; predict there, with STATE-ROOT/<run>/personal/{client}"
        )
    state = None if version is None else load_payload(store.path(client, version))
    return replace(served, view=served.method.send(server, client, context), context=context, state=state)


def open_view(folder: Path, client: int | None = None) -> Served:
    """Open the global model of a run folder, or for export the model of one client.

    Raises `ConfigError` where the clients have none of their own, else as `open_served` and `open_personal` do.
    """
    if client is None:
        return open_served(folder)
    served = open_personal(folder, client)
    if not served.method.personal:
        raise ConfigError(
            f"--client is {client}, but with {served.meta['method']} every client predicts with the global model; "
            "leave --client out"
        )
    return served


def _meta(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        _check_meta(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is missing or damaged ({type(error).__name__}); run the configuration again"
        ) from error
    return found


def _check_meta(found: Any) -> None:
    """Raise `ValueError`, `KeyError` or `TypeError` unless the values have the kinds that `describe` writes."""
    numbers = {key: list(found[key]) for key in ("input_shape", "seen", "old", "current", "mean", "std")}
    classes = [*numbers["seen"], *numbers["old"], *numbers["current"]]
    domains = [k for key in ("seen", "old", "current") for k in found.get(f"{key}_domains", ())]
    whole = [found["stages"], found["rounds"], *numbers["input_shape"], *classes, *domains]
    names = [*found["class_names"], *found.get("domain_names", ())]
    fits = all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in whole)
    fits = fits and all(isinstance(v, int | float) for v in (*numbers["mean"], *numbers["std"]))
    fits = fits and bool(found["class_names"]) and all(isinstance(name, str) for name in names) and found["stages"] > 0
    if not fits or found["stored"] not in STORED or len(numbers["mean"]) != len(numbers["std"]):
        raise ValueError("values of the wrong kind")
    if "text" in found:
        _check_text(found["text"], numbers["input_shape"])
    if not numbers["input_shape"] or max(classes, default=0) >= len(found["class_names"]):
        raise ValueError("a shape or class that cannot be")


def _check_text(found: Any, input_shape: Sequence[int]) -> None:
    """The same for what is recorded of texts."""
    from fedloom.data.text import Text

    text = Text(**found)
    whole = (text.vocab_size, text.max_length)
    if not all(isinstance(v, int) and v > 0 for v in whole) or input_shape[-1] != text.max_length:
        raise ValueError("values of the wrong kind")
    if text.kind not in ("tokens", "choices") or not isinstance(text.tokenizer, str):
        raise ValueError("values of the wrong kind")


def _context(config: Any, made: Method, meta: Mapping[str, Any], model: Any) -> Context:
    from fedloom.build import forward
    from fedloom.core import Context, Net, Stage
    from fedloom.network import network

    words = meta.get("text", {}).get("vocab_size", 0)
    shape, statistics = tuple(meta["input_shape"]), (meta["mean"], meta["std"])
    spec = network(config, len(meta["class_names"]), shape, model, vocab_size=words, statistics=statistics)
    net = Net(lambda: made.module(spec), replace(forward(config), grad_checkpointing=False))
    arrived = (tuple(meta[key]) for key in ("current", "seen", "old"))
    domains = (tuple(meta.get(f"{key}_domains", ())) for key in ("current", "seen", "old"))
    stage = Stage(meta["stages"] - 1, meta["stages"], meta["rounds"], *arrived, *domains)
    return Context(
        net=net,
        stage=stage,
        num_classes=len(meta["class_names"]),
        num_domains=len(meta.get("domain_names", ())),
        seed=config.seed,
        exchange="evaluate",
        client=meta.get("client"),
    )


def describe(built: Built) -> dict[str, Any]:
    """What `model/model.json` must hold for a model to be used without its data set."""
    from fedloom.engine.result import arrived

    source, plan = built.source, built.experiment.plan
    stage = plan.stage(plan.num_stages - 1)
    return {
        "method": built.config.method["name"],
        "num_classes": plan.num_classes,
        "class_names": list(source.class_names),
        "input_shape": list(source.input_shape),
        "stored": str(source.x_train.dtype).removeprefix("torch."),
        "mean": list(source.mean),
        "std": list(source.std),
        "domain_names": list(plan.domains),
        **({"text": source.text.as_dict()} if source.text else {}),
        **arrived(stage),
        "tasks": [list(task) for task in plan.tasks],
        "stages": plan.num_stages,
        "rounds": plan.rounds,
    }


def module_of(served: Served) -> torch.nn.Module:
    """The network that is served, with its values and in evaluation mode; `ConfigError` where there is no single one.

    Of a method that prunes it is the compact one.
    """
    return served.deployed().net.module


def top(scores: Sequence[float], names: Sequence[str], count: int = 5) -> list[tuple[str, float]]:
    """The `count` most likely classes as (name, probability), classes never seen left out."""
    import torch

    probabilities = torch.softmax(torch.as_tensor(scores, dtype=torch.float64), 0)
    order = probabilities.argsort(descending=True, stable=True).tolist()
    return [(names[k], float(probabilities[k])) for k in order[:count] if float(probabilities[k]) > 0]
