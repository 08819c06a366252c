"""CLIP checkpoints on disk, in open_clip's names whatever wrote them, and the model of an architecture with them.

A folder holds weights and `open_clip_config.json` ({"model_cfg": embed_dim, vision_cfg, text_cfg and more,
"preprocess_cfg": mean, std}), or weights and `config.json` of transformers' `CLIPModel`. A file is a state dict of
either package, or an archive of OpenAI's; what lies beside it is read as in a folder.
"""

from __future__ import annotations

import json
import math
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.models.clip.compact import build_clip
from fedloom.models.clip.convert import State, is_transformers, open_clip_config, to_open_clip
from fedloom.models.clip.packages import open_clip
from fedloom.models.weights import check_values, read_state

Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std per channel of pictures in [0, 1]

OPENAI: Statistics = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
CONFIG, OTHER_CONFIG, PROCESSOR = "open_clip_config.json", "config.json", "preprocessor_config.json"
FILES = ("open_clip_model.safetensors", "model.safetensors", "open_clip_pytorch_model.bin", "pytorch_model.bin")
SCRIPT_ONLY = ("input_resolution", "context_length", "vocab_size")
# What no tensor's shape tells, by section: two models that differ in it take the same weights and give other features.
UNSEEN = {"vision_cfg": ("head_width", "pool_type", "final_ln_after_pool"), "text_cfg": ("heads", "pool_type")}
VOCABULARY = 49408
SUCH = "take a CLIP of plain transformers, such as open_clip/ViT-B-16"


@dataclass(frozen=True)
class Design:
    """architecture: in open_clip's form (`embed_dim`, `vision_cfg`, `text_cfg`, `quick_gelu`, `stem`). statistics: of
    pictures as the model wants them."""

    architecture: Mapping[str, Any]
    statistics: Statistics = OPENAI

    def config(self) -> dict[str, Any]:
        """What `open_clip_config.json` says."""
        mean, std = map(list, self.statistics)
        return {"model_cfg": dict(self.architecture), "preprocess_cfg": {"mean": mean, "std": std}}


def design_of(config: Any, where: str) -> Design:
    """The design that the content of an `open_clip_config.json` says; `ConfigError` for another content."""
    model, pictures = (_part(config, key) for key in ("model_cfg", "preprocess_cfg"))
    parts = (
        [isinstance(model.get(key), Mapping) for key in ("vision_cfg", "text_cfg")]
        if isinstance(model, Mapping)
        else []
    )
    if not parts or not all(parts) or "embed_dim" not in model:
        raise ConfigError(
            f"{where} must hold model_cfg with embed_dim, vision_cfg and text_cfg, as open_clip writes it; it has "
            f"{', '.join(map(str, config)) or 'nothing' if isinstance(config, Mapping) else type(config).__name__}"
        )
    return Design(model, _statistics(pictures or {}, "mean", "std", where))


def _part(config: Any, key: str) -> Any:
    return config.get(key) if isinstance(config, Mapping) else None


def design_beside(path: Path) -> Design | None:
    """What the configuration in a folder, or beside a file, says; None where there is none."""
    folder = path if path.is_dir() else path.parent
    if (folder / CONFIG).is_file():
        return design_of(_json(folder / CONFIG), f"'{folder / CONFIG}'")
    if not (folder / OTHER_CONFIG).is_file():
        return None
    config = _json(folder / OTHER_CONFIG)
    if not isinstance(config, Mapping) or config.get("model_type") != "clip":
        return None
    seen = _json(folder / PROCESSOR) if (folder / PROCESSOR).is_file() else {}
    statistics = _statistics(seen, "image_mean", "image_std", f"'{folder / PROCESSOR}'")
    try:
        return Design(open_clip_config(config), statistics)
    except (TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"model.weights: '{folder / OTHER_CONFIG}' does not describe a CLIPModel of transformers "
            f"({type(error).__name__}: {error}); fetch it again"
        ) from error


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.weights: cannot read '{path}' ({type(error).__name__}); write it anew") from error


def _statistics(pictures: Any, mean: str, std: str, where: str) -> Statistics:
    """The two under these keys; those of OpenAI's models where there is neither."""
    if not isinstance(pictures, Mapping):
        raise ConfigError(f"{where}: what it says of the pictures must be a mapping with {mean} and {std}")
    both = pictures.get(mean), pictures.get(std)
    if both == (None, None):
        return OPENAI
    if not all(isinstance(part, list | tuple) and len(part) == 3 and all(map(_is_number, part)) for part in both):
        raise ConfigError(f"{where}: {mean} and {std} of the pictures must be lists of three numbers")
    if min(both[1]) <= 0:
        raise ConfigError(f"{where}: {std} of the pictures must be above 0, got {list(both[1])}")
    return tuple(map(float, both[0])), tuple(map(float, both[1]))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def weights_file(path: Path, mend: str) -> Path:
    """The file of weights that a path means: itself, or the first of the usual names in a folder.

    mend: what to do where there is none. Raises `ConfigError`.
    """
    try:
        if path.is_file():
            return path
        found = next((path / name for name in FILES if (path / name).is_file()), None) if path.is_dir() else None
    except (OSError, ValueError):  # too long a name, a null byte
        found = None
    if found is None:
        what = f"folder '{path}' holds none of {', '.join(FILES)}" if path.is_dir() else f"no file '{str(path)[:200]}'"
        raise ConfigError(f"model.weights: {what}; {mend}")
    return found


def filled(module: nn.Module, file: Path, design: Design, told: str) -> None:
    """Load a file into a model, in fp32. told: the model's name.

    Raises `ConfigError` for weights of another architecture, with the tensors that are missing, unknown or of another
    shape, or with what else is known to differ.
    """
    state, known = _tensors(file)
    _check_tensors(state, module.state_dict(), file, told)
    beside = design_beside(file)
    _check_unseen(known or (beside.architecture if beside else {}), design.architecture, file, told)
    check_values(state, module.state_dict(), file)
    if not bool(state["logit_scale"].exp().isfinite()):
        raise ConfigError(
            f"model.weights: '{file}' is damaged: logit_scale is {state['logit_scale']:g}, whose exponential is not "
            "finite; give another"
        )
    module.load_state_dict(state, strict=True)


def _tensors(file: Path) -> tuple[State, Mapping[str, Any]]:
    """Tensors in open_clip's names, and what the file itself tells of the architecture."""
    script = _is_script(file)
    state = _script_state(file) if script else read_state(file)
    state = {key.removeprefix("module."): tensor for key, tensor in state.items()}
    if is_transformers(state):
        if design_beside(file) is None:
            raise ConfigError(
                f"model.weights: '{file}' holds tensors of transformers' CLIPModel, whose activation {OTHER_CONFIG} "
                "tells; put that beside it"
            )
        state = to_open_clip(state)
    if "logit_scale" in state and state["logit_scale"].numel() == 1:
        state["logit_scale"] = state["logit_scale"].reshape(())
    state = {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in state.items()}
    return state, {"quick_gelu": True} if script else {}


def _is_script(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _script_state(file: Path) -> State:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the format deprecated, and the archives have it
            state = torch.jit.load(str(file), map_location="cpu").state_dict()  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"model.weights: cannot read the archive '{file}', which is damaged; fetch it again"
        ) from error
    return {key: tensor for key, tensor in state.items() if key not in SCRIPT_ONLY}


def _check_tensors(state: Mapping[str, Tensor], own: Mapping[str, Tensor], file: Path, told: str) -> None:
    parts = {
        "missing": sorted(own.keys() - state.keys()),
        "unknown": sorted(state.keys() - own.keys()),
        "of another shape": [
            f"'{key}' {list(state[key].shape)} for {list(own[key].shape)}"
            for key in sorted(own.keys() & state.keys())
            if state[key].shape != own[key].shape
        ],
    }
    wrong = [f"{what}: {_some(keys)}" for what, keys in parts.items() if keys]
    if wrong:
        raise ConfigError(
            f"model.weights: '{file}' is of another architecture than model {told} ({'; '.join(wrong)}); name the "
            "architecture of the weights with model.name"
        )


def _some(keys: list[str]) -> str:
    shown = ", ".join(key if key.startswith("'") else f"'{key}'" for key in keys[:3])
    return f"{shown} and {len(keys) - 3} more" if len(keys) > 3 else shown


def _check_unseen(theirs: Mapping[str, Any], own: Mapping[str, Any], file: Path, told: str) -> None:
    quick = bool(theirs.get("quick_gelu"))
    if theirs and quick != bool(own.get("quick_gelu")):
        trained, computed = ("quick_gelu", "GELU") if quick else ("GELU", "quick_gelu")
        raise ConfigError(
            f"model.weights: '{file}' was trained with {trained}, and model {told} computes {computed}; open_clip has "
            "names with and without -quickgelu: take the other one"
        )
    for section, keys in UNSEEN.items():
        if section not in theirs:
            continue
        before, now = _complete(section, theirs[section]), _complete(section, own[section])
        for key in keys:
            if before[key] != now[key]:
                raise ConfigError(
                    f"model.weights: '{file}' is of another architecture than model {told} ({section}.{key} is "
                    f"{before[key]}, not {now[key]}); name the architecture of the weights with model.name"
                )


def _complete(section: str, given: Mapping[str, Any]) -> dict[str, Any]:
    kind = {"vision_cfg": open_clip().CLIPVisionCfg, "text_cfg": open_clip().CLIPTextCfg}[section]
    return vars(kind(**given))


def model_of(design: Design, told: str) -> nn.Module:
    """The model of a design with random values, from torch's global generator. Raises `ConfigError` for what is no
    plain CLIP."""
    config = dict(design.architecture)
    foreign = [key for key in ("custom_text", "multimodal_cfg") if config.get(key)]
    foreign += [f"vision_cfg.{key}" for key in ("timm_model_name",) if config["vision_cfg"].get(key)]
    foreign += [f"text_cfg.{key}" for key in ("hf_model_name", "hf_tokenizer_name") if config["text_cfg"].get(key)]
    if foreign:
        raise ConfigError(f"model {told} has {foreign[0]}, and cannot be prompted or adapted here; {SUCH}")
    try:
        module = build_clip(config)
    except ConfigError:
        raise
    except Exception as error:  # open_clip checks little of what it is given
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise ConfigError(f"model {told} cannot be built from its configuration ({reason}); mend it") from error
    check_model(module, told)
    return module


def check_model(model: Any, told: str) -> None:
    """Raise `ConfigError` for a CLIP whose towers are not those that prompts and adapters work with."""
    visual, library = model.visual, open_clip()
    transformer = isinstance(visual, library.transformer.VisionTransformer)
    vocabulary = model.token_embedding.num_embeddings
    blocks = [*(visual.transformer.resblocks if transformer else ()), *model.transformer.resblocks]
    faults = {
        "an image tower that is no vision transformer": not transformer,
        "an image tower that pools by attention": getattr(visual, "attn_pool", None) is not None,
        "blocks of another form": not all(type(b) is library.transformer.ResidualAttentionBlock for b in blocks),
        "a text tower without causal mask": model.attn_mask is None,
        f"text pooling {model.text_pool_type}": model.text_pool_type not in ("argmax", "eos"),
        "a text projection of another form": not isinstance(model.text_projection, nn.Parameter),
        f"a vocabulary of {vocabulary:,} entries, and open_clip's tokeniser has {VOCABULARY:,}": vocabulary
        != VOCABULARY,
    }
    if fault := next((what for what, there in faults.items() if there), None):
        raise ConfigError(f"model {told} has {fault}; {SUCH}")
