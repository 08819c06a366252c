"""The model that is served as one safetensors file, which says enough to make the network again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.served import Served, module_of, open_view

if TYPE_CHECKING:
    from torch import nn

    from fedloom.config import Config


def export_safetensors(folder: Path, out: Path, client: int | None = None) -> Path:
    """Write the global model, or a client's own, as plain safetensors: the network's tensor names, metadata as text.

    The network is the one that is served: of a method that prunes the compact one. What a method predicts with besides
    the network (the class means of `replay`, say) is there as `<field>.<name>`. Metadata, other than text as JSON: what
    `model/model.json` records; `method_options`, `model` and `model_options` with the defaults; `widths`, the channels
    kept of each group, where the method can prune; `parameters`; and the `client`, null for the global model. The
    tokeniser of a model of texts is written beside it, as `tokenizer.json`.
    Raises `ConfigError` for a client that there is not, or that has no network of its own.
    """
    from safetensors.torch import save_file

    from fedloom.config import read_yaml, resolve
    from fedloom.engine.files import usual_mode

    served = open_view(folder, client)
    if client is not None:
        _check_own_network(served)
    module = module_of(served)
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in module.state_dict().items()}
    # what a client predicts with is its own where it has kept it, not what it would be sent next
    own = served.client_state()
    others = {field: own.get(field, tree) for field, tree in served.view.items() if field not in ("params", "buffers")}
    tensors |= {
        f"{field}.{name}": tensor.contiguous() for field, tree in others.items() for name, tensor in tree.items()
    }
    told = _told(served, module, resolve(read_yaml(folder / "config.yaml")))
    words = {key: value for key, value in told.get("text", {}).items() if key != "tokenizer"}
    told |= {"text": words} if words else {}
    meta = {key: value if isinstance(value, str) else json.dumps(value) for key, value in told.items()}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with usual_mode(out):
            save_file(tensors, str(out), metadata=meta)
        if served.text is not None:
            (out.parent / "tokenizer.json").write_text(served.text.tokenizer, encoding="utf-8")
    except Exception as error:  # safetensors has an error class of its own for what the disk refuses
        raise ConfigError(f"cannot write '{out}' ({error}); name another file with --out") from error
    return out


def _check_own_network(served: Served) -> None:
    """Refuse a method whose own `predict` makes something of a client's state that `deployed` does not know of."""
    from fedloom.core import Method

    kind = type(served.method)
    if kind.predict is not Method.predict and kind.deployed is Method.deployed:
        raise ConfigError(
            f"--client is {served.context.client}, but with {served.meta['method']} what a client predicts with is no "
            "network of its own; use --format onnx, or give the method a `deployed` that returns it"
        )


def _told(served: Served, module: Any, config: Config) -> dict[str, Any]:
    from fedloom.models.clip.named import is_clip, self_contained
    from fedloom.models.registry import defaults

    part, own = config.model, {**defaults(config.model.name), **config.model.options}
    options = {name: value for name, value in config.method.items() if name != "name"}
    found = {
        **served.meta,
        "method_options": options,
        "model": part.name,
        "model_options": self_contained(part.name, part.weights, own) if is_clip(part.name) else own,
        "parameters": sum(p.numel() for p in module.parameters()),
        "client": served.context.client,
    }
    if channels := getattr(module, "channels", None):
        found["widths"] = dict(zip(channels.names, channels.sizes, strict=True))
    return found


def load_exported(path: str | Path, *, model: Any = None) -> nn.Module:
    """The network of a file that `export_safetensors` wrote, with its values and in evaluation mode.

    It takes inputs as `mean` and `std` of the metadata normalise them, 8-bit images divided by 255 before. model: the
    user's own network, where the run was given one as an object. Raises `CheckpointError` for another file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            meta, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        module = _made(meta, model)
        module.load_state_dict({name: tensors[name] for name in module.state_dict()})
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"'{path}' is no model that `fedloom export` wrote ({reason}); export it again"
        ) from error
    return module.eval()


def _made(meta: Mapping[str, str], model: Any) -> Any:
    """The network that the metadata describe, with its initial values."""
    from fedloom.build import method
    from fedloom.config import resolve
    from fedloom.models.clip.named import RANDOM, is_clip
    from fedloom.network import network

    model_section = {"name": meta["model"], "options": json.loads(meta["model_options"])}
    sections = {
        "method": {"name": meta["method"], **json.loads(meta["method_options"])},
        "model": model_section | ({"weights": RANDOM} if is_clip(meta["model"]) else {}),
    }
    config, shape = resolve(sections), tuple(json.loads(meta["input_shape"]))
    words = json.loads(meta.get("text", "{}")).get("vocab_size", 0)
    statistics = tuple(json.loads(meta[key]) for key in ("mean", "std"))
    spec = network(config, json.loads(meta["num_classes"]), shape, model, vocab_size=words, statistics=statistics)
    module: Any = method(config).module(spec)
    widths = tuple(json.loads(meta.get("widths", "{}")).values())
    return module if not widths or widths == module.channels.sizes else module.rebuild(widths)
